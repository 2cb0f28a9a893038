"""DFlash attention: who sees whom as data (`mask`), and two ways to compute it (`dense`, `flex`).

Both ways have two halves. `prepare` turns a DFlashMask into what every layer of a step shares (a boolean
tensor, or flex's BlockMask); `attend` is one layer's attention. Strategies choose the pair and compile it.
"""

from dflash.attention.dense import attend_dense
from dflash.attention.flex import attend_flex, block_mask
from dflash.attention.mask import DFlashMask, rule, visible

__all__ = ["DFlashMask", "attend_dense", "attend_flex", "block_mask", "rule", "visible"]
