"""Tables in files: in checkpoints one file per server's block and tensor, in exports in the order of ids.

Rows and optimizer state travel in pieces of :data:`.served_table.PIECE_BYTES`, so a worker never holds a block.
A checkpoint's folder has, for each server::

    parameter-<server>.json                       tables: placement, and the optimizer that the state belongs to
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
from gtrain_ps.worker.served_table import ServerTableStorage, piece_rows

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
    """A table in a checkpoint: its placement, and its blocks by server."""

    placement: Placement
    blocks: Mapping[int, SavedBlock]

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows in pieces: ids int64 [m] and rows [m, d]."""
        placement, columns = self.placement, self.placement.column_blocks
        for block in range(placement.row_blocks):
            parts = [self.blocks[block * columns + column].tensors["rows"] for column in range(columns)]
            step = piece_rows(placement.dim, parts[0].dtype)
            for begin in range(0, placement.block_rows(block), step):
                end = min(begin + step, placement.block_rows(block))
                yield placement.ids(block, begin, end), torch.cat([part[begin:end] for part in parts], dim=1)


def write_blocks(folder: Path, tables: Mapping[str, ServerTableStorage], servers: Iterable[int]) -> None:
    """Write the blocks of some servers into a checkpoint."""
    for server in servers:
        entries: dict[str, Any] = {}
        for name, table in tables.items():
            rule, shapes = table.describe_block(server)
            for tensor, shape in shapes.items():
                _write_file(folder / _file(name, server, tensor), shape, table, table.read_block(server, tensor))
            entries[name] = {"placement": table.placement.fields(), "rule": rule, "tensors": list(shapes)}
        (folder / f"parameter-{server}.json").write_text(json.dumps({"format": FORMAT, "tables": entries}, indent=1))


def read_blocks(folder: Path) -> dict[str, SavedTable]:
    """Return the tables of a checkpoint by name; their rows stay in files.

    Raises:
        CheckpointError: a later version of gtrain wrote it, or a server's block is missing.
    """
    saved: dict[str, dict[int, SavedBlock]] = {}
    placements: dict[str, Placement] = {}
    for path in folder.glob("parameter-*.json"):
        server, content = int(path.stem.rpartition("-")[2]), json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']}; this version of gtrain reads format {FORMAT}.",
                hint="use the version of gtrain that wrote it.",
            )
        for name, entry in content["tables"].items():
            tensors = {tensor: mapped(folder / _file(name, server, tensor)) for tensor in entry["tensors"]}
            placements[name] = Placement(**entry["placement"])
            saved.setdefault(name, {})[server] = SavedBlock(entry["rule"], tensors)
    if not saved:
        _read_worker_states(folder, saved, placements)
    for name, blocks in saved.items():
        if len(blocks) != placements[name].servers:
            raise CheckpointError(
                f"{folder} has {len(blocks)} of the {placements[name].servers} blocks of the table {name}.",
                hint="use another checkpoint.",
            )
    return {name: SavedTable(placements[name], blocks) for name, blocks in saved.items()}


def read_table(folder: Path, name: str, table: TableSpec) -> SavedRows:
    """Return the rows of a table in a checkpoint, for other strategies.

    Args:
        folder: the checkpoint.
        name: the layer's name.
        table: the table's specification.

    Raises:
        CheckpointError: the checkpoint lacks the table, or a server's block.
    """
    saved = read_blocks(folder).get(name)
    if saved is None:
        raise CheckpointError(f"{folder} lacks rows of the table {name}.", hint="use another checkpoint.")
    return SavedRows(saved.placement.rows, saved.pieces)


def export(folder: Path, tables: Mapping[str, ServerTableStorage]) -> None:
    """Write each table as ``<name>.npy`` into a folder, in the order of ids."""
    for name, served in tables.items():
        path, (rows, dim) = folder / f"{name}.npy", (served.table.rows, served.table.dim)
        step = piece_rows(dim, served.dtype)
        pieces = (served.read(begin, min(begin + step, rows)) for begin in range(0, rows, step))
        _write_file(path, (rows, dim), served, pieces)
        print(f"written: {path}", flush=True)


def _write_file(path: Path, shape: tuple[int, ...], table: ServerTableStorage, pieces: Iterable[Tensor]) -> None:
    writing = Writing(path, shape, table.dtype)
    for piece in pieces:
        writing.add(piece)
    writing.done()


def _read_worker_states(
    folder: Path, saved: dict[str, dict[int, SavedBlock]], placements: dict[str, Placement]
) -> None:
    """Read a checkpoint of an early version, which has the blocks in the workers' states."""
    for path in folder.glob("rank-*.pt"):
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["shard"]
        for name, entry in state.items():
            if isinstance(entry, dict) and "placement" in entry:
                placements[name] = Placement(**entry["placement"])
                blocks = {int(server): SavedBlock(**block) for server, block in entry["servers"].items()}
                saved.setdefault(name, {}).update(blocks)


def _file(table: str, server: int, tensor: str) -> str:
    return f"{safe_name(table)}.parameter-{server}.{tensor}.npy"
