"""A conclusion in sentences, for a person at a terminal: what matters first, and no more than a screen of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sweeper.analysis import effects, failures
from sweeper.analysis.conclude import MOST_GAPS
from sweeper.measure import slower_side
from sweeper.progress import number

MOST_EFFECTS, MOST_UNCLEAR, MOST_CAUSES, MOST_OPEN, MOST_COMMANDS = 20, 8, 6, 4, 3
COMMAND = "    python -m sweeper "
# Causes that a budget decides: a shorter one than an honest compile or step needs makes such a finding by itself.
BY_BUDGET = ("compile.no_end", "process.hung")


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
    lines += _told_fastest(found["fastest"], runs["blocks"])
    lines += _told_effects(found)
    return "\n".join(lines) + "\n"


def _told_failure(failure: Mapping[str, Any], runs: Mapping[str, Any]) -> list[str]:
    share = failure["share"]
    lines = [f"{failure['cause']}: {_share(share)}."]
    if failure["cause"] in BY_BUDGET and failure["waited"]:
        waited = " or ".join(failure["waited"][:MOST_OPEN])
        lines.append(f"  Hung means here: {waited}. What is only slow may need more.")
    if runs["cells"] == 1:
        return [*lines, "  One cell ran: there is nothing to compare it with."]
    if share["k"] == share["n"]:
        return [
            *lines,
            "  Every run that could show it did: which level matters cannot be told without one that passes.",
        ]
    told = failure["told"]
    if told and told["levels"]:
        others = f"; else {_share(failure['spared'])}" if failure["spared"] else ""
        lines.append(f"  Fails under {_explained(told)}: {_share(failure['exposed'])}{others}.")
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


def _told_fastest(leads: Sequence[Mapping[str, Any]], blocks: int) -> list[str]:
    """Of factors of many levels, which the effects against one of them do not rank, and of the split, where it matters
    who waited for whom."""
    lines = []
    for lead in leads:
        if lead["levels"] < 3 and lead["factor"] != "split":
            continue
        over = lead["over"]
        factor, level = lead["factor"], lead["level"]
        if lead["clear"]:
            said = f"The fastest {factor} is {level}: {_ratio(over, blocks)}, which comes next"
        else:
            said = f"No {factor} is shown to be the fastest: {level} leads, {_ratio(over, blocks)}"
        lines.append(f"{said}{_starved(lead)}.")
    return lines


def _starved(lead: Mapping[str, Any]) -> str:
    targets, drafters = lead["targets_waited"], lead["drafters_waited"]
    if targets is None or drafters is None:
        return ""
    slower = slower_side(targets, drafters)
    why = f"{slower} are the slower side" if slower else "neither side is clearly the slower"
    return f"; there {why} (targets waited {targets:.0%} of the time, drafters {drafters:.0%})".replace("%", " %")


def _told_effects(found: Mapping[str, Any]) -> list[str]:
    noise, blocks, lines = found["noise"], found["runs"]["blocks"], []
    floor = ""
    if noise:
        lines.append(f"The first cell run twice: {_ratio(noise, blocks)}: what no difference looks like here.")
        floor = f"; A/A {_interval(noise)}" if noise["low"] is not None and not effects.too_wide(noise) else ""
    told = sorted(found["effects"], key=lambda effect: not effect["clear"])
    shown = [effect for i, effect in enumerate(told) if i < MOST_UNCLEAR or (effect["clear"] and i < MOST_EFFECTS)]
    for effect in shown:
        (factor,), (level,) = effect["factors"], effect["levels"]
        told_by_itself = effect["clear"] or effect["low"] is None or effects.too_wide(effect)
        doubt = "" if told_by_itself else ": no difference shown"
        lines.append(f"{factor}={level} is {_ratio(effect, blocks)}{floor}{doubt}.")
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


def _ratio(effect: Mapping[str, Any], blocks: int) -> str:
    pairs = f"{effect['pairs']} pair{'s' * (effect['pairs'] != 1)}"
    (factor,), (reference,) = effect["factors"], effect["references"]
    if number(reference) is not None:  # 0.98x 0 would read as a product
        reference = f"{factor}={reference}"
    against = "" if factor == "A/A" else f" {reference}"
    if effects.too_wide(effect):
        enough = effects.telling_repeat(effect, blocks)
        return f"{_number(effect['ratio'], effect)}x{against} ({pairs}, too few runs to tell: try repeat={enough})"
    inside = f"{_interval(effect)}, {pairs}" if effect["low"] is not None else pairs
    over = " of different cells, once each" if effect["spread_over"] == "contexts" else ""
    return f"{_number(effect['ratio'], effect)}x{against} ({inside}{over})"


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
