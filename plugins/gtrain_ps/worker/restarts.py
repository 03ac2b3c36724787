"""The part of the strategy by which a worker that died, or a job that was cut off, goes on where it was."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from gtrain.errors import ConfigError
from gtrain.launch.job_store import network_of
from gtrain.memory.heap import keep_freed
from gtrain.strategy.base import GraphStrategy
from gtrain.strategy.group import Group
from gtrain_ps.config import PsConfig
from gtrain_ps.worker.group import ServedGroup
from gtrain_ps.worker.progress import Progress
from gtrain_ps.worker.servers import ParameterServers, Request

log = logging.getLogger("gtrain")
ROLE = "parameter"


class RestartingStrategy(GraphStrategy):
    """Tells the servers with each step how the worker came into it, and begins with what they know.

    Attributes:
        parameter_servers: the servers, once they were asked for anything.
    """

    settings_type = PsConfig
    settings: PsConfig

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.parameter_servers: ParameterServers | None = None
        self._flying: deque[list[Request]] = deque()
        self._progress: Progress | None = None
        self._again: int | None = None

    @property
    def _workers_restart(self) -> bool:
        """Whether a worker that dies is restarted, in this job or the next."""
        return self.settings.keeps_workers and self.started_by_agent

    @property
    def outlives_job(self) -> bool:
        return self.settings.durability == "disk"

    def _asked(self) -> ParameterServers:
        """The servers, from now on."""
        if not self.servers.count(ROLE):
            raise ConfigError(
                "strategy=ps was set, and the job has no parameter servers.",
                hint="start it with the gtrain command.",
            )
        if self.parameter_servers is None:
            assert self.cluster_environment is not None
            keep_freed()
            self.parameter_servers = ParameterServers(
                self.servers.clients(ROLE),
                self.settings.restarts > 0,
                self.global_rank,
                network_of(self.cluster_environment),
            )
        return self.parameter_servers

    def restart_checkpoint(self, run_dir: Path) -> Path | None:
        """The last step that all servers have applied; None: there is none, and the run begins anew."""
        versions = [answer.fields["version"] for answer in self._asked().everybody("come_back", {})]
        self._again = min(versions) - 1 if min(versions) else None
        if self._again is not None and not self._workers_restart:
            raise ConfigError(
                f"the servers are at step {min(versions)} of a job that was cut off, and keep nothing for its workers.",
                hint="delete the servers' folders, and go on from the last checkpoint (ckpt_path=last).",
            )
        return None if self._again is None else run_dir / f"step-{self._again}"

    def make_group(self) -> Group:
        if not self._workers_restart:
            return super().make_group()
        group = ServedGroup(self.global_rank, self.world_size, self._asked(), self.counters)
        group.again, group.alone = self.former_lives > 0 or self._again is not None, self._again is not None
        return group

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self._progress = None
        if isinstance(self.group, ServedGroup) and self.fitting:
            self._progress = Progress(trainer, self.group, self._asked(), self.settings.lag + 3)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self._again is None or self._progress is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        step, self._again = self._again, None
        log.warning("worker %d goes on at step %d", self.global_rank, step)
        return self._progress.come_back(step)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._settled()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._settled()

    def _settled(self) -> None:
        """Callbacks have seen something: what is kept of the run is not enough any more."""
        if self._progress is not None:
            self._progress.changed()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._progress is not None:
            servers = self._asked()
            for step in range(servers.step - self._progress.returned_flying, servers.step):
                self._flying.append([servers.submit(one, "sum", {"step": step}) for one in range(len(servers))])
            self._progress.begin(len(self._flying))
        return super().training_step(*args, **kwargs)
