"""What a run is: typed, validated, with an identity.

`read` turns the composed configurations of a sweep's cells into Options (how the harness goes about it) and
Runs (what a child is told). It raises SettingError, in one sentence, on anything that can be known to fail
without starting; nothing has been written when it does.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dflash import models
from dflash.events import STAGES
from dflash.settings import DEVICES, JobSettings, SettingError, Split
from sweeper import caches, help, leases, machine, wheels
from sweeper import workload as workloads
from sweeper.cluster import settings as cluster
from sweeper.composed import Composed
from sweeper.tracking import place as places
from sweeper.workload import Workload

# In a folder of prepared data: what it holds, with the checksum of each file.
PREPARED = "meta.json"
CACHE_FROM = "wheel@cache_from"  # Hydra's name of the choice cache_from=, a wheel level
FACTORS = ("wheel", "cache", "compile", "split", "isolation")
ORDERS = ("random", "given")
COPY = "aa"  # in a cell: it is the second copy of the first one, run to see the noise
LEAST_BLOCKS = 5  # from which on an interval's width may end a sweep
# Settings without influence on compiled code: numbers that a compiled graph takes as inputs, and what happens
# outside of it.
NO_GRAPH = (
    *("seed", "eval", "optim", "loss.gamma", "loss.alpha"),
    *("data.path", "data.format", "data.reasoning", "data.too_long", "data.bad_rows"),
    *("train.steps", "train.steady_after", "train.queue_mib", "train.save", "train.save_every", "train.keep"),
    "train.profile",
)
# What a child is told beside the sections of its workload.
SHARED = ("compile", "split", "isolation", "device", "seed")


@dataclass
class Options:
    """How the harness goes about a sweep; the same for all its cells and no part of a run's identity."""

    store: str = "./runs"
    repeat: int = 1
    until: str = "none"
    aa: bool = False
    order: str = "random"
    dry: bool = False
    rerun: str = "none"
    strict: bool = False
    verbose: bool = False
    report: bool = True
    grace: float = 10.0
    jobs: str = "1"
    detach: bool = False
    slurm: dict[str, Any] | None = None  # what hydra/launcher=slurm brings
    budget: dict[str, float] = field(default_factory=dict)
    tracking: dict[str, Any] = field(default_factory=dict)
    wheels: wheels.Sources = field(default_factory=wheels.Sources)

    @property
    def gpus(self) -> int:
        """How many GPUs a run can have: this machine's, or those of a node of Slurm's partition."""
        return machine.gpus() if self.slurm is None else cluster.read(self.slurm).node_gpus()

    @property
    def folder(self) -> Path:
        return Path(self.store).expanduser().absolute()

    @property
    def width(self) -> float | None:
        """The width (high / low - 1) of every effect's interval that ends the sweep; None without `until`."""
        asked = re.fullmatch(r"(?:ci<)?(\d+(?:\.\d+)?)%", self.until)
        return float(asked[1]) / 100 if asked else None

    def check(self) -> None:
        """Raise SettingError on values that cannot work."""
        if not 1 <= self.repeat <= 10_000:
            raise SettingError("repeat", self.repeat, "must be from 1 to 10000")
        if self.until != "none" and not self.width:
            raise SettingError("until", self.until, "must be none, or a width such as ci<5%")
        if self.width and self.repeat < LEAST_BLOCKS:
            least = f"needs repeat={LEAST_BLOCKS} or more, the most blocks that may be run"
            raise SettingError("until", self.until, least)
        if self.order not in ORDERS:
            raise SettingError("order", self.order, f"must be one of {', '.join(ORDERS)}")
        leases.check(self.jobs)
        if self.slurm is not None:
            cluster.read(self.slurm).check()
        if self.detach and self.slurm is None:
            raise SettingError("detach", "true", "needs jobs to leave to themselves: hydra/launcher=slurm")
        if self.detach and self.width:
            raise SettingError("until", self.until, "needs the command to stay; detach=true leaves")
        if not 0 <= self.grace < math.inf:
            raise SettingError("grace", self.grace, "must be 0 or more seconds, and an end")
        for stage, seconds in self.budget.items():
            if stage not in STAGES:
                raise SettingError(f"budget.{stage}", seconds, f"unknown stage; known: {', '.join(STAGES)}")
            if not seconds > 0:
                raise SettingError(f"budget.{stage}", seconds, "must be more than 0 seconds")
        for stage in STAGES:
            if stage not in self.budget:
                raise SettingError("budget", self.budget, f"must give seconds for the stage {stage}")
        self.wheels.check()
        places.read(self.tracking, self.folder)
        if not self.store:
            raise SettingError("store", "''", "must be a folder")
        _check_store(self.folder)


@dataclass(frozen=True)
class Run:
    """One run of a cell. `spec` is what the child is told; `skip` says why it cannot run by nature, if so."""

    cell: dict[str, str]
    spec: dict[str, Any]
    workload: Workload
    wheel: wheels.Wheel
    facts: dict[str, Any]  # what `spec` means on this machine: content of inputs and code, see `_facts`
    repeat: int = 1
    role: str = "cell"  # cell | prime
    skip: str = ""
    cache_wheel: wheels.Wheel | None = None  # whose caches cache=foreign starts from
    code: dict[str, str] = field(default_factory=dict)  # what its code was when it was planned: file -> content's hash

    def changed(self) -> list[str]:
        """Files of its code that are not what they were when it was planned; one that is not to be had here is not
        counted: in a container it may lie elsewhere.
        """
        return [path for path, known in self.code.items() if os.path.isfile(path) and _digest(path) != known]

    @property
    def cell_id(self) -> str:
        """Identity of the cell (hex): all that a run computes from, less the number of the repeat."""
        donor = self.donor()
        start = f"{self.state} {donor.snapshot_key()}" if donor and self.state != caches.WARM else self.state
        copy = {COPY: True} if COPY in self.cell else {}
        return _hash({**self.facts, "cache": start, "role": self.role, **copy})

    @property
    def identity(self) -> str:
        """Identity of the run (hex); two runs with the same one are the same experiment done again."""
        return _hash([self.cell_id, self.repeat])

    @property
    def label(self) -> str:
        """The cell in words, for people."""
        parts = [self.cell["wheel"]] if self.cell["wheel"] != wheels.CURRENT else []
        parts += [self.cell[name] for name in ("compile", "cache", "split", "isolation")]
        parts += [f"{key}={value}" for key, value in self.cell.items() if key not in FACTORS]
        prefix = "prime " if self.role == "prime" else ""
        return prefix + " ".join(parts) + (f" #{self.repeat}" if self.repeat > 1 else "")

    def slug(self, attempt: int) -> str:
        """Name of the run's directory: readable, safe in a shell, at most 120 characters."""
        words = re.sub(r"[^A-Za-z0-9.]+", "-", self.label.split(" #")[0])[:80].strip("-.")
        return f"{words}-{self.identity[:12]}-r{self.repeat}.a{attempt}"

    def snapshot_key(self) -> str:
        """Which compile caches fit this run (hex): environment, machine, strategy, geometry and code.

        What is left out (NO_GRAPH) is known to change no compiled code; anything else may.
        """
        settings = json.loads(json.dumps(self.facts["settings"]))
        for one in (settings, *_variants(settings)):
            for path in NO_GRAPH:
                section, _, name = path.partition(".")
                if not name:
                    one.pop(section, None)
                elif isinstance(inside := one.get(section), dict):
                    inside.pop(name, None)
        place = {"machine": machine.kind(), "compilers": caches.compiler_settings()}
        return _hash({**self.facts, "settings": settings, **place})

    @property
    def state(self) -> str:
        """The cache state that the run starts from: cold, warm, foreign or standalone."""
        return self.cell["cache"].partition(":")[0]

    def donor(self) -> Run | None:
        """The run whose caches this one starts with; None where it starts with none (cache=cold)."""
        if self.state == caches.COLD:
            return None
        prime = self.prime()
        if self.state == caches.STANDALONE:
            alone = self.workload.standalone
            return replace(prime, workload=replace(self.workload, argv=alone), facts=prime.facts | {"argv": alone})
        if self.state == caches.FOREIGN and self.cache_wheel:
            wheel = self.cache_wheel
            cell, facts = prime.cell | {"wheel": wheel.name}, prime.facts | {"wheel": wheel.fingerprint}
            return replace(prime, wheel=wheel, cell=cell, facts=facts)
        return prime

    def prime(self) -> Run:
        """The run that fills the caches for a warm one: the same, cold, and only until it is steady.

        It neither evaluates nor writes checkpoints nor profiles.
        """
        spec, facts = json.loads(json.dumps([self.spec, self.facts]))
        for settings in (spec, facts["settings"]) if self.workload.is_trainer else ():
            train = settings["train"]
            train |= {"steps": min(train["steps"], train["steady_after"] + 2), "save_every": 0, "profile": 0}
            settings["eval"] |= {"prompts": [], "every": 0}
        cell = self.cell | {"cache": caches.COLD}
        return replace(self, cell=cell, spec=spec, facts=facts, repeat=1, role="prime", skip="", cache_wheel=None)

    def again(self) -> Run:
        """The same cell under another name: what two measurements of one thing differ by."""
        return replace(self, cell=self.cell | {COPY: "again"})

    def repeated(self, repeat: int) -> Run:
        return replace(self, repeat=repeat)


def read(configs: Sequence[Composed], failures: Mapping[str, str] | None = None) -> tuple[Options, list[Run]]:
    """Options and one Run per configuration, in order; configurations that mean the same give equal runs.

    `failures` says which environments could not be built and why, by the key of their pins; of others that are
    not built the runs know only what the pins say. Raises SettingError.
    """
    for config in configs:
        for name in (*Options.__dataclass_fields__, *SHARED, "wheel", "cache", "workload"):
            if name not in config.settings and name != "slurm":
                raise SettingError(name, "removed", "this setting is required")
        for name in ("budget", "wheels", "tracking"):
            if not isinstance(config.settings[name], dict):
                parts = [key for key in help.known_keys() if key.startswith(f"{name}.")]
                raise SettingError(name, config.settings[name], f"has parts, each set by its name: {', '.join(parts)}")
    options = _options(configs[0])
    for config in configs[1:]:
        if _given(config) != _given(configs[0]):
            one = _options(config)
            for name in Options.__dataclass_fields__:
                if (value := getattr(one, name)) != (first := getattr(options, name)):
                    raise SettingError(name, f"{first},{value}", "must be the same in every cell")
    options.check()
    swept = _swept(configs)
    return options, [_run(config, swept, options, failures or {}) for config in configs]


def _given(config: Composed) -> dict[str, Any]:
    given = {name: config.settings.get(name) for name in Options.__dataclass_fields__}
    return given | {"": config.choices["tracking"]}


def _options(config: Composed) -> Options:
    given = {name: config.settings.get(name) for name in Options.__dataclass_fields__ if name != "tracking"}
    plain: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Options), given))
    return replace(plain, tracking={"name": config.choices["tracking"], **config.settings["tracking"]})


def _swept(configs: Sequence[Composed]) -> list[str]:
    """Keys, other than the factors, that the command line gave different values in different cells."""
    values: dict[str, set[str]] = {}
    for config in configs:
        for override in config.overrides:
            key, _, value = override.lstrip("+~").partition("=")
            values.setdefault(key, set()).add(value)
    return [key for key, seen in values.items() if len(seen) > 1 and key not in (*FACTORS, CACHE_FROM)]


def _run(config: Composed, swept: Iterable[str], options: Options, failures: Mapping[str, str]) -> Run:
    settings, choices = config.settings, config.choices
    workload = workloads.read(settings["workload"])
    known = {*Options.__dataclass_fields__, *FACTORS, *SHARED, *workload.sections, "workload", "cache_from"}
    known |= set() if workload.is_trainer else {"args"}
    for key in settings:
        if key == "args" and key not in known:
            name, value = next(iter(settings[key].items() if isinstance(settings[key], dict) else ()), ("NAME", "..."))
            needs = f"needs workload=command, whose workload.argv is told of it as {{args.{name}}}"
            raise SettingError(f"args.{name}", value, needs)
        if key not in known:
            raise SettingError(key, settings[key], f"unknown setting; known: {', '.join(sorted(known))}")
    wheel = wheels.resolve(str(choices["wheel"]), settings["wheel"], options.wheels, failures)
    levels = {name: str(choices[name]) for name in FACTORS if name != "split"}
    cell = levels | {"split": str(settings["split"])}
    cell = {name: cell[name] for name in FACTORS}
    for key in swept:
        cell[key] = str(choices[key]) if key in choices else str(_at(settings, key))
    spec = {
        "compile": levels["compile"],
        "split": settings["split"],
        "isolation": levels["isolation"],
        "device": _device(settings["device"], wheel, options),
        "seed": settings["seed"],
        **{name: settings[name] for name in workload.sections if name in settings},
    }
    if type(spec["seed"]) is not int or spec["seed"] < 0:
        raise SettingError("seed", spec["seed"], "must be a whole number from 0")
    if workload.is_trainer:
        spec = _job(spec)
        _check_split(spec["split"], spec["device"], spec["target"]["gpus"], options)
    else:
        Split.parse(spec["split"])
        spec["args"] = workloads.arguments(settings.get("args"), workload)
        workloads.check_places(workload, workloads.values(spec))
    cache_wheel = None
    if cell["cache"] == caches.FOREIGN:
        level = choices.get(CACHE_FROM)
        if level is None:
            raise SettingError("cache_from", "null", "cache=foreign needs the wheel level whose caches it starts from")
        cache_wheel = wheels.resolve(str(level), settings["cache_from"], options.wheels, failures)
        cell["cache"] = f"{caches.FOREIGN}:{cache_wheel.name}"  # one factor: a source means nothing to other levels
    elif cell["cache"] == caches.STANDALONE and not workload.standalone:
        raise SettingError("workload.standalone", "[]", "cache=standalone needs a command that fills the caches")
    skip = ""
    if cache_wheel and cache_wheel.fingerprint == wheel.fingerprint:
        skip = f"{cell['cache']} is the run's own wheel; that is cache=warm"
    if workload.is_trainer and spec["compile"] == "triton" and spec["device"] == "cpu":
        skip = "needs CUDA"
    return Run(
        cell=cell,
        spec=spec,
        workload=workload,
        wheel=wheel,
        facts=_facts(spec, workload, wheel),
        skip=skip,
        cache_wheel=cache_wheel,
        code={os.path.abspath(path): _file_hash(os.path.abspath(path)) for path in _sources(workload)},
    )


def _at(settings: Any, key: str) -> Any:
    """The setting of this dotted name; None where there is none."""
    for part in filter(None, re.split(r"[.\[\]]", key)):
        if isinstance(settings, list) and part.isdigit():
            settings = dict(enumerate(settings)).get(int(part))
        else:
            settings = settings.get(part) if isinstance(settings, dict) else None
    return settings


def _job(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec of a dflash job, checked as far as it can be without loading anything, its paths absolute."""
    spec = JobSettings.from_dict(spec).to_dict()
    data, target, prompts = spec["data"], spec["target"], spec["eval"]["prompts"]
    data["path"], target["models_dir"] = _absolute(data["path"]), _absolute(target["models_dir"])
    prompts[:] = map(_absolute, prompts)
    for settings in (spec, *_variants(spec)):
        if isinstance(init := _drafter(settings).get("init"), str):
            settings["drafter"]["init"] = _absolute(init)
    JobSettings.from_dict(spec).check()
    if not _readable(data["path"]) and not _readable(os.path.join(data["path"], PREPARED)):
        raise SettingError(
            "data.path",
            data["path"],
            "must be a readable file of chats that is not empty, or a folder that `dflash prepare` made",
        )
    for number, path in enumerate(prompts):
        if not _readable(path):
            raise SettingError(f"eval.prompts[{number}]", path, "must be a readable file of prompts, not empty")
    models.check(target["model"], target["models_dir"], weights=not target["made_up"])
    if os.path.isdir(target["model"]):
        target["model"] = os.path.abspath(target["model"])
    return spec


def _variants(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What the variants of a fanout change, as far as it has the form of settings."""
    return [changes for changes in settings.get("fanout", {}).values() if isinstance(changes, dict)]


def _drafter(settings: dict[str, Any]) -> dict[str, Any]:
    section = settings.get("drafter")
    return section if isinstance(section, dict) else {}


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _readable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.R_OK) and os.path.getsize(path) > 0


def _device(asked: Any, wheel: wheels.Wheel, options: Options) -> str:
    if asked not in DEVICES:
        raise SettingError("device", asked, f"must be one of {', '.join(DEVICES)}")
    on_gpu = asked in ("cuda", "shared")
    where = "this machine shows" if options.slurm is None else "Slurm's partition has"
    if on_gpu and not options.gpus:
        raise SettingError("device", asked, f"{where} no NVIDIA GPU; use cpu or auto")
    if on_gpu and not wheel.computes_on_gpu:
        torch = wheel.versions.get("torch", "not installed")
        raise SettingError("device", asked, f"torch here is {torch}, a build without CUDA; use cpu or auto")
    if asked == "auto":
        return "cuda" if options.gpus and wheel.computes_on_gpu else "cpu"
    return str(asked)


def _check_split(text: Any, device: str, target_gpus: int, options: Options) -> None:
    split = Split.parse(text)
    workers, wanted = split.targets + split.drafters, split.targets * target_gpus + split.drafters
    if device == "cuda" and wanted > options.gpus:
        there = "this machine shows" if options.slurm is None else "a node of Slurm's partition has"
        spread = f" (a target takes target.gpus={target_gpus})" if target_gpus > 1 else ""
        raise SettingError(
            "split",
            text,
            f"needs {wanted} GPUs{spread} and {there} {options.gpus}; device=shared puts several workers on one",
        )
    if device == "cpu" and workers > machine.CPU_WORKERS:
        raise SettingError("split", text, f"on CPU targets and drafters together must be at most {machine.CPU_WORKERS}")


def _check_store(folder: Path) -> None:
    place = folder
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK) or _read_only(place):
        raise SettingError("store", folder, f"must be a folder that can be written, and {place} cannot")


def _read_only(place: Path) -> bool:
    # Mode bits tell nothing to root, nor of read-only and synthetic file systems.
    facts = os.statvfs(place)
    return bool(facts.f_flag & os.ST_RDONLY) or str(place.resolve()).startswith(("/proc", "/sys"))


def _facts(spec: dict[str, Any], workload: Workload, wheel: wheels.Wheel) -> dict[str, Any]:
    """All that decides what a run computes, with paths replaced by the content they name."""
    settings = json.loads(json.dumps(spec))
    if workload.is_trainer:
        data = spec["data"]["path"]
        settings["data"]["path"] = _file_hash(os.path.join(data, PREPARED) if os.path.isdir(data) else data)
        settings["eval"]["prompts"] = [_file_hash(path) for path in spec["eval"]["prompts"]]
        for one in (settings, *_variants(settings)):
            if init := _drafter(one).get("init"):
                one["drafter"]["init"] = _drafter_hash(init)
        del settings["target"]["models_dir"]
        target = spec["target"]
        named = models.identity(target["model"], target["models_dir"], weights=not target["made_up"])
        settings["target"]["model"] = named
        code = _package_hash("dflash")
    else:
        code = _hash([[path, _file_hash(os.path.abspath(path))] for path in _sources(workload)])
    return {
        "workload": workload.name,
        "argv": list(workload.argv),
        "env": workload.env,
        "progress": [workload.pattern, workload.tokens, workload.warmup_lines],
        "settings": settings,
        "wheel": wheel.fingerprint,
        "code": code,
    }


def _sources(workload: Workload) -> list[str]:
    """The files whose content makes a run of this workload another run."""
    if workload.is_trainer:
        return list(map(str, _package("dflash")))
    # Programs only: what else a command names may be its output, which must not make it another run.
    words = (*workload.argv, *workload.standalone)
    programs = [word for word in words if word.endswith((".py", ".sh")) or word == workload.argv[0]]
    return sorted(path for path in {*programs, *workload.code} if os.path.isfile(path))


@functools.cache
def _package(name: str) -> list[Path]:
    found = importlib.util.find_spec(name)
    roots = [Path(place) for place in (found and found.submodule_search_locations) or ()]
    return sorted(path for root in roots for path in root.rglob("*.py"))


@functools.cache
def _package_hash(name: str) -> str:
    return _hash([[path.name, _file_hash(str(path))] for path in _package(name)])


def _drafter_hash(folder: str) -> str:
    """A drafter to start from, by the content of its configuration and its weights."""
    files = [Path(folder, "config.json"), *sorted(Path(folder).glob("*.safetensors"))]
    return _hash([[path.name, _file_hash(str(path))] for path in files])


@functools.cache
def _file_hash(path: str) -> str:
    return _digest(path)


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
