"""Write the edges of a store: sorted columns, held-out edges and edge buckets."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import DataError
from gtrain.graph.owners import owner_of
from gtrain.graph.store.csc import ColumnRange, EdgeView, SortedColumns
from gtrain.graph.store.files import (
    Array,
    ArrayFile,
    Ledger,
    bucket_file,
    chunks,
    edge_file,
    held_out_file,
    npy_header,
    release,
    row_bytes,
)
from gtrain.graph.store.manifest import EdgeType, TensorSpec, edge_key
from gtrain.graph.store.numbering import Numbering, index_dtype
from gtrain.graph.store.tables import EdgeTable

Ints = NDArray[np.int64]

TIME = "edge_time"
_RESERVED = ("indptr", "indices", "edge_id")


def write_columns(ledger: Ledger, table: EdgeTable, source: Numbering, target: Numbering) -> dict[str, TensorSpec]:
    """Write one edge type in CSC form, part by part, and return the specs of its tensors."""
    view = EdgeView(
        source=table.source,
        target=table.target,
        source_ids=source.global_id,
        target_ids=target.global_id,
        num_sources=source.num_nodes,
        num_targets=target.num_nodes,
        time=table.tensors.get(TIME),
        origin=f"the edges {edge_key(table.edge_type)}",
    )
    view.check()
    _check_tensors(table)
    columns = SortedColumns(view)
    indices = index_dtype(source.num_nodes)
    for part in range(target.num_parts):
        _write_part(ledger, part, table, columns, target.range(part), indices)
    rows, parts = table.num_edges, target.num_parts
    return {
        "indptr": TensorSpec("int64", (target.num_nodes + parts,)),
        "indices": TensorSpec(indices.name, (rows,)),
        "edge_id": TensorSpec("int64", (rows,)),
        **{name: _spec(tensor) for name, tensor in table.tensors.items()},
    }


def write_held_out(
    ledger: Ledger, edge_type: EdgeType, split: str, columns: dict[str, Array], source: Numbering, target: Numbering
) -> tuple[tuple[int, ...], dict[str, TensorSpec]]:
    """Write the held-out edges of one split; return their number in each part, and the specs of their tensors."""
    view = EdgeView(
        columns["source"],
        columns["target"],
        None,
        None,
        source.num_nodes,
        target.num_nodes,
        origin=f"the {split} edges {edge_key(edge_type)}",
    )
    view.check()
    targets = target.globals(columns["target"])
    owner = owner_of(targets, target.offsets)
    # Stable: within a part, edges stay in the order of the source data.
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=target.num_parts)
    tensors = {**columns, "source": source.globals(columns["source"]), "target": targets, "edge_id": None}
    start = 0
    for part, count in enumerate(counts.tolist()):
        rows = order[start : start + count]
        for name, tensor in tensors.items():
            ledger.write(held_out_file(part, name, split, edge_type), rows if tensor is None else tensor[rows])
        start += count
    specs = {name: TensorSpec("int64", order.shape) if t is None else _spec(t) for name, t in tensors.items()}
    return tuple(counts.tolist()), specs


def _spec(tensor: Array) -> TensorSpec:
    return TensorSpec(tensor.dtype.name, tensor.shape)


def _check_tensors(table: EdgeTable) -> None:
    reserved = [name for name in _RESERVED if name in table.tensors]
    if reserved:
        raise DataError(
            f"the edges have a tensor {reserved[0]}, which is a name of the store's files",
            hint=f"give {reserved[0]} another name",
        )
    times = table.tensors.get(TIME)
    if times is not None and (times.ndim != 1 or not np.issubdtype(times.dtype, np.integer)):
        raise DataError(
            f"{TIME} is {times.dtype} of shape {list(times.shape)}, and times are integers, one per edge",
            hint=f"give {TIME} as int64 of shape [E], in seconds or any other unit",
        )
    for name, tensor in (("target", table.target), *table.tensors.items()):
        if len(tensor) != table.num_edges:
            raise DataError(
                f"{name} has {len(tensor)} rows, and there are {table.num_edges} edges",
                hint=f"give {name} one row per edge",
            )


def _write_part(
    ledger: Ledger,
    part: int,
    table: EdgeTable,
    columns: SortedColumns,
    nodes: tuple[int, int],
    indices: np.dtype[Any],
) -> None:
    first, last = nodes
    starts: NDArray[np.int64] = columns.indptr[first : last + 1]
    ledger.write(edge_file(part, "indptr", table.edge_type), starts - starts[0])
    shapes = {"indices": (indices, ()), "edge_id": (np.dtype(np.int64), ())}
    shapes |= {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in table.tensors.items()}
    edges = int(starts[-1] - starts[0])
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(ledger.open(edge_file(part, name, table.edge_type), dtype, (edges, *shape)))
            for name, (dtype, shape) in shapes.items()
        }
        for piece in columns.between(first, last):
            _append(files, piece, table.tensors)


def _append(files: dict[str, ArrayFile], piece: ColumnRange, tensors: dict[str, Array]) -> None:
    """Write consecutive columns; convert and gather chunk by chunk."""
    for rows in chunks(0, piece.source.size):
        files["indices"].append(piece.source[rows])
        files["edge_id"].append(piece.edge_id[rows])
    for name, tensor in tensors.items():
        for rows in chunks(0, piece.source.size, row_bytes(tensor)):
            files[name].append(tensor[piece.edge_id[rows]])
            release(tensor)


# ---------------------------------------------------------------------------------------------------- buckets


def write_buckets(
    ledger: Ledger, table: EdgeTable, source: Numbering, target: Numbering
) -> tuple[tuple[tuple[int, ...], ...], dict[str, TensorSpec]]:
    """Write the edges of one type grouped into buckets, one per pair of parts.

    One pass counts the edges of each bucket, and one pass per tensor writes its rows at the buckets' cursors. Memory:
    one chunk.

    Returns:
        ``counts[i][j]``, the number of edges from part i to part j, and the specs of the tensors.
    """
    pairs = _Pairs(table, source, target)
    counts = np.zeros((source.num_parts, target.num_parts), dtype=np.int64)
    for rows in chunks(0, table.num_edges):
        counts += np.bincount(pairs.of(rows), minlength=counts.size).reshape(counts.shape)
    specs = {}
    for name, ids, numbering in (("source", table.source, source), ("target", table.target, target)):
        dtype = index_dtype(int(np.diff(numbering.offsets).max(initial=0)))
        specs[name] = _write_tensor(ledger, pairs, counts, name, ids, dtype, numbering.within())
    for name, tensor in table.tensors.items():
        specs[name] = _write_tensor(ledger, pairs, counts, name, tensor, tensor.dtype, None)
    return tuple(tuple(map(int, row)) for row in counts), specs


class _Pairs:
    """The bucket number of each edge: part of the source * P + part of the target."""

    def __init__(self, table: EdgeTable, source: Numbering, target: Numbering) -> None:
        self.table = table
        self.num_parts, self.num_pairs = target.num_parts, source.num_parts * target.num_parts
        # numpy sorts 16-bit integers by radix sort, in linear time.
        self._dtype = np.dtype(np.uint16 if self.num_pairs <= 2**16 else np.int64)
        # Two bytes per node for up to 65,536 parts: a look-up per edge, without the 8 bytes of a global id.
        self._source, self._target = source.owners(), target.owners()

    def of(self, rows: slice) -> Array:
        pair: Array = self._source[self.table.source[rows]].astype(self._dtype)
        pair *= self.num_parts
        pair += self._target[self.table.target[rows]]
        return pair


def _write_tensor(
    ledger: Ledger,
    pairs: _Pairs,
    counts: Ints,
    name: str,
    values: Array,
    dtype: np.dtype[Any],
    table: Array | None,
) -> TensorSpec:
    """Write one tensor of all buckets. With ``table``, ``values`` are ids, and ``table[values]`` is written."""
    paths = [bucket_file(part, name, pairs.table.edge_type) for part in range(counts.shape[1])]
    totals = counts.sum(axis=0).tolist()
    out = [_RandomAccessFile(ledger, p, dtype, (n, *values.shape[1:])) for p, n in zip(paths, totals, strict=True)]
    cursor = np.cumsum(counts, axis=0) - counts  # next row of each bucket in its file
    try:
        for rows in chunks(0, pairs.table.num_edges, row_bytes(values)):
            pair = pairs.of(rows)
            order = np.argsort(pair, kind="stable")
            content = values[rows] if table is None else table[values[rows]]
            _scatter(out, cursor, np.ascontiguousarray(content[order], dtype=dtype), pair[order].astype(np.int64))
            for array in (values, pairs.table.source, pairs.table.target):
                release(array)
    finally:
        for file in out:
            file.close()
    for path in paths:
        ledger.enter(path)
    return TensorSpec(dtype.name, values.shape)


def _scatter(out: list[_RandomAccessFile], cursor: Ints, content: Array, pair: Ints) -> None:
    """Write rows that are grouped by bucket at the buckets' cursors, and advance the cursors."""
    # Rows are sorted by bucket: each run of equal numbers is one write.
    changes = (np.flatnonzero(np.diff(pair)) + 1).tolist()
    for start, stop in zip([0, *changes], [*changes, len(content)], strict=True):
        bucket = divmod(int(pair[start]), len(out))
        out[bucket[1]].write(int(cursor[bucket]), content[start:stop])
        cursor[bucket] += stop - start


class _RandomAccessFile:
    """A ``.npy`` file of known shape whose rows are written in any order."""

    def __init__(self, ledger: Ledger, path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        header = npy_header(dtype, shape)
        file = ledger.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        self._start = len(header)
        self._row = dtype.itemsize * int(np.prod(shape[1:]))
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(self._descriptor, header, 0)

    def write(self, row: int, rows: Array) -> None:
        data, offset = rows.reshape(-1).view(np.uint8).data, self._start + row * self._row
        while data.nbytes:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        os.close(self._descriptor)
