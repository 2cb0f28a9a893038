"""The conclusion of a sweep: every analysis of its runs as one plain object, and the sentences that tell it."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sweeper.analysis import attribution, confounders, effects, failures
from sweeper.analysis.records import NO_LEVEL, UNSETTABLE, Record, in_order, only_varied, varied

MOST_GAPS = 12  # beyond, cells are a sample of a large space and not a grid with holes
MOST_EFFECTS, MOST_UNCLEAR, MOST_CAUSES, MOST_OPEN, MOST_COMMANDS = 20, 8, 6, 4, 3
LEAST_REPEATS, MOST_REPEATS = 3, 30  # that are asked of a reader at once
UNEQUAL = 0.01  # p-value below which exposed runs are said to fail unequally often
COMMAND = "    python -m sweeper "
# Words of a sweep's command that the commands proposed here say anew or must not repeat.
SAID_ANEW = ("repeat", "until", "aa", "rerun", "dry", "wheel@cache_from")


def conclude(
    records: Sequence[Record], defaults: Mapping[str, str] | None = None, command: Sequence[str] = ()
) -> dict[str, Any]:
    """All analyses of finished runs as JSON-able values.

    defaults: {factor: level} that others are compared with where there is a choice. command: words of the command
    line that made the runs; commands to paste keep what they do not vary.

    Keys: runs {total, told, cells, blocks, verdicts, skipped, ended_outside}; factors {name: levels}; failures, a list
    of {cause, share, by_level, compared, told, exposed, spared, unequal, explanations, sure_factors, next};
    confounded [{factor, differ}]; separate [command]; effects, interactions and noise (see `effects.Effect`); together,
    the command that concludes from all runs of the store.
    """
    records = only_varied(records)
    told, references = compared(records, defaults or {})
    factors = varied(told)
    cells = _cells(told)
    skipped = [cell for cell in _cells([_narrowed(r, factors) for r in records if not r.told]) if cell not in cells]
    blocks = max((record.block for record in told), default=0)
    gaps = confounders.confounded(cells)
    apart = confounders.separating(cells, skipped) if 0 < len(gaps) <= MOST_GAPS else []
    plan = _Commands(list(command), factors, cells)
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
        "interactions": [one.to_dict() | {"clear": one.clear} for one in effects.interactions(told, references)],
        "noise": noise.to_dict() if noise else None,
        "together": shlex.join(["python", "-m", "sweeper.analysis", _store(command)]),
    }


def compared(records: Sequence[Record], defaults: Mapping[str, str]) -> tuple[list[Record], dict[str, str]]:
    """The runs that say something, with the factors that vary among them, and each factor's level of reference."""
    told = [record for record in only_varied(records) if record.told]
    factors = varied(told)
    told = [_narrowed(record, factors) for record in told]
    return told, _references(told, factors, defaults)


def sentences(found: Mapping[str, Any], stopped: str = "") -> str:
    """The conclusion for a person. `stopped` says why no more blocks were run."""
    runs = found["runs"]
    lines = [stopped] if stopped else []
    if not runs["told"]:
        return "\n".join([*lines, "No run says anything: " + _counted(runs["verdicts"]) + "."]) + "\n"
    for failure in found["failures"][:MOST_CAUSES]:
        lines += _told_failure(failure, runs)
    if len(found["failures"]) > MOST_CAUSES:
        lines.append(f"{len(found['failures']) - MOST_CAUSES} rarer causes: see --json.")
    if not found["failures"]:
        limit = failures.share(0, runs["told"]).high
        lines.append(f"Nothing failed in {_runs(runs['told'])} (0 to {100 * limit:.0f} %).")
    left = [
        f"{count} {words}"
        for count, words in ((runs["skipped"], "skipped"), (runs["ended_outside"], "ended from outside"))
        if count
    ]
    if left:
        lines.append(f"Not counted: {', '.join(left)}.")
    lines += _told_confounded(found)
    if any(line.startswith(COMMAND) for line in lines):
        lines.append(f"Then, of all runs together: {found['together']}")
    lines += _told_effects(found)
    return "\n".join(lines) + "\n"


class _Commands:
    """Commands that run cells, with all else as in the command that made the runs."""

    def __init__(
        self, words: list[str], factors: Mapping[str, Sequence[str]], cells: Sequence[Mapping[str, str]]
    ) -> None:
        anew = {*factors, *SAID_ANEW}
        self._kept = [word for word in words if "=" in word and _key(word) not in anew]
        self._factors, self._cells = factors, cells

    def lines(self, new: Sequence[Mapping[str, str]], repeat: int) -> list[str]:
        """As few lines as may be for these new cells; what is done already is not run again."""
        new = [cell for cell in new if self._can_run(cell)]
        if not new:
            return []
        grids = [new] + [[cell] for cell in new]
        levels = {f: sorted({cell[f] for cell in new}, key=in_order) for f in self._factors}
        # One grid for all, unless it holds cells that nobody asked for.
        size = math.prod(map(len, levels.values()))
        chosen = grids[:1] if size == len(new) else grids[1:]
        return [self._line(cells, repeat) for cells in chosen]

    def again(self, repeat: int) -> list[str]:
        """The cells there are, more often."""
        levels = {f: list(several) for f, several in self._factors.items()}
        whole = math.prod(map(len, levels.values())) == len(self._cells)
        usable = whole and all(map(self._can_run, self._cells))
        return [self._line(list(self._cells), repeat)] if usable else []

    def _can_run(self, cell: Mapping[str, str]) -> bool:
        """Whether a command of today makes this cell: it cannot bring back older code, nor another host."""
        same = all(cell[factor] == self._cells[-1][factor] for factor in UNSETTABLE if factor in cell)
        return same and NO_LEVEL not in cell.values()

    def _line(self, cells: Sequence[Mapping[str, str]], repeat: int) -> str:
        levels = {f: sorted({cell[f] for cell in cells}, key=in_order) for f in self._factors if f not in UNSETTABLE}
        many = any(len(several) > 1 for several in levels.values()) or any(_several(word) for word in self._kept)
        words = [f"{factor}={','.join(map(_written, several))}" for factor, several in levels.items()]
        words += [*self._kept, f"repeat={repeat}"]
        return shlex.join(["python", "-m", "sweeper", *(["-m"] if many else []), *words])


def _failure(
    records: Sequence[Record],
    cause: str,
    cells: Sequence[Mapping[str, str]],
    skipped: Sequence[Mapping[str, str]],
    plan: _Commands,
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
    plan: _Commands,
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


def _told_failure(failure: Mapping[str, Any], runs: Mapping[str, Any]) -> list[str]:
    share = failure["share"]
    lines = [f"{failure['cause']}: {_share(share)}."]
    if runs["cells"] == 1:
        return [*lines, "  One cell ran: there is nothing to compare it with."]
    if share["k"] == share["n"]:
        return [
            *lines,
            "  Every run that could show it did: which level matters cannot be told without one that passes.",
        ]
    told = failure["told"]
    if told and told["levels"]:
        lines.append(
            f"  Fails under {_explained(told)}: {_share(failure['exposed'])}; else {_share(failure['spared'])}."
        )
        lines.append(f"  This is the smallest set of levels that separates them; certainty {_sure(told['posterior'])}.")
        for factor, levels in failure["unequal"].items():
            often = ", ".join(f"{level} {one['k']} of {one['n']}" for level, one in levels.items())
            lines.append(f"  How often depends on {factor}: {often}.")
    elif told and told["kind"] == "time":
        lines.append(f"  {_explained(told).capitalize()}, whatever the levels; certainty {_sure(told['posterior'])}.")
    elif told:
        certain = _sure(told["posterior"])
        lines.append(f"  No factor makes a difference between the cells that ran; certainty {certain}.")
    else:
        sure = failure["sure_factors"]
        if sure:
            verb = "matters" if len(sure) == 1 else "matter"
            lines.append(f"  {' and '.join(sure)} {verb} for sure; how exactly cannot be told yet:")
        else:
            lines.append("  Which levels matter cannot be told yet:")
        lines += [f"    {_sure(one['posterior']):>6}  {_explained(one)}" for one in failure["explanations"][:MOST_OPEN]]
        counts = [
            f"{factor}={level} {one['k']} of {one['n']}"
            for factor, levels in failure["by_level"].items()
            for level, one in levels.items()
            if one["k"]
        ]
        lines.append(f"    failed: {', '.join(counts[:8])}{' ...' if len(counts) > 8 else ''}")
        lines += _to_run("  To tell, run:", failure["next"])
    return lines


def _told_confounded(found: Mapping[str, Any]) -> list[str]:
    gaps = found["confounded"]
    if not gaps:
        return []
    if len(gaps) > MOST_GAPS:
        names = sorted({gap["factor"] for gap in gaps})
        return [f"Not told apart: the cells are a sample, not a grid; {', '.join(names)} vary together."]
    lines = []
    for i, gap in enumerate(gaps):
        if any(gap["differ"] == other["differ"] for other in gaps[:i]):
            continue
        one, other = (" ".join(f"{f}={ends[i]}" for f, ends in gap["differ"].items()) for i in (0, 1))
        lines.append(f"Not told apart: {' and '.join(gap['differ'])} moved together ({one} against {other}).")
    said = [line for failure in found["failures"] for line in failure["next"]]
    return lines + _to_run("  To separate them, run:", [line for line in found["separate"] if line not in said])


def _told_effects(found: Mapping[str, Any]) -> list[str]:
    noise, lines = found["noise"], []
    floor = ""
    if noise:
        lines.append(f"The first cell run twice: {_ratio(noise)}: what no difference looks like here.")
        floor = f"; A/A {_interval(noise)}" if noise["low"] is not None else ""
    told = sorted(found["effects"], key=lambda effect: not effect["clear"])
    shown = [effect for i, effect in enumerate(told) if i < MOST_UNCLEAR or (effect["clear"] and i < MOST_EFFECTS)]
    for effect in shown:
        (factor,), (level,), (reference,) = effect["factors"], effect["levels"], effect["references"]
        doubt = "" if effect["clear"] or effect["low"] is None else ": no difference shown"
        lines.append(f"{factor}={level} is {_ratio(effect, reference)}{floor}{doubt}.")
    if len(told) > len(shown):
        lines.append(f"{len(told) - len(shown)} more effects: see --json.")
    for one in [each for each in found["interactions"] if each["clear"]][:MOST_CAUSES]:
        (first, second), (level, other), (reference, _) = one["factors"], one["levels"], one["references"]
        another = f"{_number(one['ratio'], one)}x ({_interval(one)})"
        lines.append(f"{first}={level} against {reference} is another {another} under {second}={other}.")
    apart = sum(effect["apart"] for effect in told)
    if apart:
        lines.append(
            f"{apart} of these pairs did not run side by side: what drifted in between counts as their effect."
        )
    if told and all(effect["low"] is None for effect in told):
        lines.append("One block tells nothing of the noise: repeat=3 or more gives intervals.")
    return lines


def _to_run(head: str, commands: Sequence[str]) -> list[str]:
    if not commands:
        return []
    rest = [f"    and {len(commands) - MOST_COMMANDS} more: see --json"] if len(commands) > MOST_COMMANDS else []
    return [head, *(f"    {line}" for line in commands[:MOST_COMMANDS]), *rest]


def _store(command: Sequence[str]) -> str:
    """The store that a command line names."""
    return next((word.partition("=")[2] for word in command if _key(word) == "store"), "runs")


def _explained(one: Mapping[str, Any]) -> str:
    """An explanation in words."""
    if one["kind"] == "none":
        return "chance, whatever the levels"
    if one["kind"] == "other":
        return "these factors in some other way"
    if one["kind"] == "time":
        return (
            f"failures begin after run {one['since']}"
            if one["since"] > 0
            else f"failures end after run {-one['since']}"
        )
    joined = " or " if one["kind"] == "either" else " and "
    return joined.join(f"{factor}={','.join(levels)}" for factor, levels in one["levels"].items())


def _share(share: Mapping[str, Any]) -> str:
    low, high, middle = (f"{100 * x:.0f}" for x in (share["low"], share["high"], share["k"] / share["n"]))
    return f"{share['k']} of {_runs(share['n'])} ({middle} %; {low} to {high} %)"


def _sure(posterior: float) -> str:
    """A posterior that is never rounded up to certainty."""
    return "> 99.9 %" if posterior > 0.999 else f"{posterior:.1%}".replace("%", " %")


def _ratio(effect: Mapping[str, Any], reference: str = "") -> str:
    pairs = f"{effect['pairs']} pair{'s' * (effect['pairs'] != 1)}"
    inside = f"{_interval(effect)}, {pairs}" if effect["low"] is not None else pairs
    over = " of different cells, once each" if effect["spread_over"] == "contexts" else ""
    return f"{_number(effect['ratio'], effect)}x{' ' + reference if reference else ''} ({inside}{over})"


def _interval(effect: Mapping[str, Any]) -> str:
    return f"{_number(effect['low'], effect)} to {_number(effect['high'], effect)}"


def _number(ratio: float, effect: Mapping[str, Any]) -> str:
    """A ratio with the digits that its interval warrants."""
    narrow = effect["low"] is not None and effect["high"] - effect["low"] < 0.05
    return f"{ratio:.3f}" if narrow else f"{ratio:.2f}"


def _runs(n: int) -> str:
    return f"{n} run{'s' * (n != 1)}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items()) or "there is none"


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


def _narrowed(record: Record, factors: Mapping[str, Any]) -> Record:
    return replace(record, levels={factor: record.levels[factor] for factor in factors})


def _cells(records: Sequence[Record]) -> list[Mapping[str, str]]:
    return list({tuple(record.levels.items()): record.levels for record in records}.values())


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _several(word: str) -> bool:
    """Whether a word of a command line gives several levels."""
    depth = 0
    for letter in word:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            return True
    return False


def _written(level: str) -> str:
    """A level as a command line writes it."""
    return {"None": "null", "True": "true", "False": "false"}.get(level, level)
