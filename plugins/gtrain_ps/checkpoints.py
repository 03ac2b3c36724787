"""Tables in files: in checkpoints one file per server's block and tensor, in exports in the order of ids.

Rows and optimizer state travel in pieces of :data:`.served_table.PIECE_BYTES`, so a worker never holds a block.
A checkpoint's folder has, for each server::

    parameter-<server>.json                       tables: placement, and the optimizer that the state belongs to
    <table>.parameter-<server>.rows.npy           rows of the block [n_i, d_j]
    <table>.parameter-<server>.<state>.npy        optimizer state, [n_i, d_j] or [n_i]
    <table>.parameter-<server>.changed.npy        positions int32 [k] of the only rows that the other files have

The last file exists if the block is large and training has changed fewer than half of its rows, as in a table of hashed
features. The others are the initial rows, which :class:`.TableSpec` computes, as in :mod:`gtrain.nn.changed_rows`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import CheckpointError
from gtrain.graph.store.manifest import safe_name
from gtrain.nn import TableSpec
from gtrain.nn.changed_rows import LEAST_BYTES, MOST_CHANGED, check_initial
from gtrain.nn.table import INIT_ROWS
from gtrain.strategy.checkpoint import SavedRows
from gtrain.strategy.tensor_files import Writing, mapped
from gtrain_ps.placement import Placement
from gtrain_ps.worker.served_table import BlockDescription, InitialBlock, ServerTableStorage, piece_rows

FORMAT, CHANGED_ROWS_FORMAT = 1, 2
"""Of a server's JSON file: the second if a block has changed rows only."""
CHANGED = "changed"


@dataclass(frozen=True)
class SavedBlock:
    """A server's block of a table in a checkpoint.

    Attributes:
        rule: name of the optimizer that the state belongs to; None before the first update.
        tensors: ``rows`` [n_i, d_j] and the optimizer's state by name, mapped from files.
        positions: rows of the block that the tensors have instead of all, int32 ``[k]``, ascending.
        initial: the other rows; None if the tensors have all.
    """

    rule: str | None
    tensors: Mapping[str, Tensor]
    positions: Tensor | None = None
    initial: InitialBlock | None = None


@dataclass(frozen=True)
class SavedTable:
    """A table in a checkpoint: its placement, and its blocks by server."""

    placement: Placement
    blocks: Mapping[int, SavedBlock]

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows in pieces: ids int64 [m] and rows [m, d]."""
        initial = next((block.initial for block in self.blocks.values() if block.initial is not None), None)
        if initial is not None:
            yield from self._pieces_by_id(TableSpec(**initial.table))
            return
        placement, columns = self.placement, self.placement.column_blocks
        for block in range(placement.row_blocks):
            parts = [self.blocks[block * columns + column].tensors["rows"] for column in range(columns)]
            step = piece_rows(placement.dim, parts[0].dtype)
            for begin in range(0, placement.block_rows(block), step):
                end = min(begin + step, placement.block_rows(block))
                yield placement.ids(block, begin, end), torch.cat([part[begin:end] for part in parts], dim=1)

    def _pieces_by_id(self, table: TableSpec) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows in the order of their ids, in which the table's initial rows are computed."""
        placement, dtype = self.placement, self.blocks[0].tensors["rows"].dtype
        for begin in range(0, placement.rows, INIT_ROWS):
            ids = torch.arange(begin, min(begin + INIT_ROWS, placement.rows))
            rows = table.initial(begin, begin + len(ids)).to(dtype, copy=True)
            owner, position = placement.locate(ids)
            for server, block in self.blocks.items():
                row_block, columns = placement.block_of(server)
                mine = (owner == row_block).nonzero().flatten()
                stored = position[mine]
                if block.positions is not None:
                    mine, stored = _present(mine, stored, block.positions)
                rows[mine, columns] = block.tensors["rows"][stored]
            yield ids, rows


def _present(rows: Tensor, wanted: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return those ``rows`` whose ``wanted`` position is among ascending ``positions``, and its index there."""
    index = torch.searchsorted(positions, wanted.int())
    chosen = index < len(positions)
    chosen[chosen.clone()] = positions[index[chosen]] == wanted[chosen]
    return rows[chosen], index[chosen]


def write_blocks(folder: Path, tables: Mapping[str, ServerTableStorage], servers: Iterable[int]) -> None:
    """Write the blocks of some servers into a checkpoint."""
    for server in servers:
        entries: dict[str, Any] = {}
        for name, table in tables.items():
            block = table.describe_block(server)
            entry = {"placement": table.placement.fields(), "rule": block.rule, "tensors": list(block.shapes)}
            positions = None
            if block.initial is not None and _is_sparse(block, table.dtype):
                positions = _write_positions(folder, name, server, table, block.changed)
                first = TableSpec(**block.initial.table).initial(0, 1)[0].tolist()
                entry["initial"] = {**asdict(block.initial), "first": first}
            for tensor, shape in block.shapes.items():
                stored = shape if positions is None else (len(positions), *shape[1:])
                content = table.read_block(server, tensor, positions)
                _write_file(folder / _file(name, server, tensor), stored, table.dtype, content)
            entries[name] = entry
        number = CHANGED_ROWS_FORMAT if any("initial" in entry for entry in entries.values()) else FORMAT
        (folder / f"parameter-{server}.json").write_text(json.dumps({"format": number, "tables": entries}, indent=1))


def _is_sparse(block: BlockDescription, dtype: torch.dtype) -> bool:
    """Return whether a block is large, and training has changed few of its rows."""
    height, width = block.shapes["rows"]
    return height * width * dtype.itemsize >= LEAST_BYTES and block.changed < MOST_CHANGED * height


def _write_positions(folder: Path, name: str, server: int, table: ServerTableStorage, count: int) -> Tensor:
    """Write the positions of a block's changed rows, and return them, mapped from their file."""
    path = folder / _file(name, server, CHANGED)
    _write_file(path, (count,), torch.int32, table.changed_positions(server))
    return mapped(path)


def read_blocks(folder: Path) -> dict[str, SavedTable]:
    """Return the tables of a checkpoint by name; their rows stay in files.

    Raises:
        CheckpointError: a later version of gtrain wrote it, or a server's block is missing.
    """
    saved: dict[str, dict[int, SavedBlock]] = {}
    placements: dict[str, Placement] = {}
    first: dict[str, tuple[TableSpec, Tensor]] = {}
    for path in folder.glob("parameter-*.json"):
        server, content = int(path.stem.rpartition("-")[2]), json.loads(path.read_text())
        if content["format"] not in (FORMAT, CHANGED_ROWS_FORMAT):
            raise CheckpointError(
                f"{path} has format {content['format']}; this version of gtrain reads formats {FORMAT} and "
                f"{CHANGED_ROWS_FORMAT}.",
                hint="use the version of gtrain that wrote it.",
            )
        for name, entry in content["tables"].items():
            tensors = {tensor: mapped(folder / _file(name, server, tensor)) for tensor in entry["tensors"]}
            placements[name] = Placement(**entry["placement"])
            block = SavedBlock(entry["rule"], tensors)
            if "initial" in entry:
                initial = InitialBlock(entry["initial"]["table"], entry["initial"]["accumulator"])
                positions = mapped(folder / _file(name, server, CHANGED))
                block = SavedBlock(entry["rule"], tensors, positions, initial)
                first[name] = TableSpec(**initial.table), torch.tensor(entry["initial"]["first"], dtype=torch.float32)
            saved.setdefault(name, {})[server] = block
    if not saved:
        _read_worker_states(folder, saved, placements)
    for name, blocks in saved.items():
        if len(blocks) != placements[name].servers:
            raise CheckpointError(
                f"{folder} has {len(blocks)} of the {placements[name].servers} blocks of the table {name}.",
                hint="use another checkpoint.",
            )
    for table, row in first.values():
        check_initial(table, row)
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
        _write_file(path, (rows, dim), served.dtype, pieces)
        print(f"written: {path}", flush=True)


def _write_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype, pieces: Iterable[Tensor]) -> None:
    writing = Writing(path, shape, dtype)
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
