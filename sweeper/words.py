"""The words of a command line, what it says, and its end."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

# The words of `python -m sweeper` as they were typed; in sys.argv stand those that Hydra reads.
typed: list[str] = []
READER_GONE = 141  # as a shell tells a command that SIGPIPE ended


def with_store(arguments: Sequence[str] | None) -> list[str]:
    """The words given, or those of the process, with `store=DIR` as the option `--store=DIR`.

    So the commands that have options take the store in the words of `python -m sweeper` too.
    """
    given = sys.argv[1:] if arguments is None else arguments
    return [f"--{word}" if word.startswith("store=") else word for word in given]


def say(text: str) -> None:
    """Print a text; if whoever read the output is gone (`| head`), the command goes on without it."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        _into_nothing()


def leave(main: Callable[[], int]) -> NoReturn:
    """End the process with the status of `main`; quietly where whoever read its output is gone."""
    status: int | str | None = READER_GONE
    try:
        try:
            status = main()
        except SystemExit as end:  # argparse, which has said why
            status = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        if not _into_nothing():
            raise
    sys.exit(status)


def _into_nothing() -> bool:
    """Turn standard output into the void if nobody reads it; whether nobody does."""
    output = select.poll()
    output.register(sys.stdout, 0)
    if not output.poll(0):  # an error is told unasked; none: another pipe broke, such as a worker's
        return False
    void = os.open(os.devnull, os.O_WRONLY)
    os.dup2(void, sys.stdout.fileno())
    os.close(void)
    return True
