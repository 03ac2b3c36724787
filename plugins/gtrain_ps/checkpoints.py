"""Tables in files: in checkpoints, one file per server's block and tensor, and in exports, in the order of ids.

Rows and optimizer state travel in pieces of :data:`.served_table.PIECE_BYTES`, so a worker never holds a block.
A checkpoint's folder has, for each server::

    parameter-<server>.json                       tables: placement, and the optimizer whose state there is
    <table>.parameter-<server>.rows.npy           rows of the block [n_i, d_j]
    <table>.parameter-<server>.<state>.npy        optimizer state, [n_i, d_j] or [n_i]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import CheckpointError
from gtrain.graph.store.manifest import safe_name
from gtrain.nn import TableSpec
from gtrain.strategy.checkpoint import SavedRows
from gtrain.strategy.tensor_files import Writing, mapped
from gtrain_ps.placement import Placement
from gtrain_ps.worker.served_table import ServedTable, piece_rows

FORMAT = 1


@dataclass(frozen=True)
class SavedBlock:
    """A server's block of a table in a checkpoint.

    Attributes:
        rule: name of the optimizer that the state belongs to; None before the first update.
        tensors: ``rows`` [n_i, d_j] and the optimizer's state by name, mapped from files.
    """

    rule: str | None
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class SavedTable:
    """A table in a checkpoint: how it was cut, and its blocks by server."""

    placement: Placement
    blocks: Mapping[int, SavedBlock]

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows once: ids int64 [m] and rows [m, d], some at a time."""
        cut, columns = self.placement, self.placement.column_blocks
        for block in range(cut.row_blocks):
            parts = [self.blocks[block * columns + column].tensors["rows"] for column in range(columns)]
            step = piece_rows(cut.dim, parts[0].dtype)
            for begin in range(0, cut.block_rows(block), step):
                end = min(begin + step, cut.block_rows(block))
                yield cut.ids(block, begin, end), torch.cat([part[begin:end] for part in parts], dim=1)


def write_blocks(folder: Path, homes: Mapping[str, ServedTable], servers: Iterable[int]) -> None:
    """Write the blocks of some servers into a checkpoint."""
    for server in servers:
        said: dict[str, Any] = {}
        for name, home in homes.items():
            rule, shapes = home.describe_block(server)
            for tensor, shape in shapes.items():
                writing = Writing(folder / _file(name, server, tensor), shape, home.dtype)
                for piece in home.read_block(server, tensor):
                    writing.add(piece)
                writing.done()
            said[name] = {"placement": home.placement.fields(), "rule": rule, "tensors": list(shapes)}
        (folder / f"parameter-{server}.json").write_text(json.dumps({"format": FORMAT, "tables": said}, indent=1))


def read_blocks(folder: Path) -> dict[str, SavedTable]:
    """The tables of a checkpoint by name; their rows stay in files.

    Raises:
        CheckpointError: a later version of gtrain wrote it, or a server's block is missing.
    """
    saved: dict[str, dict[int, SavedBlock]] = {}
    placements: dict[str, Placement] = {}
    for path in folder.glob("parameter-*.json"):
        server, said = int(path.stem.rpartition("-")[2]), json.loads(path.read_text())
        if said["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {said['format']}; this version of gtrain reads format {FORMAT}.",
                hint="use the version of gtrain that wrote it.",
            )
        for name, entry in said["tables"].items():
            tensors = {tensor: mapped(folder / _file(name, server, tensor)) for tensor in entry["tensors"]}
            placements[name] = Placement(**entry["placement"])
            saved.setdefault(name, {})[server] = SavedBlock(entry["rule"], tensors)
    if not saved:
        _read_earlier(folder, saved, placements)
    for name, blocks in saved.items():
        if len(blocks) != placements[name].servers:
            raise CheckpointError(
                f"{folder} has {len(blocks)} of the {placements[name].servers} blocks of the table {name}.",
                hint="use another checkpoint.",
            )
    return {name: SavedTable(placements[name], blocks) for name, blocks in saved.items()}


def read_table(folder: Path, name: str, table: TableSpec) -> SavedRows:
    """The rows of a table in a checkpoint, for other strategies.

    Args:
        folder: the checkpoint.
        name: of the layer.
        table: what it is.

    Raises:
        CheckpointError: it has no such table, or a server's block is missing.
    """
    saved = read_blocks(folder).get(name)
    if saved is None:
        raise CheckpointError(f"{folder} lacks rows of the table {name}.", hint="use another checkpoint.")
    return SavedRows(saved.placement.rows, saved.pieces)


def export(folder: Path, homes: Mapping[str, ServedTable]) -> None:
    """Write each table as ``<name>.npy`` into a folder, in the order of ids."""
    for name, home in homes.items():
        path = folder / f"{name}.npy"
        writing = Writing(path, (home.table.rows, home.table.dim), home.dtype)
        step = piece_rows(home.table.dim, home.dtype)
        for begin in range(0, home.table.rows, step):
            writing.add(home.read(begin, min(begin + step, home.table.rows)))
        writing.done()
        print(f"written: {path}", flush=True)


def _read_earlier(folder: Path, saved: dict[str, dict[int, SavedBlock]], placements: dict[str, Placement]) -> None:
    """Checkpoints of earlier versions have blocks in the workers' states."""
    for path in folder.glob("rank-*.pt"):
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["shard"]
        for name, entry in state.items():
            if isinstance(entry, dict) and "placement" in entry:
                placements[name] = Placement(**entry["placement"])
                blocks = {int(server): SavedBlock(**block) for server, block in entry["servers"].items()}
                saved.setdefault(name, {}).update(blocks)


def _file(table: str, server: int, tensor: str) -> str:
    return f"{safe_name(table)}.parameter-{server}.{tensor}.npy"
