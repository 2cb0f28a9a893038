"""DFlash attention: who sees whom as data (`mask`), and three ways to compute it (`dense`, `flex`, `triton`).

Each has two halves. `prepare` turns a DFlashMask into what every layer of a step shares (a boolean tensor, flex's
BlockMask, the kernels' Ranges); `attend` is one layer's attention. Strategies choose the pair and compile what must
be. The kernels have a second `attend` (`alike`) for the first layer, whose queries repeat. `triton` is imported only
where it is wanted, as not every build of torch comes with the package it needs.
"""

from dflash.attention.dense import attend_dense
from dflash.attention.flex import attend_flex, block_mask
from dflash.attention.mask import DFlashMask, rule, visible

# Head dimensions that the kernels of `triton` have tiles for.
KERNEL_WIDTHS = (16, 32, 64, 128)

__all__ = ["KERNEL_WIDTHS", "DFlashMask", "attend_dense", "attend_flex", "block_mask", "rule", "visible"]
