"""The classes that Hydra demands: what hands all cells of a sweep to the harness at once.

A cell is an outcome, never an exception, so every job comes back COMPLETED with its outcome as value.
"""

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

from sweeper import composed

_HERE = "hydra_plugins.sweeper_launcher.launcher"
ConfigStore.instance().store(group="hydra/launcher", name="sweeper", node={"_target_": f"{_HERE}.SweeperLauncher"})
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="sweeper",
    node={"_target_": f"{_HERE}.Product", "max_batch_size": None, "params": None},
)


class Product(BasicSweeper):
    """Hydra's product of levels, less its trial composition of every cell: the launcher's comes before any start."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        pass


class SweeperLauncher(Launcher):
    """Composes each cell and calls the task function once, with the list of them."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        outcomes = self.task_function(composed.cells(self.hydra_context.config_loader, self.config, job_overrides))
        return [
            JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED, _return_value=outcome)
            for overrides, outcome in zip(job_overrides, outcomes, strict=True)
        ]
