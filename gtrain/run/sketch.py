"""The model of a job before its data are read: what preflight checks and the data preparation ask of it.

It is made as a rank makes it, with tables without rows, from the facts of the store if it exists, else from what the
source knows of its graph (:attr:`gtrain.data.module.GraphDataModule.outline`).
"""

from __future__ import annotations

from collections.abc import Mapping
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

_STATES = {"train": TrainerFn.FITTING, "test": TrainerFn.TESTING, "predict": TrainerFn.PREDICTING}
_KNOWN = ("gtrain.", "lightning.", "torch.", "torch_geometric.", "torchmetrics.")  # constructors without side effects
_FEW, _MANY = 16, 100_000  # nodes of a type that a model is made for instead of more than so many


def sketch_model(config: dict[str, Any], data: GraphDataModule) -> pl.LightningModule | None:
    """The model of a job, with tables without rows and perhaps of other sizes; None where making it takes the graph."""
    try:
        model: pl.LightningModule | None = ModelSketch(config, data).model
    except GtrainError:  # a rank raises it, unless the graph itself is refused first
        return None
    return model


class _Outline:
    """What :func:`gtrain.run.build.make_model` reads of a store."""

    num_parts = 1

    def __init__(self, facts: dict[str, Any], store: Store | None) -> None:
        self.facts, self._store = facts, store
        hetero = isinstance(facts["num_nodes"], dict)
        self.node_types = tuple(facts["num_nodes"]) if hetero else (NODE_TYPE,)
        self.edge_types = store.edge_types if store is not None else facts.get("edge_types", (EDGE_TYPE,))

    def names(self, node_type: str) -> Any:
        """Names are those of the store."""
        return None if self._store is None else self._store.names(node_type)

    def node(self, name: str, part: int = 0) -> torch.Tensor:
        """One label of each class, in training."""
        classes = torch.arange(self.facts["num_classes"])
        return classes if name == "y" else torch.ones_like(classes, dtype=torch.bool)


class ModelSketch:
    """The model of a job, made without the graph.

    Args:
        config: the configuration.
        data: not prepared.

    Attributes:
        certain: whether the form of the graph is known; else the model is made for a guess.
        sized: whether the model has the sizes that it has on this graph.
        model: the model; None where it cannot be made without the graph.
        traits: what the choice of a strategy depends on.
        settings: values of ``trainer`` and ``data`` by key.
    """

    def __init__(self, config: dict[str, Any], data: GraphDataModule) -> None:
        self._config, self._data = config, data
        self._store = _open(data)
        facts = dict(self._store.facts) if self._store is not None else data.outline
        self.certain = facts is not None and not facts.get("features")  # a type with bags of features
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
        if self._store is None:  # lists with a number for each class or relation, of which an outline has few
            settings |= {key: None for key in ("class_weights", "relation_weight") if key in settings}
        if not self.certain:
            facts = {**OUTLINE, "num_relations": 2, "num_classes": None if self._data.task == "link" else 2}
        small = _smaller(facts)
        try:
            with deferred():
                return build.make_model(settings, _Outline(small, self._store))  # type: ignore[arg-type]
        except GtrainError as error:
            # of a graph whose form is unknown, only this is certain: no graph gives a model an argument that it lacks
            if self.certain or "unexpected keyword" in str(error):
                raise
        except Exception:  # of a user's own model, which may want more than there is here
            pass
        return None

    def check_optimizers(self, strategy: GraphStrategy) -> None:
        """Refuse optimizers and schedulers that cannot be made, or that a strategy cannot do the work of."""
        if self._config["verb"] != "train" or self.model is None or not self.certain or not is_known(type(self.model)):
            return
        made = self.model.configure_optimizers()
        optimizers = made["optimizer"] if isinstance(made, dict) else made
        strategy.check_optimizers(self.model, optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])

    def served_by(self, settings: Mapping[str, Any]) -> list[str]:
        """Names of the installed strategies that train this model with these settings."""
        return [name for name in backends.serving(self.traits, settings) if self._is_served(name)]

    def _is_served(self, name: str) -> bool:
        if self.model is None or not self.certain:
            return True
        config = {**self._config, "trainer": _PLAIN_TRAINER}
        try:
            strategy = backends.get(name).load_strategy()()
            strategy.check_start(make_trainer(config, strategy, self._data), self.model, None)
            self.check_optimizers(strategy)
        except GtrainError:
            return False
        return True


_PLAIN_TRAINER = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "max_epochs": 1}


def _open(data: GraphDataModule) -> Store | None:
    try:
        return data.open_store() if (data.store_path / "manifest.json").is_file() else None
    except (GtrainError, OSError):  # a rank says what is wrong with it, or makes it anew
        return None


def _count(facts: Mapping[str, Any]) -> int:
    """Nodes of all types."""
    nodes = facts["num_nodes"]
    return int(sum(nodes.values()) if isinstance(nodes, dict) else nodes)


def _smaller(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts of a graph of the same form, with few nodes and columns of features if it is large."""
    few = {}
    for name in ("num_nodes", "entity_types") if _count(facts) > _MANY else ():
        value = facts.get(name)
        if isinstance(value, dict):
            few[name] = {key: count and min(count, _FEW) for key, count in value.items()}
        elif value is not None:
            few[name] = min(value, _FEW)
    return {"multilabel": False, **facts, **few}


def make_trainer(config: dict[str, Any], strategy: GraphStrategy, data: GraphDataModule) -> pl.Trainer:
    settings = {key: value for key, value in config["trainer"].items() if key != "enable_progress_bar"}
    for name, node in config["callbacks"].items():
        if node and is_known(build.find_target(node["_target_"], f"callbacks.{name}")):
            build.make(node, f"callbacks.{name}")
    trainer = build.make_trainer(
        {**settings, "enable_checkpointing": False},
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    trainer.state.fn = _STATES.get(config["verb"], TrainerFn.PREDICTING)
    trainer.datamodule = data  # type: ignore[attr-defined]
    return trainer


def is_known(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith(_KNOWN)
