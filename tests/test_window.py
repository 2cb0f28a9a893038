"""What a run is said to have reached is what its slower side can do, however the run began."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.pipeline.layout import Layout
from dflash.pipeline.window import Window
from sweeper.measure import figures

WARM, TOKENS = 2, 1000


@dataclass
class Pipeline:
    """A run by the clock: each target takes `making` seconds a batch, each drafter `using`, the first step `compiling`
    more; a channel has `room` batches. A drafter asks for a batch when the step `behind` the last has ended.
    """

    layout: Layout
    making: float
    using: float
    compiling: float
    room: int
    behind: int
    steps: int
    made: dict[int, float] = field(default_factory=dict)
    put: dict[int, float] = field(default_factory=dict)
    taken: dict[int, float] = field(default_factory=dict)
    ends: list[float] = field(default_factory=lambda: [0.0])

    def run(self) -> list[dict[str, Any]]:
        free = [0.0] * self.layout.targets
        waiting: dict[tuple[int, int], list[int]] = {}
        windows = [Window() for _ in range(self.layout.ranks)]
        events = []
        for step in range(1, self.steps + 1):
            asked, end, counted = self.ends[max(0, step - 1 - self.behind)], 0.0, []
            batches = [b for rank in range(self.layout.ranks) for b in self.layout.used_by(rank, step)]
            for batch in sorted(batches):
                target, rank = self.layout.maker(batch), batch % self.layout.ranks
                line = waiting.setdefault((target, rank), [])
                self.made[batch] = free[target] + self.making
                before = self.taken[line[-self.room]] if len(line) >= self.room else 0.0
                self.put[batch] = free[target] = max(self.made[batch], before)
                line.append(batch)
            for batch in batches:
                self.taken[batch] = max(asked, self.put[batch])
                end = max(end, max(self.ends[-1], self.taken[batch]) + self.using + self.compiling * (step == 1))
                window = windows[batch % self.layout.ranks]
                if step - 1 - self.behind >= WARM:
                    window.warm = self.ends[WARM]
                counted.append(window.has(self.made[batch], False, (self.steps - step) % self.layout.cycle == 0))
            self.ends.append(end)
            made = self.made[self.layout.used_by(0, step)[-1]]
            lag = end - made if step > WARM and made > self.ends[WARM] else None
            told = {"event": "step", "t": end, "variant": "", "step": step, "tokens": TOKENS * len(batches)}
            events.append({**told, "steady": all(counted), "lag": lag})
        return events

    @property
    def possible(self) -> float:
        """Ktok/s of the slower side alone."""
        return TOKENS * min(self.layout.targets / self.making, self.layout.ranks / self.using) / 1000


pipelines = st.builds(
    Pipeline,
    layout=st.builds(Layout, st.integers(1, 5), st.just(("",)), st.integers(1, 3), st.just(1)),
    making=st.floats(0.2, 5),
    using=st.floats(0.05, 5),
    compiling=st.sampled_from([0.0, 5.0, 50.0]),
    room=st.integers(1, 4),
    behind=st.sampled_from([0, 1]),
    steps=st.integers(40, 60),
)


@settings(max_examples=300, deadline=None)
@given(pipelines)
def test_the_figure_is_that_of_the_slower_side(pipeline: Pipeline) -> None:
    found = figures(pipeline.run()).ktok_s
    assert found is not None
    assert 0.95 * pipeline.possible <= found <= pipeline.possible * (1 + 1e-6)


@pytest.mark.parametrize("using", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("room", [1, 2, 4])
@pytest.mark.parametrize("behind", [0, 1])
def test_a_short_run_that_mostly_uses_up_a_backlog_is_as_fast_as_its_target(
    using: float, room: int, behind: int
) -> None:
    one = Pipeline(Layout(1, ("",), 1, 1), 1.0, using, 20.0, room, behind, steps=12)
    assert figures(one.run()).ktok_s == pytest.approx(1.0)


def test_targets_that_deliver_at_the_same_time_are_no_faster_for_it() -> None:
    five = Pipeline(Layout(5, ("",), 1, 1), 5.0, 0.01, 0.0, 1, 0, steps=23)
    assert figures(five.run()).ktok_s == pytest.approx(1.0)
