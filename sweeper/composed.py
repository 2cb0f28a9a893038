"""The cells of a command line as Hydra composes them: plain data, resolved.

Hydra takes some 70 ms to compose a cell. Cells that choose the same levels differ only in values, so they are
composed once and the values put in: 500 cells of one setting take as long as a few.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf


@dataclass(frozen=True)
class Composed:
    """One cell: `settings`, the level that each config group has, and the words of the command line that made it."""

    settings: dict[str, Any]
    choices: dict[str, str | None]
    overrides: list[str]


def plain(config: DictConfig) -> Composed:
    """A configuration that Hydra composed, its own section included. Raises what OmegaConf raises on values missing
    or not to be resolved."""
    return Composed(_resolved(_without_hydra(config)), _choices(config), list(config.hydra.overrides.task))


def cells(loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]]) -> list[Composed]:
    """One Composed a job, which is a list of overrides. Raises what Hydra and OmegaConf raise."""
    parse = functools.cache(OverridesParser.create(config_loader=loader).parse_override)
    shapes: dict[tuple[str, ...], tuple[DictConfig, dict[str, str | None]]] = {}
    groups: set[str] = set()
    found = []
    for job in jobs:
        words = {word: parse(word) for word in job}
        shape = tuple(one.get_key_element() if _is_value(one, groups) else word for word, one in words.items())
        if not groups or shape not in shapes:
            config = loader.load_sweep_config(master, list(job))
            groups |= set(config.hydra.runtime.choices)
            shape = tuple(one.get_key_element() if _is_value(one, groups) else word for word, one in words.items())
            shapes[shape] = _without_hydra(config), _choices(config)
        bare, choices = shapes[shape]
        for one in words.values():
            if _is_value(one, groups):
                OmegaConf.update(bare, one.key_or_group, one.value())
        found.append(Composed(_resolved(bare), choices, [w for w, one in words.items() if not one.is_hydra_override()]))
    return found


def _is_value(override: Override, groups: set[str]) -> bool:
    """Whether an override only puts one value in the place of another: neither a level nor a structure."""
    name = override.get_key_element().lstrip("+~")
    return (
        name not in groups
        and not override.is_delete()
        and not override.is_hydra_override()
        and isinstance(override.value(), str | int | float | None)
    )


def _choices(config: DictConfig) -> dict[str, str | None]:
    return {str(group): level for group, level in config.hydra.runtime.choices.items()}


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def _resolved(config: DictConfig) -> dict[str, Any]:
    settings: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return dict(settings)
