"""Making objects out of the configuration: the only place that calls Hydra's ``instantiate``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from gtrain.errors import ConfigError, GtrainError
from gtrain.graph.store import Store
from gtrain.model.networks import norm_settings
from gtrain.model.node_classifier import NodeClassifier

# settings that the built-in networks share; a network of another package gets those that it names
_SHARED = ("hidden_channels", "num_layers", "dropout", "norm", "act", "heads", "aggr", "input_dropout")
_MODULE = ("optimizer", "scheduler", "monitor", "class_weights", "test_metrics", "sparse_optimizer", "loss")


def make(node: dict[str, Any], key: str, **extra: Any) -> Any:
    """``instantiate`` a part of the configuration; mistakes in it come out as ours.

    Args:
        node: has ``_target_``.
        key: its place in the configuration, for messages.
        extra: more arguments.

    Raises:
        ConfigError: the target does not exist or does not take these arguments.
        GtrainError: as the target raised it.
    """
    try:
        return instantiate(node, **extra)
    except InstantiationException as error:
        cause = error.__cause__ or error
    if isinstance(cause, GtrainError):
        raise cause
    reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    raise ConfigError(
        f"{key}._target_={node.get('_target_')} could not be made: {type(cause).__name__}: {reason}",
        hint=f"gtrain --cfg job --package {key} shows its settings.",
    ) from cause


def optional(node: dict[str, Any] | None, key: str) -> Callable[..., Any] | None:
    """A factory for a part that is completed later (an optimizer's parameters, a scheduler's optimizer), or None."""
    if node is None:
        return None
    return lambda *args: make({**node, "_args_": list(args)}, key)


def make_model(settings: dict[str, Any], store: Store) -> pl.LightningModule:
    """The LightningModule: the user's own, or a :class:`NodeClassifier` around the named network.

    Args:
        settings: the ``model`` group.
        store: its facts give numbers of features and classes where the network takes them.

    Raises:
        ConfigError: the target cannot be imported, is no module, or does not take the settings.
    """
    settings, facts = dict(settings), store.facts
    target = _target(settings.get("_target_"))
    sizes = {"in_channels": facts.get("num_features"), "out_channels": facts.get("num_classes")}
    if inspect.isclass(target) and issubclass(target, pl.LightningModule):
        return _own_module(target, settings, sizes)
    if sizes["out_channels"] is None:
        raise ConfigError("the graph has no labels, and a node classifier needs them.", hint="set data.labels.")
    if sizes["in_channels"] is None:
        raise ConfigError(
            "the graph has no node features, and the network needs them.",
            hint="set data.features to a file, or to degree or constant.",
        )
    network = make(_network_settings(target, settings, sizes), "model")
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"model._target_={settings['_target_']} made a {type(network).__name__}, not a torch module.",
            hint="name a class or function that makes a torch.nn.Module.",
        )
    options = {key: settings[key] for key in ("monitor", "test_metrics") if settings.get(key) is not None}
    return NodeClassifier(
        network,
        sizes["out_channels"],
        multilabel=bool(facts.get("multilabel")),
        optimizer=optional(settings.get("optimizer"), "model.optimizer"),
        scheduler=optional(settings.get("scheduler"), "model.scheduler"),
        class_weights=_class_weights(settings.get("class_weights"), store),
        **options,
    )


def make_trainer(settings: dict[str, Any], **extra: Any) -> pl.Trainer:
    """Lightning's Trainer; what it refuses comes out as a ConfigError."""
    try:
        return pl.Trainer(**settings, **extra)
    except (ValueError, TypeError, MisconfigurationException) as error:
        raise ConfigError(
            f"trainer: {str(error).splitlines()[0]}", hint="gtrain --cfg job --package trainer"
        ) from error


def _target(path: Any) -> Any:
    """The class or function at a dotted path."""
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"model._target_={path} was set; it cannot be imported: {type(error).__name__}: {error}.",
            hint="give the full path of a torch module, such as torch_geometric.nn.GCN.",
        ) from error


def _own_module(
    target: type[pl.LightningModule], settings: dict[str, Any], sizes: dict[str, Any]
) -> pl.LightningModule:
    """A LightningModule of the user's: it gets the settings that it names, and the sizes if it names them."""
    names = inspect.signature(target).parameters
    given = {
        k: v for k, v in {**sizes, **settings}.items() if k in names or (k not in _SHARED + _MODULE and k not in sizes)
    }
    for key in ("optimizer", "scheduler"):
        if isinstance(given.get(key), dict):
            given[key] = optional(given[key], f"model.{key}")
    module: pl.LightningModule = make(given, "model")
    return module


def _network_settings(target: Any, settings: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a network: its own settings, and of the shared ones those that it takes."""
    settings = {key: value for key, value in settings.items() if key not in _MODULE}
    parameters = inspect.signature(target).parameters
    ours = getattr(target, "__module__", "").startswith("gtrain.")
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for key, value in sizes.items():
        if settings.get(key) is None and (key in parameters or (ours and open_ended)):
            settings[key] = value
    if ours:
        return settings
    if "norm" in settings:
        settings["norm"], settings["norm_kwargs"] = norm_settings(settings["norm"])
    shared = (*_SHARED, "norm_kwargs")
    return {key: value for key, value in settings.items() if key not in shared or key in parameters}


def _class_weights(setting: Any, store: Store) -> list[float] | None:
    """Numbers, or for ``balanced`` n / (C * n_c) over the training labels (0 for a class without any)."""
    if setting is None or isinstance(setting, list):
        return setting
    if setting != "balanced" or store.facts.get("multilabel"):
        raise ConfigError(
            f"model.class_weights={setting} was set.",
            hint="give a list with one number a class, or balanced (for one label a node).",
        )
    labels = torch.cat([store.node("y", p)[store.node("train_mask", p)] for p in range(store.num_parts)])
    counts = torch.bincount(labels, minlength=store.facts["num_classes"]).double()
    weights = labels.numel() / (len(counts) * counts.clamp(min=1)) * (counts > 0)
    return [float(weight) for weight in weights]
