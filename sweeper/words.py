"""The words of a command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def with_store(arguments: Sequence[str] | None) -> list[str]:
    """The words given, or those of the process, with `store=DIR` as the option `--store=DIR`.

    So the commands that have options take the store in the words of `python -m sweeper` too.
    """
    given = sys.argv[1:] if arguments is None else arguments
    return [f"--{word}" if word.startswith("store=") else word for word in given]
