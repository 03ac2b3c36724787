"""A sketch of a job's model, built before the data are read, for preflight checks and the data preparation.

A sketch is built like a rank's model, but its tables have no rows. The sizes come from the store if it exists, else
from what the source expects of its graph (:attr:`gtrain.data.module.GraphDataModule.expected_facts`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from gtrain import backends
from gtrain.data.module import OUTLINE, GraphDataModule
from gtrain.errors import GtrainError
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE, NODE_TYPE
from gtrain.model.kinds import kind
from gtrain.nn import deferred, tables
from gtrain.run import build
from gtrain.strategy.base import GraphStrategy

_STATES = {"train": TrainerFn.FITTING, "test": TrainerFn.TESTING}
_PLAIN_CONSTRUCTORS = ("gtrain.", "lightning.", "torch.", "torch_geometric.", "torchmetrics.")
_FEW, _MANY = 16, 100_000  # a graph of more than _MANY nodes is sketched with _FEW nodes of each type


def sketch_model(config: dict[str, Any], data: GraphDataModule) -> pl.LightningModule | None:
    """Return the sketch of a job's model; None if the model can be built only with the graph."""
    try:
        return ModelSketch(config, data).model
    except GtrainError:
        # A rank raises it again, unless the graph is refused first.
        return None


class _OutlineStore:
    """The attributes and methods of a store that :func:`gtrain.run.build.make_model` uses."""

    num_parts = 1

    def __init__(self, facts: dict[str, Any], store: Store | None) -> None:
        self.facts, self._store = facts, store
        hetero = isinstance(facts["num_nodes"], dict)
        self.node_types = tuple(facts["num_nodes"]) if hetero else (NODE_TYPE,)
        self.edge_types = store.edge_types if store is not None else facts.get("edge_types", (EDGE_TYPE,))

    def names(self, node_type: str) -> Any:
        """Return the names in the store; None if the store does not exist."""
        return None if self._store is None else self._store.names(node_type)

    def held_out_tensors(self, split: str, edge_type: Any = None) -> tuple[str, ...]:
        """Return those of the store; before it exists, the times of answers that the source recommends."""
        if self._store is None:
            return ("edge_time",) if self.facts.get("recommends") else ()
        return self._store.held_out_tensors(split, edge_type)

    def node_tensors(self, node_type: str) -> tuple[str, ...]:
        """Return the names of the tensors that :meth:`node` returns."""
        return "y", "train_mask"

    def node(self, name: str, part: int = 0, node_type: str | None = None) -> torch.Tensor:
        """Return one training label of each class."""
        classes = torch.arange(self.facts["num_classes"])
        return classes if name == "y" else torch.ones_like(classes, dtype=torch.bool)


class ModelSketch:
    """The model of a job, built without the graph.

    Args:
        config: the configuration.
        data: the DataModule, not prepared.

    Attributes:
        certain: whether the types and features of the graph are known; else the model is built for a guess.
        sized: whether the model's sizes are those of the graph.
        model: the model; None if it cannot be built without the graph.
        traits: the properties of model and data that the choice of a strategy depends on.
        settings: values of ``trainer`` and ``data`` by key.

    Raises:
        GtrainError: the configuration of the model is wrong.
    """

    def __init__(self, config: dict[str, Any], data: GraphDataModule) -> None:
        self._config, self._data = config, data
        self._store = _open(data)
        facts = dict(self._store.facts) if self._store is not None else data.expected_facts
        self.certain = facts is not None and not facts.get("features")  # no entity type has bags of features
        self.sized = self._store is not None and self.certain and _count(facts or {}) <= _MANY
        self.model = self._make_model(dict(facts or {}))
        known = self.model is not None and self.certain
        self.traits = backends.Traits(
            None if self.model is None else kind(self.model),
            data.task,
            isinstance(facts["num_nodes"], dict) if facts else None,
            any(True for _ in tables(self.model)) if known else None,
        )
        self.settings = {
            f"{group}.{key}": value for group in ("trainer", "data") for key, value in config[group].items()
        }

    def _make_model(self, facts: dict[str, Any]) -> Any:
        settings = dict(self._config["model"])
        if self._store is None:
            # These lists have a number per class or relation, and an outline has few of them.
            lists = ["relation_weight", *(["class_weights"] if facts.get("label_scale") is None else [])]
            settings |= {key: None for key in lists if key in settings}
        if not self.certain:
            facts = {**OUTLINE, "num_relations": 2, "num_classes": None if self._data.task == "link" else 2}
        store: Any = _OutlineStore(_smaller(facts), self._store)
        try:
            with deferred():
                return build.make_model(settings, store)
        except GtrainError as error:
            # An unexpected argument is a mistake on every graph; other errors may come from the guessed facts.
            if self.certain or "unexpected keyword" in str(error):
                raise
        except Exception:
            # A user's model, which may need more of the store than an outline has.
            pass
        return None

    def check_optimizers(self, strategy: GraphStrategy) -> None:
        """Refuse optimizers and schedulers that cannot be created, or that a strategy cannot replace."""
        if self._config["verb"] != "train" or self.model is None or not self.certain:
            return
        if not has_plain_constructor(type(self.model)):
            return
        configured = self.model.configure_optimizers()
        optimizers = configured["optimizer"] if isinstance(configured, dict) else configured
        strategy.check_optimizers(self.model, optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])

    def served_by(self, settings: Mapping[str, Any], preset: Collection[str] = ()) -> list[str]:
        """Return the names of the installed strategies that train this model with these settings.

        Args:
            settings: values that the user chose, by key.
            preset: keys that the refused strategy set; those of ``data`` have their defaults with another strategy.
        """
        data = copy.copy(self._data)
        for field in fields(data.settings_type):
            if f"data.{field.name}" in preset and field.default is not MISSING:
                setattr(data, field.name, field.default)
        return [name for name in backends.serving(self.traits, settings) if self._is_served(name, data)]

    def _is_served(self, name: str, data: GraphDataModule) -> bool:
        if self.model is None or not self.certain:
            return True
        config = {**self._config, "trainer": _PLAIN_TRAINER}
        try:
            strategy = backends.get(name).load_strategy()()
            strategy.check_start(make_trainer(config, strategy, data), self.model, None)
            self.check_optimizers(strategy)
        except GtrainError:
            return False
        return True


_PLAIN_TRAINER = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "max_epochs": 1}


def _open(data: GraphDataModule) -> Store | None:
    try:
        return data.open_store() if (data.store_path / "manifest.json").is_file() else None
    except (GtrainError, OSError):
        # A rank reports what is wrong with the store, or prepares it again.
        return None


def _count(facts: Mapping[str, Any]) -> int:
    """Return the number of nodes of all types."""
    nodes = facts["num_nodes"]
    return int(sum(nodes.values()) if isinstance(nodes, dict) else nodes)


def _smaller(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a graph with the same types, and few nodes of each type if the graph is large."""
    few = {}
    for name in ("num_nodes", "entity_types") if _count(facts) > _MANY else ():
        value = facts.get(name)
        if isinstance(value, dict):
            few[name] = {key: count and min(count, _FEW) for key, count in value.items()}
        elif value is not None:
            few[name] = min(value, _FEW)
    return {"multilabel": False, **facts, **few}


def make_trainer(config: dict[str, Any], strategy: GraphStrategy, data: GraphDataModule) -> pl.Trainer:
    """Build a trainer for checks, without callbacks, loggers and checkpoints.

    Raises:
        ConfigError: an argument of the trainer or of a callback is refused.
    """
    for name, node in config["callbacks"].items():
        if node and has_plain_constructor(build.find_target(node["_target_"], f"callbacks.{name}")):
            build.make(node, f"callbacks.{name}")
    settings = {**config["trainer"], "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = build.make_trainer(settings, strategy=strategy, logger=False, use_distributed_sampler=False)
    trainer.state.fn = _STATES.get(config["verb"], TrainerFn.PREDICTING)
    trainer.datamodule = data  # type: ignore[attr-defined]
    return trainer


def has_plain_constructor(target: Any) -> bool:
    """Whether a class comes from a library whose constructors have no side effects."""
    return str(getattr(target, "__module__", "")).startswith(_PLAIN_CONSTRUCTORS)
