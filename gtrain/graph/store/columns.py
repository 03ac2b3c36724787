"""Writing the edges of a store: columns in order, and held-out edges with the part of their target."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import DataError
from gtrain.graph.owners import owner_of
from gtrain.graph.store.csc import Columns, EdgeView, SortedColumns
from gtrain.graph.store.files import Array, FileSet, Ledger, chunks, edge_file, held_out_file, release, row_bytes
from gtrain.graph.store.manifest import EdgeType, TensorSpec, edge_key
from gtrain.graph.store.numbering import Numbering, index_dtype
from gtrain.graph.store.tables import EdgeTable

TIME = "edge_time"


def write_columns(ledger: Ledger, table: EdgeTable, source: Numbering, target: Numbering) -> dict[str, TensorSpec]:
    """Write one edge type by column, part by part, and return what its tensors look like."""
    view = edge_view(table, source, target)
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
        **{name: TensorSpec(tensor.dtype.name, tensor.shape) for name, tensor in table.tensors.items()},
    }


def edge_view(table: EdgeTable, source: Numbering, target: Numbering) -> EdgeView:
    """Return the edges of a table as the sort takes them."""
    return EdgeView(
        source=table.source,
        target=table.target,
        source_ids=source.global_id,
        target_ids=target.global_id,
        num_sources=source.num_nodes,
        num_targets=target.num_nodes,
        time=table.tensors.get(TIME),
        origin=f"the edges {edge_key(table.edge_type)}",
    )


def write_held_out(
    ledger: Ledger, edge_type: EdgeType, split: str, columns: dict[str, Array], source: Numbering, target: Numbering
) -> tuple[tuple[int, ...], dict[str, TensorSpec]]:
    """Write the held-out edges of one split; return how many each part has, and what the tensors look like."""
    ends = EdgeView(
        columns["source"],
        columns["target"],
        None,
        None,
        source.num_nodes,
        target.num_nodes,
        origin=f"the {split} edges {edge_key(edge_type)}",
    )
    ends.check()
    targets = target.globals(columns["target"])
    owner = owner_of(targets, target.offsets)
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
    times = table.tensors.get(TIME)
    if times is not None and (times.ndim != 1 or not np.issubdtype(times.dtype, np.integer)):
        raise DataError(
            f"{TIME} is {times.dtype} of shape {list(times.shape)}, and times are integers, one for each edge",
            hint=f"give {TIME} as int64 of shape [E], in seconds or any other unit",
        )
    for name, tensor in (("target", table.target), *table.tensors.items()):
        if len(tensor) != table.num_edges:
            raise DataError(
                f"{name} has {len(tensor)} rows, and there are {table.num_edges} edges",
                hint=f"give {name} one row for each edge",
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
    edges = int(starts[-1] - starts[0])
    with ledger.files() as files:
        files.add("indptr", edge_file(part, "indptr", table.edge_type), np.int64, starts.shape)
        files.append("indptr", starts - starts[0])
        files.add("indices", edge_file(part, "indices", table.edge_type), indices, (edges,))
        files.add("edge_id", edge_file(part, "edge_id", table.edge_type), np.int64, (edges,))
        for name, tensor in table.tensors.items():
            files.add(name, edge_file(part, name, table.edge_type), tensor.dtype, (edges, *tensor.shape[1:]))
        for piece in columns.between(first, last):
            _append(files, piece, table.tensors)


def _append(files: FileSet, piece: Columns, tensors: dict[str, Array]) -> None:
    """Write consecutive columns, converted and gathered a chunk at a time."""
    for rows in chunks(0, piece.source.size):
        files.append("indices", piece.source[rows])
        files.append("edge_id", piece.edge_id[rows])
    for name, tensor in tensors.items():
        for rows in chunks(0, piece.source.size, row_bytes(tensor)):
            files.append(name, tensor[piece.edge_id[rows]])
            release(tensor)
