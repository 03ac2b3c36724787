"""Cache of node and edge tensors in a device's memory: a batch copies only the rows that the cache does not have.

The cache is filled once, before training, and then read-only, as the cache of remote rows in host memory is
(:mod:`gtrain_pyg.features.cache`). Rows are the same wherever they are read. It may hold rows of other ranks, which are
then not requested again. ::

    cache = DeviceCache(device)
    cache.fill(features, nbytes, lambda: expected_visits(store, seeds, batch_size, fan_out))
    cached, missing = cache.split({"node": ids}, pool)    # the host gathers the rows of `missing`
    rows = cache.rows("node", "x", slots, torch.float32)  # the device gathers the others
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features import kernels
from gtrain_pyg.features.cache import FILL_BYTES, choose_rows
from gtrain_pyg.features.feature_store import FeatureStore
from gtrain_pyg.peers import Array, NodeOrEdgeType

_MOST_ROWS = 2**31 - 1  # slots are int32


@dataclass(frozen=True)
class CachedRows:
    """Where the device finds the n rows of one type that a batch needs; m of them are not in the cache.

    Attributes:
        slots: int32 or int64 ``[n]``, the row of each in the cache, 0 if it is missing; None: the nodes' global ids.
        positions: int64 ``[m]``, indices of the missing rows; None: no row is missing.
    """

    slots: Tensor | None
    positions: Tensor | None = None


@dataclass(frozen=True)
class _Table:
    """The cached rows of one node type or edge type.

    Attributes:
        tensors: by name, ``[rows, ...]`` on the device.
        bits, ranks: the ids of the rows, see :func:`.kernels.rank_bits`; None: all rows, in the order of their ids.
    """

    tensors: dict[str, Tensor]
    bits: Array | None = None
    ranks: Array | None = None


class DeviceCache:
    """Rows of a feature store in a device's memory. Threads may share it once it is filled.

    Args:
        device: the device.
        threads: threads that gather rows while the cache is filled.
    """

    def __init__(self, device: torch.device, threads: int = 1) -> None:
        self._device, self._threads = device, threads
        self._tables: dict[NodeOrEdgeType, _Table] = {}

    def __contains__(self, graph_type: object) -> bool:
        """Return whether some rows of a node type or edge type are cached."""
        return graph_type in self._tables

    @property
    def nbytes(self) -> int:
        """Return the bytes on the device."""
        return sum(tensor.nbytes for table in self._tables.values() for tensor in table.tensors.values())

    def count(self, graph_type: NodeOrEdgeType) -> int:
        """Return the number of cached rows of a type."""
        table = self._tables.get(graph_type)
        return 0 if table is None else len(next(iter(table.tensors.values())))

    # ---------------------------------------------------------------------------------------------- filling

    def fill(
        self,
        features: FeatureStore,
        nbytes: int,
        visits: Callable[[], Mapping[str, Array]],
        *,
        least_visits: float = 0.0,
    ) -> None:
        """Copy rows to the device, once; the owners of remote rows must be serving.

        If this rank hosts all rows of a type and they fit, they are cached: node types, then edge types, the
        smallest first. If the rows of the node types do not all fit, or some are remote, the nodes with most visits per
        byte are cached. Types with a tensor in CSR form are not cached.

        Args:
            features: the rows.
            nbytes: most bytes on the device.
            visits: estimates, by node type, the visits of each node by one batch, ``[N]``; called if it is needed.
            least_visits: remote nodes with fewer visits are not cached.

        Raises:
            WireError: an owner failed.
        """
        node_types = [t for t in features.names if isinstance(t, str) and _is_cacheable(features, t)]
        edge_types = [t for t in features.names if not isinstance(t, str) and _is_cacheable(features, t)]
        free = nbytes
        if sum(_type_bytes(features, t) for t in node_types) > nbytes or not features.hosts_all:
            chosen = self._most_visited(features, node_types, nbytes, visits(), least_visits)
            for node_type, ids in chosen.items():
                self._fill_type(features, node_type, ids)
            return
        edge_types.sort(key=lambda edge_type: _type_bytes(features, edge_type))
        whole: list[NodeOrEdgeType] = [*node_types, *edge_types]
        for graph_type in whole:
            if _type_bytes(features, graph_type) <= free and features.count(graph_type) <= _MOST_ROWS:
                self._fill_type(features, graph_type, None)
                free -= _type_bytes(features, graph_type)

    def _most_visited(
        self,
        features: FeatureStore,
        node_types: list[str],
        nbytes: int,
        visits: Mapping[str, Array],
        least_visits: float,
    ) -> dict[str, Array]:
        """Return ascending ids of the nodes to cache, by node type."""
        candidates = {}
        for node_type in node_types:
            visited = np.flatnonzero(visits[node_type] > 0)
            worthwhile = visits[node_type][visited] >= least_visits
            candidates[node_type] = visited[worthwhile | ~features.is_remote(node_type, visited)]
        chosen = choose_rows(candidates, visits, {t: _row_bytes(features, t) for t in node_types}, nbytes)
        return {node_type: ids[:_MOST_ROWS] for node_type, ids in chosen.items() if ids.size}

    def _fill_type(self, features: FeatureStore, graph_type: NodeOrEdgeType, ids: Array | None) -> None:
        """Copy the rows of these ascending ids, or all rows, in blocks."""
        count, names = features.count(graph_type), features.names[graph_type]
        rows = count if ids is None else ids.size
        tensors: dict[str, Tensor] = {}
        for name in names:
            shape, dtype = features.shape(graph_type, name)[1:], _cached_dtype(features, graph_type, name)
            tensors[name] = torch.empty((rows, *shape), dtype=dtype, device=self._device)
        step = max(1, int(FILL_BYTES / max(1.0, features.row_bytes(graph_type))))

        def fetch(start: int) -> dict[str, Tensor]:
            stop = min(start + step, rows)
            block = np.arange(start, stop) if ids is None else ids[start:stop]
            return features.prefetch({graph_type: block}, as_stored=True).get()[graph_type]

        with ThreadPoolExecutor(self._threads, "gtrain-fill") as pool:
            queue, fetching = iter(range(0, rows, step)), deque[tuple[int, Future[dict[str, Tensor]]]]()
            while True:
                ahead = itertools.islice(queue, 2 * self._threads - len(fetching))
                fetching.extend((start, pool.submit(fetch, start)) for start in ahead)
                if not fetching:
                    break
                start, fetched = fetching.popleft()
                for name, tensor in fetched.result().items():
                    tensors[name][start : start + len(tensor)] = tensor  # converts, as it does in a batch, and waits
        bits = ranks = None
        if ids is not None:
            bits, ranks = np.zeros(count // 64 + 1, np.uint64), np.zeros(count // 64 + 1, np.uint32)
            kernels.rank_bits(ids, bits, ranks)
            bits.flags.writeable = ranks.flags.writeable = False
        features.pool.trim()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other streams read the rows
        self._tables[graph_type] = _Table(tensors, bits, ranks)

    # ---------------------------------------------------------------------------------------------- reading

    def split(
        self, ids: Mapping[NodeOrEdgeType, Array], pool: BufferPool
    ) -> tuple[dict[NodeOrEdgeType, CachedRows], dict[NodeOrEdgeType, Array]]:
        """Divide the rows that a batch needs into cached and missing ones.

        Args:
            ids: by type, int64 ``[n]``: global ids of nodes, or global edge positions.
            pool: memory of the result.

        Returns:
            By type that is cached, where the device finds the rows; and by type of which rows are missing, their ids,
            int64 ``[m]``, in the order of ``ids``.
        """
        cached, missing = {}, dict(ids)
        for graph_type, table in self._tables.items():
            if graph_type in missing:
                cached[graph_type], absent = _split(graph_type, table, missing.pop(graph_type), pool)
                if absent.size:
                    missing[graph_type] = absent
        return cached, missing

    def rows(self, graph_type: NodeOrEdgeType, name: str, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Return new rows ``[n, ...]`` of one tensor, by their rows in the cache ``[n]``, on the current stream."""
        return self._tables[graph_type].tensors[name].index_select(0, slots).to(dtype)


def _split(graph_type: NodeOrEdgeType, table: _Table, ids: Array, pool: BufferPool) -> tuple[CachedRows, Array]:
    if table.bits is None or table.ranks is None:
        return CachedRows(None if isinstance(graph_type, str) else torch.from_numpy(ids)), ids[:0]
    slots, absent, positions = pool.take(ids.size, np.int32), pool.take(ids.size), pool.take(ids.size)
    count = kernels.split_cached(ids, table.bits, table.ranks, slots, absent, positions)
    return CachedRows(torch.from_numpy(slots), torch.from_numpy(positions[:count]) if count else None), absent[:count]


def _is_cacheable(features: FeatureStore, graph_type: NodeOrEdgeType) -> bool:
    names = features.names[graph_type]
    return bool(names) and all(features.is_dense(graph_type, name) for name in names)


def _cached_dtype(features: FeatureStore, graph_type: NodeOrEdgeType, name: str) -> torch.dtype:
    """Return the dtype in batches, or as stored if that takes fewer bytes."""
    dtypes = features.output_dtype(graph_type, name), features.stored_dtype(graph_type, name)
    return min(dtypes, key=lambda dtype: dtype.itemsize)


def _row_bytes(features: FeatureStore, graph_type: NodeOrEdgeType) -> int:
    return sum(
        math.prod(features.shape(graph_type, name)[1:]) * _cached_dtype(features, graph_type, name).itemsize
        for name in features.names[graph_type]
    )


def _type_bytes(features: FeatureStore, graph_type: NodeOrEdgeType) -> int:
    return _row_bytes(features, graph_type) * features.count(graph_type)
