"""Where runs execute: on this machine, one after another, or several at once that share its GPUs (`jobs=`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from sweeper import leases, machine, run, store
from sweeper.caches import snapshots
from sweeper.plan import Planned, starts_from

POLL_S = 0.2

# A planned run with its number among those that are to be done.
Numbered = tuple[int, Planned]


def carry_out(items: Sequence[Numbered], session: run.Session) -> None:
    """Do what is not done of these; returns when each has a verdict, or after an interrupt when none is under way."""
    specs = [item.run.spec for _, item in items if not item.done and not item.run.skip]
    count = leases.at_once(session.options.jobs, specs, machine.gpus())
    session.display.at_once = count
    if count > 1:
        _several(items, session, count)
        return
    for place, item in items:
        if session.interrupted():
            return
        do(item, session, place)


def _several(items: Sequence[Numbered], session: run.Session, count: int) -> None:
    """A thread for each run under way: it waits for GPUs, for its child, for a lock; all work is in the children."""
    waiting = list(items)
    running: dict[Future[None], Planned] = {}
    with ThreadPoolExecutor(count, thread_name_prefix="run") as pool:
        while waiting or running:
            if session.interrupted():
                waiting.clear()
            while len(running) < count and (following := _startable(waiting, running.values(), session.folder)):
                waiting.remove(following)
                place, item = following
                running[pool.submit(do, item, session, place)] = item
            for future in wait(running, POLL_S, FIRST_COMPLETED).done:
                del running[future]
                future.result()


def _startable(waiting: Sequence[Numbered], running: Iterable[Planned], folder: Path) -> Numbered | None:
    """The first that need not wait for caches which a run under way is about to leave."""
    making = {starts_from(one.run) or one.run.snapshot_key() for one in running if not one.done and not one.run.skip}
    for each in waiting:
        key = starts_from(each[1].run)
        if not key or key not in making or snapshots.exists(folder, key):
            return each
    return None


def do(item: Planned, session: run.Session, place: int) -> None:
    """Do one planned run, unless it is done; a store that cannot be written is told, not raised."""
    try:
        _one(item, session, place)
    except OSError as error:
        session.display.note(f"{item.run.label}: not run, the store cannot be written ({error})")


def _one(item: Planned, session: run.Session, place: int) -> None:
    """Do one planned run unless it is done by now; another harness may be at it."""
    if item.done and store.adopted(item.done, item.run, session.sweep):
        return

    def waiting() -> str:
        pid = store.holder(session.folder, item.run)
        return f"waiting for pid {pid or 'unknown'}, which runs {item.run.label}"

    with run.held(session, item.run.identity[:24], waiting) as mine:
        if not mine:
            return
        if last := answered(item, session):
            store.adopt(last, item.run, session.sweep)
            session.tracking.finish(last.folder)
        else:
            run.execute(item.run, session, place, item.estimate)


def answered(item: Planned, session: run.Session) -> store.Attempt | None:
    """The attempt by which a planned run is done by now, if it is."""
    last = store.newest(session.folder, item.run)
    if last is None or not last.done:
        return None
    # An attempt that was not there when the plan was made is newer than the wish to do it again.
    newer = float(last.run.get("started", 0.0)) > session.began
    return last if item.done or newer or not last.matches(session.options.rerun) else None
