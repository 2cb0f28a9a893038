"""The words of a command line, what it says, and its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from dflash import output

# The words of `python -m sweeper` as they were typed; in sys.argv stand those that Hydra reads.
typed: list[str] = []


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
        output.into_nothing()


def leave(main: Callable[[], int]) -> NoReturn:
    """End the process with the status of `main`; quietly where whoever read its output is gone."""
    sys.exit(output.status(main))
