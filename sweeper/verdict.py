"""What became of a run, and why: exit status, events, log and stacks in; verdict and signature out.

One verdict a run: `ok`, `degraded` (ended well, but its figures do not mean what they seem to), `failed`,
`hung`, `killed`, `skipped`. The signature names the root: a job's own first failure comes before whatever
followed from it, such as the other workers' hang or a kill.
"""

from __future__ import annotations

import dataclasses
import re
import signal as signals
from dataclasses import dataclass
from typing import Any, Literal

from sweeper.measure import finite, steps, totals
from sweeper.progress import UNMATCHED
from sweeper.signatures import Match, classify, fingerprint, root_of, rule, stack_fingerprint, version
from sweeper.signatures.prints import TRACEBACK, ends_in_message, last_traceback, plain
from sweeper.signatures.stacks import deadlock, endless_compile

VERDICTS = ("ok", "degraded", "failed", "hung", "killed", "skipped")
CRASHES = frozenset({signals.SIGSEGV, signals.SIGBUS, signals.SIGILL, signals.SIGFPE})
DENSE = "attention.dense_fallback"
BAD_INPUT = 2  # exit status of a job that refuses a setting
REQUEUE = 75  # exit status of a job that was asked to end, saved a checkpoint and wants to be started again
ASKED_TO_END = ("requeue", "interrupted")  # last words of a job that was

_SETTING = re.compile(r"^(?:\S+: )?[A-Za-z_][\w.\[\]]*=.*: \S.*$")


@dataclass(frozen=True)
class Evidence:
    """All that is known of a run that is over.

    exit_code, signal: as the child ended, None where it did not end so. hung_stage: the stage whose budget
    without progress ran out. cache: the proof, {requested, proved, why, layers}. reason: what the harness
    has to say, such as why a cell is skipped. asked: the cause of an interrupt that no person at the harness made.
    """

    exit_code: int | None
    signal: int | None
    ended_by: Literal["itself", "hung", "interrupt", "skipped"]
    hung_stage: str | None
    events: list[dict[str, Any]]
    bad_events: int
    log_tail: str
    stacks: str
    cache: dict[str, Any] | None
    reason: str = ""
    asked: str = ""


@dataclass(frozen=True)
class Signature:
    """The stable name of what went wrong."""

    cause: str
    fingerprint: str
    evidence: str
    remedy: str
    version: str = ""  # of the rules and of fingerprints


@dataclass(frozen=True)
class Verdict:
    """lost_checkpoints: how many the job could not write, and went on without."""

    verdict: str
    signature: Signature | None
    reason: str
    lost_checkpoints: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def judge(evidence: Evidence) -> Verdict:
    """Give the verdict. Never raises on odd events or text."""
    verdict, notes = _judge(evidence), list[str]()
    lost = [e for e in evidence.events if e.get("event") == "warning" and e.get("code") == "checkpoint.failed"]
    if lost:
        several = f"{len(lost)} checkpoint{'s' * (len(lost) != 1)}"
        notes.append(f"{several} could not be written, the last: {lost[-1].get('message')}")
    if evidence.bad_events:
        notes.append(f"{evidence.bad_events} lines of events were unreadable")
    reason = "; ".join(filter(None, (verdict.reason, *notes)))
    return dataclasses.replace(verdict, reason=reason, lost_checkpoints=len(lost))


def named(cause: str, evidence: str, printed: str = "") -> Signature:
    """A signature of a known cause; its fingerprint is that of `printed`, else of the evidence line."""
    return Signature(cause, fingerprint(printed or evidence), evidence, rule(cause).remedy, version())


def _signature(match: Match, printed: str = "") -> Signature:
    return Signature(
        match.cause, fingerprint(printed) if printed else match.fingerprint, match.evidence, match.remedy, version()
    )


def _judge(run: Evidence) -> Verdict:
    if run.ended_by == "skipped":
        return Verdict("skipped", None, run.reason)
    if run.ended_by == "interrupt" and run.exit_code == 0 and _said(run) == "ok":
        # It came when all was done, and took nothing away. A command that ends with 0 when asked has no such last word.
        run = dataclasses.replace(run, ended_by="itself", reason="")
    if run.ended_by == "interrupt":
        reason = f"{run.reason or 'interrupted'}{_checkpoint(run)}"
        return Verdict("killed", named(run.asked or "sweep.interrupted", run.reason or "interrupted"), reason)
    code, signal = _exit(run.exit_code, run.signal)
    failure = _failure(run)
    if run.ended_by == "hung":
        reason = run.reason or f"no progress in stage {run.hung_stage} for the whole of its budget"
        return Verdict("hung", failure or _hang(run), reason)
    if failure is None and (_said(run) in ASKED_TO_END or (code == REQUEUE and run.events)):
        said = "the job was asked to end"
        return Verdict("killed", named("sweep.interrupted", said), f"{said}{_checkpoint(run)}")
    if signal is not None:
        return _signalled(run, signal, failure)
    if code is None:
        signature = failure or _from_log(run, "no exit status")
        return Verdict("failed", signature, run.reason or "no exit status is known")
    if code != 0:
        signature = failure or _from_log(run, f"exit status {code}", code)
        return Verdict("failed", signature, run.reason or f"exit status {code}: {signature.evidence}")
    return _ended_well(run, failure)


def _ended_well(run: Evidence, failure: Signature | None) -> Verdict:
    """Exit status 0: the job's last word, and whether its figures can be trusted."""
    if failure or _said(run) == "failed":
        signature = failure or _from_log(run, "the job said that it failed")
        return Verdict("failed", signature, f"exit status 0, yet it failed: {signature.evidence}")
    # A command that is not ours may tell steps alone; a job that says how it starts says how it ends, too.
    if _said(run) is None and any(e.get("event") == "start" for e in run.events):
        reason = "ended without its last word"
        return Verdict("failed", named("unknown", reason), reason)
    if _said(run) is None and _died_in_passing(run.log_tail):
        signature = _from_log(run, "a traceback")
        return Verdict("failed", signature, f"exit status 0, yet it ended in a traceback: {signature.evidence}")
    doubts = [doubt for check in (_dense, _recompiled, _nonfinite, _unmatched, _missed) if (doubt := check(run))]
    if not doubts:
        return Verdict("ok", None, "; ".join(filter(None, (run.reason, _unproved(run)))))
    cause, _ = doubts[0]
    said = [text for _, text in doubts] + [_unproved(run)]
    # The kind of doubt is its identity: counts and step numbers are not.
    return Verdict("degraded", named(cause, doubts[0][1], cause), "; ".join(filter(None, (*said, run.reason))))


def _died_in_passing(log: str) -> bool:
    """Whether a log ends in a traceback, and not in one that the interpreter itself shrugs off."""
    log = log.rstrip()
    traceback = last_traceback(log)
    before = log[: len(log) - len(traceback)].rstrip().rpartition("\n")[2]
    return bool(traceback) and ends_in_message(traceback) and not before.startswith("Exception ignored")


def _said(run: Evidence) -> str | None:
    """The job's own last word: the status of its `end` event."""
    ends = [e for e in run.events if e.get("event") == "end"]
    return str(ends[-1].get("status")) if ends else None


def _checkpoint(run: Evidence) -> str:
    """The newest checkpoint that the job told of, in words that follow a reason."""
    told = [e for e in run.events if e.get("event") == "checkpoint" and finite(e.get("step")) is not None]
    return f"; checkpoint of step {told[-1]['step']:.0f} in {told[-1].get('folder')}" if told else ""


def _dense(run: Evidence) -> tuple[str, str] | None:
    count = _uncompiled(run.events)
    if not count:
        return None
    calls = totals(run.events, "attention_calls").get("attention_calls")
    of = f" of {calls:.0f}" if calls else ""
    return "attention.dense_fallback", f"{count:.0f}{of} attention calls ran un-compiled"


def _recompiled(run: Evidence) -> tuple[str, str] | None:
    late = [e for e in run.events if e.get("event") == "compile" and e.get("steady") is True]
    if not late:
        return None
    who = sorted({str(e.get("worker", "?")) for e in late})
    return "compile.recompiled", f"{len(late)} compiles inside the measured window ({', '.join(who)})"


def _nonfinite(run: Evidence) -> tuple[str, str] | None:
    done = [step for several in steps(run.events).values() for step in several]
    bad = [s for s in done if {"loss", "grad_norm"} & set(s.nonfinite)]
    if not bad:
        return None
    first = min(bad, key=lambda s: s.step)
    names = sorted({"loss", "grad_norm"} & set(first.nonfinite))
    where = f"in {len(bad)} steps, first in step {first.step}" + (f" of {first.variant}" if first.variant else "")
    return "numerics.nan", f"{' and '.join(names)} not finite {where}"


def _unmatched(run: Evidence) -> tuple[str, str] | None:
    """A pattern was to tell the steps, and no line that was printed fits it."""
    warned = [e for e in run.events if e.get("event") == "warning" and e.get("code") == UNMATCHED]
    return (UNMATCHED, str(warned[-1].get("message"))) if warned else None


def _missed(run: Evidence) -> tuple[str, str] | None:
    """A warm cache that was none, or a snapshot of any kind that could not be had."""
    cache = run.cache or {}
    requested, proved, cause = (cache.get(name) for name in ("requested", "proved", "cause"))
    if proved == "warm" or not (cause or requested == "warm"):
        return None
    why = cache.get("why") or "no reason given"
    return cause or "cache.warm_missed", f"asked for a {requested} cache, proved {proved}: {why}"


def _unproved(run: Evidence) -> str:
    """What a reader must know of the caches though nothing is wrong with the run."""
    cache = run.cache or {}
    mixed = ""
    if cache.get("proved") == "mixed" and not _missed(run):
        mixed = f"caches mixed, neither proved cold nor proved warm: {cache.get('why')}"
    return "; ".join(filter(None, (cache.get("note"), mixed)))


def _signalled(run: Evidence, signal: int, failure: Signature | None) -> Verdict:
    name = _signal_name(signal)
    reason = run.reason or f"ended by {name}"
    if failure:
        return Verdict("killed" if signal == signals.SIGKILL else "failed", failure, reason)
    if signal == signals.SIGINT:
        return Verdict("killed", named("sweep.interrupted", f"ended by {name}"), reason)
    echo = "process.sigkill" if signal == signals.SIGKILL else "process.segfault" if signal in CRASHES else ""
    if root := root_of(echo, f"{run.log_tail}\n{run.reason}"):
        signature = _signature(root)
    elif signal == signals.SIGKILL:
        signature = named("process.sigkill", f"ended by {name}")
    elif signal in CRASHES:
        top = stack_fingerprint(run.stacks or run.log_tail)
        signature = dataclasses.replace(named("process.segfault", f"ended by {name}"), fingerprint=top)
    else:
        signature = _from_log(run, f"ended by {name}")
    killed = signal in (signals.SIGKILL, signals.SIGTERM, signals.SIGHUP)
    return Verdict("killed" if killed else "failed", signature, reason)


def _hang(run: Evidence) -> Signature:
    if found := deadlock(run.stacks):
        signature = named("compile.deadlock", found)
    elif found := endless_compile(run.stacks):
        signature = named("compile.no_end", found)
    else:
        signature = named("process.hung", f"no progress in stage {run.hung_stage}")
    return dataclasses.replace(signature, fingerprint=stack_fingerprint(run.stacks))


def _failure(run: Evidence) -> Signature | None:
    """The signature of the job's own first failure event, or None if it told of none."""
    failures = [e for e in run.events if e.get("event") == "failure"]
    if not failures:
        return None
    first = min(failures, key=lambda e: finite(e.get("t")) or 0.0)
    kind, message = str(first.get("type") or "failure"), str(first.get("message") or "")
    said = f"{kind}: {message}"
    traceback = str(first.get("traceback") or "")
    # The traceback first: of a chain of exceptions the earliest is the root, and `said` is the last.
    match = classify(f"{traceback}\n{said}")
    printed = traceback if TRACEBACK in traceback else said.split("\n")[0]
    if match is None or not match.failed:
        return named("unknown", said.split("\n")[0][:300], printed)
    before = [e for e in run.events if (finite(e.get("t")) or 0.0) <= (finite(first.get("t")) or 0.0)]
    if match.cause in rule(DENSE).explains and _uncompiled(before):
        return named(DENSE, match.evidence, printed)
    if root := root_of(match.cause, run.log_tail):
        return named(root.cause, match.evidence if root.cause == DENSE else root.evidence, printed)
    return _signature(match, printed)


def _from_log(run: Evidence, otherwise: str, code: int | None = None) -> Signature:
    """A signature from the end of the log; `otherwise` is the evidence if the log is silent."""
    log = plain(run.log_tail)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if code == BAD_INPUT and lines and _SETTING.match(lines[-1]):
        return named("workload.bad_setting", lines[-1][:300])
    match = classify(run.log_tail) or classify(run.reason)
    if match and match.failed:
        return _signature(match)
    return named("unknown", lines[-1][:300] if lines else otherwise, last_traceback(log))


def _uncompiled(events: list[dict[str, Any]]) -> float:
    """Attention calls that ran un-compiled though the strategy compiles attention."""
    for event in events:
        if event.get("event") in ("start", "counters") and event.get("compile") == "eager":
            return 0.0
    return float(totals(events, "uncompiled_calls").get("uncompiled_calls") or 0.0)


def _exit(code: int | None, signal: int | None) -> tuple[int | None, int | None]:
    """Exit status and signal; a shell's 128 + n, and subprocess's -n, are signal n."""
    if signal is None and code is not None and code < 0:
        return None, -code
    if signal is None and code is not None and code - 128 in {int(s) for s in signals.Signals}:
        return None, code - 128
    return code, signal


def _signal_name(signal: int) -> str:
    try:
        return signals.Signals(signal).name
    except ValueError:
        return f"signal {signal}"
