"""Explain a failure's text, or list the causes.

python -m sweeper.signatures explain child.log     (or - for standard input; --json for one object)
python -m sweeper.signatures causes
"""

from __future__ import annotations

import argparse
import json
import sys

from sweeper.signatures import classify, fingerprint, rule, rules
from sweeper.signatures.prints import VERSION, last_traceback


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m sweeper.signatures", description="Explain a failure's text.")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="cause, evidence, remedy and fingerprint of a text")
    explain.add_argument("file", help="a log or a traceback; - reads standard input")
    explain.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    commands.add_parser("causes", help="every cause and what it means")
    chosen = parser.parse_args(arguments)
    if chosen.command == "causes":
        for cause, known in sorted(rules().items()):
            print(f"{cause:28} {known.about}")
        return 0
    try:
        text = sys.stdin.read() if chosen.file == "-" else _read(chosen.file)
    except OSError as error:
        print(f"file={chosen.file}: must be a readable text file ({error.strerror})", file=sys.stderr)
        return 2
    found = explained(text)
    if chosen.json:
        print(json.dumps(found))
    else:
        for key in ("cause", "about", "evidence", "remedy", "fingerprint", "source"):
            print(f"{key:12} {found[key]}")
    return 0


def explained(text: str) -> dict[str, str]:
    """What is known of a text; the cause is `unknown` if no rule fits."""
    match = classify(text)
    known = rule(match.cause if match else "unknown")
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return {
        "cause": known.cause,
        "about": known.about,
        "evidence": match.evidence if match else last,
        "remedy": known.remedy,
        "fingerprint": fingerprint(last_traceback(text) or (match.evidence if match else last)),
        "fingerprint_version": VERSION,
        "source": known.source,
    }


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


if __name__ == "__main__":
    sys.exit(main())
