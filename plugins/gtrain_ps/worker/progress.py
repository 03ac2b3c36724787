"""Where a worker is in its run, told to the servers with each step, so that a later life of it goes on from there.

What is told of a step is how the worker came into it. A worker that comes back goes through the last step that all
servers have applied once more: it is answered what it was answered then, and its part of the step counts once. So all
that follows a step (validation, callbacks, the end of an epoch) follows it again, and collectives that were completed
are answered as they were.

Some of it changes with every step ("step"), some now and then ("run": loops, callbacks, schedulers; "random"). The
layers that all workers have ("rest"), with their optimizer's state, are the same everywhere: a piece for each server.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from gtrain.protocols import Restartable
from gtrain.strategy.checkpoint import rng_state, set_rng_state
from gtrain_ps.packing import as_bytes, from_bytes, join, pack, split, unpack
from gtrain_ps.worker import lightning_state
from gtrain_ps.worker.group import ServedGroup
from gtrain_ps.worker.servers import ParameterServers

_MT19937_BYTES = 624 * 4 + 4
ReplayEntries = list[dict[str, Tensor]]
"""What each server is to keep of a step, by name."""


class Progress:
    """A worker's place in its run.

    Args:
        trainer: of the run.
        group: the workers.
        servers: the servers.
        overlap: steps for which servers may be apart; after coming back everything is told in so many.
    """

    def __init__(self, trainer: pl.Trainer, group: ServedGroup, servers: ParameterServers, overlap: int) -> None:
        self._trainer, self._group, self._servers = trainer, group, servers
        self._overlap, self._metrics = overlap, lightning_state.metrics_of(trainer.lightning_module)
        self._begun = 0
        self._sign: Any = None
        self._noted = 0
        self._rest: list[Tensor] = []
        self._bytes: list[Tensor] | None = None
        self._random: dict[str, Any] = {}
        self._drawn: Any = None
        self._telling: dict[str, Tensor] = {}
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._again: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------------------- telling

    def changed(self) -> None:
        """Something has happened between two steps: a validation, a checkpoint."""
        self._sign = None

    def begin(self, flying: int) -> None:
        """A step begins: note how the worker comes into it.

        Args:
            flying: steps whose sums have not been taken in.
        """
        if self._again is not None:
            self._enter(self._again)
        all_of_it = self._begun <= self._overlap
        self._telling = {}
        sign = self._signature()
        if all_of_it or sign != self._sign:
            self._telling["run"] = self._note_run()
            self._sign = self._signature()
        if self._random_changed() or all_of_it:
            self._random = rng_state()
            self._telling["random"] = pack(self._random)
        if self._rest:
            self._flat = torch.cat(self._bytes or [as_bytes(tensor) for tensor in self._rest])
        self._index, self._flying = self._group.index, flying
        self._begun += 1

    def end(self) -> ReplayEntries:
        """The step's gradients are there: what each server keeps of it."""
        if self._again is not None:
            lightning_state.restore_metrics(self._trainer, self._metrics, self._again["step"]["meters"])
            self._again = None
        own = {
            "index": self._index,
            "flying": self._flying,
            "since": self._servers.step - self._noted,
            "meters": lightning_state.metric_states(self._trainer, self._metrics),
        }
        rank, size, count = self._group.rank, self._group.size, len(self._servers)
        kept: ReplayEntries = [{} for _ in range(count)]
        kept[rank % count] |= {"step": pack(own), **self._telling}
        for server, piece in enumerate(self._flat.tensor_split(count)):
            if server % size == rank:
                kept[server][f"rest/{server}"] = piece
        return kept

    # ------------------------------------------------------------------------------------------------- coming back

    def come_back(self, step: int) -> dict[str, Any]:
        """Ask the servers how this worker came into a step; return it as a checkpoint of Lightning's."""
        answers = self._servers.everybody("recall", {"step": step})
        found: dict[str, Tensor] = {}
        for answer in answers:
            found |= dict(zip(answer.fields["names"], answer.tensors, strict=True))
        mine = {name: unpack(found[f"{name}/{self._group.rank}"].clone()) for name in ("step", "run", "random")}
        run, own = mine["run"], mine["step"]
        pieces = [found[f"rest/{server}"] for server in range(len(answers)) if f"rest/{server}" in found]
        layers = join(run["layers"], _cut(torch.cat(pieces) if pieces else torch.empty(0), run["shapes"]))
        self._again = mine
        self._servers.step = step
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if type(callback).__qualname__ in run["records"]:
                callback.load_restart_state(run["records"][type(callback).__qualname__])
        return {
            "epoch": run["epoch"],
            "global_step": step,
            "pytorch-lightning_version": pl.__version__,
            "state_dict": layers["module"],
            "optimizer_states": layers["optimizers"],
            "loops": {"fit_loop": lightning_state.shifted_loops(run["loops"], own["since"])},
            "callbacks": run["callbacks"],
            "lr_schedulers": run["schedulers"],
        }

    @property
    def returned_flying(self) -> int:
        """Steps whose sums were under way when the step began that is gone through once more."""
        return 0 if self._again is None else int(self._again["step"]["flying"])

    # ------------------------------------------------------------------------------------------------- inside

    def _enter(self, again: Mapping[str, Any]) -> None:
        """Be among the others again, at the beginning of the step."""
        self._group.enter(again["step"]["index"])
        self._trainer._logger_connector._callback_metrics.update(again["run"]["metrics"])
        # torch takes the state for garbage where it does not begin at the beginning of its memory
        set_rng_state({**again["random"], "torch": again["random"]["torch"].clone()})

    def _note_run(self) -> Tensor:
        trainer = self._trainer
        module = trainer.lightning_module
        layers = {"module": module.state_dict(), "optimizers": [one.state_dict() for one in trainer.optimizers]}
        content, self._rest = split(layers)
        in_place = all(tensor.is_contiguous() for tensor in self._rest)  # they are changed there
        self._bytes = [as_bytes(tensor) for tensor in self._rest] if in_place else None
        self._noted = self._servers.step
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        return pack(
            {
                "epoch": trainer.current_epoch,
                "layers": content,
                "shapes": [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in self._rest],
                "loops": trainer.fit_loop.state_dict(),
                "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
                "callbacks": {one.state_key: state for one in callbacks if (state := one.state_dict())},
                "records": {
                    type(one).__qualname__: one.restart_state() for one in callbacks if isinstance(one, Restartable)
                },
                "metrics": dict(trainer._logger_connector._callback_metrics),
            }
        )

    def _signature(self) -> Any:
        """Changes as soon as a note of the run is not enough any more, together with the number of steps since."""
        trainer = self._trainer
        if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
            return self._servers.step
        rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
        tensors = [id(value) for one in trainer.optimizers for state in one.state.values() for value in state.values()]
        return trainer.current_epoch, rates, tensors

    def _random_changed(self) -> bool:
        """Whether a random number was drawn since the last step: quicker than to note all of the state."""
        others = random.getstate(), _numpy_state()
        changed = others != self._drawn or not torch.equal(torch.get_rng_state(), self._random["torch"])
        self._drawn = others
        return changed


def _numpy_state() -> Any:
    """What changes with numpy's global generator."""
    generator = np.random.mtrand.get_bit_generator()
    if isinstance(generator, np.random.MT19937):  # its words and its place among them, without the dictionary
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return repr(generator.state)


def _cut(flat: Tensor, shapes: list[Any]) -> list[Tensor]:
    """The tensors that one row of bytes is made of."""
    found, begin = [], 0
    for kind, shape in shapes:
        dtype = getattr(torch, kind)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        found.append(from_bytes(flat[begin : begin + nbytes].clone(), dtype, shape))
        begin += nbytes
    return found
