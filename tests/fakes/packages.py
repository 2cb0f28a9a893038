"""Wheel files made by hand, small enough to be built by the dozen: for tests of environments."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

REST = {"transformers": "5.1.0", "safetensors": "0.6.0", "numpy": "2.4.0", "jinja2": "3.2.0", "filelock": "3.20.0"}


def torch(folder: Path, version: str, code: str = "") -> None:
    """A package file that calls itself torch `version`; `code` is what importing it does."""
    package(folder, "torch", version, code=code or f"__version__ = {version!r}\n")


def rest(folder: Path) -> None:
    """What the trainer needs beside torch, empty."""
    for name, version in REST.items():
        package(folder, name, version)


def package(folder: Path, name: str, version: str, requires: Sequence[str] = (), code: str = "") -> None:
    """Write one pure Python wheel file into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    files = {
        f"{name}/__init__.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items())
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            file.writestr(zipfile.ZipInfo(path), text)  # no time of writing, so that equal files are equal


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
