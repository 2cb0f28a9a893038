"""Find the first bad level of an ordered factor: about log2 runs, more if what is sought comes and goes.

    python -m sweeper.bisect factor=KEY levels=A,B,C,... [signature=CAUSE | slower=5%] [key=value ...]

    python -m sweeper.bisect factor=wheel levels=A,B,C,D compile=unlocked
    python -m sweeper.bisect factor=wheel levels=A,B,C,D signature=compile.fx_trace_race
    python -m sweeper.bisect factor=args.commit levels=6f1ab2c,0d3e5aa,9c41d07 slower=5% \\
        workload=command 'workload.argv=[./train-at.sh,"{args.commit}"]'

  factor      what differs: any factor or setting
  levels      its levels in order: the first must pass, the last must fail
  signature   a cause or a fingerprint; a run that fails of something else tells nothing. Without it, any failure
  slower      a slow-down instead of a failure: the least that counts, of the first level's Ktok/s
  error       how often an answer may be wrong (1%)
  most        runs that may be used, with those that the store already has (100)
  dry=true    what is known so far, and what would run next

All other words are settings, as in `python -m sweeper`. What the store holds is used; the same command again goes on
where it stopped. A level that cannot be run is stepped over. Exit status: 0 found, 3 no answer, 2 a setting cannot
work, 1 a fault of the harness, 130 interrupted. More: docs/BISECT.md
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash.settings import SettingError
from sweeper.__main__ import BAD_INPUT, compose
from sweeper.bisect import search
from sweeper.bisect.question import Question, Result, parse
from sweeper.bisect.search import Answer
from sweeper.words import leave, say

if TYPE_CHECKING:
    from sweeper import spec, sweep
    from sweeper.composed import Composed
    from sweeper.store import Attempt

NO_ANSWER = 3


def main() -> int:
    """Entry point; returns the status above."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        question, rest = parse(words)
    except SettingError as error:
        print(f"sweeper.bisect: {error}", file=sys.stderr)
        return BAD_INPUT
    return compose(["-m", *rest, f"{question.factor}={question.levels}"], lambda configs: bisect(configs, question))


def bisect(configs: Sequence[Composed], question: Question) -> sweep.Result:
    """Run levels until the answer is sure, and print it. Raises SettingError, before anything is started."""
    from sweeper import spec, store, sweep

    options, cells = spec.read(configs)
    names = _names(cells, options, question)
    results = _done(cells, store.history(options.folder), question)
    following = question.decide(results)
    if options.dry:
        print(report(question, names, results, following))
        return sweep.Result(sweep.OK, [[] for _ in cells])
    sweep.prepare(options.folder)
    failures: dict[str, str] = {}
    status = sweep.OK
    with sweep.Interrupts() as interrupts, sweep.opened(_plan(cells, question), options, interrupts) as session:
        session.display.total = 0  # nobody knows how many it will be
        while not isinstance(following, Answer) and not interrupts.look():
            wheel = cells[following].wheel
            if wheel.unbuilt and not wheel.failure:
                # Only of levels that are run: an environment takes minutes and gigabytes.
                failures |= sweep.build_wheels(_plan([cells[following]], question), options, interrupts)
                cells = spec.read(configs, failures)[1]
            past, before = store.history(options.folder), sum(map(len, results))
            run = cells[following].repeated(len(_done(cells, past, question)[following]) + 1)
            session.display.total += 1
            if not interrupts.look():
                sweep.do(
                    sweep.Planned(run, None, store.estimates(past).get(run.cell_id)), session, session.display.total
                )
            results = _done(cells, store.history(options.folder), question)
            if sum(map(len, results)) <= before:
                status = sweep.FAULT
                break
            following = question.decide(results)
            session.display.note(progress(question, names, results, following))
        if interrupts.look():
            status = sweep.INTERRUPTED
        text = report(question, names, results, following)
        try:
            store.write(options.folder / "sweeps" / session.sweep / "bisect.txt", text + "\n")
        except OSError as error:
            session.display.note(f"the conclusion could not be kept ({error})")
        session.tracking.close_sweep(session.sweep)
    say(f"{text}\n")
    if status == sweep.OK and not (isinstance(following, Answer) and following.kind == "found"):
        status = NO_ANSWER
    return sweep.Result(status, [[one.why for one in several] for several in results])


def _plan(cells: Sequence[spec.Run], question: Question) -> sweep.Plan:
    """The bisect as a sweep of its levels; how often each runs shows only on the way.

    The id is that of the question and not of the cells, which are called otherwise once their wheel is built.
    """
    from sweeper import sweep

    settings = cells[0].facts["settings"]
    asked = json.dumps([question.factor, question.levels, question.symptom, settings], sort_keys=True)
    name = hashlib.sha256(asked.encode()).hexdigest()[:12]
    return sweep.Plan(name, [sweep.Planned(cell, None, None) for cell in cells], [])


def _names(cells: Sequence[spec.Run], options: spec.Options, question: Question) -> list[str]:
    """The levels in order; refuses what is no list of different levels of one factor."""
    if options.repeat != 1:
        raise SettingError("repeat", options.repeat, "a bisect decides by itself how often a level runs")
    if options.rerun != "none":
        raise SettingError("rerun", options.rerun, "a bisect uses what is done; take another store= to begin anew")
    if options.aa:
        raise SettingError("aa", "true", "a bisect measures the spread of each level by itself")
    if options.detach:
        raise SettingError("detach", "true", "a bisect has to see each run before it knows the next")
    if len(cells) < 2:
        raise SettingError("levels", question.levels, "must be at least two levels, in order")
    for name in cells[0].cell:
        values = sorted({cell.cell[name] for cell in cells})
        if len(values) > 1 and name != question.factor:
            raise SettingError(name, ",".join(values), f"must be one level: a bisect varies {question.factor} alone")
    names = [cell.cell.get(question.factor, "?") for cell in cells]
    seen: dict[str, str] = {}
    for name, cell in zip(names, cells, strict=True):
        if cell.cell_id in seen:
            raise SettingError("levels", question.levels, f"{seen[cell.cell_id]} and {name} mean the same run")
        seen[cell.cell_id] = name
    return names


def _done(cells: Sequence[spec.Run], past: dict[str, list[Attempt]], question: Question) -> list[list[Result]]:
    """What the store's runs of each level say, from its first repeat to the first that is missing."""
    results: list[list[Result]] = []
    for cell in cells:
        found: list[Result] = []
        while (attempts := past.get(cell.repeated(len(found) + 1).identity)) and attempts[-1].done:
            found.append(question.read(attempts[-1]))
        results.append(found)
    return results


def progress(
    question: Question, names: Sequence[str], results: Sequence[Sequence[Result]], following: int | Answer
) -> str:
    """One line on what is known now."""
    seen = question.judge(results)
    runs = sum(map(len, results))
    belief = search.tally(seen) if isinstance(seen, list) else None
    if belief is None:
        return f"{runs} runs: the ends are being looked at"
    if belief.alike > search.ENDS_ALIKE:
        return f"{runs} runs: the ends are alike with {_percent(belief.alike)}"
    best = max(range(len(names)), key=lambda level: belief.first_bad[level])
    known = f"first bad {question.factor} may be {names[best]} ({_percent(belief.first_bad[best])})"
    then = "" if isinstance(following, Answer) else f"; next {names[following]}"
    return f"{runs} runs: {known}{then}"


def report(
    question: Question, names: Sequence[str], results: Sequence[Sequence[Result]], following: int | Answer
) -> str:
    """The levels with what their runs showed, and the conclusion in a sentence."""
    seen = question.judge(results)
    known: list[list[bool | None]] = seen if isinstance(seen, list) else [[] for _ in results]
    belief = search.tally(seen) if isinstance(seen, list) else None
    rows = [[question.factor, "runs", "bad", "good", "no answer", "Ktok/s", "first bad"]]
    for level, (name, symptoms) in enumerate(zip(names, known, strict=True)):
        counts = [len(results[level]), *(symptoms.count(which) for which in (True, False, None))]
        speed = _speed(results[level])
        chance = _percent(belief.first_bad[level]) if belief and level else "-"
        rows.append([name, *(str(n) if n else "-" for n in counts), f"{speed:.3f}" if speed else "-", chance])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(
        [f"bisect {question.factor}: {question.symptom}", *lines, _sentence(question, names, results, known, following)]
    )


def _sentence(
    question: Question,
    names: Sequence[str],
    results: Sequence[Sequence[Result]],
    known: Sequence[Sequence[bool | None]],
    following: int | Answer,
) -> str:
    runs = sum(map(len, results))
    if isinstance(following, int):
        return f"Not finished: next is run {len(results[following]) + 1} of {names[following]}."
    if following.kind == "stuck":
        end = results[following.level]
        return f"No answer: {names[following.level]}, an end of the list, gives none ({end[-1].why if end else ''})."
    if following.kind == "alike":
        return _alike(question, names, results, known, following, runs)
    there, before = names[following.bad], names[following.good]
    if following.kind == "unsure":
        return (
            f"No answer after {runs} runs: the first bad {question.factor} may be {there} "
            f"({_percent(following.sure)}); a larger most= goes on."
        )
    bad, good = known[following.bad], known[following.good]
    said = (
        f"{before} is good ({good.count(True)} of {_told(good)} runs show it), "
        f"{there} is bad ({bad.count(True)} of {_told(bad)})"
    )
    sure = f"{_percent(following.sure)} sure after {runs} runs"
    speeds = [_speed(results[level]) for level in (following.good, following.bad)]
    if question.slower is not None and all(speeds):
        said += f", {speeds[1] / speeds[0] - 1:+.1%}"  # type: ignore[operator]
    over = names[following.good + 1 : following.bad]
    if not over:
        return f"The first bad {question.factor} is {there}: {said}; {sure}."
    why = ", ".join(f"{name} ({results[names.index(name)][-1].why})" for name in over)
    return (
        f"The first bad {question.factor} is one of {', '.join([*over, there])}: {said}; {sure}. Stepped over: {why}."
    )


def _alike(
    question: Question,
    names: Sequence[str],
    results: Sequence[Sequence[Result]],
    known: Sequence[Sequence[bool | None]],
    answer: Answer,
    runs: int,
) -> str:
    if question.slower is not None:
        first, last = (_speed(results[end]) for end in (0, -1))
        turned = bool(first and last and last > first)
        said = f"{first:.3f} and {last:.3f} Ktok/s" if first and last else "no speed"
        said = f"No answer: {names[-1]} is not {question.symptom} than {names[0]} ({said})"
    else:
        shares = [known[end].count(True) / max(1, _told(known[end])) for end in (0, -1)]
        turned = shares[0] > shares[1]
        counts = [f"{known[end].count(True)} of {_told(known[end])} runs of {names[end]}" for end in (0, -1)]
        said = f"No answer: the ends do not differ: {question.symptom} in {' and '.join(counts)}"
    hint = "; if the change is the other way round, turn the list round" if turned else ""
    return f"{said}, {_percent(answer.sure)} sure after {runs} runs{hint}."


def _told(symptoms: Sequence[bool | None]) -> int:
    return sum(one is not None for one in symptoms)


def _speed(results: Sequence[Result]) -> float | None:
    speeds = [one.ktok_s for one in results if one.ktok_s is not None]
    return statistics.median(speeds) if speeds else None


def _percent(share: float) -> str:
    return f"{min(share, 0.999):.1%}" if share > 0.99 else f"{share:.0%}"


if __name__ == "__main__":
    leave(main)
