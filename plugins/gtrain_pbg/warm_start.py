"""Beginning with what another run learned: rows and relations by name, whatever its partitions were.

Nodes and relations that the other run did not know keep their initial values; so the other way round, what it knew and
this run does not is left out. Optimizer state begins anew.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import CheckpointError
from gtrain.graph.store import Store
from gtrain_pbg import files
from gtrain_pbg.tables import PartitionedTable

DESCRIPTION = "pbg.json"
FORMAT = 1
log = logging.getLogger("gtrain")


def describe(folder: Path, store: Store, table: PartitionedTable) -> None:
    """Write into a checkpoint what :func:`warm_start` must know of it."""
    content = {
        "format": FORMAT,
        "store": str(store.path.absolute()),
        "partitions": table.partitions.count,
        "rows": table.spec.rows,
        "columns": table.spec.dim,
    }
    (folder / DESCRIPTION).write_text(json.dumps(content, indent=1))


def warm_start(path: Path, store: Store, table: PartitionedTable, shared: dict[str, Tensor]) -> None:
    """Overwrite rows of the table and relation parameters by those of a checkpoint.

    Args:
        path: a checkpoint, or the folder of a run, whose last one is taken.
        store: the graph.
        table: the table, with its initial values; of the process that reads and writes files.
        shared: relation parameters by the module's names.

    Raises:
        CheckpointError: there is none, it is of another kind, or the other run's names are not there any more.
    """
    folder = _find(path)
    said = _description(folder)
    if said["columns"] != table.spec.dim:
        raise CheckpointError(
            f"strategy.warm_start={path}: its vectors have {said['columns']} columns, the model's {table.spec.dim}.",
            hint=f"set model.dimension (and model.bias) as there, so that there are {said['columns']} columns.",
        )
    old = _old_store(path, said)
    known = _copy_rows(folder, said, old, store, table)
    log.info("warm start: %d of %d nodes were known to %s", known, table.spec.rows, folder)
    _copy_relations(folder, old, store, shared)


def _find(path: Path) -> Path:
    for folder in (path, path / "checkpoints" / "last.ckpt", path.with_name(path.name + ".old")):
        if (folder / "manifest.json").is_file():
            return folder
    raise CheckpointError(
        f"strategy.warm_start={path} was set; there is no complete checkpoint.",
        hint="give the folder of a run of strategy=pbg, or one of its checkpoints.",
    )


def _description(folder: Path) -> dict[str, Any]:
    if not (folder / DESCRIPTION).is_file():
        raise CheckpointError(
            f"strategy.warm_start: {folder} is no checkpoint of strategy=pbg.",
            hint="give a checkpoint that strategy=pbg wrote.",
        )
    found: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
    if found.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / DESCRIPTION} has format {found.get('format')}; this version of gtrain reads format {FORMAT}.",
            hint="use the version of gtrain that wrote it.",
        )
    return found


def _old_store(path: Path, said: dict[str, Any]) -> Store:
    if not Path(said["store"], "manifest.json").is_file():
        raise CheckpointError(
            f"strategy.warm_start={path}: the store {said['store']}, which has the names of its nodes, is gone.",
            hint="keep the store of a run that others are to begin with (gtrain partition makes it anew).",
        )
    return Store.open(said["store"])


def _mapping(kind: str, old: Store, new: Store, count: int) -> Tensor:
    """For each of the old run's ids the new one, -1 where there is none: by name, or by number without names."""
    theirs, mine = old.names(kind), new.names(kind)
    if theirs is None or mine is None:
        if theirs is not mine:
            raise CheckpointError(
                f"strategy.warm_start: the {kind}s of one of the two graphs have names, those of the other have none.",
                hint="prepare both from the same kind of source.",
            )
        return torch.arange(count)
    pieces = [torch.arange(count)[begin : begin + files.PIECE] for begin in range(0, count, files.PIECE)]
    return torch.cat([mine.encode(theirs.decode(piece)) for piece in pieces])


def _copy_rows(folder: Path, said: dict[str, Any], old: Store, new: Store, table: PartitionedTable) -> int:
    mapping = _mapping(old.node_types[0], old, new, said["rows"])
    mapping = torch.where(mapping < table.spec.rows, mapping, -1)
    rows = [files.mapped(folder / files.file_name(files.ROWS, part)) for part in range(said["partitions"])]
    known = [mapping[old.node("orig_id", part)] for part in range(said["partitions"])]
    for partition in range(table.partitions.count):
        table.overwrite(partition, zip(known, rows, strict=True))
    return int((mapping >= 0).sum())


def _copy_relations(folder: Path, old: Store, new: Store, shared: dict[str, Tensor]) -> None:
    """Rows of the parameters with a row a relation; what all embeddings have in common as it is."""
    saved = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)["state_dict"]
    for name, value in shared.items():
        if name not in saved or saved[name].shape[1:] != value.shape[1:]:
            raise CheckpointError(
                f"strategy.warm_start: {folder} has no parameter {name} of that shape.",
                hint="set model.operator, model.reciprocal and model.global_emb as there.",
            )
        if len(value) == 1 or "relation" not in {*old.manifest.names, *new.manifest.names}:
            count = min(len(value), len(saved[name]))
            value[:count] = saved[name][:count]
            continue
        mapping = _mapping("relation", old, new, len(saved[name]))
        there = (mapping >= 0) & (mapping < len(value))
        value[mapping[there]] = saved[name][there]
