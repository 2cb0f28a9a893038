"""Who makes and who uses which batch.

A job trains one drafter or, with fanout, several variants on one stream of batches. The drafter workers are
shared evenly by the variants, in order: worker v * R + r is rank r of the R ranks of variant v. Batch b is made
by target b mod T, once, and used by rank b mod R of every variant. A step takes `accumulate` batches a rank, so
step s, from 1, is trained on the batches from (s - 1) * R * accumulate to below s * R * accumulate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from dflash.settings import JobSettings, Split


@dataclass(frozen=True)
class Seat:
    """A drafter worker's place."""

    worker: int  # its number among all drafter workers
    variant: str  # name, empty without fanout
    rank: int  # within the variant; rank 0 reports, saves and evaluates
    leads: bool  # rank 0 of the first variant, which speaks for the whole job


@dataclass(frozen=True)
class Layout:
    """The arithmetic of a job."""

    targets: int
    variants: tuple[str, ...]
    ranks: int  # drafter workers of one variant
    accumulate: int

    @classmethod
    def of(cls, job: JobSettings) -> Layout:
        split, variants = Split.parse(job.split), tuple(job.variants())
        return cls(split.targets, variants, split.drafters // len(variants), job.train.accumulate)

    @property
    def seats(self) -> list[Seat]:
        """Every drafter worker's place, by its number."""
        return [
            Seat(v * self.ranks + rank, name, rank, v == rank == 0)
            for v, name in enumerate(self.variants)
            for rank in range(self.ranks)
        ]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Every (target, drafter worker)."""
        return [(t, d) for t in range(self.targets) for d in range(self.ranks * len(self.variants))]

    @property
    def batches_a_step(self) -> int:
        return self.ranks * self.accumulate

    @property
    def cycle(self) -> int:
        """Steps after which every target has made as many batches as the others."""
        return self.targets // math.gcd(self.targets, self.batches_a_step)

    def made_by(self, target: int, done: int) -> Iterator[int]:
        """The batches that a target makes for the steps after `done`, in order and without end."""
        first = done * self.batches_a_step
        yield from itertools.count(first + (target - first) % self.targets, self.targets)

    def used_by(self, rank: int, step: int) -> range:
        """The batches that a rank takes in a step, in order."""
        first = (step - 1) * self.batches_a_step
        return range(first + rank, first + self.batches_a_step, self.ranks)

    def maker(self, batch: int) -> int:
        """The target that makes a batch."""
        return batch % self.targets

    def users(self, batch: int) -> list[int]:
        """The drafter worker that takes a batch, of each variant in order."""
        return [v * self.ranks + batch % self.ranks for v in range(len(self.variants))]

    def step_of(self, batch: int) -> int:
        """The step, from 1, that is trained on a batch."""
        return batch // self.batches_a_step + 1
