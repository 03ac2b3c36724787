"""A device and its streams. On a CPU, where tests run, everything happens at once and in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("gtrain")
Event = Any
"""A ``torch.cuda.Event``; None on a CPU."""
PAGE = 4096
"""Bytes of a page of memory."""


class Lane:
    """A stream of a device: what is launched in it runs in order.

    Args:
        stream: of CUDA; None: the CPU.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream

    def __call__(self) -> AbstractContextManager[Any]:
        """Return a context in which work is launched in this lane."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def record(self) -> Event:
        """Return an event that happens when all work launched so far is done."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: Event) -> None:
        """Have later work of this lane wait for an event."""
        if self.stream is not None and event is not None:
            self.stream.wait_event(event)

    def follow(self) -> None:
        """Have later work of this lane wait for what was launched in the current stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def synchronize(self) -> None:
        """Block until all work launched so far is done."""
        if self.stream is not None:
            self.stream.synchronize()


class Device:
    """A device that trains, with a lane for computation, one for the preparation of batches, and one for each direction
    of copies.

    Args:
        name: ``cpu`` or a CUDA device.
        graphs: whether steps are captured in CUDA graphs; a CPU has none.

    Attributes:
        name: the same.
        compute, prepare, load, save: the lanes.
    """

    def __init__(self, name: torch.device, graphs: bool = True) -> None:
        self.name, self.is_cuda = name, name.type == "cuda"
        self.graphs = graphs and self.is_cuda
        self._pool: Any = None
        self._registered: int | None = None
        streams = [torch.cuda.Stream(name) if self.is_cuda else None for _ in range(4)]
        self.compute, self.prepare, self.load, self.save = map(Lane, streams)

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized host memory that is copied to the device asynchronously."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.is_cuda)

    def moved(self, tensor: Tensor) -> Tensor:
        """Return pinned host memory on the device; the copy is in the current lane."""
        return tensor.to(self.name, non_blocking=True)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory of the device."""
        return torch.empty(shape, dtype=dtype, device=self.name)

    def free_bytes(self) -> int | None:
        """Return how much memory of the device can still be allocated; None: unlimited."""
        if not self.is_cuda:
            return None
        reserved = torch.cuda.memory_reserved(self.name) - torch.cuda.memory_allocated(self.name)
        return int(torch.cuda.mem_get_info(self.name)[0]) + reserved

    def register(self, tensors: Iterable[Tensor]) -> None:
        """Pin memory that processes share, so that copies of it are asynchronous, until :meth:`unregister`.

        Args:
            tensors: in one mapping.
        """
        parts = [tensor for tensor in tensors if tensor.nbytes]
        if not self.is_cuda or not parts:
            return
        # As one range: two tensors may have bytes of one page, which cannot be pinned twice.
        begin = min(tensor.data_ptr() for tensor in parts) // PAGE * PAGE
        end = max(tensor.data_ptr() + tensor.nbytes for tensor in parts)
        code = int(torch.cuda.cudart().cudaHostRegister(begin, -(-(end - begin) // PAGE) * PAGE, 0))
        if not code:
            self._registered = begin
        else:
            with suppress(RuntimeError):  # the next kernel reports the error again, and clears it
                torch.zeros(1, device=self.name).add_(1)
            log.warning("%d MB of host memory could not be pinned (CUDA error %d): partitions are copied more slowly, "
                        "and not while the GPU computes", (end - begin) >> 20, code)  # fmt: skip

    def unregister(self) -> None:
        """Unpin what :meth:`register` pinned: the memory may be unmapped, and its addresses used again."""
        if self._registered is not None:
            torch.cuda.synchronize(self.name)
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = None

    def captured(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Capture work in a CUDA graph and return a function that replays it; it has run once before.

        All graphs share one pool of memory: they are replayed one after the other.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, pool, stream = torch.cuda.CUDAGraph(), self._pool, self.compute.stream
        # thread_local: other threads may use other streams of the device.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph.replay
