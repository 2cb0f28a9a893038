"""Which Python environment a run uses, and the fingerprint that says two of them are the same."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata as metadata
import platform
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

# What a training job computes with; all that these need belongs to the fingerprint too.
ROOTS = ("torch", "transformers", "numpy", "safetensors", "triton")


@dataclass(frozen=True)
class Wheel:
    """An environment: `python` starts it, `fingerprint` (hex) is equal where the installed packages are."""

    name: str
    python: str
    fingerprint: str
    versions: dict[str, str] = field(hash=False)
    platform: str = ""

    @property
    def computes_on_gpu(self) -> bool:
        """False for a build of torch that says it is CPU only."""
        return "torch" in self.versions and not self.versions["torch"].endswith("+cpu")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@functools.cache
def current() -> Wheel:
    """The interpreter in use.

    The fingerprint covers name, version and the checksums of the files (so local builds differ) of every
    distribution that ROOTS need, the Python version and the kind of machine.
    """
    versions: dict[str, str] = {}
    digest = hashlib.sha256(f"{platform.python_version()} {sysconfig.get_platform()}\n".encode())
    for name, dist in sorted(_closure(ROOTS).items()):
        versions[name] = dist.version
        digest.update(f"{name}=={dist.version} {_content(dist)}\n".encode())
    return Wheel(
        name="current",
        python=sys.executable,
        fingerprint=digest.hexdigest(),
        versions={"python": platform.python_version()} | versions,
        platform=platform.platform(),
    )


def _content(dist: metadata.Distribution) -> str:
    """Hash of what RECORD says of the payload, less scripts and notes that name the place of installation."""
    lines = (dist.read_text("RECORD") or "").splitlines()
    return hashlib.sha256("\n".join(sorted(x for x in lines if _payload(x))).encode()).hexdigest()


def _payload(line: str) -> bool:
    return not line.startswith(("../", "/")) and ".pyc," not in line and ".dist-info/" not in line


def _closure(roots: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    waiting = list(roots)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # an optional root such as triton, or a requirement of another platform
        for line in found[name].requires or []:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found
