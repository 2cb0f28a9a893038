"""When a sweep's answer is sure enough to run no further block.

The widths of intervals are looked at after each block, and one that is narrow by chance would end the sweep too
early (Anscombe 1953; Chow and Robbins 1965). So none ends it before `spec.LEAST_BLOCKS`; the coverage that is left is
in docs/ANALYSIS.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sweeper.analysis import effects
from sweeper.analysis.conclude import compared
from sweeper.analysis.records import Record
from sweeper.spec import LEAST_BLOCKS


def enough(records: Sequence[Record], width: float, defaults: Mapping[str, str]) -> tuple[bool, str]:
    """Whether every main effect's interval (and that of the first cell run twice) is narrower than `width`, in words.

    A level under which no run has a speed has no effect, and is not waited for.
    """
    told, references = compared(records, defaults)
    blocks = max((record.block for record in told), default=0)
    found = effects.main_effects(told, references)
    if twice := effects.same_twice(told):
        found.append(twice)
    ran = f"after {blocks} block{'s' * (blocks != 1)}"
    limit = f"{100 * width:.3g}%"
    if not found:
        return False, f"until=ci<{limit}: {ran} there is no effect on speed to know."
    widest = max(found, key=lambda effect: effect.width)
    name = f"{widest.factors[0]}={widest.levels[0]} against {widest.references[0]}"
    now = "without an interval" if math.isinf(widest.width) else f"{widest.width:.1%}".replace("%", " %")
    sure = blocks >= LEAST_BLOCKS and widest.width < width
    if sure:
        return True, f"Stopped {ran}: every effect's interval is narrower than {limit} (widest: {name}, {now})."
    return False, f"until=ci<{limit} is not reached {ran}: {name} is the widest, {now}."
