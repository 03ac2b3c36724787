"""Preflight checks: refuse a job that cannot run before its data are read and its ranks start.

The command runs them in a short-lived fork of the agent: importing a user's model may start threads, which do not
survive the fork of the ranks, and querying GPUs may initialise CUDA.
"""

from __future__ import annotations

import importlib.resources
import inspect
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping
from omegaconf import OmegaConf
from torchmetrics import MetricCollection

from gtrain import backends, targets
from gtrain.callbacks.checkpoint import check_stopping, unknown_monitor
from gtrain.callbacks.predictions import check_output
from gtrain.config import APPLYING, PREPARING
from gtrain.data.module import GraphDataModule
from gtrain.errors import ConfigError
from gtrain.launch import launchers
from gtrain.model.classification import Classifier, NodeClassifier
from gtrain.model.inputs import check_types, input_names
from gtrain.model.link_predictor import LinkPredictor
from gtrain.model.module import OptimizedModule
from gtrain.model.regression import NodeRegressor
from gtrain.object_store import is_address, refuse_address
from gtrain.run import build, runs
from gtrain.run.sketch import ModelSketch, has_plain_constructor, make_trainer
from gtrain.run.task import Task, data_module
from gtrain.settings import as_typed, nested
from gtrain.strategy import checkpoint as checkpoints
from gtrain.strategy.base import GraphStrategy
from gtrain.strategy.remote_checkpoint import RemoteCheckpoint, check_dirpath

log = logging.getLogger("gtrain")


def check(config: dict[str, Any], choices: dict[str, str], typed: Sequence[str]) -> None:
    """Refuse a job that cannot run, whatever its data contain.

    Args:
        config: the resolved and validated configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        typed: keys that the user typed on the command line.

    Raises:
        GtrainError: the error that a rank would raise later.
    """
    job, verb = Task(config, choices), config["verb"]
    refuse_address(config["output"], "output", "write to a local file, and copy it when the command has ended.")
    refuse_address(
        config["data"].get("store"),
        "data.store",
        "set data.remote_store to the address; data.store is the local folder that keeps what was read from it.",
    )
    # Before data_module instantiates these targets.
    targets.check_objects(config, build.find_target, ["data"])
    build.find_target(config["data"]["_target_"], "data")
    ranks = config["trainer"]["num_nodes"] * config["trainer"]["devices"]
    job.make_smoothing()  # raises its errors
    if verb in ("predict", "export"):
        check_output(job.output, job.format)
        check_folder(job.output.parent, f"output={job.output}")
    data = data_module(config, ranks)
    is_first = _machine(config) == 0
    if is_first and verb not in PREPARING and (path := job.checkpoint()) is not None:
        data.follow(checkpoints.training_data(path), applied=verb in APPLYING)
        if data.trained is not None and not data.applied:
            log.info("%s: other data than those of the training so far, with its columns and classes", data.origin)
    if is_first:  # the others may lack the raw files: they fetch what machine 0 prepares
        data.check_inputs()
    check_folder(data.store, f"data.store={data.store}")
    if verb in PREPARING:
        return
    strategy, checkpoint = job.make_strategy(), _find_checkpoint(job) if is_first else None
    if verb == "train" and isinstance(checkpoint, Path):
        runs.check_epochs_left(checkpoint, config)
    targets.check_objects(config, build.find_target)
    for key, node in nested({key: config[key] for key in ("model", "callbacks", "logger")}):
        if isinstance(node, dict) and node.get("_target_") is not None:
            _check_target(key, node)
    sketch = ModelSketch(config, data)
    _check_strategy(strategy, sketch, job.model_name, typed)
    strategy.serves.check_parts(strategy.strategy_name, data.num_parts, ranks)
    _check_accelerator(config["trainer"]["accelerator"], config["trainer"]["devices"])
    _check_monitors(config, sketch)
    _check_stopping(config, data)
    _check_dirpaths(config)
    _check_types(sketch)
    trainer = make_trainer(config, strategy, data)
    if sketch.model is None or not sketch.certain:
        return
    strategy.check_start(trainer, sketch.model, data)
    if verb == "train" and isinstance(sketch.model, OptimizedModule):
        sketch.model.check_clipping(trainer.gradient_clip_val)
    if checkpoint is not None:
        if sketch.sized:
            checkpoints.check_model(checkpoint, sketch.model)
        # A strategy that overrides making_model stores the tables' rows itself, outside of the module.
        stores_rows = type(strategy).making_model is not GraphStrategy.making_model
        writer = checkpoints.writer_of_tables(checkpoint, sketch.model, strategy.strategy_name, stores_rows)
        if writer is not None and verb == "train":
            raise checkpoints.refuse_training(checkpoint, writer, strategy.strategy_name)


def _machine(config: dict[str, Any]) -> int:
    """Return the number of this machine in the job."""
    rank_info = launchers.detect().rank_info()
    return (config["cluster"]["rank"] or 0) if rank_info is None else rank_info.machine


def _find_checkpoint(job: Task) -> Path | str | None:
    """Return the folder of the checkpoint that the job reads, or its address.

    None if it reads none, or one that Lightning wrote.
    """
    path = job.checkpoint()
    if isinstance(path, str):
        remote = RemoteCheckpoint(path)
        if not remote.exists():
            remote.manifest_text()  # raises the error
        if remote.is_file:
            return None
    folder = checkpoints.find(path) if isinstance(path, Path) else path
    if folder is None or (isinstance(folder, Path) and not folder.is_dir()):
        return None
    checkpoints.check_complete(folder)
    return folder


def _check_strategy(strategy: GraphStrategy, sketch: ModelSketch, model: str, typed: Sequence[str]) -> None:
    """Refuse a model, optimizers or settings that a strategy does not serve; hints name the strategies that do."""
    name, serves, settings = strategy.strategy_name, strategy.serves, sketch.settings
    reason, violated, error = sketch.traits.refusal(serves), serves.violated(settings), None
    if reason is None:
        try:
            sketch.check_optimizers(strategy)
        except ConfigError as refusal:
            error = refusal
    if reason is None and error is None and not violated:
        return
    preset = _preset_keys(name).difference(typed)
    chosen = {
        key: value for key, value in settings.items() if key in typed or (key.startswith("data.") and key not in preset)
    }
    others = sketch.served_by(chosen, preset)
    if error is not None:
        advice = f"; or choose strategy={' or '.join(others)}." if others else "."
        raise ConfigError(error.message, hint=f"{(error.hint or 'choose another optimizer').rstrip('.')}{advice}")
    if reason is not None:
        raise backends.not_served(name, model, sketch.traits, reason, others)
    raise backends.not_honoured(name, next(iter(violated)), violated, settings, others)


def _preset_keys(name: str) -> set[str]:
    """Return the keys of ``data`` and ``trainer`` that a strategy's YAML file sets."""
    path = importlib.resources.files(backends.get(name).conf) / "strategy" / f"{name}.yaml"
    content: Any = OmegaConf.to_container(OmegaConf.create(path.read_text()))
    return {f"{group}.{key}" for group in ("data", "trainer") for key in content.get(group) or {}}


def check_folder(folder: Path, key: str) -> None:
    """Refuse a folder that cannot be created.

    Raises:
        ConfigError: names the file, or the folder without write permission, that prevents it.
    """
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "cannot be written to" if existing.is_dir() else "is a file"
        raise ConfigError(
            f"{key} was set; {existing} {reason}.", hint="name a path in a folder that can be written to."
        )


# ---------------------------------------------------------------------------------------------------- targets


def _check_target(key: str, node: dict[str, Any]) -> None:
    """Refuse a target that cannot be imported, or does not have the arguments that its node sets.

    Raises:
        ConfigError: names the key.
    """
    target = build.find_target(node["_target_"], key)
    if key == "model" or not callable(target):
        # The model's arguments depend on the data; the sketch checks them.
        return
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        # Implemented in C, without a signature.
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in node:
        if not name.startswith("_") and name not in parameters:
            raise ConfigError(
                f"{key}.{name}={as_typed(node[name])} was set; {node['_target_']} has no such argument.",
                hint=f"its arguments are {', '.join(p for p in parameters if p != 'self')}.",
            )


def _check_accelerator(name: str, devices: int) -> None:
    if name in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.accelerator={name} was set; torch finds no GPU on this machine.",
            hint="set trainer.accelerator=cpu; gtrain doctor says what torch and the driver lack.",
        )
    if name in ("gpu", "cuda") and isinstance(devices, int) and devices > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.devices={devices} was set with trainer.accelerator={name}; torch finds "
            f"{torch.cuda.device_count()} GPU(s) on this machine.",
            hint=f"set trainer.devices={torch.cuda.device_count()}. For tests, trainer.num_nodes={devices} "
            "trainer.devices=1 simulates machines, whose ranks may share a GPU.",
        )


def _check_dirpaths(config: dict[str, Any]) -> None:
    """Refuse an object store that checkpoints cannot be written to.

    Raises:
        ConfigError: names the address and the reason.
    """
    if config["verb"] != "train" or not config["trainer"]["enable_checkpointing"]:
        return
    for node in config["callbacks"].values():
        address = node.get("dirpath") if isinstance(node, dict) else None
        if address is not None and is_address(address):
            check_dirpath(str(address))


def _check_types(sketch: ModelSketch) -> None:
    """Refuse a network for graphs with one type if the data are known to have several, and the other way round."""
    model, hetero = sketch.model, sketch.traits.heterogeneous
    if isinstance(model, (NodeClassifier, NodeRegressor, LinkPredictor)) and sketch.certain and hetero is not None:
        check_types(model.network, input_names(model.network), hetero=hetero)


def _check_monitors(config: dict[str, Any], sketch: ModelSketch) -> None:
    """Refuse callbacks that monitor a value which gtrain's model does not log.

    Raises:
        ConfigError: lists the logged values.
    """
    if config["verb"] != "train" or sketch.model is None or not sketch.certain:
        return
    if not type(sketch.model).__module__.startswith("gtrain."):
        return
    logged, score = logged_values(sketch), config["model"].get("score")
    for name, node in config["callbacks"].items():
        monitor, key = node.get("monitor") if isinstance(node, dict) else None, f"callbacks.{name}"
        if not isinstance(monitor, str) or monitor in ("auto", *logged):
            continue
        if has_plain_constructor(build.find_target(node["_target_"], key)):
            raise unknown_monitor("model.score" if monitor == score else f"{key}.monitor", monitor, logged)


def _check_stopping(config: dict[str, Any], data: GraphDataModule) -> None:
    """Refuse to stop early by a score of a validation that the settings turn off.

    Raises:
        ConfigError: names the callback and the setting.
    """
    trainer, split = config["trainer"], data.split
    reason = None
    if not trainer["limit_val_batches"]:
        reason = "trainer.limit_val_batches=0"
    elif split.kind in ("random", "time") and split.val_fraction == 0:
        reason = "data.val_fraction=0"
    elif split.kind == "per_class" and split.val_per_class == 0:
        reason = "data.val_per_class=0"
    if config["verb"] != "train" or reason is None or trainer["fast_dev_run"]:
        return
    for name, node in config["callbacks"].items():
        target = build.find_target(node["_target_"], f"callbacks.{name}") if isinstance(node, dict) and node else None
        if isinstance(target, type) and issubclass(target, EarlyStopping):
            check_stopping(f"callbacks.{name}", node.get("monitor"), node.get("strict", True), reason)


def logged_values(sketch: ModelSketch) -> set[str]:
    """Return the names of the values that gtrain's model logs in training and validation.

    A sketch without the sizes of the graph may log fewer: ``val/auc`` is among them if there may be two classes.
    """
    assert sketch.model is not None
    collections = [module for module in sketch.model.modules() if isinstance(module, MetricCollection)]
    names = {str(name) for collection in collections for name in collection.keys(keep_base=False)}
    logged = {"train/loss", "val/loss", *(name for name in names if name.startswith("val/"))}
    if sketch.traits.task == "link" or (isinstance(sketch.model, Classifier) and not sketch.sized):
        logged.add("val/auc")
    return logged
