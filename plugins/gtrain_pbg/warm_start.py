"""Beginning with what another run learned: rows and relations by name, whatever its partitions were.

Nodes and relations that the other run did not know keep their initial values; so the other way round, what it knew and
this run does not is left out. Optimizer state begins anew.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtrain.errors import CheckpointError
from gtrain.graph.store import Store
from gtrain.graph.store.entities import entity_types, feature_kind
from gtrain.nn import TableSpec
from gtrain.nn.recipe import ModelRecipe
from gtrain.nn.table import BLOCK_ROWS
from gtrain.strategy.checkpoint import SavedRows
from gtrain_pbg import files
from gtrain_pbg.tables import PartitionedTable
from gtrain_pbg.typed import TypedTables, partition_types

DESCRIPTION = "pbg.json"
FORMAT = 2
log = logging.getLogger("gtrain")


def relations_of(module: nn.Module, recipe: ModelRecipe) -> dict[str, tuple[int, ...]]:
    """Ids of the relations that the rows of parameters are for, by the parameters' names in the module."""
    ids = {
        id(p): group.relations for group in recipe.groups for p in (*group.forwards.values(), *group.backwards.values())
    }
    return {name: ids[id(parameter)] for name, parameter in module.named_parameters() if id(parameter) in ids}


def describe(
    folder: Path, store: Store, tables: TypedTables, relations: dict[str, tuple[int, ...]], matmul: str | None
) -> None:
    """Write into a checkpoint what :func:`warm_start` and a resumed run must know of it.

    Args:
        folder: the checkpoint.
        store: the graph.
        tables: by type.
        relations: see :func:`relations_of`.
        matmul: number format of the matrix products that trained it; None: nothing was trained.
    """
    types = {
        entity.spec.name: {
            "file": entity.name,
            "partitions": entity.partitions.count,
            "rows": entity.spec.rows,
            "columns": entity.spec.dim,
        }
        for entity in tables.types
    }
    content = {"format": FORMAT, "store": str(store.path.absolute()), "types": types, "relations": relations}
    content |= {"numbering": _numbering(store), "matmul": matmul}
    (folder / DESCRIPTION).write_text(json.dumps(content, indent=1))


def matmul_of(folder: Path) -> str:
    """Number format of the matrix products that trained a checkpoint; an earlier gtrain wrote none: its default."""
    said: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
    return str(said.get("matmul") or "float32")


def check_numbering(folder: Path, store: Store) -> None:
    """Check that partitions of a checkpoint have the nodes that they have here; names were compared before.

    Raises:
        CheckpointError: they have others.
    """
    said = json.loads((folder / DESCRIPTION).read_text())
    there, here = said.get("numbering"), _numbering(store)
    if there is not None and {name: there.get(name) for name in here} != here:  # None: an earlier version wrote it
        raise CheckpointError(
            f"{folder} was trained on the store {said['store']}, whose nodes or relations are numbered or cut "
            f"differently than those of {store.path}: its rows would be taken for other nodes.",
            hint="set seed, data and strategy.num_partitions as there, or begin a run with strategy.warm_start, which "
            "goes by names.",
        )


def _numbering(store: Store) -> dict[str, int]:
    """Checksums of what says which node a row of a partition belongs to: ids by part."""
    wanted = re.compile(r"part-\d+/nodes/.*/orig_id\.npy")
    return {name: crc for name, crc in store.manifest.checksums.items() if wanted.fullmatch(name)}


def warm_start(
    path: Path,
    store: Store,
    tables: TypedTables,
    shared: dict[str, Tensor],
    relations: dict[str, tuple[int, ...]],
) -> None:
    """Overwrite rows of the tables and relation parameters by those of a checkpoint.

    Args:
        path: a checkpoint, or the folder of a run, whose last one is taken.
        store: the graph.
        tables: with their initial values; of the process that reads and writes files.
        shared: parameters by the module's names.
        relations: see :func:`relations_of`.

    Raises:
        CheckpointError: there is none, it is of another kind, or the other run's names are not there any more.
    """
    folder = _find(path)
    said = _description(folder)
    old = _old_store(path, said)
    for entity, table in zip(tables.types, tables.tables, strict=True):
        other, columns = said["types"].get(entity.spec.name), entity.spec.dim
        if other is None:
            log.info("warm start: %s has no %s", folder, entity.spec.name)
            continue
        if other["columns"] != columns:
            raise CheckpointError(
                f"strategy.warm_start={path}: its vectors of {entity.spec.name} have {other['columns']} columns, the "
                f"model's {columns}.",
                hint=f"set model.dimension (and model.bias) as there, so that there are {other['columns']} columns.",
            )
        known = _copy_rows(folder, other, old, store, table, entity.spec.name)
        log.info("warm start: %d of %d %ss were known to %s", known, entity.spec.rows, entity.spec.name, folder)
    saved = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)["state_dict"]
    _copy_relations(folder, (saved, said["relations"]), (shared, relations), old, store)


def read_table(folder: Path, name: str, table: TableSpec) -> SavedRows:
    """The rows of a table in a checkpoint by the source data's ids, for other strategies.

    Args:
        folder: the checkpoint.
        name: of the layer.
        table: what it is.

    Raises:
        CheckpointError: it has no such table, or the store that says which node a row belongs to is gone.
    """
    said = _description(folder)
    entry = said["types"].get(table.name)
    if entry is None:
        raise CheckpointError(f"{folder} has no table of {table.name} ({name}).", hint="use another checkpoint.")
    if not Path(said["store"], "manifest.json").is_file():
        raise CheckpointError(
            f"{folder} was written by strategy=pbg, and the store {said['store']}, which says which node each row "
            "belongs to, is gone.",
            hint="use strategy=pbg, or make the store again with gtrain partition and the settings of that run.",
        )
    old = Store.open(said["store"])
    entity = {entity.name: entity for entity in partition_types(old, _tables_of(old))}[entry["file"]]

    def pieces() -> Iterator[tuple[Tensor, Tensor]]:
        for partition, orig_id in enumerate(entity.partitions.orig_id):
            rows = files.mapped(folder / files.file_name(files.ROWS, partition, entry["file"]))
            for begin in range(0, len(rows), BLOCK_ROWS):
                yield orig_id[begin : begin + BLOCK_ROWS], rows[begin : begin + BLOCK_ROWS]

    return SavedRows(entry["rows"], pieces)


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


def _copy_rows(folder: Path, said: dict[str, Any], old: Store, new: Store, table: PartitionedTable, kind: str) -> int:
    """Overwrite the rows of one type; return how many were known."""
    named = feature_kind(kind) if kind in (new.facts.get("features") or {}) else kind
    mapping = _mapping(named, old, new, said["rows"])
    mapping = torch.where(mapping < table.spec.rows, mapping, -1)
    parts = range(said["partitions"])
    rows = [files.mapped(folder / files.file_name(files.ROWS, part, said["file"])) for part in parts]
    place = {entity.name: entity for entity in partition_types(old, _tables_of(old))}[said["file"]]
    known = [mapping[orig_id] for orig_id in place.partitions.orig_id]
    for partition in range(table.partitions.count):
        table.overwrite(partition, zip(known, rows, strict=True))
    return int((mapping >= 0).sum())


def _tables_of(store: Store) -> list[TableSpec]:
    """What :func:`~gtrain_pbg.typed.partition_types` must know of the types of a store."""
    features = store.facts.get("features") or {}
    return [TableSpec(each.name, features.get(each.name, each.count), 0, seed=0) for each in entity_types(store)]


def _copy_relations(
    folder: Path,
    theirs: tuple[dict[str, Tensor], dict[str, list[int]]],
    mine: tuple[dict[str, Tensor], dict[str, tuple[int, ...]]],
    old: Store,
    new: Store,
) -> None:
    """Rows of the parameters with a row a relation, by its name; what all embeddings have in common as it is.

    Args:
        folder: the checkpoint, for messages.
        theirs: parameters of the checkpoint, and whose relations their rows are.
        mine: the same of this run.
        old: the other run's graph.
        new: this one's.
    """
    (saved, their_relations), (shared, relations) = theirs, mine
    for name, value in shared.items():
        if name not in relations:
            _check_same(folder, name, saved.get(name), value)
            value.copy_(saved[name])
            continue
        kind = name.rpartition(".scores.")[2]
        given = {n: ids for n, ids in their_relations.items() if n.rpartition(".scores.")[2] == kind}
        if not given:
            _check_same(folder, name, None, value)
        to_new = _relation_mapping(old, new, their_relations)
        row = {relation: place for place, relation in enumerate(relations[name])}
        for other, ids in given.items():
            pairs = [(at, row[to_new[r]]) for at, r in enumerate(ids) if to_new.get(r, -1) in row]
            if pairs:
                _check_same(folder, name, saved[other][:1], value[:1])
                at, to = torch.tensor(pairs).T
                value[to] = saved[other][at]


def _relation_mapping(old: Store, new: Store, relations: dict[str, list[int]]) -> dict[int, int]:
    """This run's number of each of the other run's relations that it knows."""
    count = 1 + max((max(ids) for ids in relations.values()), default=-1)
    if "relation" not in {*old.manifest.names, *new.manifest.names}:
        return {relation: relation for relation in range(count)}
    return {number: found for number, found in enumerate(_mapping("relation", old, new, count).tolist()) if found >= 0}


def _check_same(folder: Path, name: str, saved: Tensor | None, value: Tensor) -> None:
    if saved is None or saved.shape != value.shape:
        raise CheckpointError(
            f"strategy.warm_start: {folder} has no parameter {name} of that shape.",
            hint="set model.operator, model.reciprocal and model.global_emb as there.",
        )
