"""Tables in the order of their ids: written to files, and read from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gtrain.errors import CheckpointError
from gtrain.nn import TableSpec
from gtrain_ps.placement import Placement
from gtrain_ps.worker.home import CHUNK_BYTES, ServedHome


def export(folder: Path, homes: Mapping[str, ServedHome]) -> None:
    """Write each table as ``<name>.npy`` into a folder, piece by piece."""
    for name, home in homes.items():
        kind = torch.empty(0, dtype=home.dtype).numpy().dtype
        shape = home.table.rows, home.table.dim
        out = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", kind, shape)
        step = max(1, CHUNK_BYTES // max(1, shape[1] * kind.itemsize))
        for begin in range(0, shape[0], step):
            end = min(begin + step, shape[0])
            out[begin:end] = home.read(begin, end).numpy()
        out.flush()
        print(f"written: {folder / f'{name}.npy'}", flush=True)


def read_table(folder: Path, name: str, table: TableSpec) -> Tensor:
    """Read the rows of a table from a checkpoint, in the order of ids.

    Args:
        folder: the checkpoint.
        name: of the layer.
        table: what it is.

    Raises:
        CheckpointError: a server's block is missing.
    """
    rows: Tensor | None = None
    read = 0
    for path in sorted(folder.glob("rank-*.pt")):
        entry = torch.load(path, map_location="cpu", weights_only=True)["shard"].get(name)
        if entry is None:
            continue
        placement = Placement(**entry["placement"])
        for server, held in entry["servers"].items():
            block, column = divmod(int(server), placement.column_blocks)
            first, last = placement.columns(column)
            piece = held["tensors"]["rows"]
            rows = torch.empty(placement.rows, placement.dim, dtype=piece.dtype) if rows is None else rows
            rows[placement.ids(block, 0, len(piece)), first:last] = piece
            read += piece.numel()
    if rows is None or read != rows.numel():
        raise CheckpointError(f"{folder} lacks rows of the table {name}.", hint="use another checkpoint.")
    return rows
