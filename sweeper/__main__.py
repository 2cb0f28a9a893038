"""The command: `python -m sweeper [-m] key=value ...`, or `sweeper`.

Exit status: 0 every planned run has a verdict; 3 some are not ok and strict=true; 2 a setting cannot work
(one sentence on standard error, nothing started); 1 a fault of the harness; 130 after an interrupt.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.settings import SettingError
from sweeper import help
from sweeper.words import leave, typed

if TYPE_CHECKING:
    from sweeper.composed import Composed
    from sweeper.sweep import Result

BAD_INPUT, INTERRUPTED = 2, 130


def main() -> None:
    """Entry point of the console script; ends the process with the status above."""
    leave(lambda: command(sys.argv[1:]))


def command(arguments: list[str]) -> int:
    """Do what the command line says; returns the exit status."""
    if "--help" in arguments or "-h" in arguments:
        print(help.text())
        return 0

    def carry_out(configs: Sequence[Composed]) -> Result:
        from sweeper.sweep import sweep

        if len(configs) > 1 and not {"-m", "--multirun"} & set(arguments):
            varied = next((word for word in arguments if re.search(r"=.*[,(*]", word)), arguments[-1])
            raise SettingError(*varied.partition("=")[::2], "several levels make a sweep; say so with -m")
        return sweep(configs)

    return compose(arguments, carry_out)


def compose(arguments: list[str], carry_out: Callable[[Sequence[Composed]], Result]) -> int:
    """Compose the cells that a command line asks for and hand them over; returns the exit status of the command.

    What `carry_out` raises as SettingError, and what Hydra cannot read, is told in one sentence.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from sweeper.complaints import sentence

    typed[:] = arguments
    words = (_hydras(word) for given in arguments for word in _start(given))
    arguments = list(dict.fromkeys(words))
    if {"-m", "--multirun"} & set(arguments):
        # argparse reads no setting that follows a flag which itself follows a setting
        arguments = ["-m", *(word for word in arguments if word not in ("-m", "--multirun"))]
    sys.argv = [sys.argv[0], *arguments]
    if complaint := _bad_flags(arguments):
        print(f"sweeper: {complaint}", file=sys.stderr)
        return BAD_INPUT
    # Hydra then raises instead of printing and leaving, so that what went wrong is ours to tell.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    status = 0

    def task(configs: Any) -> list[list[str]]:
        nonlocal status
        result = carry_out(configs)
        status = result.status
        return result.verdicts

    with tempfile.TemporaryDirectory(prefix="sweeper-") as scratch:
        _resolvers(scratch)
        try:
            hydra.main(version_base="1.3", config_path=str(help.CONF), config_name="config")(task)()
        except (HydraException, OmegaConfBaseException, SettingError) as error:
            print(f"sweeper: {sentence(error, arguments)}", file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            return INTERRUPTED
    return status


def _start(word: str) -> list[str]:
    """cache=cold,foreign:cu128, one factor to a person, is cache=cold,foreign cache_from=cu128 to Hydra."""
    name, _, value = word.partition("=")
    if name != "cache" or ":" not in value:
        return [word]
    states, sources = zip(*(level.partition(":")[::2] for level in value.split(",")), strict=True)
    return [f"cache={','.join(dict.fromkeys(states))}", f"cache_from={','.join(filter(None, dict.fromkeys(sources)))}"]


def _hydras(word: str) -> str:
    """A word of the command line as Hydra wants it."""
    if word in ("-v", "--verbose"):
        return "verbose=true"
    if re.match(r"cache_from=", word):  # a level of the group wheel, of its own
        return f"wheel@{word}"
    if word.startswith("until="):  # its grammar knows no < outside of quotes
        return f"until='{word[6:].strip(chr(39))}'"
    name, _, value = word.partition("=")
    pieces = value.split(",")
    if re.match(r"(args|workload\.env)\.", name) and all(re.fullmatch(r"[\w.:/+-]+", piece) for piece in pieces):
        # What a command is told is text as it was written: no 1e5 for a commit, no true for True.
        word = f"{name}={','.join(map(repr, pieces))}"
    # The names below fanout and args are the user's own, as are a command's variables, and a wheel's file gives only
    # the pins that it means; Hydra sets a key that no file has only where told that it is new.
    return f"++{word}" if re.match(r"(fanout|args)[.=]|(wheel|workload\.env)\.", word) else word


def _bad_flags(arguments: list[str]) -> str:
    """What argparse, which would print its usage as well, says of flags that do not exist."""
    from hydra._internal.utils import get_args_parser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            get_args_parser().parse_args(arguments)
    except SystemExit as end:
        return said.getvalue().splitlines()[-1].partition("error: ")[2] if end.code else ""
    return ""


def _resolvers(scratch: str) -> None:
    """What conf/ may interpolate: the trainer's example files, and a folder for what Hydra itself writes."""
    from omegaconf import OmegaConf

    examples = Path(help.CONF).parent / "dflash" / "data" / "examples"
    OmegaConf.register_new_resolver("example", lambda name: str(examples / name), replace=True)
    OmegaConf.register_new_resolver("scratch", lambda: scratch, replace=True)


if __name__ == "__main__":
    main()
