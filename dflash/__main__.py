"""`python -m dflash COMMAND`: prepare and regenerate data, train, evaluate and export a drafter."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import re
import sys

from dflash.output import status
from dflash.settings import SettingError

# Name -> module in dflash.commands, in the order of use.
COMMANDS = {
    "regenerate": "regenerate",
    "prepare": "prepare",
    "train": "train",
    "warm": "warm",
    "eval": "evaluate",
    "export": "export",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command; 2 and one sentence on standard error when a setting cannot work.

    A word that the command does not know ends the process with 2, after the command's usage.
    """
    parser = argparse.ArgumentParser(prog="python -m dflash", description="Train DFlash drafters.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, file in COMMANDS.items():
        module = importlib.import_module(f"dflash.commands.{file}")
        doc = module.__doc__ or ""
        command = commands.add_parser(
            name,
            help=doc.split("\n")[0],
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(command)
        command.set_defaults(run=module.run, command=command, options=getattr(module, "OPTIONS", {}))
    arguments, more = parser.parse_known_args(argv)
    if "settings" in arguments and not any(word.startswith("-") for word in more):
        arguments.settings += more  # argparse takes those that stand together; they may also follow an option
    elif more:
        arguments.command.error(f"unrecognized arguments: {' '.join(more)}")
    faulthandler.enable()
    try:
        return arguments.run(arguments)
    except SettingError as error:
        print(f"dflash: {_in_options(str(error), arguments.options)}", file=sys.stderr)
        return 2


def _in_options(sentence: str, options: dict[str, str]) -> str:
    """A sentence about settings, which names those that the command has options for by the options."""
    for setting, option in options.items():
        sentence = re.sub(rf"(?<![\w./]){re.escape(setting)}=", f"{option}=", sentence)
    return sentence


if __name__ == "__main__":
    code = int(status(main) or 0)
    sys.stderr.flush()
    # Not sys.exit: a worker thread that hangs after a failure must not keep the process.
    os._exit(code)
