"""What a report tells of a sweep, gathered from its folder and those of its runs; drawing and wording come after."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dflash.events import EVENTS_FILE, STACKS_FILE, EventReader
from sweeper import help, store, usage
from sweeper.analysis.conclude import conclude
from sweeper.analysis.records import in_order, read
from sweeper.analysis.sentences import sentences
from sweeper.measure import finite, opening, steps
from sweeper.report import table
from sweeper.spec import COPY
from sweeper.store import Attempt, read_json
from sweeper.supervisor import LOG_FILE, tail

BAD = ("failed", "hung", "killed", "degraded")
TEXTS = 1_200_000  # bytes of logs and stacks that a report quotes in all
LONGEST, SHORTEST = 12_000, 1_500  # and of each text
LINES = 60  # of a log
MOST_COMPARED = 100  # runs that a link to MLflow's compare view names
Points = list[tuple[float, float]]  # (seconds since the run's start, value)


@dataclass(frozen=True)
class Timeline:
    """What a run was at: queue in MiB, memory in GB, busy in shares of its GPUs (0 to 1) or in processors.

    window: when the measured window opened; None where it did not.
    """

    queue: Points = field(default_factory=list)
    memory: Points = field(default_factory=list)
    busy: Points = field(default_factory=list)
    window: float | None = None
    on_gpu: bool = False


@dataclass(frozen=True)
class Told:
    """One run that is over. cell: its levels of the factors that vary. ktok_s: of a run that is `ok`."""

    attempt: Attempt
    cell: dict[str, str]
    repeat: int
    verdict: str
    ktok_s: float | None
    first_step_s: float | None
    proved: str
    link: str
    timeline: Timeline
    start: dict[str, Any]  # the job's event of this name, and the first `failure` that it told of
    failure: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{table.label(self.cell)} r{self.repeat}"


@dataclass(frozen=True)
class Failure:
    """Runs of one cell that ended alike. texts: [(what it is, its end, number of the failure that has the same)]."""

    number: int
    label: str
    verdict: str
    cause: str
    fingerprint: str
    evidence: str
    reason: str
    remedy: str
    holders: list[str]
    repeats: list[int]
    of: int
    folder: Path
    link: str
    texts: list[tuple[str, str, int | None]]


@dataclass(frozen=True)
class Profile:
    """Profiles that one run left. text: what one of them tells in words, of the first run of each cell."""

    label: str
    folder: Path
    files: list[str]
    text: str
    link: str


@dataclass(frozen=True)
class Story:
    """A sweep as its report tells it. rows: `table.rows`. said: the conclusion in sentences. compare: a link to MLflow,
    empty without one. unfinished: planned runs that have no verdict yet."""

    sweep: str
    title: str
    folder: Path
    command: str
    facts: dict[str, str]
    factors: dict[str, list[str]]
    rows: list[dict[str, Any]]
    runs: list[Told]
    failures: list[Failure]
    skipped: dict[str, list[str]]
    profiles: list[Profile]
    verdicts: dict[str, int]
    conclusion: dict[str, Any]
    said: str
    unfinished: int
    compare: str


def gather(folder: Path, stopped: str = "") -> Story:
    """Read the sweep in `folder` (a folder below a store's sweeps/).

    `stopped` says why no more blocks were run. Raises OSError, ValueError, KeyError, TypeError on a bad plan.json.
    """
    plan = read_json(folder / "plan.json") or {}
    found = store.planned(folder)
    folders = [one.folder for one in found]
    rows = table.rows(folders)
    factors = _factors(rows)
    conclusion = conclude(read(folders), help.defaults(), plan.get("command") or ())
    runs = sorted((_told(one, factors) for one in found), key=lambda told: (_order(told.cell), told.repeat))
    said = sentences(conclusion, stopped or str((read_json(folder / "conclusion.json") or {}).get("stopped") or ""))
    return Story(
        sweep=str(plan.get("sweep") or folder.name),
        title=str(plan.get("title") or folder.name),
        folder=folder,
        command=shlex.join(["python", "-m", "sweeper", *map(str, plan.get("command") or ())]),
        facts=_facts(runs),
        factors=factors,
        rows=sorted(rows, key=lambda row: _order(row["cell"])),
        runs=runs,
        failures=_failures(runs),
        skipped=_skipped(runs),
        profiles=_profiles(runs),
        verdicts=dict(Counter(told.verdict for told in runs)),
        conclusion=conclusion,
        said=said,
        unfinished=len({one["identity"] for one in plan["runs"]}) - len(found),
        compare=_compare(found),
    )


def _factors(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The factors that vary between these cells, with their levels in order."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        for factor, level in row["cell"].items():
            if factor != COPY:
                seen.setdefault(factor, set()).add(str(level))
    return {factor: sorted(levels, key=in_order) for factor, levels in seen.items() if len(levels) > 1}


def _order(cell: Mapping[str, Any]) -> list[tuple[bool, float, str]]:
    return [in_order(str(level)) for level in cell.values()]


def _told(one: Attempt, factors: Mapping[str, Any]) -> Told:
    verdict, given = one.verdict or {}, one.run.get("cell") or {}
    measured = verdict.get("figures") or {}
    cell = {factor: str(given[factor]) for factor in [*factors, COPY] if factor in given}
    name = str(verdict.get("verdict"))
    events = list(EventReader(one.folder / EVENTS_FILE).poll())
    failures = [event for event in events if event["event"] == "failure"]
    return Told(
        attempt=one,
        cell=cell or {factor: str(level) for factor, level in given.items()},
        repeat=int(finite(one.run.get("repeat")) or 1),
        verdict=name,
        ktok_s=finite(measured.get("ktok_s")) if name == "ok" else None,
        first_step_s=finite(measured.get("time_to_first_step_s")) if name in table.ENDED else None,
        proved=str((verdict.get("cache") or {}).get("proved") or ""),
        link=_link(one.folder),
        timeline=_timeline(one, events),
        start=next((event for event in events if event["event"] == "start"), {}),
        failure=min(failures, key=lambda event: float(event["t"]), default={}),
    )


def _timeline(one: Attempt, events: list[dict[str, Any]]) -> Timeline:
    began = finite(one.run.get("started")) or min((float(e["t"]) for e in events), default=0.0)
    done = next(iter(steps(events).values()), [])
    looks = usage.read(one.folder)
    device = next((event.get("device") for event in events if event["event"] == "start"), None)
    on_gpu = device != "cpu" and any(any(look.gpu_busy.values()) for look in looks)
    if on_gpu:
        memory = [(look.t, sum(look.gpu_bytes.values()) / 1e9) for look in looks if look.gpu_bytes]
        busy = [(look.t, sum(look.gpu_busy.values()) / len(look.gpu_busy)) for look in looks if look.gpu_busy]
    else:
        memory = [(look.t, look.rss_bytes / 1e9) for look in looks]
        busy = [(look.t, look.cpu) for look in looks if look.cpu is not None]
    opened = opening(done)
    return Timeline(
        queue=_since(
            began, ((step.t, step.series["queue_bytes"] / 2**20) for step in done if "queue_bytes" in step.series)
        ),
        memory=_since(began, memory),
        busy=_since(began, busy),
        window=None if opened is None else opened.t - began,
        on_gpu=on_gpu,
    )


def _since(began: float, points: Iterable[tuple[float, float]]) -> Points:
    return [(max(0.0, t - began), value) for t, value in points]


def _failures(runs: Iterable[Told]) -> list[Failure]:
    """The runs that went wrong, by cell and signature; a text that several have is quoted once."""
    groups: dict[tuple[str, ...], list[Told]] = {}
    of = Counter(table.label(told.cell) for told in runs)
    for told in runs:
        signature = (told.attempt.verdict or {}).get("signature") or {}
        if told.verdict in BAD:
            key = (table.label(told.cell), told.verdict, told.attempt.cause, str(signature.get("fingerprint") or ""))
            groups.setdefault(key, []).append(told)
    size = max(SHORTEST, min(LONGEST, TEXTS // (3 * len(groups) or 1)))
    quoted: dict[str, int] = {}
    found = []
    for number, ((label, verdict, cause, fingerprint), several) in enumerate(groups.items(), 1):
        one = several[0]
        record = one.attempt.verdict or {}
        signature = record.get("signature") or {}
        texts = []
        for name, text in _texts(one, size) if verdict != "degraded" else ():
            same = quoted.setdefault(text, number)
            texts.append((name, text if same == number else "", None if same == number else same))
        found.append(
            Failure(
                number=number,
                label=label,
                verdict=verdict,
                cause=cause,
                fingerprint=fingerprint,
                evidence=str(signature.get("evidence") or ""),
                reason=str(record.get("reason") or ""),
                remedy=str(signature.get("remedy") or ""),
                holders=table.holders(one.attempt.folder),
                repeats=[told.repeat for told in several],
                of=of[label],
                folder=one.attempt.folder,
                link=one.link,
                texts=texts,
            )
        )
    return found


def _texts(told: Told, size: int) -> Iterator[tuple[str, str]]:
    """What a run that went wrong left to read, each with its name: traceback, stacks, the end of its log."""
    first, folder = told.failure, told.attempt.folder
    if first.get("traceback"):
        yield f"traceback of {first.get('worker') or 'the job'}", _end(str(first["traceback"]), size)
    stacks = _tail(folder / STACKS_FILE, size) or _end(str(first.get("stacks") or ""), size)
    if stacks.strip():
        yield "stacks of all threads", stacks
    log = _tail(folder / LOG_FILE, size)
    if log.strip():
        lines = log.splitlines()
        yield "last lines of its log", "\n".join(lines[-LINES:])


def _tail(path: Path, size: int) -> str:
    try:
        return _end(tail(path, size + 1), size)
    except OSError:
        return ""


def _end(text: str, size: int) -> str:
    """The last `size` characters, from the start of a line; control characters that are no space are taken out."""
    if len(text) > size:
        text = "...\n" + text[-size:].partition("\n")[2]
    return _printable(text)


def _beginning(path: Path, size: int) -> str:
    """The first `size` characters of a file, to the end of a line, as `_end` has the last."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(size + 1)
    except OSError:
        return ""
    return _printable(text if len(text) <= size else text[:size].rpartition("\n")[0] + "\n...")


def _printable(text: str) -> str:
    return "".join(c for c in text if c in "\n\t" or c >= " ")


def _skipped(runs: Iterable[Told]) -> dict[str, list[str]]:
    """{why: labels of the cells that were skipped}."""
    found: dict[str, list[str]] = {}
    for told in runs:
        if told.verdict == "skipped":
            labels = found.setdefault(str((told.attempt.verdict or {}).get("reason") or "no reason given"), [])
            if table.label(told.cell) not in labels:
                labels.append(table.label(told.cell))
    return found


def _profiles(runs: Iterable[Told]) -> list[Profile]:
    """The runs with profiles; what those say that are text is quoted once a cell."""
    found = [(told, files) for told in runs if (files := store.profiles(told.attempt.folder))]
    size = max(SHORTEST, min(LONGEST, TEXTS // (len({table.label(told.cell) for told, _ in found}) or 1)))
    quoted, profiles = set[str](), []
    for told, files in found:
        text, cell = "", table.label(told.cell)
        if cell not in quoted:
            quoted.add(cell)
            text = next((_beginning(path, size) for path in files if path.suffix == ".txt"), "")
        names = [path.name for path in files]
        profiles.append(Profile(told.label, told.attempt.folder, names, text, told.link))
    return profiles


def _facts(runs: list[Told]) -> dict[str, str]:
    """Where and with what these runs ran; several values where they differ."""
    found, starts = [told.attempt for told in runs], [told.start for told in runs]
    began = min((t for one in found if (t := finite(one.run.get("started")))), default=None)
    ended = max((t for one in found if (t := finite((one.verdict or {}).get("ended")))), default=None)
    told = {
        "host": _several(one.run.get("host") for one in found),
        "torch": _several(start.get("torch") for start in starts),
        "GPUs": _several(
            ", ".join(f"{n} x {gpu}" for gpu, n in Counter(map(str, start.get("gpus") or ())).items())
            for start in starts
        ),
        "device": _several(start.get("device") for start in starts),
        "wheel": _several((one.run.get("wheel") or {}).get("name") for one in found),
        "first run began": _when(began),
        "last run ended": _when(ended),
    }
    return {name: value for name, value in told.items() if value}


def _several(values: Iterable[Any]) -> str:
    return "; ".join(dict.fromkeys(str(value) for value in values if value))


def _when(seconds: float | None) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC" if seconds else ""


def _link(folder: Path) -> str:
    """Where MLflow's UI shows a run; empty if it was not tracked."""
    told = read_json(folder / "tracking.json") or {}
    return f"{told['ui']}/#/runs/{told['run_id']}" if told.get("ui") and told.get("run_id") else ""


def _compare(found: list[Attempt]) -> str:
    """Where MLflow's UI shows these runs side by side."""
    told = [one for each in found if (one := read_json(each.folder / "tracking.json")) and one.get("ui")]
    if len(told) < 2:
        return ""
    runs = quote(json.dumps([one.get("run_id") for one in told[:MOST_COMPARED]]))
    return f"{told[0]['ui']}/#/compare-runs?runs={runs}&experiments={quote(json.dumps([told[0].get('experiment')]))}"
