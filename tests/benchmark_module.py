"""A script of benchmarks/ as a module, which is forgotten again with those it imports from beside it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

FOLDER = Path(__file__).parent.parent / "benchmarks"


@contextmanager
def benchmark_module(name: str) -> Iterator[ModuleType]:
    """Workers that are processes find it where this process does."""
    try:
        with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
            yield importlib.import_module(name)
    finally:
        for imported in {script.stem for script in FOLDER.glob("*.py")} & sys.modules.keys():
            if Path(sys.modules[imported].__file__ or "").parent == FOLDER:
                del sys.modules[imported]
