"""Explain a failure's text, or list the causes.

python -m sweeper.signatures explain child.log     (or - for standard input; --json for one object)
python -m sweeper.signatures causes
python -m sweeper.signatures document              (docs/SIGNATURES.md, on standard output)
"""

from __future__ import annotations

import argparse
import json
import re
import sys

from sweeper.signatures import classify, fingerprint, rule, rules, version
from sweeper.signatures.document import document
from sweeper.signatures.prints import last_traceback, plain
from sweeper.signatures.text import joined, read
from sweeper.words import leave

_TROUBLE = re.compile(
    r"(?i)error|exception|traceback|fatal|fail|abort|kill|denied|not found|no such|cannot|can't|could not|unable|panic"
    r"|core dumped|segmentation|terminated|time[d -]?out|refused|invalid|unknown|unrecogni[sz]ed|usage:|assert|\bnan\b"
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m sweeper.signatures", description="Explain a failure's text.")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="cause, evidence, remedy and fingerprint of a text")
    explain.add_argument("file", help="a log or a traceback; - reads standard input")
    explain.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    commands.add_parser("causes", help="every cause and what it means")
    commands.add_parser("document", help="the page of all causes, docs/SIGNATURES.md")
    chosen = parser.parse_args(arguments)
    if chosen.command == "causes":
        print("".join(f"{cause:28} {known.about}\n" for cause, known in sorted(rules().items())), end="")
        return 0
    if chosen.command == "document":
        print(document(), end="")
        return 0
    try:
        text = joined(sys.stdin.buffer.read()) if chosen.file == "-" else read(chosen.file)
    except OSError as error:
        print(f"file={chosen.file}: must be a readable text file ({error.strerror})", file=sys.stderr)
        return 2
    found = explained(text)
    if chosen.json:
        print(json.dumps(found))
    else:
        told = ("cause", "about", "evidence", "remedy", "fingerprint", "source")
        print("".join(f"{key:12} {found[key]}\n" for key in told), end="")
    return 0


def explained(text: str) -> dict[str, str]:
    """What is known of a text; the cause is `unknown` if no rule fits, and the evidence is then its last line."""
    match = classify(text)
    known = rule(match.cause if match else "unknown")
    said = "" if match else plain(text)
    last = next((line.strip()[:300] for line in reversed(said.splitlines()) if line.strip()), "")
    good = match is None and not _TROUBLE.search(said)
    return {
        "cause": known.cause,
        "about": "Nothing in this text looks like a failure." if good else known.about,
        "evidence": match.evidence if match else "" if good else last,
        "remedy": "None is needed, unless this is not the text of what failed." if good else known.remedy,
        "fingerprint": match.fingerprint if match else fingerprint(last_traceback(said) or last),
        "version": version(),
        "source": known.source,
    }


if __name__ == "__main__":
    leave(main)
