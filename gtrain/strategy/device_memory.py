"""The message for a rank that has no memory left, on its device or on the host: what the memory held, and which
settings reduce it."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch_geometric.data import Data, HeteroData

from gtrain.errors import DeviceMemoryError
from gtrain.memory.limits import meminfo, usable_memory
from gtrain.nn.compressed import CompressedMatrix
from gtrain.strategy.counters import rss_bytes

_LARGEST = 3
"""Tensors of batches and graphs that the message names."""
_DRIVER_MESSAGES = ("CUDA error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY")
_HOST_MESSAGE = "DefaultCPUAllocator"
"""In the RuntimeError of torch's allocator, with ``not enough memory`` or ``can't allocate memory``."""
_HOST = torch.device("cpu")
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
    """Whether an exception, or one of its causes, says that a device or the host has no memory left."""
    return _of_device(exception) is not None or _of_host(exception) is not None


def _of_device(exception: BaseException | None) -> BaseException | None:
    """Return the exception or cause that says that a device has no memory left; None without one."""
    for each in _chain(exception):
        driver = isinstance(each, RuntimeError) and any(text in str(each) for text in _DRIVER_MESSAGES)
        if driver or isinstance(each, torch.OutOfMemoryError):
            return each
    return None


def _of_host(exception: BaseException | None) -> BaseException | None:
    """Return the exception or cause that says that the host has no memory left: of torch, numpy or Python."""
    for each in _chain(exception):
        if isinstance(each, MemoryError) or (isinstance(each, RuntimeError) and _HOST_MESSAGE in str(each)):
            return each
    return None


def _chain(exception: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        yield exception
        seen.add(id(exception))
        exception = exception.__cause__ or exception.__context__


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
    """Return the error for an exception that says that there is no memory left; None for another exception.

    Args:
        exception: as it was raised; its traceback keeps the tensors of the failed step alive.
        rank: such as ``rank 1 of 2``.
        device: of the rank.
        module: the model.
        optimizers: of the model.
        hints: what reduces the memory, clauses in the imperative.
        memory: of the device; None: :func:`read_memory`.
    """
    hint = f"{'; or '.join(hints)}." if hints else _GENERAL_HINT
    if _of_device(exception) is None:
        on_host = _of_host(exception)
        return None if on_host is None else DeviceMemoryError(_host_text(on_host, rank, module, optimizers), hint=hint)
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
    return DeviceMemoryError(" ".join(sentences), hint=hint)


def _host_text(exception: BaseException, rank: str, module: Module | None, optimizers: Sequence[Optimizer]) -> str:
    """Return what the rank held, and what it could not allocate."""
    held, sentences = rss_bytes(), [f"{rank} ran out of memory on its machine ({gibibytes(usable_memory())})."]
    amount = re.search(r"tried to allocate (\d+) bytes|[Uu]nable to allocate ([\d.]+ \wiB)", str(exception))
    wanted = "" if amount is None else f" when it needed {amount[2] or gibibytes(int(amount[1]))} more"
    sentences.append(f"It held {gibibytes(held)}{wanted}; {gibibytes(meminfo('MemAvailable'))} were available.")
    parts = _parts(_HOST, module, optimizers, None)
    if parts:
        sentences.append(f"Allocated: {', '.join(parts)}; the rest are libraries and results of the step.")
    return " ".join(sentences)


def holdings(module: Module | None, batch: Any) -> str:
    """Return the sizes of the parameters and of the tensors of a batch: ``parameters and buffers 4.0 MiB, x 64.0 MiB``.

    Args:
        module: the model.
        batch: a ``Data`` or ``HeteroData``, whose tensors of one name count together; others have no sizes.
    """
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    sizes = {"parameters and buffers": sum(tensor.nbytes for tensor in tensors)}
    entries: dict[str, int] = {}
    for store in batch.stores if isinstance(batch, (Data, HeteroData)) else ():
        for name, value in store.items():
            if isinstance(value, Tensor):
                entries[name] = entries.get(name, 0) + sum(tensor.nbytes for tensor in _stored(value))
    largest = sorted(entries.items(), key=lambda item: -item[1])[:_LARGEST]
    return ", ".join(f"{name} {gibibytes(size)}" for name, size in (*sizes.items(), *largest))


def _stored(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the dense tensors that hold a tensor, which may be in CSR form."""
    if isinstance(tensor, CompressedMatrix) and tensor.is_compressed:
        yield from (part for part in tensor.rows if part is not None)
    elif tensor.layout == torch.sparse_csr:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout == torch.strided:
        yield tensor


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
