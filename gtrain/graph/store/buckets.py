"""Edge buckets: the edges by pair of parts, each bucket in the order of the source data."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.store.files import Array, Ledger, bucket_file, chunks, npy_header, release, row_bytes
from gtrain.graph.store.manifest import TensorSpec
from gtrain.graph.store.numbering import Numbering, index_dtype
from gtrain.graph.store.tables import EdgeTable

Ints = NDArray[np.int64]


def write_buckets(
    ledger: Ledger, table: EdgeTable, source: Numbering, target: Numbering
) -> tuple[tuple[tuple[int, ...], ...], dict[str, TensorSpec]]:
    """Write the edges of one type by pair of parts.

    One pass counts, and one for each tensor writes its rows where each bucket has come to; what is held is one chunk.

    Returns:
        ``counts[i][j]``, the edges from part i to part j, and what the tensors look like.
    """
    pairs = _Pairs(table, source, target)
    counts = np.zeros((source.num_parts, target.num_parts), dtype=np.int64)
    for rows in chunks(0, table.num_edges):
        counts += np.bincount(pairs.of(rows), minlength=counts.size).reshape(counts.shape)
    specs = {}
    for name, ids, numbering in (("source", table.source, source), ("target", table.target, target)):
        dtype = index_dtype(int(np.diff(numbering.offsets).max(initial=0)))
        specs[name] = _write(ledger, pairs, counts, name, ids, dtype, numbering.within())
    for name, tensor in table.tensors.items():
        specs[name] = _write(ledger, pairs, counts, name, tensor, tensor.dtype, None)
    return tuple(tuple(map(int, row)) for row in counts), specs


class _Pairs:
    """The pair of parts of each edge, as one number: part of the source * P + part of the target."""

    def __init__(self, table: EdgeTable, source: Numbering, target: Numbering) -> None:
        self.table = table
        self.num_parts, self.num_pairs = target.num_parts, source.num_parts * target.num_parts
        # numpy sorts 16-bit numbers by their digits, in linear time.
        self._dtype = np.dtype(np.uint16 if self.num_pairs <= 2**16 else np.int64)
        self._source, self._target = source.owners(), target.owners()

    def of(self, rows: slice) -> Array:
        pair: Array = self._source[self.table.source[rows]].astype(self._dtype)
        pair *= self.num_parts
        pair += self._target[self.table.target[rows]]
        return pair


def _write(
    ledger: Ledger,
    pairs: _Pairs,
    counts: Ints,
    name: str,
    values: Array,
    dtype: np.dtype[Any],
    table: Array | None,
) -> TensorSpec:
    """Write one tensor of all buckets; ``table`` holds what to write for each of the ids in ``values``."""
    paths = [bucket_file(part, name, pairs.table.edge_type) for part in range(counts.shape[1])]
    totals = counts.sum(axis=0).tolist()
    out = [_Regions(ledger, p, dtype, (n, *values.shape[1:])) for p, n in zip(paths, totals, strict=True)]
    cursor = np.cumsum(counts, axis=0) - counts  # where in its file each bucket has come to
    try:
        for rows in chunks(0, pairs.table.num_edges, row_bytes(values)):
            pair = pairs.of(rows)
            order = np.argsort(pair, kind="stable")
            content = values[rows] if table is None else table[values[rows]]
            _scatter(out, cursor, np.ascontiguousarray(content[order], dtype=dtype), pair[order].astype(np.int64))
            for array in (values, pairs.table.source, pairs.table.target):
                release(array)
    finally:
        for regions in out:
            regions.close()
    for path in paths:
        ledger.enter(path)
    return TensorSpec(dtype.name, values.shape)


def _scatter(out: list[_Regions], cursor: Ints, content: Array, pair: Ints) -> None:
    """Write rows that are grouped by pair of parts to where the buckets' cursors point, and advance these."""
    changes = (np.flatnonzero(np.diff(pair)) + 1).tolist()
    for start, stop in zip([0, *changes], [*changes, len(content)], strict=True):
        at = divmod(int(pair[start]), len(out))
        out[at[1]].write(int(cursor[at]), content[start:stop])
        cursor[at] += stop - start


class _Regions:
    """A ``.npy`` file of known shape, written in any order."""

    def __init__(self, ledger: Ledger, path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        header = npy_header(dtype, shape)
        file = ledger.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        self._start = len(header)
        self._row = dtype.itemsize * int(np.prod(shape[1:]))
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(self._descriptor, header, 0)

    def write(self, row: int, rows: Array) -> None:
        data, at = rows.reshape(-1).view(np.uint8).data, self._start + row * self._row
        while data.nbytes:
            written = os.pwrite(self._descriptor, data, at)
            data, at = data[written:], at + written

    def close(self) -> None:
        os.close(self._descriptor)
