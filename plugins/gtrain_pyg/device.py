"""Batches on a GPU: copied from page-locked memory on a separate stream, beside the one that trains.

One thread copies the batches in their order. The training stream waits for an event before it reads a batch; the CPU
does not wait. ::

    copies = DeviceCopies(torch.device("cuda:0"))
    mover = BatchMover(copies, dtypes, cache)
    moved = mover(host_batch)                     # in the thread that copies
    batch = moved.take()                          # in the thread that trains
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.nn.compressed import CompressedMatrix, is_compressed
from gtrain.nn.csr import Csr
from gtrain_pyg.buffers import BufferPool, pinned_memory, private_memory
from gtrain_pyg.features.device_cache import CachedRows, DeviceCache
from gtrain_pyg.features.tables import arrays_of
from gtrain_pyg.peers import NodeOrEdgeType
from gtrain_pyg.sampling.sampler import Subgraph
from gtrain_pyg.seeds import SeedFields, as_tensor, make_batch

_IN_FLIGHT = 1
"""Earlier batches whose copies may be under way when the copies of the next batch have been started."""

Event = torch.cuda.Event | None


class DeviceCopies:
    """Copies of tensors to one device, on a stream beside the one that trains. Threads may share it.

    For a CPU, which tests use, there are no streams and events, and a copy is complete when it returns.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Sources of copies that may be under way; their memory must not be reused before the event.
        self._sources: deque[tuple[Event, Any]] = deque()
        self._lock = threading.Lock()

    def pool(self) -> BufferPool:
        """Return a pool of host memory that the device reads while the CPU goes on."""
        return BufferPool(private_memory if self._stream is None else pinned_memory)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return the context in which the calling thread's operations on the device are on the stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device. Pass the source to :meth:`hold` afterwards."""
        if is_compressed(tensor):
            assert isinstance(tensor, CompressedMatrix)
            ids, values, offsets = tensor.rows
            rows = Csr(self.copy(ids), None if values is None else self.copy(values), self.copy(offsets))
            return CompressedMatrix(rows, tensor.size(1), tensor.dtype)
        return tensor.to(self.device, non_blocking=True, copy=True)

    def hold(self, sources: Any) -> Event:
        """Keep the sources of the copies so far until these are complete, and return the event of that moment.

        Waits for the copies of earlier calls.
        """
        event = self._record()
        with self._lock:
            self._sources.append((event, sources))
            earlier = [self._sources.popleft() for _ in range(len(self._sources) - _IN_FLIGHT)]
        for complete, _ in earlier:
            if complete is not None:
                complete.synchronize()
        return event

    def _record(self) -> Event:
        if self._stream is None:
            return None
        # A thread that waits for an event which is not "blocking" occupies a core.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        """Let the calling thread's current stream wait for an event; the CPU does not."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def used(self, tensor: Tensor) -> None:
        """Keep a copy's memory until the work that its last user gave to the current stream is complete."""
        if self._stream is not None:
            stream, dense = torch.cuda.current_stream(self.device), tensor.layout == torch.strided
            for array in (tensor,) if dense and not is_compressed(tensor) else arrays_of(tensor):
                array.record_stream(stream)

    def free_bytes(self) -> int:
        """Return the free memory of the device, with what torch has reserved and does not use; 0 for a CPU."""
        if self._stream is None:
            return 0
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def close(self) -> None:
        """Wait for all copies and release their sources."""
        with self._lock:
            if self._stream is not None:
                self._stream.synchronize()
            self._sources.clear()


@dataclass(frozen=True)
class HostBatch:
    """What a batch is made of, in host memory; for :class:`BatchMover`.

    Attributes:
        subgraph: what was sampled.
        rows: node and edge tensors by type and name; of a type in ``cached`` only the rows that the cache lacks.
        seeds: the seeds it was grown from.
        hetero, trim: see :func:`gtrain_pyg.seeds.make_batch`.
        cached: by node type or edge type, which rows the cache has.
    """

    subgraph: Subgraph
    rows: Mapping[NodeOrEdgeType, Mapping[str, Tensor]]
    seeds: SeedFields
    hetero: bool
    trim: bool
    cached: Mapping[NodeOrEdgeType, CachedRows] = field(default_factory=dict)


@dataclass(frozen=True)
class MovedBatch:
    """A batch on the device, whose copies may be under way.

    Attributes:
        batch: the batch.
        ready: the event after which it is complete.
        copies: of the device.
    """

    batch: Data | HeteroData
    ready: Event
    copies: DeviceCopies

    def take(self) -> Data | HeteroData:
        """Return the batch, for use on the calling thread's current stream."""
        self.copies.wait(self.ready)
        for store in self.batch.stores:
            for value in store.values():
                if isinstance(value, Tensor):
                    self.copies.used(value)
        return self.batch


class BatchMover:
    """Moves batches to the device.

    Args:
        copies: of the device.
        dtypes: by node type or edge type, and by name in the store, the dtype of each tensor in batches.

    Attributes:
        cache: rows that the device has; None: none. It may be set later.
    """

    def __init__(self, copies: DeviceCopies, dtypes: Mapping[NodeOrEdgeType, Mapping[str, torch.dtype]]) -> None:
        self.copies, self._dtypes = copies, dtypes
        self.cache: DeviceCache | None = None

    def __call__(self, host: HostBatch) -> MovedBatch:
        """Start the copies of a batch, and return it with tensors of the device, which also converts their dtypes."""
        sources: list[Any] = [host]

        def copy(tensor: Tensor) -> Tensor:
            sources.append(tensor)
            return self.copies.copy(tensor)

        with self.copies.on_stream():
            arrays = host.subgraph
            node = {node_type: copy(as_tensor(ids)) for node_type, ids in arrays.node.items()}
            tensors: dict[str, Any] = {
                "node": node,
                "edge_index": {edge_type: copy(as_tensor(index)) for edge_type, index in arrays.edge_index.items()},
                "batch": arrays.batch and {t: copy(as_tensor(array)) for t, array in arrays.batch.items()},
            }
            subgraph = replace(arrays, **tensors)
            rows = {t: self._rows(host, t, node, copy) for t in self._dtypes}
            batch = make_batch(subgraph, rows, host.seeds, hetero=host.hetero, trim=host.trim, copy=copy)
            ready = self.copies.hold(sources)
        return MovedBatch(batch, ready, self.copies)

    def _rows(
        self,
        host: HostBatch,
        graph_type: NodeOrEdgeType,
        node: Mapping[str, Tensor],
        copy: Callable[[Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """Return the tensors of a type by name: those of the host, those of the cache, or both put together."""
        dtypes, tensors = self._dtypes[graph_type], host.rows.get(graph_type, {})
        rows = {name: copy(tensor).to(dtypes[name]) for name, tensor in tensors.items()}
        cached = host.cached.get(graph_type)
        if cached is None:
            return rows
        assert self.cache is not None
        slots = node[str(graph_type)] if cached.slots is None else copy(cached.slots)
        hits = {name: self.cache.rows(graph_type, name, slots, dtype) for name, dtype in dtypes.items()}
        if cached.positions is not None:
            positions = copy(cached.positions)
            for name, tensor in rows.items():
                hits[name].index_copy_(0, positions, tensor)
        return hits
