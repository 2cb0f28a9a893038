"""A drafter's weights by name: where they lie, and what they begin with, drawn from a seed or copied."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import Tensor

from dflash.devices import cores
from dflash.geometry import Geometry

STD = 0.02
INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight")  # smaller, which keeps the residual's size with depth
# Projections of a layer that read the same input, in the order in which a product of them all gives them.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Each thread holds a matrix in float32 (up to 335 MB for the drafter of an 8B target) until it is on its device.
MAX_THREADS = 16


def room(shapes: Mapping[str, tuple[int, ...]], device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of these names and shapes, not yet filled; those of TOGETHER are successive rows of one tensor.

    Raises KeyError when `shapes` has some of a layer's projections that lie together and not the others.
    """
    found: dict[str, Tensor] = {}
    for name in shapes:
        if name not in found:
            group = _together(name)
            rows = [shapes[each][0] for each in group]
            joint = torch.empty(sum(rows), *shapes[name][1:], device=device, dtype=dtype)
            found |= zip(group, joint.split(rows), strict=True)
    return {name: found[name] for name in shapes}


def side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """The tensor [sum of out, H] whose successive rows are `weights` [out, H] each: no copy, and without gradient.

    Raises ValueError when they do not lie so, as after Module.to, which moves each alone; `copied` lays them out again.
    """
    first = weights[0].detach()
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for weight in weights:
        here = weight.untyped_storage().data_ptr(), weight.storage_offset(), weight.is_contiguous()
        if here != (storage, place, True):
            raise ValueError("weights that one product takes lie apart: lay them out with dflash.weights.copied")
        place += weight.numel()
    return first.as_strided((sum(len(weight) for weight in weights), *first.shape[1:]), first.stride())


def draw(
    geometry: Geometry, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Every tensor of `geometry.shapes()`: vectors, which are those of norms, are ones; matrices are normal around 0.

    Their standard deviation is 0.02, that of projections back into the residual 0.02 / sqrt(2 layers). Each has a
    generator of its own, which follows from `seed` and its name, and is drawn in float32 on the CPU, then rounded to
    `dtype`. So no bit of it depends on the device, on threads or on the geometry's other tensors.
    """
    shapes = geometry.shapes()
    found = room(shapes, device, dtype)
    std = {name: STD / (2 * geometry.layers) ** 0.5 if name.endswith(INTO_RESIDUAL) else STD for name in shapes}

    def matrix(name: str) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(seed_of(seed, name))
        own = found[name]
        drawn = own if own.is_cpu and dtype == torch.float32 else torch.empty(shapes[name], device="cpu")
        return drawn.normal_(0, std[name], generator=generator)

    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    matrices.sort(key=lambda name: shapes[name][0] * shapes[name][1], reverse=True)  # the longest begin first
    # torch draws in one thread, but without Python's lock.
    with ThreadPoolExecutor(min(MAX_THREADS, cores())) as pool:
        begun = {pool.submit(matrix, name): name for name in matrices}
        for drawn in as_completed(begun):
            name = begun.pop(drawn)
            found[name].copy_(drawn.result())
            del drawn  # with its float32
    for tensor in found.values():
        if tensor.ndim == 1:
            tensor.fill_(1.0)
    return found


def copied(weights: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of a drafter's own on a device: a file's may be its very pages, another drafter's are trained on."""
    found = room({name: tuple(tensor.shape) for name, tensor in weights.items()}, device, dtype)
    for name, tensor in weights.items():
        found[name].copy_(tensor.detach())
    return found


def _together(name: str) -> list[str]:
    """The names that lie together with this one, in their order; itself alone for most."""
    for group in TOGETHER:
        for projection in group:
            if name.endswith(f"{projection}.weight"):
                stem = name.removesuffix(f"{projection}.weight")
                return [f"{stem}{each}.weight" for each in group]
    return [name]


def seed_of(seed: int, name: str) -> int:
    """A seed for what bears this name, of 32 bits: a generator on the CPU takes no more."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "big")
