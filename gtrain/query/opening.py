"""Open the model of a run from its folder: the configuration, a checkpoint, and the store, which has the names.

The source data are not read. Nothing that the folder names is imported: only gtrain's own embedding model is built.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gtrain import backends
from gtrain.cli.earlier_run import EarlierRun, folder_of
from gtrain.config import PathsConfig
from gtrain.errors import CheckpointError, ConfigError, StoreError
from gtrain.graph.store import Store
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.nn import deferred
from gtrain.query.rows import load_rows
from gtrain.record.run import RunRecord
from gtrain.run import build
from gtrain.strategy import checkpoint as checkpoints

TARGET = f"{KGEmbedding.__module__}.{KGEmbedding.__name__}"
_SCORING = (
    *("dimension", "operator", "comparator", "reciprocal", "bias", "global_emb", "entities", "relations"),
    "all_negs",  # relations with another value form a group, whose parameters lie together
)
"""The settings of the model on which scores, and the places of its parameters, depend."""
_NAMES = (
    "it has the names; `gtrain partition run=FOLDER` makes it again from the data, store=FOLDER names another place."
)


@dataclass(frozen=True)
class OpenedRun:
    """A trained model.

    Attributes:
        folder: of the run.
        checkpoint: its folder or file.
        fingerprint: identifies the contents of the checkpoint.
        store: the graph's store.
        model: with the parameters of the checkpoint.
    """

    folder: Path
    checkpoint: Path
    fingerprint: str
    store: Store
    model: KGEmbedding


def open_run(
    run: str | Path, ckpt_path: str | None = None, store: str | Path | None = None, memory: int | None = None
) -> OpenedRun:
    """Open the model of a run.

    Args:
        run: the folder of the run, or ``last``.
        ckpt_path: ``best``, ``last`` or the path of a checkpoint; None: the best one.
        store: the folder of the store; None: where the run had it.
        memory: bytes of tables that are read into memory, see :func:`~gtrain.query.rows.load_rows`.

    Raises:
        GtrainError: the folder is not that of a run of ``model=kg``, or its checkpoint or store is missing or damaged.
    """
    earlier = EarlierRun(folder_of(str(run), Path(str(PathsConfig.runs))))
    settings = _settings(earlier)
    path = _checkpoint(earlier, ckpt_path)
    graph = _open_store(earlier.folder, store)
    with deferred():
        model = build.make_model({"_target_": TARGET, **settings}, graph)
    assert isinstance(model, KGEmbedding)
    model.eval().requires_grad_(False)
    trained_by = str(OmegaConf.select(earlier.composed, "strategy.name"))
    return OpenedRun(earlier.folder, path, _load(path, model, graph, memory, trained_by), graph, model)


def _settings(earlier: EarlierRun) -> dict[str, Any]:
    composed = earlier.composed
    target = str(OmegaConf.select(composed, "model._target_"))
    # By name: importing what a folder names would run its code. Earlier releases had the class elsewhere.
    if not (target.startswith("gtrain.") and target.endswith(f".{KGEmbedding.__name__}")):
        raise ConfigError(
            f"run={earlier.folder} was set; this run trained model._target_={target}, which has no embeddings of "
            "entities and relations.",
            hint="name a run of model=kg; gtrain export writes the embeddings of other models.",
        )
    # Only these are resolved: others may refer to what only training has.
    chosen = {name: composed.model[name] for name in _SCORING if name in composed.model}
    return {
        name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, value in chosen.items()
    }


def _checkpoint(earlier: EarlierRun, ckpt_path: str | None) -> Path:
    path: Path | str | None = earlier.checkpoint("export", ckpt_path)
    if path is None:
        path = checkpoints.located(str(ckpt_path))
    if isinstance(path, str):
        raise CheckpointError(
            f"{path} is the address of a checkpoint, and questions are answered from a folder of this machine.",
            hint="copy the checkpoint, and set ckpt_path to its folder.",
        )
    return checkpoints.find(path)


def _open_store(folder: Path, store: str | Path | None) -> Store:
    """Open the store of a run.

    Raises:
        StoreError: the run did not record it, or it is not on this machine.
    """
    path = RunRecord(folder).store if store is None else Path(store)
    if path is None or not (path / "manifest.json").is_file():
        where = "this run recorded no store" if path is None else f"its store {path} is not on this machine"
        raise StoreError(f"run={folder} was set; {where}.", hint=_NAMES)
    return Store.open(path)


def _load(path: Path, model: KGEmbedding, store: Store, memory: int | None, trained_by: str) -> str:
    """Load the parameters of a checkpoint, whichever strategy wrote it; return its fingerprint.

    Args:
        path: the checkpoint.
        model: without rows.
        store: of the graph.
        memory: see :func:`open_run`.
        trained_by: the strategy of the run, which a checkpoint of an earlier release does not name.
    """
    if path.is_file():
        raise CheckpointError(
            f"ckpt_path={path} was set; it is a file of Lightning, which does not say what its rows belong to.",
            hint="set ckpt_path to a checkpoint of gtrain, which is a folder.",
        )
    manifest = checkpoints.read_manifest(path)
    reader = backends.get(str(manifest.get("strategy") or trained_by)).load_table_reader()
    saved, rows = checkpoints.load_other(path, model, reader, checkpoints.numbering_of(model, store))
    state = saved["state_dict"]
    model.to(next(value.dtype for value in state.values() if value.is_floating_point()))
    model.load_state_dict({name: value.to(model.dtype) for name, value in state.items()})
    load_rows(model, rows, memory)
    return f"{zlib.crc32(json.dumps(manifest['files'], sort_keys=True).encode()):08x}"
