"""Writing the node tensors of a store: rows gathered part by part, dense or sparse."""

from __future__ import annotations

import numpy as np

from gtrain.graph.store.files import CHUNK_BYTES, Array, Ledger, chunks, node_file, release, row_bytes
from gtrain.graph.store.manifest import TensorSpec
from gtrain.graph.store.numbering import Numbering
from gtrain.graph.store.tables import CsrArrays, NodeTable


def write_nodes(ledger: Ledger, kind: str, table: NodeTable, numbering: Numbering) -> dict[str, TensorSpec]:
    """Write all tensors of one node type, and return what they look like."""
    specs = {"orig_id": TensorSpec("int64", (table.num_nodes,))}
    for name, value in table.tensors.items():
        if isinstance(value, CsrArrays):
            specs[name] = TensorSpec(value.values.dtype.name, value.shape, "csr", len(value.values))
        else:
            specs[name] = TensorSpec(value.dtype.name, value.shape)
    for part in range(numbering.num_parts):
        start, stop = numbering.range(part)
        ledger.write(node_file(part, "orig_id", kind), numbering.originals(start, stop))
        for name, value in table.tensors.items():
            if isinstance(value, CsrArrays):
                _write_sparse(ledger, part, kind, name, value, numbering)
            else:
                _write_dense(ledger, part, kind, name, value, numbering)
    return specs


def _write_dense(ledger: Ledger, part: int, kind: str, name: str, tensor: Array, numbering: Numbering) -> None:
    start, stop = numbering.range(part)
    with ledger.files() as files:
        file = files.add(name, node_file(part, name, kind), tensor.dtype, (stop - start, *tensor.shape[1:]))
        for rows in chunks(start, stop, row_bytes(tensor)):
            file.append(tensor[numbering.originals(rows.start, rows.stop)])
            release(tensor)


def _write_sparse(ledger: Ledger, part: int, kind: str, name: str, matrix: CsrArrays, numbering: Numbering) -> None:
    start, stop = numbering.range(part)
    ids = numbering.originals(start, stop)
    lengths = matrix.indptr[ids + 1] - matrix.indptr[ids]
    indptr = np.zeros(ids.size + 1, dtype=matrix.indptr.dtype)
    np.cumsum(lengths, out=indptr[1:])
    ledger.write(node_file(part, f"{name}.indptr", kind), indptr)
    with ledger.files() as files:
        for piece, column in (("indices", matrix.indices), ("values", matrix.values)):
            files.add(piece, node_file(part, f"{name}.{piece}", kind), column.dtype, (int(indptr[-1]),))
        for rows in _row_groups(indptr):
            entries = _entries(matrix.indptr[ids[rows]], lengths[rows])
            files.append("indices", matrix.indices[entries])
            files.append("values", matrix.values[entries])
            release(matrix.indices)
            release(matrix.values)


def _row_groups(indptr: Array, entries: int = CHUNK_BYTES // 16) -> list[slice]:
    """Cut rows into groups of about ``entries`` stored entries."""
    cuts = np.searchsorted(indptr, np.arange(0, int(indptr[-1]) + entries, entries))
    edges = np.unique(np.concatenate([[0], cuts, [len(indptr) - 1]])).tolist()
    return [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def _entries(starts: Array, lengths: Array) -> Array:
    """Return the positions of the entries of rows that start at ``starts`` and are so long."""
    lengths = lengths.astype(np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts.astype(np.int64) - before, lengths) + np.arange(int(lengths.sum()))
