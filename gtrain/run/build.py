"""Making objects out of the configuration: the only place that calls Hydra's ``instantiate``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import hydra.utils
import lightning.pytorch as pl
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from gtrain import messages
from gtrain.errors import ConfigError, GtrainError
from gtrain.graph.store import Store
from gtrain.graph.store.entities import entity_bags
from gtrain.model.config import ModuleConfig, NetworkConfig
from gtrain.model.decoders import make_decoder
from gtrain.model.encoder import NodeEncoder, NodeIds
from gtrain.model.link_predictor import LinkPredictor
from gtrain.model.networks import norm_settings
from gtrain.model.node_classifier import NodeClassifier
from gtrain.nn import Csr
from gtrain.settings import defaults

# Hydra 1.4 asks which targets a configuration may name. Ours is the user's own and may name any module.
_UNRESTRICTED = getattr(hydra.utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
_ANY_TARGET = {} if _UNRESTRICTED is None else {"_execution_whitelist_": _UNRESTRICTED}

_SHARED = frozenset(defaults(NetworkConfig))
_MODULE = frozenset(defaults(ModuleConfig))


def make(node: dict[str, Any], key: str, *args: Any) -> Any:
    """``instantiate`` a part of the configuration; mistakes in it come out as ours.

    Args:
        node: has ``_target_``; functions in it are passed as they are, because a configuration cannot hold them.
        key: its place in the configuration, for messages.
        args: positional arguments of the target.

    Raises:
        ConfigError: the target does not exist or does not take these arguments.
        GtrainError: as the target raised it.
    """
    functions = {name: value for name, value in node.items() if callable(value)}
    settings = {name: value for name, value in node.items() if name not in functions}
    try:
        return hydra.utils.instantiate(settings, *args, **functions, **_ANY_TARGET)
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
    if node is None or node.get("_target_") is None:
        return None
    return lambda *args: make(node, key, *args)


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
    if inspect.isclass(target) and issubclass(target, pl.LightningModule):
        return _own_module(target, settings, store)
    if settings.get("task") == "link":
        return _link_predictor(target, settings, store)
    if facts.get("num_classes") is None:
        raise ConfigError(
            "the graph has no labels, and a node classifier needs them.",
            hint="give the source labels (data.labels), or predict edges: model=link_sage or kg.",
        )
    encoder = make_encoder(target, settings, facts)
    options = {key: settings[key] for key in ("monitor", "test_metrics") if settings.get(key) is not None}
    return NodeClassifier(
        make_network(target, settings, store, encoder),
        facts["num_classes"],
        encoder=encoder,
        multilabel=bool(facts.get("multilabel")),
        optimizer=optional(settings.get("optimizer"), "model.optimizer"),
        sparse_optimizer=optional(settings.get("sparse_optimizer"), "model.sparse_optimizer"),
        scheduler=optional(settings.get("scheduler"), "model.scheduler"),
        class_weights=_class_weights(settings.get("class_weights"), store),
        **options,
    )


def _link_predictor(target: Any, settings: dict[str, Any], store: Store) -> LinkPredictor:
    """A :class:`LinkPredictor` whose network makes ``model.out_channels`` columns, or as many as it has hidden ones."""
    channels = settings.get("out_channels") or settings["hidden_channels"]
    settings = {**settings, "out_channels": channels}
    encoder = make_encoder(target, settings, store.facts)
    options = {key: settings[key] for key in ("monitor", "num_negatives", "filtered") if settings.get(key) is not None}
    return LinkPredictor(
        make_network(target, settings, store, encoder),
        make_decoder(settings.get("decoder", "dot"), channels, store.facts.get("num_relations")),
        encoder=encoder,
        optimizer=optional(settings.get("optimizer"), "model.optimizer"),
        sparse_optimizer=optional(settings.get("sparse_optimizer"), "model.sparse_optimizer"),
        scheduler=optional(settings.get("scheduler"), "model.scheduler"),
        **options,
    )


def make_network(target: Any, settings: dict[str, Any], store: Store, encoder: nn.Module | None) -> nn.Module:
    """The network that ``model._target_`` names, with the sizes of the graph.

    Args:
        target: the class or function.
        settings: the ``model`` group.
        store: the graph.
        encoder: what comes before it; an encoder other than :class:`NodeIds` makes ``model.hidden_channels`` columns.
    """
    sizes = _sizes(store)
    if encoder is not None and not isinstance(encoder, NodeIds):
        sizes["in_channels"] = settings["hidden_channels"]
    if sizes["num_relations"] is None and "num_relations" in inspect.signature(target).parameters:
        raise ConfigError(
            f"model._target_={settings['_target_']} needs relations (edge_type), and the graph has none.",
            hint="set model to gcn, sage, gat or gin.",
        )
    network = make(_network_settings(target, settings, sizes), "model")
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"model._target_={settings['_target_']} made a {type(network).__name__}, not a torch module.",
            hint="name a class or function that makes a torch.nn.Module.",
        )
    return network


def make_encoder(target: Any, settings: dict[str, Any], facts: dict[str, Any]) -> nn.Module | None:
    """A first layer where the graph's features do not go into the network as they are, else None.

    That is where the graph has several node types, where features are sparse, and where there are none: a network that
    takes ``num_nodes`` gets the nodes' ids then, another learned features if ``model.learn_features`` asks for them.
    """
    nodes, features = facts["num_nodes"], facts["num_features"]
    sparse = facts["sparse_features"]
    if not isinstance(nodes, dict):
        if features is None and "num_nodes" in inspect.signature(target).parameters:
            return NodeIds()
        if features is None and not settings.get("learn_features"):
            raise ConfigError(
                "the graph has no node features, and the network needs them.",
                hint="set data.features to a file, or to degree or constant; or model.learn_features=true.",
            )
        if features is not None and not sparse:
            return None
        nodes, features, sparse = {"node": nodes}, {"node": features}, ["node"] if sparse else []
    return NodeEncoder(settings["hidden_channels"], nodes, features, frozenset(sparse))


def _sizes(store: Store) -> dict[str, Any]:
    """What a network or a module may want to know of the graph, by argument name."""
    facts = store.facts
    return {
        "in_channels": facts.get("num_features"),
        "out_channels": facts.get("num_classes"),
        **{key: facts.get(key) for key in ("num_nodes", "num_features", "num_classes", "multilabel", "num_relations")},
        **{key: facts.get(key) for key in ("entity_types", "relation_ends")},
        "relation_names": _relation_names(store),
        "entity_bags": _entity_bags(store) if facts.get("features") else None,
        "node_types": list(store.node_types),
        "edge_types": list(store.edge_types),
    }


def _entity_bags(store: Store) -> Callable[[str], tuple[Csr, int] | None]:
    """What gives the bags of a featurized entity type, and the number of its features."""

    def bags(name: str) -> tuple[Csr, int] | None:
        found = entity_bags(store, name)
        return None if found is None else (Csr(found[0], None, found[1]), found[2])

    return bags


def _relation_names(store: Store) -> list[str] | None:
    """The names of relations, where there are any."""
    names, count = store.names("relation"), store.facts.get("num_relations") or 0
    return None if names is None else list(names.decode(torch.arange(count)))


def make_trainer(settings: dict[str, Any], **extra: Any) -> pl.Trainer:
    """Lightning's Trainer; what it refuses comes out as a ConfigError."""
    arguments = inspect.signature(pl.Trainer).parameters
    for key, value in settings.items():
        if key not in arguments:
            raise messages.unknown_key_of(f"trainer.{key}", value, sorted(arguments))
    profiler = settings.get("profiler") or NoProfiler()
    try:
        return pl.Trainer(**{**settings, "profiler": profiler}, **extra)
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


def find_target(path: Any, key: str) -> Any:
    """The class or function that a part of the configuration names.

    Raises:
        ConfigError: it cannot be imported.
    """
    if key == "model":
        return _target(path)
    try:
        return get_object(str(path))
    except Exception as error:
        raise ConfigError(
            f"{key}._target_={path} was set; it cannot be imported: {str(error).strip().splitlines()[-1]}.",
            hint="give the full path of a class or function, such as torch.optim.Adam.",
        ) from error


def _own_module(target: type[pl.LightningModule], settings: dict[str, Any], store: Store) -> pl.LightningModule:
    """A LightningModule, ours or the user's: it gets the settings that it names, and the sizes if it names them."""
    names, sizes = inspect.signature(target).parameters, _sizes(store)
    given = {
        k: v for k, v in {**sizes, **settings}.items() if k in names or (k not in _SHARED | _MODULE and k not in sizes)
    }
    for key in ("optimizer", "sparse_optimizer", "scheduler"):
        if isinstance(given.get(key), dict):
            given[key] = optional(given[key], f"model.{key}")
    if given.get("class_weights") is not None:
        given["class_weights"] = _class_weights(given["class_weights"], store)
    module: pl.LightningModule = make(given, "model")
    return module


def _network_settings(target: Any, settings: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a network: its own settings, and of the shared ones those that it takes."""
    settings = {key: value for key, value in settings.items() if key not in _MODULE}
    parameters = inspect.signature(target).parameters
    ours = getattr(target, "__module__", "").startswith("gtrain.")
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for key, value in sizes.items():
        expected = key in parameters or (ours and open_ended and key in ("in_channels", "out_channels"))
        if settings.get(key) is None and expected:
            settings[key] = value
    if ours:
        return settings
    if "norm" in settings:
        settings["norm"], settings["norm_kwargs"] = norm_settings(settings["norm"])
    shared = {*_SHARED, "norm_kwargs"}
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


_NOTHING = nullcontext()


class NoProfiler(PassThroughProfiler):
    """Measures nothing, at no cost: Lightning enters a profile some thirty times a step, and its own makes one anew."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """A context that does nothing, always the same one."""
        return _NOTHING
