"""Finds the first bad level of an ordered factor: `python -m sweeper.bisect` (docs/BISECT.md)."""
