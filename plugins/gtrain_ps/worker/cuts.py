"""Sparse rows, and ids, cut by the blocks of a table that they are of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.errors import DataError
from gtrain.nn import Csr
from gtrain_ps.kernels import rows as kernels
from gtrain_ps.placement import Placement


@dataclass(frozen=True)
class Cut:
    """Entries of sparse rows by the row block of their ids.

    Attributes:
        ids: int32, their rows in the blocks, block by block.
        values: likewise; None: all 1.
        begin: where each block's entries begin, and the end, ``[Pr + 1]``.
        lengths: entries of each row in each block, ``[Pr, m]``; None: each row has one, and ``order`` says which.
        order: the row of each entry, where ``lengths`` is None.
    """

    ids: Tensor
    values: Tensor | None
    begin: list[int]
    lengths: Tensor | None
    order: Tensor | None = None


def cut_rows(rows: Csr, placement: Placement, dtype: torch.dtype, name: str) -> Cut:
    """Cut sparse rows by the blocks of their ids.

    Args:
        rows: the rows.
        placement: which block has what.
        dtype: of the values.
        name: of the table, for messages.

    Raises:
        DataError: an id is out of range.
    """
    block, place = _places(rows.ids, placement, name)
    blocks, offsets = placement.row_blocks, rows.offsets.numpy()
    short = kernels.most_entries(offsets) < 1 << 16
    lengths = np.zeros((blocks, rows.num_rows), np.uint16 if short else np.int32)
    totals = np.zeros(blocks, np.int64)
    kernels.count_blocks(block, offsets, lengths, totals)
    values = None if rows.values is None else rows.values.detach().to(dtype)
    if values is not None and kernels.all_ones(values.numpy()):
        values = None
    begin = np.zeros(blocks + 1, np.int64)
    np.cumsum(totals, out=begin[1:])
    if blocks == 1:
        return Cut(torch.from_numpy(place), values, begin.tolist(), torch.from_numpy(lengths))
    weighted = values is not None
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    given = np.empty(0, kind) if values is None else values.numpy()
    ids_out, values_out = np.empty(len(place), np.int32), np.empty(len(place) if weighted else 0, kind)
    kernels.deal(block, place, given, weighted, begin[:-1].copy(), ids_out, values_out)
    cut_values = torch.from_numpy(values_out) if weighted else None
    return Cut(torch.from_numpy(ids_out), cut_values, begin.tolist(), torch.from_numpy(lengths))


def cut_ids(ids: Tensor, placement: Placement, name: str) -> Cut:
    """Rows with one entry each, of the value 1: a lookup. They are sent by block; see :func:`cut_rows`."""
    block, place = _places(ids, placement, name)
    order = np.argsort(block, kind="stable")
    counts = np.bincount(block, minlength=placement.row_blocks)
    begin = [0, *np.cumsum(counts).tolist()]
    return Cut(torch.from_numpy(place[order]), None, begin, None, torch.from_numpy(order))


def _places(ids: Tensor, placement: Placement, name: str) -> tuple[Any, Any]:
    """Row block (uint8) and place in it (int32) of each id."""
    found = ids.numpy()
    block, place = np.empty(len(found), np.uint8), np.empty(len(found), np.int32)
    wrong = kernels.place_ids(found, placement.multiplier, placement.rows, placement.height, block, place)
    if wrong >= 0:
        raise DataError(
            f"the id {int(found[wrong])} was looked up in the table {name}, whose ids are 0 to {placement.rows - 1}.",
            hint="correct the data, or give the model more rows (data.num_features).",
        )
    return block, place
