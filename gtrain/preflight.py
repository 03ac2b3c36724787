"""Preflight checks: refuse a job before its data are read and before ranks start.

The command runs them in a short-lived fork of the agent, because importing a user's model may start threads, which do
not survive the fork of the ranks, and asking torch for GPUs may initialise CUDA. The model is made as a rank makes it,
with tables without rows, from the facts of the store if it exists, else from what the source knows of its graph before
it is read (:attr:`gtrain.data.module.GraphDataModule.outline`).
"""

from __future__ import annotations

import importlib.resources
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import OmegaConf
from torchmetrics import MetricCollection

from gtrain import backends, build, targets, task
from gtrain.callbacks.checkpoint import unknown_monitor
from gtrain.callbacks.predictions import check_output
from gtrain.data.module import OUTLINE, GraphDataModule
from gtrain.errors import ConfigError, GtrainError
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE, NODE_TYPE
from gtrain.model.kinds import kind
from gtrain.nn import deferred, tables
from gtrain.strategy import checkpoint as checkpoints
from gtrain.strategy.base import GraphStrategy

_STATES = {"train": TrainerFn.FITTING, "test": TrainerFn.TESTING, "predict": TrainerFn.PREDICTING}
_KNOWN = ("gtrain.", "lightning.", "torch.", "torch_geometric.", "torchmetrics.")  # constructors without side effects
_FEW, _MANY = 16, 100_000  # nodes of a type that a model is made for instead of more than so many


def check(config: dict[str, Any], choices: dict[str, str], typed: Sequence[str]) -> None:
    """Refuse a job that cannot run, whatever its data hold.

    Args:
        config: the resolved and validated configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        typed: keys that the command line sets.

    Raises:
        GtrainError: as a rank would raise it later.
    """
    job, verb = task._Task(config, choices), config["verb"]
    targets.check_objects(config, build.find_target, ["data"])  # before objects are made of it
    ranks = config["trainer"]["num_nodes"] * config["trainer"]["devices"]
    if verb in ("predict", "export"):
        check_output(job._output, config["format"])
        check_folder(job._output.parent, f"output={job._output}")
    data = task._data_module(config, ranks)
    data.check_inputs()
    check_folder(data.store, f"data.store={data.store}")
    if verb == "partition":
        return
    strategy, checkpoint = job._strategy(), _find_checkpoint(job)
    targets.check_objects(config, build.find_target)
    for key, node in _targets({key: config[key] for key in ("model", "callbacks", "logger")}):
        _check_target(key, node)
    sketch = _Sketch(config, data)
    _check_strategy(strategy, sketch, job.model_name, typed)
    strategy.serves.check_parts(strategy.strategy_name, data.num_parts, ranks)
    _check_accelerator(config["trainer"]["accelerator"])
    _check_monitors(config, sketch)
    trainer = _make_trainer(config, strategy, data)
    if sketch.model is None or not sketch.certain:
        return
    strategy.check_start(trainer, sketch.model, data)
    if checkpoint is not None:
        if sketch.sized:
            checkpoints.check_model(checkpoint, sketch.model)
        elsewhere = type(strategy).making_model is not GraphStrategy.making_model
        writer = checkpoints.writer_of_tables(checkpoint, sketch.model, strategy.strategy_name, elsewhere)
        if writer is not None and verb == "train":
            raise checkpoints.refuse_training(checkpoint, writer, strategy.strategy_name)


def sketch_model(config: dict[str, Any], data: GraphDataModule) -> pl.LightningModule | None:
    """The model of a job, with tables without rows and perhaps of other sizes; None where making it takes the graph."""
    try:
        model: pl.LightningModule | None = _Sketch(config, data).model
    except GtrainError:  # a rank raises it, unless the graph itself is refused first
        return None
    return model


def _find_checkpoint(job: Any) -> Path | None:
    """The checkpoint that the job reads, if it is one of ours."""
    path = job._checkpoint()
    if path is None:
        return None
    folder = checkpoints.find(path)
    if not folder.is_dir():
        return None
    checkpoints.check_complete(folder)
    return folder


def _check_strategy(strategy: GraphStrategy, sketch: _Sketch, model: str, typed: Sequence[str]) -> None:
    """Refuse a model, optimizers or settings that a strategy does not serve; hints name strategies that do."""
    name, serves, settings = strategy.strategy_name, strategy.serves, sketch.settings
    reason, broken, error = sketch.traits.refusal(serves), serves.violated(settings), None
    if reason is None:
        try:
            sketch.check_optimizers(strategy)
        except ConfigError as wrong:
            error = wrong
    if reason is None and error is None and not broken:
        return
    own = _set_by(name)
    chosen = {key: value for key, value in settings.items() if key in typed or key.startswith("data.")}
    others = sketch.served_by({key: value for key, value in chosen.items() if key in typed or key not in own})
    if error is not None:
        advice = f"; or choose strategy={' or '.join(others)}." if others else "."
        raise ConfigError(error.message, hint=f"{(error.hint or 'choose another optimizer').rstrip('.')}{advice}")
    if reason is not None:
        raise backends.not_served(name, model, sketch.traits, reason, others)
    raise backends.not_honoured(name, next(iter(broken)), broken, settings, others)


def _set_by(name: str) -> set[str]:
    """Keys of data and trainer that a strategy's own YAML file sets."""
    path = importlib.resources.files(backends.get(name).conf) / "strategy" / f"{name}.yaml"
    content: Any = OmegaConf.to_container(OmegaConf.create(path.read_text()))
    return {f"{group}.{key}" for group in ("data", "trainer") for key in content.get(group) or {}}


def check_folder(folder: Path, key: str) -> None:
    """Refuse a folder that cannot be made.

    Raises:
        ConfigError: names the file or the folder that is in the way.
    """
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "cannot be written to" if there.is_dir() else "is a file"
        raise ConfigError(f"{key} was set; {there} {why}.", hint="name a path in a folder that can be written to.")


# ---------------------------------------------------------------------------------------------------- targets


def _targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of the configuration that names a ``_target_``, with its key."""
    if isinstance(node, dict):
        if node.get("_target_") is not None:
            yield path, node
        for key, value in node.items():
            yield from _targets(value, f"{path}.{key}" if path else str(key))


def _check_target(key: str, node: dict[str, Any]) -> None:
    """Refuse a target that cannot be imported, or has no such argument.

    Raises:
        ConfigError: names the key.
    """
    target = build.find_target(node["_target_"], key)
    if key == "model" or not callable(
        target
    ):  # the model's arguments depend on the data, and are checked as it is made
        return
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # of C, without a signature
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in node:
        if not name.startswith("_") and name not in parameters:
            raise ConfigError(
                f"{key}.{name}={backends.as_set(node[name])} was set; {node['_target_']} has no such argument.",
                hint=f"its arguments are {', '.join(p for p in parameters if p != 'self')}.",
            )


def _is_known(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith(_KNOWN)


def _check_accelerator(name: str) -> None:
    if name in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.accelerator={name} was set; torch finds no GPU on this machine.",
            hint="set trainer.accelerator=cpu; gtrain doctor says what torch and the driver lack.",
        )


def _check_monitors(config: dict[str, Any], sketch: _Sketch) -> None:
    """Refuse callbacks and schedulers that look at a value which a model of ours does not log.

    Raises:
        ConfigError: lists what it logs.
    """
    if config["verb"] != "train" or sketch.model is None or not sketch.certain or not _is_ours(type(sketch.model)):
        return
    collections = [module for module in sketch.model.modules() if isinstance(module, MetricCollection)]
    names = {str(name) for collection in collections for name in collection.keys(keep_base=False)}
    logged = {"train/loss", "val/loss", *(name for name in names if name.startswith("val/"))}
    logged |= {"val/auc"} if sketch.traits.task == "link" or not sketch.sized else set()  # of two classes, or of edges
    for key, node in [(f"callbacks.{name}", node) for name, node in config["callbacks"].items()]:
        monitor = node.get("monitor") if isinstance(node, dict) else None
        if (
            isinstance(monitor, str)
            and monitor not in ("auto", *logged)
            and _is_known(build.find_target(node["_target_"], key))
        ):
            raise unknown_monitor(f"{key}.monitor", monitor, logged)


def _is_ours(target: type) -> bool:
    return target.__module__.startswith("gtrain.")


# ---------------------------------------------------------------------------------------------------- model


class _Outline:
    """What :func:`gtrain.build.make_model` reads of a store."""

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


class _Sketch:
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
        if self._config["verb"] != "train" or self.model is None or not self.certain or not _is_known(type(self.model)):
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
            strategy.check_start(_make_trainer(config, strategy, self._data), self.model, None)
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


def _make_trainer(config: dict[str, Any], strategy: GraphStrategy, data: GraphDataModule) -> pl.Trainer:
    settings = {key: value for key, value in config["trainer"].items() if key != "enable_progress_bar"}
    for name, node in config["callbacks"].items():
        if node and _is_known(build.find_target(node["_target_"], f"callbacks.{name}")):
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
