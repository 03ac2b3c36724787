"""Preflight checks: refuse a job before its data are read and before ranks start.

The command runs them in a short-lived fork of the agent, because importing a user's model may start threads, which do
not survive the fork of the ranks, and asking torch for GPUs may initialise CUDA.
"""

from __future__ import annotations

import importlib.resources
import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torchmetrics import MetricCollection

from gtrain import backends, targets
from gtrain.callbacks.checkpoint import unknown_monitor
from gtrain.callbacks.predictions import check_output
from gtrain.errors import ConfigError
from gtrain.run import build
from gtrain.run.sketch import ModelSketch, is_known, make_trainer
from gtrain.run.task import Task, data_module
from gtrain.strategy import checkpoint as checkpoints
from gtrain.strategy.base import GraphStrategy


def check(config: dict[str, Any], choices: dict[str, str], typed: Sequence[str]) -> None:
    """Refuse a job that cannot run, whatever its data hold.

    Args:
        config: the resolved and validated configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        typed: keys that the command line sets.

    Raises:
        GtrainError: as a rank would raise it later.
    """
    job, verb = Task(config, choices), config["verb"]
    targets.check_objects(config, build.find_target, ["data"])  # before objects are made of it
    build.find_target(config["data"]["_target_"], "data")
    ranks = config["trainer"]["num_nodes"] * config["trainer"]["devices"]
    if verb in ("predict", "export"):
        check_output(job.output, config["format"])
        check_folder(job.output.parent, f"output={job.output}")
    data = data_module(config, ranks)
    data.check_inputs()
    check_folder(data.store, f"data.store={data.store}")
    if verb == "partition":
        return
    strategy, checkpoint = job.make_strategy(), _find_checkpoint(job)
    targets.check_objects(config, build.find_target)
    for key, node in _targets({key: config[key] for key in ("model", "callbacks", "logger")}):
        _check_target(key, node)
    sketch = ModelSketch(config, data)
    _check_strategy(strategy, sketch, job.model_name, typed)
    strategy.serves.check_parts(strategy.strategy_name, data.num_parts, ranks)
    _check_accelerator(config["trainer"]["accelerator"])
    _check_monitors(config, sketch)
    trainer = make_trainer(config, strategy, data)
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


def _find_checkpoint(job: Task) -> Path | None:
    """The checkpoint that the job reads, if it is one of ours."""
    path = job.checkpoint()
    if path is None:
        return None
    folder = checkpoints.find(path)
    if not folder.is_dir():
        return None
    checkpoints.check_complete(folder)
    return folder


def _check_strategy(strategy: GraphStrategy, sketch: ModelSketch, model: str, typed: Sequence[str]) -> None:
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


def _check_accelerator(name: str) -> None:
    if name in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.accelerator={name} was set; torch finds no GPU on this machine.",
            hint="set trainer.accelerator=cpu; gtrain doctor says what torch and the driver lack.",
        )


def _check_monitors(config: dict[str, Any], sketch: ModelSketch) -> None:
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
            and is_known(build.find_target(node["_target_"], key))
        ):
            raise unknown_monitor(f"{key}.monitor", monitor, logged)


def _is_ours(target: type) -> bool:
    return target.__module__.startswith("gtrain.")
