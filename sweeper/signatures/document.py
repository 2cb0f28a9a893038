"""The page of all causes, docs/SIGNATURES.md, from rules.toml."""

from __future__ import annotations

from sweeper.signatures import Rule, rules, version

_HEAD = """# Signatures

What went wrong has a name: a cause from this closed list, and a fingerprint that is the same wherever it happens
again. This page is written by `python -m sweeper.signatures document` from `sweeper/signatures/rules.toml`.

```
python -m sweeper.signatures explain child.log          # or - for standard input; --json for one object
```

* The first failure is the root: by the rank that torchrun names, else by time where every line tells one, else by the
  order of lines. What another cause *explains* is its echo, whatever the order.
* A text that fits no rule is `unknown`, never a guess. Equal fingerprints group equal unknowns.
* Prefixes of ranks and loggers, colours and progress bars are taken off first, and the source lines that a traceback
  quotes are not read. Of a long log the first 0.1 MB and the last 0.4 MB are read.
* Every signature carries a version, here {version}: of the rules, then of fingerprints. Prints of two versions are not
  comparable.
"""
_INJECTED = """
## How well it holds
Rules were written with tests/data/failures.jsonl and failures-tuning.jsonl in sight (texts of issues, cut short; where
the source is a file of source code, the text is made after what that file prints). Then three lots of public texts
were gathered, in words that the rules had not seen (failures-heldback.jsonl), and looked at once each before anything
was changed: of 75 failures 54 were named right, 20 `unknown`, 1 named wrongly; of 16 texts without a cause 15 were
`unknown`, 1 was named. Both mistakes were Docker's `"OOMKilled": false`. The rules have been mended since, so these
texts prove nothing any more. ordinary.jsonl holds logs and errors of users that must name nothing.

## Injected in tests
Each of these causes was made to happen in a run of its own under the harness (tests/test_injected.py, or the test
that is named), and the run ended in its signature. *By hand* means that the words were printed, not the fault made.

"""
_NOT_INJECTED = """
## Not injected
These need what the machine of the tests, two processors and no GPU, has not. Their rules are tested with public texts
(tests/data/failures*.jsonl, each with its source) and with their examples above.

| cause | needs | tested with instead |
|---|---|---|
"""


def document() -> str:
    """The page as Markdown."""
    known = sorted(rules().values(), key=lambda rule: rule.cause)
    parts = [_HEAD.format(version=version()), *(_entry(rule) for rule in known)]
    parts += [_INJECTED, "| cause | how |\n|---|---|\n", *(_row(r.cause, r.injected) for r in known if r.injected)]
    parts += [_NOT_INJECTED, *(_row(r.cause, r.not_injected, r.instead) for r in known if r.not_injected)]
    return "".join(parts)


def _entry(rule: Rule) -> str:
    told = [f"\n## {rule.cause}\n{rule.about}\n"]
    told += [f"* Evidence: {rule.evidence}", f"* Remedy: {rule.remedy}"]
    if rule.explains:
        told.append(f"* Explains: {', '.join(rule.explains)}")
    told.append(f"* Source: {rule.source}")
    if rule.examples:
        told += ["", "```", *rule.examples, "```"]
    return "\n".join(told) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"
