"""Checkpoints: within an epoch, preserved ones, relation state, and starting from another run's checkpoint by name.

A warm start takes rows and relations by name, whatever the other run's partitions were. Nodes and relations that only
one of the two runs knows keep their initial values or are left out. Optimizer state starts from its initial values.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtrain.errors import CheckpointError
from gtrain.graph.store import Store
from gtrain.graph.store.entities import entity_types, feature_kind
from gtrain.nn import TableSpec
from gtrain.nn.changed_rows import restored
from gtrain.nn.recipe import ModelRecipe
from gtrain.nn.table import BLOCK_ROWS
from gtrain.strategy.checkpoint import SavedRows, find, link, located
from gtrain.strategy.remote_checkpoint import RemoteCheckpoint
from gtrain.strategy.tensor_files import mapped
from gtrain_pbg.partition_store import PIECE, ROWS, file_name
from gtrain_pbg.tables import PartitionedTable
from gtrain_pbg.typed import TypedTables, TypePartitioning, partition_types

PROGRESS = "reached.json"
RELATIONS = "relations.pt"
DESCRIPTION = "pbg.json"
FORMAT = 2
log = logging.getLogger("gtrain")


@dataclass(frozen=True)
class EpochProgress:
    """How far an epoch has come.

    Attributes:
        epoch: its number, from 0.
        chunk: passes through the buckets that are trained: one for each chunk of each edge set.
        step: steps after these passes that are trained, on a single machine.
    """

    epoch: int
    chunk: int
    step: int = 0

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint."""
        content = {name: value for name, value in asdict(self).items() if name != "step" or value}
        (folder / PROGRESS).write_text(json.dumps(content))

    @classmethod
    def read(cls, folder: Path) -> EpochProgress | None:
        """Read it from a checkpoint; None: the checkpoint was written between epochs."""
        path = folder / PROGRESS
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def of(self, epoch: int) -> EpochProgress:
        """Return where an epoch starts: here if it is this one, else at its beginning."""
        return self if epoch == self.epoch else EpochProgress(epoch, 0)


def preserve(path: Path | str, epoch: int, interval: int) -> None:
    """Keep every ``interval``-th checkpoint for good, as ``epoch-<number>.ckpt`` beside it, in place of another run's.

    Its files are hard links to those of the checkpoint, which are never written again; its cost grows with the
    partitions that change afterwards. In an object store they are copies.

    Args:
        path: the checkpoint of an epoch, or its address.
        epoch: its number, from 0.
        interval: epochs from one preserved checkpoint to the next.
    """
    path, name = located(path), f"epoch-{epoch + 1:05}.ckpt"
    if (epoch + 1) % interval or str(path).rpartition("/")[2].startswith("epoch-"):
        return
    if isinstance(path, str):
        RemoteCheckpoint(path).preserve(name)
        return
    target = path.with_name(name)
    manifests = [folder / "manifest.json" for folder in (find(path), target)]
    if not all(file.is_file() for file in manifests) or manifests[0].read_bytes() != manifests[1].read_bytes():
        link(path, target)


def save_states(folder: Path, shared: Mapping[str, Tensor], recipe: ModelRecipe) -> None:
    """Write the optimizer state of relation parameters into a checkpoint."""
    states = {f"{name}.state" for name in recipe.parameters} & set(shared)
    torch.save({name: shared[name].clone() for name in sorted(states)}, folder / RELATIONS)


def load_states(folder: Path, shared: Mapping[str, Tensor]) -> None:
    """Load what :func:`save_states` wrote, if the checkpoint has it."""
    path = folder / RELATIONS
    for name, state in (torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}).items():
        if name in shared:
            shared[name].copy_(state)


def relations_of(module: nn.Module, recipe: ModelRecipe) -> dict[str, tuple[int, ...]]:
    """Return the relations that the rows of parameters belong to, by the parameters' names in the module."""
    ids = {
        id(p): group.relations for group in recipe.groups for p in (*group.forwards.values(), *group.backwards.values())
    }
    return {name: ids[id(parameter)] for name, parameter in module.named_parameters() if id(parameter) in ids}


def describe(
    folder: Path, store: Store, tables: TypedTables, relations: dict[str, tuple[int, ...]], matmul: str | None
) -> None:
    """Write the description of a checkpoint, for :func:`warm_start` and resumed runs.

    Args:
        folder: the checkpoint.
        store: the graph.
        tables: by type.
        relations: see :func:`relations_of`.
        matmul: number format of the matrix products that trained it; None: nothing was trained.
    """
    content = {
        "format": FORMAT,
        "store": str(store.path.absolute()),
        "types": {
            entity.spec.name: {
                "file": entity.name,
                "partitions": entity.partitions.count,
                "rows": entity.spec.rows,
                "columns": entity.spec.dim,
            }
            for entity in tables.types
        },
        "relations": relations,
        "numbering": _numbering(store),
        "matmul": matmul,
    }
    (folder / DESCRIPTION).write_text(json.dumps(content, indent=1))


def matmul_of(folder: Path) -> str:
    """Return the number format of the products that trained a checkpoint; float32 if an earlier gtrain wrote it."""
    return str(json.loads((folder / DESCRIPTION).read_text()).get("matmul") or "float32")


def check_numbering(folder: Path, store: Store) -> None:
    """Check that partitions of a checkpoint have the nodes that they have in this store.

    Raises:
        CheckpointError: nodes or relations are numbered or partitioned differently.
    """
    description = json.loads((folder / DESCRIPTION).read_text())
    theirs, ours = description.get("numbering"), _numbering(store)
    if theirs is not None and {name: theirs.get(name) for name in ours} != ours:  # None: an earlier version wrote it
        raise CheckpointError(
            f"{folder} was trained on the store {description['store']}, whose nodes or relations are numbered or "
            f"partitioned differently than those of {store.path}: its rows would be taken for other nodes.",
            hint="set seed, data and strategy.num_partitions as there, or start a run with strategy.warm_start, which "
            "goes by names.",
        )


def _numbering(store: Store) -> dict[str, int]:
    """Return checksums of the files that say which node a row of a partition belongs to."""
    checksums = store.manifest.checksums.items()
    return {name: crc for name, crc in checksums if re.fullmatch(r"part-\d+/nodes/.*/orig_id\.npy", name)}


def warm_start_location(setting: str) -> Path | str:
    """Return the local path or the address that ``strategy.warm_start`` names, itself or by a folder of a run."""
    if isinstance(location := located(setting), str):
        return location
    last = located(location / "checkpoints" / "last.ckpt")
    return last if isinstance(last, str) else location


def warm_start(
    path: Path,
    store: Store,
    tables: TypedTables,
    shared: dict[str, Tensor],
    relations: dict[str, tuple[int, ...]],
) -> None:
    """Overwrite rows of the tables and relation parameters by those of a checkpoint.

    Args:
        path: a checkpoint, or the folder of a run, whose last checkpoint is taken.
        store: the graph.
        tables: with their initial values; of the process that reads and writes files.
        shared: parameters by the module's names.
        relations: see :func:`relations_of`.

    Raises:
        CheckpointError: no complete checkpoint of strategy=pbg was found, or the other run's store, which has the
            names, is gone.
    """
    folders = (path, path / "checkpoints" / "last.ckpt", path.with_name(path.name + ".old"))
    folder = next((folder for folder in folders if (folder / "manifest.json").is_file()), None)
    if folder is None:
        raise CheckpointError(
            f"strategy.warm_start={path} was set; no complete checkpoint was found.",
            hint="give the folder of a run of strategy=pbg, or one of its checkpoints.",
        )
    description = _description(folder)
    old = _old_store(
        f"strategy.warm_start={path}: the store {{}}, which has the names of its nodes,",
        "keep the store of a run that others are to start from (gtrain partition makes it again).",
        description,
    )
    for entity, table in zip(tables.types, tables.tables, strict=True):
        other, columns = description["types"].get(entity.spec.name), entity.spec.dim
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
        log.info("warm start: %d of %d %ss have a vector in %s", known, entity.spec.rows, entity.spec.name, folder)
    saved = restored(torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True))["state_dict"]
    _copy_relations(folder, (saved, description["relations"]), (shared, relations), old, store)


def read_table(folder: Path, name: str, table: TableSpec) -> SavedRows:
    """Read the rows of a table in a checkpoint by the source data's ids, for other strategies.

    Args:
        folder: the checkpoint.
        name: of the layer.
        table: its specification.

    Raises:
        CheckpointError: the checkpoint has no such table, or its store is gone, which maps rows to nodes.
    """
    description = _description(folder)
    entry = description["types"].get(table.name)
    if entry is None:
        raise CheckpointError(f"{folder} has no table of {table.name} ({name}).", hint="use another checkpoint.")
    store = _old_store(
        f"{folder} was written by strategy=pbg, and the store {{}}, which says which node each row belongs to,",
        "use strategy=pbg, or make the store again with gtrain partition and the settings of that run.",
        description,
    )
    entity = _partitioning(store, entry["file"])

    def pieces() -> Iterator[tuple[Tensor, Tensor]]:
        for partition, orig_id in enumerate(entity.partitions.orig_id):
            rows = mapped(folder / file_name(ROWS, partition, entry["file"]))
            yield from zip(orig_id.split(BLOCK_ROWS), rows.split(BLOCK_ROWS), strict=True)

    return SavedRows(entry["rows"], pieces)


def _description(folder: Path) -> dict[str, Any]:
    if not (folder / DESCRIPTION).is_file():
        raise CheckpointError(
            f"strategy.warm_start: {folder} is not a checkpoint of strategy=pbg.",
            hint="give a checkpoint that strategy=pbg wrote.",
        )
    description: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / DESCRIPTION} has format {description.get('format')}; this version of gtrain reads {FORMAT}.",
            hint="use the version of gtrain that wrote it.",
        )
    return description


def _old_store(message: str, hint: str, description: dict[str, Any]) -> Store:
    """Open the store of a checkpoint's run."""
    if not Path(description["store"], "manifest.json").is_file():
        raise CheckpointError(message.replace("{}", description["store"]) + " is gone.", hint=hint)
    return Store.open(description["store"])


def _partitioning(store: Store, name: str) -> TypePartitioning:
    """Return how the table of this name is partitioned in a store."""
    features = store.facts.get("features") or {}
    specs = [TableSpec(each.name, features.get(each.name, each.count), 0, seed=0) for each in entity_types(store)]
    return next(entity for entity in partition_types(store, specs) if entity.name == name)


def _mapping(kind: str, old: Store, new: Store, count: int) -> Tensor:
    """Map the other run's ids to this run's, -1 for unknown ones: by name, or by number without names."""
    theirs, ours = old.names(kind), new.names(kind)
    if theirs is None or ours is None:
        # Exactly one of the two is None.
        if theirs is not ours:
            raise CheckpointError(
                f"strategy.warm_start: the {kind}s of one of the two graphs have names, those of the other have not.",
                hint="prepare both from the same kind of source.",
            )
        return torch.arange(count)
    return torch.cat([ours.encode(theirs.decode(piece)) for piece in torch.arange(count).split(PIECE)])


def _copy_rows(
    folder: Path, entry: dict[str, Any], old: Store, new: Store, table: PartitionedTable, entity_type: str
) -> int:
    """Overwrite the rows of one type; return how many were known."""
    named = feature_kind(entity_type) if entity_type in (new.facts.get("features") or {}) else entity_type
    mapping = _mapping(named, old, new, entry["rows"])
    mapping = torch.where(mapping < table.spec.rows, mapping, -1)
    rows = [mapped(folder / file_name(ROWS, part, entry["file"])) for part in range(entry["partitions"])]
    known = [mapping[orig_id] for orig_id in _partitioning(old, entry["file"]).partitions.orig_id]
    for partition in range(table.partitions.count):
        table.overwrite(partition, zip(known, rows, strict=True))
    return int((mapping >= 0).sum())


def _copy_relations(
    folder: Path,
    theirs: tuple[dict[str, Tensor], dict[str, list[int]]],
    ours: tuple[dict[str, Tensor], dict[str, tuple[int, ...]]],
    old: Store,
    new: Store,
) -> None:
    """Copy the rows of relation parameters by the relations' names; copy all other parameters whole.

    Args:
        folder: the checkpoint, for messages.
        theirs: parameters of the checkpoint, and the relations of their rows.
        ours: the same of this run.
        old: the other run's graph.
        new: this run's graph.
    """
    (saved, their_relations), (shared, relations) = theirs, ours
    for name, value in shared.items():
        if name not in relations:
            _check_same(folder, name, saved.get(name), value)
            value.copy_(saved[name])
            continue
        role = name.rpartition(".scores.")[2]
        sources = {n: ids for n, ids in their_relations.items() if n.rpartition(".scores.")[2] == role}
        if not sources:
            _check_same(folder, name, None, value)
        to_new = _relation_mapping(old, new, their_relations)
        row = {relation: number for number, relation in enumerate(relations[name])}
        for other, ids in sources.items():
            pairs = [(number, row[to_new[r]]) for number, r in enumerate(ids) if to_new.get(r, -1) in row]
            if pairs:
                _check_same(folder, name, saved[other][:1], value[:1])
                source, target = torch.tensor(pairs).T
                value[target] = saved[other][source]


def _relation_mapping(old: Store, new: Store, relations: dict[str, list[int]]) -> dict[int, int]:
    """Map the other run's relations to this run's, without unknown ones."""
    count = 1 + max((max(ids) for ids in relations.values()), default=-1)
    if "relation" not in {*old.manifest.names, *new.manifest.names}:
        return {relation: relation for relation in range(count)}
    return {theirs: ours for theirs, ours in enumerate(_mapping("relation", old, new, count).tolist()) if ours >= 0}


def _check_same(folder: Path, name: str, saved: Tensor | None, value: Tensor) -> None:
    if saved is None or saved.shape != value.shape:
        raise CheckpointError(
            f"strategy.warm_start: {folder} has no parameter {name} of that shape.",
            hint="set model.operator, model.reciprocal and model.global_emb as there.",
        )
