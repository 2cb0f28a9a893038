"""The launcher class that Hydra demands: hands all cells of a sweep to the harness at once.

A cell is an outcome, never an exception, so every job comes back COMPLETED with its outcome as value.
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

ConfigStore.instance().store(
    group="hydra/launcher",
    name="sweeper",
    node={"_target_": "hydra_plugins.sweeper_launcher.launcher.SweeperLauncher"},
)


class SweeperLauncher(Launcher):
    """Composes each cell and calls the task function once, with the list of them."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        loader = self.hydra_context.config_loader
        cells = [loader.load_sweep_config(self.config, list(overrides)) for overrides in job_overrides]
        outcomes = self.task_function(cells)
        return [
            JobReturn(overrides=list(overrides), cfg=cell, status=JobStatus.COMPLETED, _return_value=outcome)
            for overrides, cell, outcome in zip(job_overrides, cells, outcomes, strict=True)
        ]
