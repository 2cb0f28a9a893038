"""Which Python environment a run uses: the interpreter in use, or pins that are built into one of their own.

A level of `wheel` other than `current` is a handful of pins (`Pins`). `sweeper.wheels.build` makes an environment
of them with uv, once; here is what an environment is (`Wheel`), how a built one is found again, and the
fingerprint that says two of them are the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata as metadata
import importlib.util
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from dflash import models
from dflash.settings import SettingError

CURRENT = "current"
RECORD = "wheel.json"  # written last: a folder without it is no environment
ENVIRONMENT = "env"
# What a training job computes with; all that these need belongs to the fingerprint too.
ROOTS = ("torch", "transformers", "numpy", "safetensors", "triton")
# What the trainer imports beside the pins. Its own code is not installed but shown (`shown`).
REQUIRES = ("transformers>=5", "safetensors>=0.5", "numpy>=2", "jinja2>=3", "filelock>=3.15")


@dataclass
class Sources:
    """Where environments are built and their packages come from; no part of a run's identity.

    find_links are folders (or pages) of package files, index the package indexes; no index means PyPI, an
    empty list none at all, not even the level's own.
    """

    dir: str = "./runs/wheels"
    find_links: list[str] = field(default_factory=list)
    index: list[str] | None = None

    @property
    def folder(self) -> Path:
        return Path(self.dir).expanduser().absolute()

    def places(self) -> list[str]:
        """find_links with folders as absolute paths."""
        return [text if "://" in text else os.path.abspath(os.path.expanduser(text)) for text in self.find_links]

    def check(self) -> None:
        """Raise SettingError on a place that does not exist or cannot be an address."""
        for number, place in enumerate(self.places()):
            if "://" not in place and not os.path.isdir(place):
                raise SettingError(
                    f"wheels.find_links[{number}]", self.find_links[number], "must be an existing folder of packages"
                )
        for number, address in enumerate(self.index or ()):
            _check_address(f"wheels.index[{number}]", address)


@dataclass(frozen=True)
class Pins:
    """What an environment is built from. Versions are specifiers such as `==2.13.0` or `>=2.16.0.dev0`."""

    name: str
    torch: str
    transformers: str = ""
    triton: str = ""
    extra: tuple[str, ...] = ()  # further requirements, as pip reads them
    index: str = ""  # address of an index that is looked in besides
    python: str = ""  # a version such as 3.12, or the path of an interpreter; empty: the one in use

    @property
    def requirements(self) -> list[str]:
        """Everything that is installed, one requirement a package."""
        pinned = {name: getattr(self, name) for name in ("torch", "transformers", "triton")}
        asked = [f"{name}{version}" for name, version in pinned.items() if version]
        names = {canonicalize_name(Requirement(line).name) for line in (*asked, *self.extra)}
        return [*asked, *self.extra, *(line for line in REQUIRES if Requirement(line).name not in names)]

    @property
    def key(self) -> str:
        """Equal (hex) where the same environment is asked for; known before anything is built."""
        python = self.python or platform.python_version()
        asked = [sorted(self.requirements), self.index, python, sysconfig.get_platform()]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    def __str__(self) -> str:
        more = [f"{name}{value}" for name in ("transformers", "triton") if (value := getattr(self, name))]
        return ", ".join([f"torch{self.torch}", *more, *self.extra])


@dataclass(frozen=True)
class Wheel:
    """An environment: `python` starts it, `fingerprint` (hex) is equal where the installed packages are.

    `pins` is what it is built from, None for the interpreter in use. Before it is built, `python` is empty;
    `failure` says why it could not be.
    """

    name: str
    python: str
    fingerprint: str
    versions: dict[str, str] = field(hash=False)
    platform: str = ""
    pins: Pins | None = None
    torch: dict[str, str | None] = field(default_factory=dict, hash=False)  # what torch.version says
    failure: str = ""

    @property
    def computes_on_gpu(self) -> bool:
        """False for a build of torch that says it is CPU only."""
        return "torch" in self.versions and not self.versions["torch"].endswith("+cpu")

    @property
    def unbuilt(self) -> bool:
        return not self.python

    def environment(self) -> dict[str, str]:
        """Variables with which a child finds this environment's own commands first."""
        if self.pins is None or self.unbuilt:
            return {}
        commands = Path(self.python).parent
        path = f"{commands}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {"VIRTUAL_ENV": str(commands.parent), "PATH": path}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(name: str, settings: Any) -> Pins | None:
    """The pins of a level, from its file and the command line; None for `current`. Raises SettingError."""
    given = {key: value for key, value in dict(settings or {}).items() if key != "about"}
    known = [one.name for one in fields(Pins) if one.name != "name"]
    for key, value in given.items():
        if name == CURRENT:
            raise SettingError(f"wheel.{key}", value, "wheel=current is the interpreter in use; wheel=pins takes pins")
        if key not in known:
            raise SettingError(f"wheel.{key}", value, f"unknown setting; a wheel has {', '.join(known)}")
    if name == CURRENT:
        return None
    given = {key: value for key, value in given.items() if value not in (None, "")}
    if "torch" not in given:
        raise SettingError("wheel.torch", "???", f"must be given for wheel={name}, such as wheel.torch=2.13.0")
    extra = given.get("extra", [])
    if not isinstance(extra, list) or not all(isinstance(line, str) and _requirement(line) for line in extra):
        raise SettingError("wheel.extra", extra, "must be a list of requirements, such as [liger-kernel==0.6.4]")
    index, python = given.get("index", ""), given.get("python", "")
    if index:
        _check_address("wheel.index", index)
    if python and not (isinstance(python, str) and _interpreter(python)):
        raise SettingError("wheel.python", python, "must be a version in quotes, such as '3.12', or an interpreter")
    versions = {key: _specifier(key, given[key]) for key in ("torch", "transformers", "triton") if key in given}
    return Pins(name=name, **versions, extra=tuple(extra), index=index, python=python)


def _specifier(key: str, value: Any) -> str:
    """A version as a specifier; a bare one is exact."""
    allowed = "must be a version in full, such as 2.13.0 or 2.11.0+cu128, or a specifier such as '>=2.13,<2.14'"
    if not isinstance(value, str):  # YAML reads 2.10 as the number 2.1
        raise SettingError(f"wheel.{key}", value, allowed)
    text = value.replace(" ", "")
    try:
        Version(text)
        text = f"=={text}"
    except InvalidVersion:
        if not (found := _requirement(f"{key}{text}")) or not found.specifier or found.url:
            raise SettingError(f"wheel.{key}", value, allowed) from None
    return text


def _requirement(line: str) -> Requirement | None:
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None


def _interpreter(text: str) -> bool:
    version = re.fullmatch(r"3\.(\d+)(\.\d+)?", text)
    return int(version[1]) >= 11 if version else os.path.isabs(text) and os.access(text, os.X_OK)


def _check_address(setting: str, address: Any) -> None:
    parts = urlsplit(address) if isinstance(address, str) else None
    if parts is None or parts.scheme not in ("http", "https", "file"):
        raise SettingError(setting, address, "must be the address of a package index, such as https://pypi.org/simple")
    if parts.username or parts.password:
        # Neither said again here nor kept in any record.
        raise SettingError(setting, parts.hostname, "must hold no user and password; uv reads those from ~/.netrc")


def resolve(name: str, settings: Any, sources: Sources, failures: Mapping[str, str]) -> Wheel:
    """The environment that a level means: in use, built, or one that is yet to be built.

    `failures` says, by the pins' key, which could not be built, and why. Raises SettingError.
    """
    pins = read(name, settings)
    if pins is None:
        return current()
    if found := find(pins, sources):
        return found
    # What the pins say has to do until there is more to look at.
    torch = re.sub("^==", "", pins.torch)
    guess = torch if "+" in torch or not pins.index.rstrip("/").endswith("/cpu") else f"{torch}+cpu"
    failure = failures.get(pins.key, "")
    return Wheel(name, "", f"unbuilt {pins.key}", {"torch": guess}, platform.platform(), pins, failure=failure)


def find(pins: Pins, sources: Sources) -> Wheel | None:
    """The environment that was built of these pins, if there is one; contacts nobody."""
    for folder, record in whole(sources.folder):
        if pins.key in record["keys"]:
            kept = {name: record[name] for name in ("fingerprint", "versions", "torch", "platform")}
            return Wheel(name=pins.name, python=str(python(folder)), pins=pins, **kept)
    return None


def whole(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every whole environment below `folder`: its own folder and its record."""
    for path in sorted(folder.glob(f"[!.]*/{RECORD}")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        told = isinstance(record, dict) and {"keys", "fingerprint", "versions", "torch", "platform"} <= set(record)
        if told and os.access(python(path.parent), os.X_OK):
            yield path.parent, record


def python(folder: Path) -> Path:
    """The interpreter of the environment in `folder`."""
    return folder / ENVIRONMENT / "bin" / "python"


def brief(failure: str) -> str:
    """Why an environment could not be built, in one line."""
    title, *said = [line.strip() for line in failure.splitlines()]
    errors = [number for number, line in enumerate(said) if line.startswith("error: ")]
    # uv tells an error with its causes, a line or more each; of anything else the last line is the reason.
    return f"{title}: {' '.join(said[errors[0] if errors else -1 :])}"[:600]


def mark_used(wheel: Wheel) -> None:
    """Note that a run starts in this environment now, for `prune`."""
    if wheel.pins is not None:
        with contextlib.suppress(OSError):  # somebody else's, or gone
            os.utime(Path(wheel.python).parents[2] / RECORD)


def shown(sources: Sources) -> Path:
    """A folder that shows the trainer and the packages that carry models, and nothing else, to another interpreter.

    The folder they are installed in would show the wrong torch as well. Its path is the same for every run, since
    paths of source files reach compile caches. Raises OSError.
    """
    found = {name: importlib.util.find_spec(name) for name in ("dflash", *(m.module for m in models.PACKAGED.values()))}
    places = {name: at[0] for name, spec in found.items() if spec and (at := spec.submodule_search_locations)}
    digest = hashlib.sha256(json.dumps(places, sort_keys=True).encode()).hexdigest()
    folder = sources.folder / f".shown-{digest[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, place in places.items():
        try:
            (folder / name).symlink_to(place, target_is_directory=True)
        except FileExistsError:
            continue
    return folder


@functools.cache
def current() -> Wheel:
    """The interpreter in use."""
    versions, fingerprint = _fingerprint(ROOTS, _own, platform.python_version(), sysconfig.get_platform(), {})
    return Wheel(CURRENT, sys.executable, fingerprint, versions, platform.platform())


def _own(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def fingerprint_at(
    places: list[str], requirements: Iterable[str], facts: Mapping[str, Any]
) -> tuple[dict[str, str], str]:
    """Versions and fingerprint of what is installed at `places`; `facts` is what its interpreter says of itself:
    {python, platform, markers}."""

    def look(name: str) -> metadata.Distribution | None:
        return next(iter(metadata.distributions(name=name, path=places)), None)

    roots = (*ROOTS, *(Requirement(line).name for line in requirements))
    return _fingerprint(roots, look, facts["python"], facts["platform"], facts["markers"])


def _fingerprint(
    roots: Iterable[str],
    look: Callable[[str], metadata.Distribution | None],
    python: str,
    machine: str,
    markers: Mapping[str, str],
) -> tuple[dict[str, str], str]:
    """Versions by name, and the fingerprint.

    It covers name, version and the checksums of the files (so local builds differ) of every distribution that
    `roots` need, the Python version and the kind of machine.
    """
    versions = {"python": python}
    digest = hashlib.sha256(f"{python} {machine}\n".encode())
    for name, dist in sorted(_closure(roots, look, markers).items()):
        versions[name] = dist.version
        digest.update(f"{name}=={dist.version} {_content(dist)}\n".encode())
    return versions, digest.hexdigest()


def _content(dist: metadata.Distribution) -> str:
    """Hash of what RECORD says of the payload, less scripts and notes that name the place of installation."""
    lines = (dist.read_text("RECORD") or "").splitlines()
    return hashlib.sha256("\n".join(sorted(x for x in lines if _payload(x))).encode()).hexdigest()


def _payload(line: str) -> bool:
    return not line.startswith(("../", "/")) and ".pyc," not in line and ".dist-info/" not in line


def _closure(
    roots: Iterable[str], look: Callable[[str], metadata.Distribution | None], markers: Mapping[str, str]
) -> dict[str, metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    waiting = list(roots)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        dist = look(name)
        if dist is None:
            continue  # an optional root such as triton, or a requirement of another platform
        found[name] = dist
        for line in dist.requires or []:
            requirement = _requirement(line)
            if requirement is None:
                continue
            if requirement.marker is None or requirement.marker.evaluate({**markers, "extra": ""}):
                waiting.append(requirement.name)
    return found
