"""A command's output, and its end when whoever read it is gone (`| head`)."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

READER_GONE = 141  # as a shell tells a command that SIGPIPE ended


def status(main: Callable[[], int]) -> int | str | None:
    """What `main` returns or ends the process with, its output flushed; READER_GONE where that ended it."""
    code: int | str | None = READER_GONE
    try:
        try:
            code = main()
        except SystemExit as end:  # argparse, which has said why
            code = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        if not into_nothing():
            raise
    return code


def into_nothing() -> bool:
    """Turn standard output into the void if nobody reads it; whether nobody does."""
    output = select.poll()
    output.register(sys.stdout, 0)
    if not output.poll(0):  # an error is told unasked; none: another pipe broke, such as a worker's
        return False
    void = os.open(os.devnull, os.O_WRONLY)
    os.dup2(void, sys.stdout.fileno())
    os.close(void)
    return True
