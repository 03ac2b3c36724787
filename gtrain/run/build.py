"""Build the model, the trainer and other objects from the configuration: the only caller of Hydra's ``instantiate``."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Container
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
from gtrain.data.batches.loader import has_split, target_type
from gtrain.errors import ConfigError, GtrainError
from gtrain.graph.store import Store
from gtrain.graph.store.entities import entity_bags
from gtrain.memory.limits import usable_memory
from gtrain.model.classification import Classifier, NodeClassifier
from gtrain.model.config import ModuleConfig, NetworkConfig
from gtrain.model.decoders import make_decoder
from gtrain.model.encoder import NodeEncoder, NodeIds
from gtrain.model.link_predictor import LinkPredictor
from gtrain.model.networks import norm_settings
from gtrain.model.regression import NodeRegressor
from gtrain.nn import Csr
from gtrain.settings import defaults
from gtrain.units import size

# Hydra 1.4 restricts the targets of a configuration. gtrain.targets has checked ours, so any module is allowed here.
_UNRESTRICTED = getattr(hydra.utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
_ANY_TARGET = {} if _UNRESTRICTED is None else {"_execution_whitelist_": _UNRESTRICTED}

_REFUSED = re.compile(r"tried to allocate (\d+) bytes")
"""In the RuntimeError of torch's allocator for the host."""
_SHARED = frozenset(defaults(NetworkConfig))
_MODULE = frozenset(defaults(ModuleConfig))
_CONNECTIONS = ("residual", "ego")
_OPTIMIZERS = ("optimizer", "sparse_optimizer", "scheduler")


def make(node: dict[str, Any], key: str, *args: Any) -> Any:
    """Call ``instantiate`` on a node of the configuration and translate its errors.

    Args:
        node: the node, with ``_target_``. Functions in it are passed as they are, because OmegaConf cannot hold them.
        key: the node's key in the configuration, for messages.
        args: positional arguments of the target.

    Raises:
        ConfigError: the target does not exist or does not accept these arguments.
        GtrainError: the target raised it.
    """
    functions = {name: value for name, value in node.items() if callable(value)}
    settings = {name: value for name, value in node.items() if name not in functions}
    try:
        return hydra.utils.instantiate(settings, *args, **functions, **_ANY_TARGET)
    except InstantiationException as error:
        cause = error.__cause__ or error
    if isinstance(cause, GtrainError):
        raise cause
    if isinstance(cause, RuntimeError) and (refused := _REFUSED.search(str(cause))) is not None:
        raise ConfigError(
            f"{key}._target_={node.get('_target_')} could not be created: one of its arrays has "
            f"{size(int(refused[1]))}, and this process may use {size(usable_memory())} of memory.",
            hint="lower model.hidden_channels, or what else sets the model's width, or the number of classes.",
        ) from cause
    reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    raise ConfigError(
        f"{key}._target_={node.get('_target_')} could not be created: {type(cause).__name__}: {reason}",
        hint=f"gtrain --cfg job --package {key} shows its settings.",
    ) from cause


def optional(node: dict[str, Any] | None, key: str) -> Callable[..., Any] | None:
    """Return a factory for an object that needs more arguments (an optimizer's parameters, a scheduler's optimizer).

    Returns:
        None if the node is unset.
    """
    if node is None or node.get("_target_") is None:
        return None
    return lambda *args: make(node, key, *args)


def make_model(settings: dict[str, Any], store: Store) -> pl.LightningModule:
    """Build the LightningModule: the named one, or a wrapper around the named network.

    A network is wrapped in a :class:`NodeClassifier`, in a :class:`NodeRegressor` if labels are numbers to predict, or
    in a :class:`LinkPredictor` if ``model.task`` is ``link``. A link predictor's network has ``model.out_channels``
    outputs, by default ``model.hidden_channels``.

    Args:
        settings: the ``model`` group.
        store: the graph; its facts give the numbers of features and classes, or the scale of numbers to predict.

    Raises:
        ConfigError: the target cannot be imported, is not a module, or does not accept the settings.
    """
    facts, target = store.facts, find_target(settings.get("_target_"), "model")
    if inspect.isclass(target) and issubclass(target, pl.LightningModule):
        return _lightning_module(target, settings, store)
    is_link, scale = settings.get("task") == "link", facts.get("label_scale")
    if is_link:
        _check_classifier_settings(settings, "model.task=link predicts edges, which have no classes")
        settings = {**settings, "out_channels": settings.get("out_channels") or settings["hidden_channels"]}
    elif scale is not None:
        _check_classifier_settings(settings, "the labels are numbers to predict, not classes")
    elif facts.get("num_classes") is None:
        raise ConfigError(
            "the graph has no labels, and a node classifier needs them.",
            hint="give the source labels (data.labels), or predict edges: model=link_sage or kg.",
        )
    encoder = make_encoder(target, settings, facts)
    network = make_network(target, settings, store, encoder)
    names = ("monitor", "num_negatives", "filtered") if is_link else ("monitor", "test_metrics")
    options: dict[str, Any] = {key: settings[key] for key in names if settings.get(key) is not None}
    options |= {key: optional(settings.get(key), f"model.{key}") for key in _OPTIMIZERS}
    if is_link:
        decoder = make_decoder(settings.get("decoder", "dot"), settings["out_channels"], facts.get("num_relations"))
        return LinkPredictor(network, decoder, encoder=encoder, eval_k=_eval_k(settings, store), **options)
    if scale is not None:
        loss = settings.get("regression_loss") or "l1"
        return NodeRegressor(network, scale["mean"], scale["deviation"], encoder=encoder, loss=loss, **options)
    return NodeClassifier(
        network,
        facts["num_classes"],
        encoder=encoder,
        multilabel=bool(facts.get("multilabel")),
        class_weights=_class_weights(settings.get("class_weights"), store),
        label_smoothing=settings.get("label_smoothing") or 0.0,
        **options,
    )


def _eval_k(settings: dict[str, Any], store: Store) -> int | None:
    """Return k of ``map@k``; None if the edges are not answers to questions: held-out training edges with times."""
    edge_type = store.facts.get("target_edge")
    if "edge_time" in store.held_out_tensors("train", None if edge_type is None else tuple(edge_type)):
        return 10 if settings.get("eval_k") is None else int(settings["eval_k"])
    return None


def _check_classifier_settings(settings: dict[str, Any], reason: str, taken: Container[str] = ()) -> None:
    """Refuse settings of classifiers for a model that is none, except those that it takes."""
    for name, unset in (("class_weights", "null"), ("label_smoothing", "0"), ("test_metrics", "null")):
        if settings.get(name) not in (None, 0) and name not in taken:
            raise ConfigError(
                f"model.{name}={settings[name]} was set, and {reason}.", hint=f"set model.{name}={unset}."
            )


def make_network(target: Any, settings: dict[str, Any], store: Store, encoder: nn.Module | None) -> nn.Module:
    """Build the network that ``model._target_`` names, with the sizes of the graph.

    Args:
        target: the class or function.
        settings: the ``model`` group.
        store: the graph.
        encoder: the layer before the network; every encoder but :class:`NodeIds` has ``model.hidden_channels`` outputs.

    Raises:
        ConfigError: the network needs relations and the graph has none, or the target does not return a module.
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
            f"model._target_={settings['_target_']} returned a {type(network).__name__}, not a torch module.",
            hint="name a subclass of torch.nn.Module, or a function that returns one.",
        )
    return network


def make_encoder(target: Any, settings: dict[str, Any], facts: dict[str, Any]) -> nn.Module | None:
    """Build the layer between the graph's features and the network; None if the network reads the features directly.

    A graph with several node types or sparse features has a :class:`NodeEncoder`. If the graph has no features, a
    network with the argument ``num_nodes`` gets node ids, and any other learned features if ``model.learn_features`` is
    set.

    Raises:
        ConfigError: the graph has no features, and the network needs them.
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
    """Return the sizes and names of the graph that a network or a module can take, by argument name."""
    facts = store.facts
    return {
        "in_channels": facts.get("num_features"),
        "out_channels": facts.get("num_classes") if facts.get("label_scale") is None else 1,
        **{key: facts.get(key) for key in ("num_nodes", "num_features", "num_classes", "multilabel", "num_relations")},
        "label_scale": facts.get("label_scale"),
        **{key: facts.get(key) for key in ("entity_types", "relation_ends")},
        "relation_names": _relation_names(store),
        "entity_bags": _entity_bags(store) if facts.get("features") else None,
        "node_types": list(store.node_types),
        "edge_types": list(store.edge_types),
    }


def _entity_bags(store: Store) -> Callable[[str], tuple[Csr, int] | None]:
    """Return a function from a featurized entity type to its bags of features and its number of features."""

    def bags_of(entity_type: str) -> tuple[Csr, int] | None:
        bags = entity_bags(store, entity_type)
        return None if bags is None else (Csr(bags[0], None, bags[1]), bags[2])

    return bags_of


def _relation_names(store: Store) -> list[str] | None:
    """Return the names of relations; None if the store has none."""
    names, count = store.names("relation"), store.facts.get("num_relations") or 0
    return None if names is None else list(names.decode(torch.arange(count)))


def make_trainer(settings: dict[str, Any], **extra: Any) -> pl.Trainer:
    """Build Lightning's Trainer.

    Args:
        settings: the ``trainer`` group.
        extra: further arguments of the Trainer.

    Raises:
        ConfigError: the Trainer has no such argument, or refuses a value.
    """
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


def find_target(path: Any, key: str) -> Any:
    """Import the class or function that a node of the configuration names.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name) if key == "model" else get_object(str(path))
    except Exception as error:
        if key == "model":
            reason, example = f"{type(error).__name__}: {error}", "torch module, such as torch_geometric.nn.GCN"
        else:
            reason, example = str(error).strip().splitlines()[-1], "class or function, such as torch.optim.Adam"
        raise ConfigError(
            f"{key}._target_={path} was set; it cannot be imported: {reason}.",
            hint=f"give the full path of a {example}.",
        ) from error


def _lightning_module(target: type[pl.LightningModule], settings: dict[str, Any], store: Store) -> pl.LightningModule:
    """Build a LightningModule, from gtrain or the user.

    It receives the shared settings and the graph's sizes that its signature names, and every other setting.
    """
    if store.facts.get("label_scale") is not None and issubclass(target, Classifier):
        raise ConfigError(
            f"model._target_={settings['_target_']} predicts classes, and the labels are numbers to predict.",
            hint="set model to a network, such as mlp, sage or hetero_sage; or label_kind to class.",
        )
    names, sizes = inspect.signature(target).parameters, _sizes(store)
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in names.values()):
        _check_classifier_settings(settings, f"{target.__name__} does not take it", names)
    shared = _SHARED | _MODULE | sizes.keys()
    arguments = {key: value for key, value in {**sizes, **settings}.items() if key in names or key not in shared}
    for key in _OPTIMIZERS:
        if isinstance(arguments.get(key), dict):
            arguments[key] = optional(arguments[key], f"model.{key}")
    if arguments.get("class_weights") is not None:
        arguments["class_weights"] = _class_weights(arguments["class_weights"], store)
    return make(arguments, "model")


def _network_settings(target: Any, settings: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return a network's arguments: its specific settings, and the shared settings that its signature names."""
    settings = {key: value for key, value in settings.items() if key not in _MODULE}
    parameters = inspect.signature(target).parameters
    is_gtrain = getattr(target, "__module__", "").startswith("gtrain.")
    takes_keywords = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for key, value in sizes.items():
        expected = key in parameters or (is_gtrain and takes_keywords and key in ("in_channels", "out_channels"))
        if settings.get(key) is None and expected:
            settings[key] = value
    if is_gtrain:
        return settings
    if "norm" in settings:
        settings["norm"], settings["norm_kwargs"] = norm_settings(settings["norm"])
    shared = {*_SHARED, "norm_kwargs"}
    # A network that takes no such connections must not train without them unnoticed.
    asked = {key for key in _CONNECTIONS if settings.get(key)}
    return {key: value for key, value in settings.items() if key not in shared - asked or key in parameters}


def _class_weights(setting: Any, store: Store) -> list[float] | None:
    """Return a weight per class; ``balanced``: n / (C * n_c) over the training labels, 0 for a class without labels."""
    if setting is None or isinstance(setting, list):
        return setting
    if setting != "balanced" or store.facts.get("multilabel"):
        raise ConfigError(
            f"model.class_weights={setting} was set.",
            hint="give a list with one number per class, or balanced (for one label per node).",
        )
    counts = torch.tensor(store.facts.get("train_classes") or _training_labels(store), dtype=torch.float64)
    if not counts.any():
        return None  # new data for a checkpoint of an early version, which does not record the training's labels
    weights = counts.sum() / (len(counts) * counts.clamp(min=1)) * (counts > 0)
    return [float(weight) for weight in weights]


def _training_labels(store: Store) -> list[int]:
    """Count the training labels of each class in a store of an early version, whose facts lack these numbers."""
    counts, target = torch.zeros(store.facts["num_classes"], dtype=torch.int64), target_type(store)
    for part in range(store.num_parts) if has_split(store, "train") else ():
        labels = store.node("y", part, target)[store.node("train_mask", part, target)]
        counts += torch.bincount(labels, minlength=len(counts))
    return counts.tolist()  # type: ignore[no-any-return]


_NOTHING = nullcontext()


class NoProfiler(PassThroughProfiler):
    """Measure nothing: Lightning enters some thirty profiles per step, and its default creates a context each time."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Return the one context that does nothing."""
        return _NOTHING
