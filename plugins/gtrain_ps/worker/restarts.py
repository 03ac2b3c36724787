"""The part of the strategy that resumes a worker that was restarted, or a job that was interrupted."""

from __future__ import annotations

import logging
import threading
from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from gtrain.errors import ConfigError, PeerLostError
from gtrain.launch.job_store import await_end_of_store, job_network, store_address
from gtrain.memory.heap import keep_freed
from gtrain.nn.dropout import installed_dropout
from gtrain.strategy.base import GraphStrategy
from gtrain.strategy.group import Group
from gtrain_ps.config import PsConfig
from gtrain_ps.worker.device import WorkerDevice
from gtrain_ps.worker.group import ServedGroup
from gtrain_ps.worker.progress import ProgressRecorder
from gtrain_ps.worker.servers import ParameterServers, ServerRequest

log = logging.getLogger("gtrain")
ROLE = "parameter"


class RestartingStrategy(GraphStrategy):
    """Records each worker's progress on the servers, and resumes from it.

    Attributes:
        parameter_servers: the servers, once a request was sent to them.
    """

    settings_type = PsConfig
    settings: PsConfig

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.parameter_servers: ParameterServers | None = None
        self._pending_sums: deque[list[ServerRequest]] = deque()  # of each step
        self._progress: ProgressRecorder | None = None
        self._restart_step: int | None = None
        self._device: WorkerDevice | None = None

    @property
    def worker_device(self) -> WorkerDevice:
        """This worker's device, on which the layers behind the tables are."""
        if self._device is None:
            self._device = WorkerDevice(self.root_device)
        return self._device

    @property
    def _workers_restart(self) -> bool:
        """Whether a worker that dies is restarted, in this job or the next."""
        return self.settings.keeps_replay_buffer and self.started_by_agent

    @property
    def outlives_job(self) -> bool:
        return self.settings.durability == "disk"

    def _connected(self) -> ParameterServers:
        """Return the servers, connected at the first call."""
        if not self.servers.count(ROLE):
            raise ConfigError(
                "strategy=ps was set; the job has no parameter servers.",
                hint="start it with the gtrain command.",
            )
        if self.parameter_servers is None:
            assert self.cluster_environment is not None
            keep_freed()
            if not self.started_by_agent and not self.is_global_zero:
                store = store_address(self.cluster_environment)
                threading.Thread(target=self._watch, args=(store,), name="gtrain-store", daemon=True).start()
            self.parameter_servers = ParameterServers(
                self.servers.clients(ROLE),
                self.settings.restarts > 0,
                self.global_rank,
                job_network(self.cluster_environment),
                self.counters,
            )
        return self.parameter_servers

    def _watch(self, store: str) -> None:
        """Let requests fail once rank 0 has ended: its launcher ends this rank too, and waits for it."""
        await_end_of_store(store)
        for client in self.servers.clients(ROLE):
            client.close(PeerLostError("rank 0 (machine 0) is gone: the job's key-value store, which it has, ended"))

    def restart_checkpoint(self, run_dir: Path) -> Path | None:
        """Name the last step that all servers have applied; None if the run starts from the beginning."""
        versions = [reply.fields["version"] for reply in self._connected().request_all("come_back", {})]
        self._restart_step = min(versions) - 1 if min(versions) else None
        if self._restart_step is not None and not self._workers_restart:
            raise ConfigError(
                f"the servers are at step {min(versions)} of an interrupted job, and have no state of its workers.",
                hint="delete the servers' folders, and resume from the last checkpoint (ckpt_path=last).",
            )
        return None if self._restart_step is None else run_dir / f"step-{self._restart_step}"

    def make_group(self) -> Group:
        if not self._workers_restart:
            return super().make_group()
        group = ServedGroup(self.global_rank, self.world_size, self._connected(), self.counters)
        group.alone = self._restart_step is not None
        group.repeating = self.former_lives > 0 or group.alone
        return group

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self._progress = None
        if isinstance(self.group, ServedGroup) and self.fitting:
            self._progress = ProgressRecorder(
                trainer, self.group, self._connected(), self.settings.lag + 3, self.worker_device, installed_dropout()
            )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self._restart_step is None or self._progress is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        step, self._restart_step = self._restart_step, None
        log.warning("worker %d resumes at step %d", self.global_rank, step)
        return self._progress.restore(step)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._invalidate_progress()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._invalidate_progress()

    def _invalidate_progress(self) -> None:
        """Have the next step record the run's state again, because callbacks may have changed it."""
        if self._progress is not None:
            self._progress.invalidate()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._progress is not None:
            servers = self._connected()
            for step in range(servers.step - self._progress.restored_pending_sums, servers.step):
                requests = [servers.submit(server, "sum", {"step": step}) for server in range(len(servers))]
                self._pending_sums.append(requests)
            self._progress.start_step(len(self._pending_sums))
        return super().training_step(*args, **kwargs)
