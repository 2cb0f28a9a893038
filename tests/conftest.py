import os
from pathlib import Path

import pytest

# Workers of the jobs under test share two cores; a pool of threads in each only makes them wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packaged model is unpacked, once a session."""
    return tmp_path_factory.mktemp("models")
