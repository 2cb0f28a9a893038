"""What follows from settings, data and target before any worker exists: all that a job can be refused for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash import made_up, models, strategies
from dflash.checkpoint import Checkpoint
from dflash.data import dataset, store
from dflash.data.dataset import Dataset
from dflash.data.tokens import resolve_mask_token
from dflash.devices import compute_dtype
from dflash.drafter import Drafter
from dflash.evaluator import prompt_sets
from dflash.events import CHECKPOINTS, EventWriter
from dflash.export import read_weights
from dflash.geometry import Geometry, starting_mask_token, starting_taps
from dflash.pipeline import state
from dflash.pipeline.layout import Layout
from dflash.pipeline.step import FrozenEnds
from dflash.resume import DRAFTER_FOLDER, PATHS, lasting
from dflash.settings import DISTILLING, JobSettings
from dflash.strategies import Strategy
from dflash.target import Target, load_tokenizer
from dflash.weights import copied, draw

DATA_FOLDER = "data"
HEAD_ROWS = 256  # of a head at a time in float64, where they stay in a cache: a whole one would be gigabytes


@dataclass(frozen=True)
class Variant:
    """One of the drafters that a job trains; the only one, with an empty name, unless there is a fanout."""

    name: str
    job: JobSettings
    geometry: Geometry
    mask_token: int
    taps: list[int]
    checkpoints: Path
    folder: Path  # of the trained drafter
    identity: dict[str, Any]  # what training depends on; a checkpoint belongs to jobs that agree in it
    begun: Checkpoint | None = None  # to go on from

    @property
    def done(self) -> int:
        """Steps behind it."""
        return self.begun.step if self.begun else 0


@dataclass(frozen=True)
class Plan:
    """A job that can start. Cheap to send to a worker process: the data lies in a folder."""

    job: JobSettings
    layout: Layout
    data: Dataset
    variants: dict[str, Variant]
    feature_width: int  # Target.width
    feature_dtype: torch.dtype
    facts: dict[str, Any]  # of target and data, for the card of a trained drafter
    spans: bool = False  # workers tell where their time goes (pipeline/spans.py)

    def facts_of(self, variant: Variant) -> dict[str, Any]:
        """What the card of a variant's drafter tells beside what training reached."""
        job = variant.job
        settings = {"init": job.drafter.init, "loss_kind": job.loss.kind, "lr": job.optim.lr, "seed": job.seed}
        return self.facts | {name: value for name, value in settings.items() if value is not None}

    @property
    def done(self) -> dict[str, int]:
        return {name: variant.done for name, variant in self.variants.items()}


def whole_target(job: JobSettings) -> bool:
    """Whether some variant's loss needs the target's own distribution, and so all of its layers."""
    return any(variant.loss.kind in DISTILLING for variant in job.variants().values())


def settle_taps(job: JobSettings) -> JobSettings:
    """The job with the taps of the drafter that it starts from, if it names none and starts from one."""
    return dataclasses.replace(job, target=dataclasses.replace(job.target, taps=starting_taps(job)))


def make_plan(job: JobSettings, target: Target, out: Path, events: EventWriter) -> Plan:
    """Prepare the data, settle what the settings leave open, find what is done already.

    `target` may be an outline. Raises SettingError where settings, data, target and what lies in `out` cannot
    work together.
    """
    prompt_sets(job.eval.prompts, job.eval.limit)  # read to be refused now, if they cannot be read
    geometries = {name: Geometry.settle(v.drafter, target) for name, v in job.variants().items()}
    for geometry in geometries.values():
        strategies.check(job.compile, geometry)
    tokenizer = load_tokenizer(job.target)
    mask_tokens = {
        name: resolve_mask_token(starting_mask_token(v.drafter), tokenizer, target.vocab_size)
        for name, v in job.variants().items()
    }
    data = dataset.load(
        job.data,
        tokenizer,
        embedding_rows=target.vocab_size,
        seed=job.seed,
        cache=out / DATA_FOLDER,
        progress=lambda done, total: events.emit("progress", what="data bytes", done=done, total=total),
    )
    events.emit("data", **data.summary)
    if job.target.made_up:
        events.emit("warning", code="target.made_up", message=made_up.SAID)
    known = models.identity(job.target.model, job.target.models_dir, weights=not job.target.made_up)
    wishes = lasting(job)
    variants = {}
    for name, variant in job.variants().items():
        checkpoints = out / CHECKPOINTS / name
        settled = dataclasses.asdict(geometries[name]) | {"mask_token": mask_tokens[name]}
        identity = {
            "target.model": f"made up of {known}" if job.target.made_up else known,
            **{key: value for key, value in wishes[name].items() if key not in PATHS},
            "target.taps": target.taps,
            **{f"drafter.{key}": value for key, value in settled.items()},
            "data.path": _content(data),
        }
        identity = json.loads(json.dumps(identity))  # as it is read from a checkpoint
        begun, damaged = state.find(checkpoints, identity, name)
        for sentence in damaged:
            events.emit("warning", code="checkpoint.damaged", message=sentence)
        folder = out / DRAFTER_FOLDER / name
        variants[name] = Variant(
            name, variant, geometries[name], mask_tokens[name], target.taps, checkpoints, folder, identity, begun
        )
    facts = {
        "target": job.target.model,
        **({"target_made_up": True} if job.target.made_up else {}),
        "data": Path(job.data.path).name,
        **{key: data.summary[key] for key in ("documents", "tokens", "supervised")},
        "row_tokens": job.data.row_tokens,
    }
    return Plan(job, Layout.of(job), data, variants, target.width, target.embedding.dtype, facts)


def make_drafter(
    variant: Variant, target: Target, strategy: Strategy, device: torch.device
) -> tuple[Drafter, FrozenEnds]:
    """A drafter on its device, and what it shares with its target.

    Weights are those of drafter.init or drawn from the job's seed, so equal in every worker.
    """
    job = variant.job
    dtype = compute_dtype(job.train.precision, device)
    if job.drafter.init:
        read = read_weights(Path(job.drafter.init), variant.geometry, "drafter.init")
        weights = copied(read, device, dtype)
    else:
        weights = draw(variant.geometry, job.seed, device, dtype)
        # Logits begin with a spread of at most 1. A target that ties head and embedding has a head so large that
        # the drafter would otherwise begin by being sure of the mask token (loss 97 on SmolLM2 instead of 12).
        weights["norm.weight"].fill_(min(1.0, 1 / _spread(target.head)))
    drafter = Drafter(variant.geometry, strategy.prepare, strategy.attend, weights, strategy.attend_alike)
    embedding = target.embedding.to(device, dtype)
    head = embedding if target.head is target.embedding else target.head.to(device, dtype)
    ends = FrozenEnds(embedding, target.embedding_scale, head, variant.mask_token)
    return drafter, ends


def _spread(head: Tensor) -> float:
    """Standard deviation of the logits of head [V, H] on hidden states of unit variance."""
    # In float64, or the last bits would depend on how device and threads divide the sum.
    squares = sum(part.float().pow(2).sum(dtype=torch.float64) for part in head.split(HEAD_ROWS))
    return math.sqrt(float(squares) / len(head))


def _content(data: Dataset) -> str:
    """A name for what the prepared data holds, equal wherever it lies."""
    files = store.read_meta(data.rows.folder).files
    content = hashlib.sha256(repr(sorted((name, facts["sha256"]) for name, facts in files.items())).encode())
    return f"content sha256:{content.hexdigest()[:16]}"
