from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dflash.probe import Probe

# Tests of one worker share this machine with those of the others, and must not see their runs beside their own.
os.environ.setdefault("SWEEPER_LEASES", tempfile.mkdtemp(prefix="leases-"))
# Workers of the jobs under test share two cores; a pool of threads in each only makes them wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that two workers, each with whole files, end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packaged model is unpacked, once a session."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Probe]:
    """A probe at work that writes to events.jsonl in the test's folder."""
    import torch  # here, because most tests do without

    from dflash.events import EventWriter
    from dflash.probe import Probe

    probe = Probe(EventWriter(tmp_path / "events.jsonl"))
    probe.install()
    yield probe
    probe.close()
    torch._dynamo.reset()
