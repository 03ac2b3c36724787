"""The replay buffer: the last steps of each server, so that a restarted worker can repeat them.

It has the products that were sent, the state of the workers at the start of each step, and sums of gradients. All are
in memory that survives a restart of the server (:class:`~gtrain_ps.server.memory.PersistentServerMemory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gtrain_ps.packing import prepare, unpack
from gtrain_ps.server.memory import ServerMemory
from gtrain_ps.server.requests import Commit, ProductRequest, gradient_factor

CARRIED = ("run/", "random/")
"""Names of the entries that a worker sends only if they have changed; they carry over to the next step."""


class GrowingMemory:
    """Named buffers that grow, each time to at least twice the size, so that few copies are made.

    Args:
        name: prefix of the buffers' names.
        memory: holds the tensors.
    """

    def __init__(self, name: str, memory: ServerMemory) -> None:
        self._name, self._memory = name, memory

    def allocate(self, number: int, nbytes: int = 0, preserve: int = 0) -> Tensor:
        """Return a buffer of at least this size, uint8.

        Args:
            number: of the buffer.
            nbytes: required size.
            preserve: bytes at the start that are copied to a larger buffer before it replaces the smaller one.
        """
        name = f"{self._name}/{number}"
        capacity = int(self._memory.notes.get(name, 0))
        nothing = torch.empty(0, dtype=torch.uint8)
        buffer = self._memory.tensor(f"{name}/{capacity}", (capacity,), torch.uint8) if capacity else nothing
        if capacity >= nbytes:
            return buffer
        capacity = max(2 * capacity, nbytes)
        larger = self._memory.tensor(f"{name}/{capacity}", (capacity,), torch.uint8)
        # Before the note, which makes the larger buffer the current one.
        larger[:preserve] = buffer[:preserve]
        self._memory.set_note(name, capacity)
        return larger


class StepHistory:
    """Named tensors of each of the last steps.

    They are complete before the step counts as applied: a restarted worker finds all of a step or nothing.

    Args:
        count: number of steps that are kept.
        memory: holds the tensors.
    """

    def __init__(self, count: int, memory: ServerMemory) -> None:
        self._count, self._slots = count, GrowingMemory("slots", memory)
        self._steps = memory.tensor("slots/step", (count,), torch.int64).numpy()  # NumPy reads single items faster

    def write(self, step: int, entries: Mapping[str, Tensor]) -> None:
        """Store a step in place of the oldest one."""
        slot, packed = step % self._count, prepare(entries)
        # The slot is invalid while it is written, and valid with the last store.
        self._steps[slot] = 0
        packed.write(self._slots.allocate(slot, packed.nbytes))
        self._steps[slot] = step + 1

    def has(self, step: int) -> bool:
        """Whether a step is stored."""
        return step >= 0 and int(self._steps[step % self._count]) == step + 1

    def read(self, step: int) -> dict[str, Tensor]:
        """Return the tensors of a step, without a copy; an empty dictionary if it is not stored."""
        entries: dict[str, Tensor] = unpack(self._slots.allocate(step % self._count)) if self.has(step) else {}
        return entries


class ReplayBuffer:
    """Products that workers received in the last steps, and the workers' state at the start of these.

    Args:
        count: number of steps that are kept.
        memory: holds the tensors.
    """

    def __init__(self, count: int, memory: ServerMemory) -> None:
        self._history = StepHistory(count, memory)
        self._carried: tuple[int, dict[str, Tensor]] = (-1, {})

    def store(self, step: int, commits: Mapping[int, Commit], products: Mapping[tuple[int, int], Tensor]) -> None:
        """Store a step before it is applied: during the update the block's rows belong to two steps.

        Args:
            step: the step.
            commits: the workers' parts.
            products: products that were sent, by worker and call.
        """
        if self._history.has(step):
            return
        last_step, carried = self._carried
        if last_step != step - 1:
            # A restarted server: copy, because the slot's memory will hold another step.
            carried = {name: tensor.clone() for name, tensor in _carried(self._history.read(step - 1)).items()}
        entries = dict(carried)
        for worker, commit in commits.items():
            entries |= {name if "/" in name else f"{name}/{worker}": tensor for name, tensor in commit.replay.items()}
        self._carried = step, _carried(entries)
        entries |= {f"product/{worker}/{call}": product for (worker, call), product in products.items()}
        self._history.write(step, entries)

    def product(self, request: ProductRequest) -> Tensor | None:
        """Return the product that the worker's process before received; None if the step was not stored."""
        product = self._history.read(request.step).get(f"product/{request.worker}/{request.call}")
        # A copy: the reply is sent without one, and the slot may be overwritten before it has left.
        return None if product is None else product.clone()

    def worker_state(self, step: int, worker: int) -> dict[str, Tensor]:
        """Return what a worker needs to start with a step that was applied."""
        names = {f"{name}{worker}" for name in ("step/", *CARRIED)}
        entries = self._history.read(step)
        return {name: tensor.clone() for name, tensor in entries.items() if name in names or name.startswith("rest/")}


def _carried(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in entries.items() if name.startswith(CARRIED)}


class GradientSums:
    """Sums over the workers of their other layers' gradients, of the last steps.

    A worker that has not received a sum when the server dies gets it from the restarted server.

    Args:
        count: number of steps that are kept.
        memory: holds the tensors.
    """

    def __init__(self, count: int, memory: ServerMemory) -> None:
        self._count, self._memory = count, memory
        self._steps = memory.tensor("sums/step", (count,), torch.int64).numpy()
        self._tensors: Tensor | None = None
        if "sums" in memory.notes:
            size, dtype = memory.notes["sums"]
            self._tensors = memory.tensor("sums", (count, size), getattr(torch, dtype))

    def get(self, step: int) -> Tensor | None:
        """Return the sum of a step; None if it is not stored."""
        slot = step % self._count
        if self._tensors is None or int(self._steps[slot]) != step + 1:
            return None
        return self._tensors[slot].clone()

    def compute(self, step: int, commits: Sequence[Commit]) -> Tensor | None:
        """Sum a step's gradients in rank order, and store the sum; None if the workers sum them themselves."""
        gradients = [commit.rest for commit in commits if commit.rest is not None]
        if len(gradients) < len(commits):
            return None
        # A restarted server must send the sum that some workers may already have.
        stored = self.get(step)
        if stored is not None:
            return stored
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        factor = gradient_factor(commits)
        if factor != 1.0:
            total *= factor
        if self._tensors is None:
            self._tensors = self._memory.tensor("sums", (self._count, total.numel()), total.dtype)
            self._memory.set_note("sums", [total.numel(), str(total.dtype).removeprefix("torch.")])
        slot = step % self._count
        self._steps[slot] = 0
        self._tensors[slot] = total
        self._steps[slot] = step + 1
        return total
