"""Records a worker's progress in the replay buffer of the servers, and restores it after a restart.

With each step a worker sends its state at the start of the step. A restarted worker repeats the last step that all
servers have applied: it receives the same products and sums again, and its part of the step counts once. All that
follows a step (validation, callbacks, the end of an epoch) follows it again, and completed collectives return their
results again.

Some of the state changes with every step ("step"), some now and then ("run": loops, callbacks, schedulers, what hooks
add to a checkpoint; "random").
The layers that all workers hold ("rest") and their optimizer state are the same everywhere: each server gets a part.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from gtrain.nn.dropout import ExactDropout
from gtrain.protocols import Restartable
from gtrain.strategy.checkpoint import rng_state, set_rng_state
from gtrain.strategy.metric_states import metric_states, module_metrics, restore_metrics
from gtrain_ps.packing import as_bytes, cut_tensors, join, layout_of, pack, split, unpack
from gtrain_ps.worker import lightning_state
from gtrain_ps.worker.device import HOST, WorkerDevice
from gtrain_ps.worker.group import ServedGroup
from gtrain_ps.worker.servers import ParameterServers

_MT19937_BYTES = 624 * 4 + 4
ReplayEntries = list[dict[str, Tensor]]
"""For each server the replay entries of a step, by name."""


class ProgressRecorder:
    """Records and restores a worker's progress in its run.

    Args:
        trainer: the run's trainer.
        group: the workers' collectives.
        servers: the servers.
        overlap: by how many steps servers may differ; after a restart this many steps record the complete state.
        device: of the layers that the worker holds.
        dropout: the run's dropout, whose seed a checkpoint may have set; None without it.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        group: ServedGroup,
        servers: ParameterServers,
        overlap: int,
        device: WorkerDevice = HOST,
        dropout: ExactDropout | None = None,
    ) -> None:
        self._dropout = dropout
        self._hooked = lightning_state.reads_checkpoints(trainer.lightning_module)
        self._trainer, self._group, self._servers, self._device = trainer, group, servers, device
        self._overlap, self._metrics = overlap, module_metrics(trainer.lightning_module)
        self._recorded_steps = 0
        self._signature: Any = None
        self._run_step = 0  # at which "run" was recorded last
        self._layers: list[Tensor] = []
        self._layer_bytes: list[Tensor] | None = None
        self._random: dict[str, Any] = {}
        self._last_random: Any = None
        self._changes: dict[str, Tensor] = {}
        self._state: list[Tensor] = []  # bytes of the layers, in order
        self._restored: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------------------ recording

    def invalidate(self) -> None:
        """Record the run's state with the next step: a validation or a checkpoint came between."""
        self._signature = None

    def start_step(self, pending_sums: int) -> None:
        """Record the worker's state at the start of a step.

        Args:
            pending_sums: steps whose gradient sums have not been received.
        """
        if self._restored is not None:
            self._rejoin(self._restored)
        complete = self._recorded_steps <= self._overlap
        self._changes = {}
        if complete or self._run_signature() != self._signature:
            self._changes["run"] = self._pack_run()
            self._signature = self._run_signature()
        if self._random_changed() or complete:
            self._random = rng_state()
            self._changes["random"] = pack(self._random)
        if self._layers:
            layers = self._layer_bytes or [as_bytes(tensor) for tensor in self._layers]
            self._state = self._device.bytes_on_host(layers)
        self._index, self._pending_sums = self._group.index, pending_sums
        self._recorded_steps += 1

    def finish_step(self) -> ReplayEntries:
        """Return the replay entries of a step whose gradients are complete."""
        self._device.synchronize()  # what start_step copied
        metrics = [*lightning_state.logged_metrics(self._trainer), *self._metrics]
        if self._restored is not None:
            restore_metrics(metrics, self._restored["step"]["meters"])
            self._restored = None
        step = {
            "index": self._index,
            "flying": self._pending_sums,
            "since": self._servers.step - self._run_step,
            "meters": metric_states(metrics),
        }
        rank, size, count = self._group.rank, self._group.size, len(self._servers)
        entries: ReplayEntries = [{} for _ in range(count)]
        entries[rank % count] |= {"step": pack(step), **self._changes}
        flat = self._state[0] if len(self._state) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *self._state])
        for server, part in enumerate(flat.tensor_split(count)):
            if server % size == rank:
                entries[server][f"rest/{server}"] = part
        return entries

    # ------------------------------------------------------------------------------------------------ restoring

    def restore(self, step: int) -> dict[str, Any]:
        """Fetch this worker's state at the start of a step, and return it in the form of a Lightning checkpoint."""
        replies = self._servers.request_all("recall", {"step": step})
        entries: dict[str, Tensor] = {}
        for reply in replies:
            entries |= dict(zip(reply.fields["names"], reply.tensors, strict=True))
        state = {name: unpack(entries[f"{name}/{self._group.rank}"].clone()) for name in ("step", "run", "random")}
        run = state["run"]
        parts = [entries[f"rest/{server}"] for server in range(len(replies)) if f"rest/{server}" in entries]
        flat = torch.cat(parts) if parts else torch.empty(0)
        layers = join(run["layers"], cut_tensors(flat, run["shapes"], copy=True))
        self._restored = state
        self._servers.step = step
        if self._dropout is not None:
            self._dropout.seed = run.get("dropout_seed", self._dropout.seed)  # servers' folders of earlier releases
        loops = lightning_state.shifted_loops(run["loops"], state["step"]["since"])
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if type(callback).__qualname__ in run["records"]:
                callback.load_restart_state(run["records"][type(callback).__qualname__])
        completed = lightning_state.global_step(loops)
        checkpoint = lightning_state.as_checkpoint(
            run["epoch"], completed, layers, loops, run["callbacks"], run["schedulers"]
        )
        return {**run.get("added", {}), **checkpoint}

    @property
    def restored_pending_sums(self) -> int:
        """Steps whose gradient sums were pending at the start of the step that is repeated; 0 without one."""
        return 0 if self._restored is None else int(self._restored["step"]["flying"])

    def _rejoin(self, state: dict[str, Any]) -> None:
        """Join the other workers again, at the start of the step."""
        self._group.rejoin(state["step"]["index"])
        self._trainer._logger_connector._callback_metrics.update(state["run"]["metrics"])
        # torch rejects a generator state that does not start at the beginning of its storage
        set_rng_state({**state["random"], "torch": state["random"]["torch"].clone()})

    # ------------------------------------------------------------------------------------------------ state

    def _pack_run(self) -> Tensor:
        trainer = self._trainer
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        layers = {"module": trainer.lightning_module.state_dict(), "optimizers": optimizers}
        content, self._layers = split(layers)
        in_place = all(tensor.is_contiguous() for tensor in self._layers)  # steps change the tensors themselves
        self._layer_bytes = [as_bytes(tensor) for tensor in self._layers] if in_place else None
        self._run_step = self._servers.step
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        restartable = [callback for callback in callbacks if isinstance(callback, Restartable)]
        loops = trainer.fit_loop.state_dict()
        schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        states = {one.state_key: state for one in callbacks if (state := one.state_dict())}
        checkpoint = lightning_state.as_checkpoint(
            trainer.current_epoch, trainer.global_step, layers, loops, states, schedulers
        )
        return pack(
            {
                "epoch": trainer.current_epoch,
                "layers": content,
                "shapes": [layout_of(tensor) for tensor in self._layers],
                "loops": loops,
                "schedulers": schedulers,
                "callbacks": states,
                "added": lightning_state.added_by_hooks(trainer, checkpoint),
                "dropout_seed": None if self._dropout is None else self._dropout.seed,
                "records": {type(callback).__qualname__: callback.restart_state() for callback in restartable},
                "metrics": dict(trainer._logger_connector._callback_metrics),
            }
        )

    def _run_signature(self) -> Any:
        """Return a value that changes when "run" must be recorded again; the count of steps since covers the rest."""
        trainer = self._trainer
        if self._hooked or any(config.interval == "step" for config in trainer.lr_scheduler_configs):
            return self._servers.step
        module = trainer.lightning_module
        # A tensor that was replaced by another is not the one whose memory each step sends.
        held = [_memory_of(tensor) for tensors in (module.parameters(), module.buffers()) for tensor in tensors]
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        return trainer.current_epoch, rates, held, [id(value) for state in states for value in state.values()]

    def _random_changed(self) -> bool:
        """Whether a random number was drawn since the last step; faster than recording all generators."""
        current = random.getstate(), _numpy_state(), _cuda_state()
        changed = current != self._last_random or not torch.equal(torch.get_rng_state(), self._random["torch"])
        self._last_random = current
        return changed


def _memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's elements; that of the object if it has no such memory."""
    return tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)


def _numpy_state() -> Any:
    """Return the part of NumPy's global generator that changes with its use."""
    generator = np.random.mtrand.get_bit_generator()
    if isinstance(generator, np.random.MT19937):
        # Its words and the position, without building a dictionary.
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return repr(generator.state)


def _cuda_state() -> list[bytes]:
    """Return the state of the devices' generators; empty where this process uses no GPU."""
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [state.numpy().tobytes() for state in states]
