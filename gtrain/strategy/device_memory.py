"""The message for a rank whose device has no memory left: what the memory held, and which settings reduce it."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from gtrain.errors import DeviceMemoryError

_LARGEST = 3
"""Tensors of batches and graphs that the message names."""
_DRIVER_MESSAGES = ("CUDA error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY")
_GENERAL_HINT = "lower data.batch_size or the width of the model's layers, or start more ranks on more devices."


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device, in bytes.

    Attributes:
        total: of the device.
        free: that no process has reserved.
        allocated: of this rank's tensors.
        reserved: by this rank's allocator, with what it has not returned to the device.
    """

    total: int
    free: int
    allocated: int
    reserved: int

    @property
    def others(self) -> int:
        """Memory of other processes, and of the driver."""
        return max(self.total - self.free - self.reserved, 0)


def read_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a CUDA device that this process uses; None for another device, or if it cannot be read."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # the driver itself had no memory
        return None
    return DeviceMemory(total, free, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


def is_out_of_memory(exception: BaseException | None) -> bool:
    """Whether an exception, or one of its causes, says that a device has no memory left."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        if isinstance(exception, torch.OutOfMemoryError):
            return True
        if isinstance(exception, RuntimeError) and any(text in str(exception) for text in _DRIVER_MESSAGES):
            return True
        seen.add(id(exception))
        exception = exception.__cause__ or exception.__context__
    return False


def out_of_memory(
    exception: BaseException,
    *,
    rank: str,
    device: torch.device,
    module: Module | None,
    optimizers: Sequence[Optimizer],
    hints: Sequence[str],
    memory: DeviceMemory | None = None,
) -> DeviceMemoryError | None:
    """Return the error for an exception that says that a device has no memory left; None for another exception.

    Args:
        exception: as it was raised; its traceback keeps the tensors of the failed step alive.
        rank: such as ``rank 1 of 2``.
        device: of the rank.
        module: the model.
        optimizers: of the model.
        hints: what reduces the memory, clauses in the imperative.
        memory: of the device; None: :func:`read_memory`.
    """
    if not is_out_of_memory(exception):
        return None
    memory = memory or read_memory(device)
    name = str(device)
    if memory is not None:
        name += f" ({_device_name(device)}{gibibytes(memory.total)})"
    parts = _parts(device, module, optimizers, memory)
    sentences = [f"{rank} ran out of memory on {name}."]
    if memory is not None:
        sentences.append(
            f"It had allocated {gibibytes(memory.allocated)} and reserved {gibibytes(memory.reserved)}; "
            f"{gibibytes(memory.free)} were free, and other processes and the driver had {gibibytes(memory.others)}."
        )
    if parts:
        sentences.append(f"Allocated: {', '.join(parts)}.")
    hint = f"{'; or '.join(hints)}." if hints else _GENERAL_HINT
    return DeviceMemoryError(" ".join(sentences), hint=hint)


def _device_name(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" and torch.cuda.is_initialized() else ""


def _parts(
    device: torch.device, module: Module | None, optimizers: Sequence[Optimizer], memory: DeviceMemory | None
) -> list[str]:
    """Return the sizes of the known parts of the memory, the largest tensors of batches and graphs, and the rest."""
    counted: set[int] = set()
    parameters = [] if module is None else list(module.parameters())
    buffers = [] if module is None else list(module.buffers())
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    groups = {
        "parameters and buffers": [*parameters, *buffers],
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer state": [value for value in states if isinstance(value, Tensor)],
    }
    sizes = {name: sum(size for size, _ in _storages(tensors, device, counted)) for name, tensors in groups.items()}
    others = sorted(_storages(_living_tensors(), device, counted), key=lambda pair: -pair[0])
    sizes["batches, graph and results"] = sum(size for size, _ in others)
    parts = [f"{name} {gibibytes(size)}" for name, size in sizes.items() if size]
    if others:
        largest = ", ".join(f"{description} {gibibytes(size)}" for size, description in others[:_LARGEST])
        parts[-1] += f" (the largest: {largest})"
    if memory is not None and (rest := memory.allocated - sum(sizes.values())) > 0:
        parts.append(f"results that the backward pass needs {gibibytes(rest)}")
    return parts


def _storages(tensors: Iterable[Tensor], device: torch.device, counted: set[int]) -> Iterator[tuple[int, str]]:
    """Yield bytes and description of the tensors' memory on a device that is not ``counted`` yet, and count it."""
    for tensor in tensors:
        if tensor.device != device or tensor.layout != torch.strided:
            continue
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own
            continue
        if size and address not in counted:
            counted.add(address)
            yield size, f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _living_tensors() -> Iterator[Tensor]:
    """Yield the tensors that Python objects refer to, among them the batch, the graph and those of the failed call."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor):  # not isinstance, which may import what a lazy module stands for
            yield candidate


def gibibytes(size: int) -> str:
    """Return bytes as text in GiB, or in MiB if it is less."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
