"""A drafter's weights by name: drawn from a seed, or copied."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import Tensor

from dflash.devices import cores
from dflash.geometry import Geometry

STD = 0.02
INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight")  # smaller, which keeps the residual's size with depth
# Each thread holds a matrix in float32 (up to 335 MB for the drafter of an 8B target) until it is on its device.
MAX_THREADS = 16


def draw(
    geometry: Geometry, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Every tensor of `geometry.shapes()`: vectors, which are those of norms, are ones; matrices are normal around 0.

    Their standard deviation is 0.02, that of projections back into the residual 0.02 / sqrt(2 layers). Each has a
    generator of its own, which follows from `seed` and its name, and is drawn in float32 on the CPU, then rounded to
    `dtype`. So no bit of it depends on the device, on threads or on the geometry's other tensors.
    """
    shapes = geometry.shapes()
    std = {name: STD / (2 * geometry.layers) ** 0.5 if name.endswith(INTO_RESIDUAL) else STD for name in shapes}

    def matrix(name: str) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(seed_of(seed, name))
        return torch.empty(shapes[name], device="cpu").normal_(0, std[name], generator=generator)

    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    matrices.sort(key=lambda name: shapes[name][0] * shapes[name][1], reverse=True)  # the longest begin first
    found = {}
    # torch draws in one thread, but without Python's lock.
    with ThreadPoolExecutor(min(MAX_THREADS, cores())) as pool:
        begun = {pool.submit(matrix, name): name for name in matrices}
        for drawn in as_completed(begun):
            name = begun.pop(drawn)
            found[name] = drawn.result().to(device, dtype)
            del drawn  # with its float32
    return {
        name: found[name] if name in found else torch.ones(shape, device=device, dtype=dtype)
        for name, shape in shapes.items()
    }


def copied(weights: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of a drafter's own on a device: a file's may be its very pages, another drafter's are trained on."""
    return {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in weights.items()}


def seed_of(seed: int, name: str) -> int:
    """A seed for what bears this name, of 32 bits: a generator on the CPU takes no more."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "big")
