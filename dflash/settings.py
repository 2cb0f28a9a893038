"""Everything a training job can be told, as plain dataclasses that check themselves.

A job is one JSON file with the sections below. `JobSettings.from_dict` refuses unknown keys and wrong types;
`JobSettings.check` refuses values that cannot work together. Both raise SettingError, whose text is one
sentence naming the setting, its value and what is allowed. No torch here: a harness validates a matrix of
runs with this module before it starts any.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPILE_STRATEGIES = (
    "locked",
    "whole",
    "unlocked",
    "firstlock",
    "suppressed",
    "forced",
    "patched",
    "triton",
    "eager",
)

DEVICES = ("auto", "cpu", "cuda", "shared")
DATA_FORMATS = ("auto", "messages", "sharegpt", "completion", "text", "tokens")
FANOUT_SECTIONS = ("drafter", "loss", "optim")
LOSSES = ("ce", "dpace", "kl", "tv")
# Losses that need the target's own distribution, and so all of its layers and its last hidden state.
DISTILLING = ("kl", "tv")


class SettingError(ValueError):
    """A setting that cannot work, told in one sentence."""

    def __init__(self, setting: str, value: object, allowed: str) -> None:
        super().__init__(f"{setting}={value}: {allowed}")
        self.setting, self.value, self.allowed = setting, value, allowed


@dataclass(kw_only=True)
class Data:
    """What to train on and how it becomes rows (docs/DATA.md)."""

    path: str = ""  # a data file, or a folder that `dflash prepare` made
    format: str = "auto"  # auto | messages | sharegpt | completion | text | tokens; auto looks at the first row
    reasoning: str = "keep"  # the assistant's thoughts: keep | drop (and the template told not to think)
    row_tokens: int = 256  # length of a packed row, the context of one drafter call
    too_long: str = "skip"  # a document longer than a row: skip | cut (keep its beginning) | split | error
    bad_rows: str = "error"  # broken JSON, unknown role, no assistant turn: error | skip (counted)

    def check(self) -> None:
        if not self.path:
            raise SettingError("data.path", "''", "must be a data file, or a folder that `dflash prepare` made")
        _among("data.format", self.format, DATA_FORMATS)
        _among("data.reasoning", self.reasoning, ("keep", "drop"))
        _between("data.row_tokens", self.row_tokens, 16, 1 << 20)
        _among("data.too_long", self.too_long, ("skip", "cut", "split", "error"))
        _among("data.bad_rows", self.bad_rows, ("error", "skip"))


@dataclass(kw_only=True)
class Target:
    """The frozen target model."""

    model: str = ""  # a Hugging Face model folder, or the name of a model that a package carries
    models_dir: str = "models"  # where packaged models are unpacked, once
    taps: list[int] | None = None  # decoder layers whose output is tapped, 0-based; None: z-lab's spread
    dtype: str = "auto"  # auto: float32 on CPU, bfloat16 on GPU
    gpus: int = 1  # GPUs that one target is spread over, layer by layer
    made_up: bool = False  # random weights drawn on the device, whatever the folder holds: to measure speed alone
    trust_remote_code: bool = False

    def check(self) -> None:
        if not self.model:
            raise SettingError("target.model", "''", "must be a model folder or the name of a packaged model")
        _among("target.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _between("target.gpus", self.gpus, 1, 64)
        if self.taps is not None and (not self.taps or sorted(set(self.taps)) != self.taps or self.taps[0] < 0):
            raise SettingError("target.taps", self.taps, "must be rising 0-based layer numbers, each once")


@dataclass(kw_only=True)
class Drafter:
    """Geometry of the drafter. None: taken from the target."""

    layers: int = 2
    block: int = 8  # slots a block, the anchor's included
    anchors: int = 32  # blocks a packed row, fewer than its tokens; one with fewer places for them is padded
    hidden: int | None = None  # must equal the target's: embedding and head are shared
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    mask_token: int | None = None  # id of the mask token in the target's embedding; None: see docs/TRAINER.md
    window: int | None = None  # sliding window over the context, in tokens; None: all of the document
    window_layers: list[int] | None = None  # layers that have the window, 0-based; None: all
    init: str | None = None  # folder of a drafter in z-lab's format to start from; None: random weights

    def check(self) -> None:
        _between("drafter.layers", self.layers, 1, 64)
        _between("drafter.block", self.block, 2, 64)
        _between("drafter.anchors", self.anchors, 1, (1 << 20) - 1)
        for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "window"):
            if getattr(self, name) is not None:
                _between(f"drafter.{name}", getattr(self, name), 1, 1 << 20)
        if self.window is not None and self.window < self.block:
            # Slots of one block would lose sight of each other, which implementations read differently.
            raise SettingError("drafter.window", self.window, f"must be at least drafter.block={self.block}")
        if self.window_layers is not None:
            if self.window is None:
                raise SettingError("drafter.window_layers", self.window_layers, "needs drafter.window")
            rising = sorted(set(self.window_layers)) == self.window_layers
            if not rising or not all(0 <= layer < self.layers for layer in self.window_layers):
                raise SettingError(
                    "drafter.window_layers",
                    self.window_layers,
                    f"must be rising layer numbers from 0 to {self.layers - 1}, each once",
                )
        if self.init is not None:
            for name in ("config.json", "model.safetensors"):
                if not (Path(self.init) / name).is_file():
                    raise SettingError("drafter.init", self.init, f"must be a drafter's folder, it has no {name}")
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise SettingError("drafter.heads", self.heads, f"must be a multiple of drafter.kv_heads={self.kv_heads}")
        if self.head_dim and self.head_dim % 2:
            raise SettingError("drafter.head_dim", self.head_dim, "must be even, rotary embedding turns pairs")


@dataclass(kw_only=True)
class Loss:
    """What the drafter is trained to (docs/TRAINER.md, "Losses")."""

    kind: str = "ce"  # ce: decayed cross-entropy (Eq. 4) | dpace | kl, tv: towards the target's own distribution
    gamma: float | None = None  # weight exp(-(k-1)/gamma); None: 4 for block 8, 5 for 10, 7 for 16, else 7/16 block
    alpha: float = 0.5  # dpace: share of a slot's weight that does not depend on the slots before it
    chunk: int = 2048  # supervised slots a head matrix product, bounds the logits held at once

    def check(self) -> None:
        _among("loss.kind", self.kind, LOSSES)
        if self.gamma is not None and not self.gamma > 0:
            raise SettingError("loss.gamma", self.gamma, "must be greater than 0")
        if not 0 <= self.alpha <= 1:
            raise SettingError("loss.alpha", self.alpha, "must be from 0 to 1")
        _between("loss.chunk", self.chunk, 1, 1 << 20)


@dataclass(kw_only=True)
class Optim:
    """AdamW with warm-up and a schedule; defaults from the paper, A.1."""

    lr: float = 6e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.0
    clip: float = 1.0  # global norm of the averaged gradient
    warmup: float = 0.04  # share of the steps
    min_lr: float = 0.0  # as a share of lr
    schedule: str = "cosine"  # cosine | wsd (warm up, stay, decay) | constant; all warm up
    decay: float = 0.2  # wsd: share of the steps, at the end, over which the rate falls to min_lr

    def check(self) -> None:
        if not 0 < self.lr <= 10:
            raise SettingError("optim.lr", self.lr, "must be more than 0 and at most 10")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise SettingError("optim.betas", self.betas, "must be two numbers from 0 to below 1")
        if not 0 <= self.weight_decay < math.inf:
            raise SettingError("optim.weight_decay", self.weight_decay, "must be 0 or more")
        if not self.clip > 0:
            raise SettingError("optim.clip", self.clip, "must be greater than 0")
        for name in ("warmup", "min_lr", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(f"optim.{name}", getattr(self, name), "must be from 0 to 1")
        _among("optim.schedule", self.schedule, ("cosine", "wsd", "constant"))
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise SettingError("optim.decay", self.decay, f"must leave room for optim.warmup={self.warmup}")


@dataclass(kw_only=True)
class Train:
    """The loop."""

    steps: int = 60  # optimiser steps
    rows: int = 1  # packed rows of one batch
    accumulate: int = 1  # batches a drafter takes each step
    precision: str = "auto"  # auto: float32 on CPU; on GPU bfloat16, with master weights and optimiser in float32
    steady_after: int = 3  # steps of warm-up; the measured window opens with the first batch made after them
    profile: int = 0  # steps after warm-up that are recorded with torch.profiler, before the measured window opens
    queue_mib: float = 64.0  # bound on features waiting for one drafter; one batch of each target always fits
    cpu_threads: int = 0  # intra-op threads of each worker on CPU; 0: the machine's cores over the workers
    save: bool = True  # write the trained drafter at the end
    save_every: int = 0  # steps between checkpoints to resume from; 0: only when asked to stop
    keep: int = 2  # checkpoints kept

    @property
    def unmeasured(self) -> int:
        """Steps before the measured window: after those that are profiled one more, in which all drafters meet."""
        return self.steady_after + (self.profile + 1 if self.profile else 0)

    def check(self) -> None:
        _between("train.steps", self.steps, 1, 1 << 40)
        _between("train.rows", self.rows, 1, 4096)
        _between("train.accumulate", self.accumulate, 1, 4096)
        _among("train.precision", self.precision, ("auto", "float32", "bfloat16"))
        _between("train.cpu_threads", self.cpu_threads, 0, 4096)
        _between("train.save_every", self.save_every, 0, 1 << 40)
        _between("train.keep", self.keep, 1, 1000)
        _between("train.profile", self.profile, 0, 100)
        if not 0 <= self.steady_after < self.steps:
            raise SettingError(
                "train.steady_after", self.steady_after, f"must be from 0 to below train.steps={self.steps}"
            )
        if self.unmeasured >= self.steps:
            why = f"with train.steady_after={self.steady_after} measuring begins at step {self.unmeasured + 1}"
            raise SettingError("train.profile", self.profile, f"needs more than train.steps={self.steps}: {why}")
        if not 0 < self.queue_mib <= 1 << 20:
            raise SettingError("train.queue_mib", self.queue_mib, f"must be more than 0 and at most {1 << 20}")


@dataclass(kw_only=True)
class Eval:
    """Acceptance length by real speculative decoding, while training and at its end (docs/ACCEPTANCE.md)."""

    prompts: list[str] = field(default_factory=list)  # files of prompts, each a set of its own; none: no evaluation
    every: int = 0  # steps between evaluations; 0: only at the end
    limit: int = 32  # prompts taken of each set, from its beginning; 0: all
    max_new: int = 128  # most tokens of a response
    temperature: float = 0.0
    batch: int = 16  # prompts decoded at a time

    def check(self) -> None:
        _between("eval.every", self.every, 0, 1 << 40)
        _between("eval.limit", self.limit, 0, 1 << 30)
        _between("eval.max_new", self.max_new, 1, 1 << 20)
        _between("eval.batch", self.batch, 1, 65536)
        if not 0 <= self.temperature <= 10:
            raise SettingError("eval.temperature", self.temperature, "must be from 0 (greedy) to 10")
        if self.every and not self.prompts:
            raise SettingError("eval.every", self.every, "needs eval.prompts")


@dataclass(kw_only=True)
class Split:
    """How many devices run targets and how many run drafters; written `5t3d`."""

    targets: int
    drafters: int

    @classmethod
    def parse(cls, text: str) -> Split:
        """Read `<targets>t<drafters>d`; raises SettingError."""
        match = re.fullmatch(r"(\d+)t(\d+)d", str(text))
        if not match or not all(int(number) for number in match.groups()):
            raise SettingError("split", text, "must be <targets>t<drafters>d with at least one of each, such as 5t3d")
        return cls(targets=int(match[1]), drafters=int(match[2]))


@dataclass(kw_only=True)
class JobSettings:
    """One training job. `compile`, `split` and `isolation` are the factors a sweep varies."""

    data: Data
    target: Target
    drafter: Drafter = field(default_factory=Drafter)
    loss: Loss = field(default_factory=Loss)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    # Several drafters on one stream of batches: name -> what differs, in the sections of FANOUT_SECTIONS.
    fanout: dict[str, Any] = field(default_factory=dict)
    compile: str = "locked"
    split: str = "1t1d"
    isolation: str = "threads"
    device: str = "auto"  # auto | cpu | cuda (a GPU a worker) | shared (all workers on the GPUs there are)
    seed: int = 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> JobSettings:
        """Build from nested plain values; raises SettingError on an unknown key, a missing section, a wrong type."""
        return typing.cast("JobSettings", _build(cls, values, ""))

    def check(self) -> None:
        """Raise SettingError on values that cannot work, alone or together."""
        self._check_one()
        split = Split.parse(self.split)
        if self.fanout and split.drafters % len(self.fanout):
            raise SettingError(
                "split", self.split, f"needs a number of drafters that {len(self.fanout)} fanout variants share evenly"
            )
        for variant in self.variants().values():
            variant._check_one()

    def _check_one(self) -> None:
        sections = (self.data, self.target, self.drafter, self.loss, self.optim, self.train, self.eval)
        for section in sections:
            section.check()
        _among("compile", self.compile, COMPILE_STRATEGIES)
        if self.compile == "triton" and self.train.precision == "float32":
            raise SettingError(
                "train.precision",
                "float32",
                "must be auto or bfloat16 with compile=triton, whose kernels for float32 take minutes to compile",
            )
        _among("isolation", self.isolation, ("threads", "processes"))
        _between("seed", self.seed, 0, (1 << 63) - 1)
        _among("device", self.device, DEVICES)
        if self.target.made_up and self.eval.prompts:
            allowed = "must be empty with target.made_up=true: made-up weights have nothing to say"
            raise SettingError("eval.prompts", self.eval.prompts, allowed)
        if self.drafter.block > self.data.row_tokens:
            raise SettingError(
                "drafter.block", self.drafter.block, f"must not exceed data.row_tokens={self.data.row_tokens}"
            )
        if self.drafter.anchors >= self.data.row_tokens:  # an anchor's block has at least one token behind it
            raise SettingError(
                "drafter.anchors", self.drafter.anchors, f"must be less than data.row_tokens={self.data.row_tokens}"
            )
        if self.device == "cpu" and self.target.gpus > 1:
            raise SettingError("target.gpus", self.target.gpus, "must be 1 with device=cpu")

    def variants(self) -> dict[str, JobSettings]:
        """The settings of each drafter that this job trains, by name; one without a name if there is no fanout.

        Raises SettingError when a fanout entry sets what the variants share.
        """
        if not self.fanout:
            return {"": self}
        found = {}
        for name, changes in self.fanout.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
                raise SettingError("fanout", name, "a variant's name must be letters, digits, '.', '_' and '-'")
            if not isinstance(changes, dict):
                raise SettingError(f"fanout.{name}", changes, "must be a section with settings")
            values = self.to_dict() | {"fanout": {}}
            for section, settings in changes.items():
                if section not in FANOUT_SECTIONS:
                    raise SettingError(
                        f"fanout.{name}.{section}", settings, f"may differ only in {', '.join(FANOUT_SECTIONS)}"
                    )
                if not isinstance(settings, dict):
                    raise SettingError(f"fanout.{name}.{section}", settings, "must be a section with settings")
                values[section] = values[section] | settings
            try:
                found[name] = JobSettings.from_dict(values)
            except SettingError as error:
                raise SettingError(f"fanout.{name}.{error.setting}", error.value, error.allowed) from None
        return found

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def override(values: dict[str, Any], word: str) -> None:
    """Set `a.b=value` in nested values; the value is JSON where it parses as such, else text.

    Raises SettingError on a word that is not of this form.
    """
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise SettingError(word, "", "must be KEY=VALUE, such as drafter.block=16")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise SettingError(key, text, f"{section} is no section")
    values[name] = value


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(cls: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise SettingError(where.rstrip(".") or "spec", values, "must be a section with settings")
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise SettingError(f"{where}{key}", values[key], f"unknown setting; known here: {', '.join(fields)}")
    built = {}
    for name, f in fields.items():
        if name in values:
            built[name] = _value(hints[name], values[name], where + name)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise SettingError(where + name, "missing", "this setting is required")
    return cls(**built)


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where + ".")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option is types.NoneType and value is None:
            return None
        if typing.get_origin(option) is dict and isinstance(value, dict):
            return value
        if typing.get_origin(option) is list and isinstance(value, list):
            (item,) = typing.get_args(option)
            return [_value(item, v, f"{where}[{i}]") for i, v in enumerate(value)]
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and isinstance(value, option) and (option is bool or not isinstance(value, bool)):
            return value
    names = " or ".join("a list" if typing.get_origin(option) is list else _KINDS[option] for option in options)
    raise SettingError(where, value, f"must be {names}")


_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict[str, Any]: "a section with settings",
    types.NoneType: "null",
}


def _between(setting: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SettingError(setting, value, f"must be from {low} to {high}")


def _among(setting: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingError(setting, value, f"must be one of {', '.join(allowed)}")
