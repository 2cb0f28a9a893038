"""Every analysis of a sweep's runs as one plain object; `sentences` tells it to a person."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sweeper.analysis import attribution, confounders, effects, failures
from sweeper.analysis.commands import Commands, store_of
from sweeper.analysis.effects import MOST_REPEATS
from sweeper.analysis.records import Record, only_varied, varied

MOST_GAPS = 12  # beyond, cells are a sample of a large space and not a grid with holes
LEAST_REPEATS = 3  # that are asked of a reader at once
UNEQUAL = 0.01  # p-value below which exposed runs are said to fail unequally often


def conclude(
    records: Sequence[Record], defaults: Mapping[str, str] | None = None, command: Sequence[str] = ()
) -> dict[str, Any]:
    """All analyses of finished runs as JSON-able values.

    defaults: {factor: level} that others are compared with where there is a choice. command: words of the command
    line that made the runs; commands to paste keep what they do not vary.

    Keys: runs {total, told, cells, blocks, verdicts, skipped, ended_outside}; factors {name: levels}; failures, a list
    of {cause, share, waited, by_level, compared, told, exposed, spared, unequal, explanations, sure_factors, next};
    confounded [{factor, differ}]; separate [command]; effects, interactions and noise (see `effects.Effect`); fastest
    [see `effects.Lead`]; together, the command that concludes from all runs of the store.
    """
    fixed = _fixed(records)
    records = only_varied(records)
    told, references = compared(records, defaults or {})
    factors = varied(told)
    cells = _cells(told)
    skipped = [cell for cell in _cells([_narrowed(r, factors) for r in records if not r.told]) if cell not in cells]
    blocks = max((record.block for record in told), default=0)
    gaps = confounders.confounded(cells)
    apart = confounders.separating(cells, skipped) if 0 < len(gaps) <= MOST_GAPS else []
    plan = Commands(command, factors, cells, fixed)
    noise = effects.same_twice(told)
    return {
        "runs": {
            "total": len(records),
            "told": len(told),
            "cells": len(cells),
            "blocks": blocks,
            "verdicts": dict(Counter(record.verdict for record in records)),
            "skipped": sum(record.verdict == "skipped" for record in records),
            "ended_outside": sum(not record.told and record.verdict != "skipped" for record in records),
        },
        "factors": factors,
        "failures": [_failure(told, cause, cells, skipped, plan, blocks) for cause in failures.causes(told)],
        "confounded": [gap.to_dict() for gap in gaps],
        "separate": plan.lines(apart, blocks),
        "effects": [effect.to_dict() | {"clear": effect.clear} for effect in effects.main_effects(told, references)],
        "fastest": [lead.to_dict() for lead in effects.fastest(told)],
        "interactions": [one.to_dict() | {"clear": one.clear} for one in effects.interactions(told, references)],
        "noise": noise.to_dict() if noise else None,
        "together": shlex.join(["python", "-m", "sweeper.analysis", store_of(command)]),
    }


def compared(records: Sequence[Record], defaults: Mapping[str, str]) -> tuple[list[Record], dict[str, str]]:
    """The runs that say something, with the factors that vary among them, and each factor's level of reference."""
    told = [record for record in only_varied(records) if record.told]
    factors = varied(told)
    told = [_narrowed(record, factors) for record in told]
    return told, _references(told, factors, defaults)


def _failure(
    records: Sequence[Record],
    cause: str,
    cells: Sequence[Mapping[str, str]],
    skipped: Sequence[Mapping[str, str]],
    plan: Commands,
    blocks: int,
) -> dict[str, Any]:
    runs = [(record, bad) for record in records if (bad := failures.failed(record, cause)) is not None]
    found = attribution.attribute([(record.levels, bad) for record, bad in runs])
    k, told = sum(bad for _, bad in runs), found.told
    by_level = failures.by_level(records, cause)
    told_next = _next(found, cells, skipped, plan, blocks, k / len(runs)) if told is None else []
    named = told if told and told.levels else None
    exposed = [record for record, _ in runs if named and named.exposes(record.levels)]
    spared = [record for record, _ in runs if named and not named.exposes(record.levels)]
    return {
        "cause": cause,
        "share": failures.share(k, len(runs)).to_dict(),
        "waited": sorted({record.waited for record, bad in runs if bad and record.waited}),
        "by_level": {f: {level: s.to_dict() for level, s in levels.items()} for f, levels in by_level.items()},
        "compared": _compared(records, cause),
        "told": told.to_dict() if told else None,
        "exposed": _fails(exposed, cause),
        "spared": _fails(spared, cause),
        "unequal": _unequal(exposed, cause),
        "explanations": [explanation.to_dict() for explanation in found.explanations[:30]],
        "sure_factors": found.sure_factors,
        "next": told_next,
    }


def _next(
    found: attribution.Attribution,
    cells: Sequence[Mapping[str, str]],
    skipped: Sequence[Mapping[str, str]],
    plan: Commands,
    blocks: int,
    rate: float,
) -> list[str]:
    """The commands whose runs would tell most: new cells if there are such, else cells there are, more often."""
    explanations = found.explanations[:30]
    seen = attribution.runs_to_see(rate, 0.9)
    if new := confounders.telling(explanations, confounders.untried(cells, skipped)):
        return plan.lines(new, min(MOST_REPEATS, max(blocks, seen)))
    more = blocks + min(MOST_REPEATS, max(blocks, seen, LEAST_REPEATS))
    return plan.lines(confounders.telling(explanations, cells), more) or plan.again(more)


def _compared(records: Sequence[Record], cause: str) -> dict[str, dict[str, float | None]]:
    """{factor: {level: p-value of its failing as often as the level that fails least, all else equal}}."""
    found: dict[str, dict[str, float | None]] = {}
    for factor, levels in failures.by_level(records, cause).items():
        least = min(levels, key=lambda level: (levels[level].k / levels[level].n, -levels[level].n))
        others = [level for level in levels if level != least]
        found[factor] = {level: failures.compare(records, cause, factor, level, least) for level in others}
    return found


def _unequal(exposed: Sequence[Record], cause: str) -> dict[str, dict[str, Any]]:
    """Factors on which it depends how often exposed runs fail, with their levels' shares (Bonferroni)."""
    told = {
        (factor, level): p
        for factor, levels in _compared(exposed, cause).items()
        for level, p in levels.items()
        if p is not None
    }
    factors = dict.fromkeys(factor for (factor, _), p in told.items() if p < UNEQUAL / len(told))
    shares = failures.by_level(exposed, cause)
    return {factor: {level: one.to_dict() for level, one in shares[factor].items()} for factor in factors}


def _fails(records: Sequence[Record], cause: str) -> dict[str, Any] | None:
    counted = [bad for record in records if (bad := failures.failed(record, cause)) is not None]
    return failures.share(sum(counted), len(counted)).to_dict() if counted else None


def _references(
    records: Sequence[Record], factors: Mapping[str, Sequence[str]], defaults: Mapping[str, str]
) -> dict[str, str]:
    """Of each factor the level to compare with: the default if it has a speed, else the one that most runs have."""
    speeds = Counter((f, r.levels[f]) for r in records if r.speed for f in factors)
    chosen = {}
    for factor, levels in factors.items():
        usual = defaults.get(factor, "")
        ordered = sorted(levels, key=lambda level: (-speeds[factor, level], levels.index(level)))
        chosen[factor] = usual if usual in levels and speeds[factor, usual] else ordered[0]
    return chosen


def _fixed(records: Sequence[Record]) -> dict[str, str]:
    """The factors that have one level in all runs that say something, with that level."""
    levels = [record.levels for record in records if record.told]
    shared = set.intersection(*(set(one.items()) for one in levels)) if levels else set()
    return {factor: level for factor, level in (levels[0] if levels else {}).items() if (factor, level) in shared}


def _narrowed(record: Record, factors: Mapping[str, Any]) -> Record:
    return replace(record, levels={factor: record.levels[factor] for factor in factors})


def _cells(records: Sequence[Record]) -> list[Mapping[str, str]]:
    return list({tuple(record.levels.items()): record.levels for record in records}.values())
