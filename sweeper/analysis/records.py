"""Run directories -> plain records: under which levels a run ran, what became of it, how fast it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweeper import store
from sweeper.measure import finite
from sweeper.spec import COPY, FACTORS
from sweeper.store import Attempt, read_json

# Factors that no command line sets: what else may differ between runs of one cell.
BUILD, CODE, HOST = "wheel.build", "code", "host"
UNSETTABLE = (BUILD, CODE, HOST)
NO_LEVEL = "-"
# Verdicts of a run that came to no good end by itself.
FAILED = ("failed", "hung", "killed")


@dataclass(frozen=True)
class Record:
    """One run that is over.

    levels: {factor: level}. block: the repeat. proved: the cache state as proved. started: Unix seconds. copy: the
    second copy of the first cell, run to see the noise. sweep: which one made the run. targets_waited, drafters_waited:
    shares of the measured window.
    """

    levels: Mapping[str, str]
    block: int
    verdict: str
    cause: str = ""
    ktok_s: float | None = None
    proved: str = ""
    started: float = 0.0
    sweep: str = ""
    attempt: int = 1
    copy: bool = False
    waited: str = ""
    targets_waited: float | None = None
    drafters_waited: float | None = None

    @property
    def told(self) -> bool:
        """Whether the run says anything of its levels: it was neither skipped nor ended from outside."""
        return self.verdict != "skipped" and self.cause not in store.UNFINISHED

    @property
    def failed(self) -> bool:
        return self.told and self.verdict in FAILED

    @property
    def speed(self) -> float | None:
        """Ktok/s of a run that is a measurement of speed: `ok`, and with tokens in its window."""
        return self.ktok_s if self.verdict == "ok" and self.ktok_s and self.ktok_s > 0 else None


def read(folders: Iterable[Path]) -> list[Record]:
    """The records of these run directories, in order of their start.

    Of several attempts of a run the last finished one counts; priming runs and directories without a verdict are
    left out. Factors are those that the sweeps named, and every other setting, build of a wheel, code or host in
    which the runs differ, so that runs of several sweeps are compared only where all else is equal.
    """
    latest: dict[str, Attempt] = {}
    for folder in folders:
        one = store.attempt(folder)
        if not one.verdict or "identity" not in one.run or one.run.get("role") == "prime":
            continue
        known = latest.get(one.run["identity"])
        if known is None or known.number <= one.number:
            latest[one.run["identity"]] = one
    attempts = list(latest.values())
    levels = _levels(attempts)
    found = [_record(one, level) for one, level in zip(attempts, levels, strict=True)]
    return sorted(found, key=lambda record: record.started)


def of_store(folder: Path) -> list[Record]:
    """The records of every run in a store."""
    return read(one.folder for several in store.history(folder).values() for one in several)


def of_sweep(folder: Path) -> list[Record]:
    """The records of the runs that a sweep planned. Raises what `store.planned` raises on a bad plan.json."""
    return read(one.folder for one in store.planned(folder))


def varied(records: Sequence[Record]) -> dict[str, list[str]]:
    """The factors with more than one level in these records, with their levels: numbers by size, words by name."""
    seen: dict[str, set[str]] = {}
    for record in records:
        for factor, level in record.levels.items():
            seen.setdefault(factor, set()).add(level)
    return {factor: sorted(levels, key=in_order) for factor, levels in seen.items() if len(levels) > 1}


def in_order(level: str) -> tuple[bool, float, str]:
    """Sort key of a level."""
    try:
        return False, float(level), level
    except ValueError:
        return True, 0.0, level


def only_varied(records: Sequence[Record]) -> list[Record]:
    """The same records with the factors that vary between them, each with a level for every such factor."""
    filled = {factor for record in records for factor in record.levels}
    whole = [replace(r, levels={f: r.levels.get(f, NO_LEVEL) for f in sorted(filled)}) for r in records]
    names = varied(whole)
    return [replace(r, levels={f: r.levels[f] for f in names}) for r in whole]


def _record(one: Attempt, levels: dict[str, str]) -> Record:
    verdict = one.verdict or {}
    figures, cache = verdict.get("figures") or {}, verdict.get("cache") or {}
    return Record(
        levels=levels,
        block=int(one.run.get("repeat") or 1),
        verdict=str(verdict.get("verdict")),
        cause=one.cause,
        ktok_s=finite(figures.get("ktok_s")),
        proved=str(cache.get("proved") or ""),
        started=finite(one.run.get("started")) or finite(verdict.get("started")) or 0.0,
        sweep=str(one.run.get("sweep") or ""),
        attempt=one.number,
        copy=COPY in (one.run.get("cell") or {}),
        waited=_waited(verdict),
        targets_waited=finite(figures.get("targets_waited")),
        drafters_waited=finite(figures.get("drafters_waited")),
    )


def _waited(verdict: Mapping[str, Any]) -> str:
    stage, reason = verdict.get("hung_stage"), str(verdict.get("reason") or "")
    return f"{reason.partition(';')[0]} (budget.{stage})" if stage and verdict.get("verdict") == "hung" else ""


def _levels(attempts: Sequence[Attempt]) -> list[dict[str, str]]:
    """Levels of each run: its cell, and the settings that differ although no cell names them."""
    cells = [
        {name: str(level) for name, level in (one.run.get("cell") or {}).items() if name != COPY} for one in attempts
    ]
    silent = [_unnamed(one) for one in attempts]
    names = sorted({name for told in silent for name in told})
    hidden = [name for name in names if len({told.get(name) for told in silent}) > 1]
    hidden = [name for name in hidden if not _follows(name, cells, silent)]
    # A setting that one sweep varied has a value in the other sweeps' runs too.
    named = {name for cell in cells for name in cell}
    return [
        {name: told[name] for name in sorted(named | set(hidden)) if name in told} | cell
        for cell, told in zip(cells, silent, strict=True)
    ]


def _unnamed(one: Attempt) -> dict[str, str]:
    """All that a run's record says of what it computed from, by name."""
    facts, wheel = one.run.get("facts") or {}, one.run.get("wheel") or {}
    given = read_json(one.folder / store.SPEC_FILE) or {}
    told = {name: value for name, value in _flat(given).items() if name in _flat(facts.get("settings") or {})}
    told |= {BUILD: str(wheel.get("fingerprint"))[:8], CODE: str(facts.get("code"))[:8]}
    told |= {HOST: str(one.run.get("host")), "workload": str(facts.get("workload"))}
    return told | {"workload.argv": str(facts.get("argv"))} | _flat(facts.get("env") or {}, "workload.env.")


def _follows(name: str, cells: list[dict[str, str]], silent: list[dict[str, str]]) -> bool:
    """Whether factors of the cells already stand for this setting: they bear its name, or a choice that sets it."""
    everywhere = set.intersection(*map(set, cells))
    sets = [factor for factor in everywhere if _may_set(factor, name)]
    values: dict[tuple[str, ...], set[str | None]] = {}
    for cell, told in zip(cells, silent, strict=True):
        values.setdefault(tuple(cell[factor] for factor in sets), set()).add(told.get(name))
    return bool(sets) and all(len(several) == 1 for several in values.values())


def _may_set(factor: str, name: str) -> bool:
    """Whether a factor of a cell can be what gives a setting its value."""
    if name == BUILD:
        return factor == "wheel" or factor.startswith("wheel.")
    if factor in FACTORS:
        return factor == name
    return factor in (name, name.partition(".")[0]) or (factor == "workload" and name != HOST)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = str(value)
    return found
