"""Many threads at work, or one thread compiling: never both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Aborted(RuntimeError):
    """The job is ending and nobody may wait any longer: at a gate, a channel or for the other drafters.

    Not a failure of the one who gets it.
    """


class Gate:
    """A readers-writer lock whose writer goes first.

    `shared` is for work, `exclusive` for compiling. Once somebody asks for `exclusive`, newcomers to `shared`
    wait, so those inside run out and the request is never starved. Work pays one short lock on the way in and
    one on the way out and holds none while inside. Both are released whatever way the block is left.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._working = 0
        self._asking = 0
        self._compiling = False
        self._aborted = False
        self._mine = _Mine()

    @property
    def compiling(self) -> bool:
        """Whether some thread is inside `exclusive`."""
        return self._compiling

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Take part in the work. Nests freely, inside `exclusive` too. Raises Aborted."""
        if self._mine.inside:
            yield
            return
        with self._turn:
            self._wait(lambda: not self._compiling and not self._asking)
            self._working += 1
        self._mine.inside = True
        try:
            yield
        finally:
            self._mine.inside = False
            with self._turn:
                self._working -= 1
                self._turn.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Be alone, once all others have left. Raises Aborted; RuntimeError when asked from inside the gate."""
        if self._mine.inside:
            raise RuntimeError("a thread at work cannot ask to be alone: it would wait for itself")
        with self._turn:
            self._asking += 1
            try:
                self._wait(lambda: not self._compiling and not self._working)
                self._compiling = True
            finally:
                self._asking -= 1
                self._turn.notify_all()
        self._mine.inside = True
        try:
            yield
        finally:
            self._mine.inside = False
            with self._turn:
                self._compiling = False
                self._turn.notify_all()

    def abort(self) -> None:
        """Make everybody who waits, and everybody who comes, raise Aborted. Who is inside may finish."""
        with self._turn:
            self._aborted = True
            self._turn.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._turn.wait_for(lambda: self._aborted or ready())
        if self._aborted:
            raise Aborted("the job is ending")


class _Mine(threading.local):
    inside = False
