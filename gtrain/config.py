"""The typed part of the configuration, and the checks that need no torch."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import hydra
import omegaconf
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gtrain import backends, messages
from gtrain.errors import ConfigError
from gtrain.model.config import NetworkConfig
from gtrain.settings import Settings, check, defaults, schema, setting

VERBS = {
    "train": "fit, then test with the best checkpoint (the default)",
    "test": "test a checkpoint (ckpt_path=best unless set)",
    "predict": "write the predictions of a checkpoint for every node (ckpt_path=best unless set) to output=",
    "export": "write the embedding of every node by name (format=npy, parquet, tsv or pbg_hdf5) to output=",
    "partition": "make the partitioned store and print edge cut, halo sizes and balance",
    "serve": "start one server of role= by hand, at cluster.rendezvous=",
    "key": "make the file cluster.key_file=, with which a job's processes authenticate each other on a network",
    "explain": "print what settings mean: explain KEY, GROUP=OPTION or GROUP, as data.split, strategy=single, trainer",
    "doctor": "print the capabilities and problems of this machine and installation (format=json for programs)",
}


VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
"""Keyword of Hydra 1.3's entry points; later releases deprecate it and behave so."""


ACCELERATORS = ("cpu", "gpu", "cuda", "auto")


@dataclass
class JobConfig(Settings):
    """Settings at the top of the configuration."""

    verb: str = setting("train", "action of the command; its first word sets it", words=VERBS)
    seed: int = setting(
        0, "seed of initial weights, dropout, generated graphs, splits, partitioner and order of batches"
    )
    role: str | None = setting(None, "`serve`: role of the server")
    ckpt_path: str | None = setting(
        None,
        "`last` or `best` of the newest run with equal data, model and strategy, or a path; `train` resumes from it, "
        "`test` and `predict` read it",
    )
    output: str | None = setting(
        None,
        "`predict`, `export`: the file to write, which must not exist yet; null: `predictions.<format>` or "
        "`embeddings.<format>` in the run's folder",
    )
    format: str = setting(
        "npy",
        "format of `output`",
        words={
            "npy": "one row per node, in the order of the source data's ids",
            "parquet": "columns `id` (the name, if nodes have names), `values` and, for scores of classes, "
            "`prediction`",
            "tsv": "`export`: a name and its values on each line, see [pbg](pbg.md#evaluation-and-checkpoints)",
            "pbg_hdf5": "`export`: PyTorch-BigGraph's files, see [pbg](pbg.md#evaluation-and-checkpoints)",
        },
    )
    allow_targets: list[str] = setting(
        [],
        "packages, modules or classes that files may name as `_target_`, in addition to "
        "[the allowed ones](configuration.md#code-that-a-file-names)",
    )
    embeddings: bool = setting(False, "`predict`: write the input of the network's last layer instead of scores")


@dataclass
class TrainerConfig:
    """Arguments of Lightning's Trainer that a job may set; ``num_nodes`` * ``devices`` ranks."""

    accelerator: str = setting("cpu", "device of the tensors: `cpu`, or [`gpu`](launchers.md#gpus)", words=ACCELERATORS)
    num_nodes: int = setting(1, "machines; strategies set their own defaults", least=1)
    devices: int = setting(1, "ranks on each machine", least=1)
    precision: str = setting("32-true", "floating type")
    max_epochs: int | None = setting(50, "epochs; -1: no limit", least=-1)
    min_epochs: int | None = setting(None, "least number of epochs, even if a callback stops earlier")
    max_steps: int = setting(-1, "optimizer steps; -1: no limit")
    min_steps: int | None = setting(None, "least number of optimizer steps")
    max_time: str | None = setting(None, "time limit of training, as DD:HH:MM:SS")
    limit_train_batches: Any = setting(1.0, "batches per training epoch, a number or a fraction", type="int or float")
    limit_val_batches: Any = setting(1.0, "batches per validation, a number or a fraction", type="int or float")
    limit_test_batches: Any = setting(1.0, "batches of a test, a number or a fraction", type="int or float")
    limit_predict_batches: Any = setting(1.0, "batches of a prediction, a number or a fraction", type="int or float")
    overfit_batches: Any = setting(
        0.0, "train and validate on the same batches, a number or a fraction", type="int or float"
    )
    fast_dev_run: Any = setting(False, "one batch of each split, without logs and checkpoints", type="bool or int")
    val_check_interval: Any = setting(
        None, "validate within an epoch, after this number or fraction of batches", type="int or float or null"
    )
    check_val_every_n_epoch: int | None = setting(1, "epochs between validations")
    num_sanity_val_steps: int = setting(0, "validation steps before training")
    log_every_n_steps: int = setting(1, "steps between logged values")
    accumulate_grad_batches: int = setting(1, "batches per optimizer step", least=1)
    gradient_clip_val: float | None = setting(
        None, "bound of the gradients' norm, or of each value; 0 and null: no clipping"
    )
    gradient_clip_algorithm: str | None = setting(
        None, "quantity that `trainer.gradient_clip_val` bounds; null: norm", words=("norm", "value")
    )
    deterministic: Any = setting(None, "torch's switch", type="bool or str or null")
    benchmark: bool | None = setting(None, "torch's switch (cuDNN)")
    reload_dataloaders_every_n_epochs: int = setting(
        0, "epochs after which the data module makes its loaders again; 0: never"
    )
    enable_progress_bar: bool = setting(True, "show the progress line")
    enable_checkpointing: bool = setting(True, "write checkpoints")
    enable_model_summary: bool = setting(False, "print Lightning's table of layers")
    inference_mode: bool = setting(True, "evaluate without autograd")
    detect_anomaly: bool = setting(False, "find the operation that produced a NaN")
    profiler: str | None = setting(None, "Lightning's profiler: `simple` or `advanced`")


@dataclass
class ClusterConfig(Settings):
    """Launcher, keys and rendezvous of a job."""

    group: ClassVar[str] = "cluster"
    kind: str = setting(
        "auto",
        "who starts the ranks, see [launchers](launchers.md): `auto`, `local` (gtrain's own agent), `torchrun`, "
        "`slurm` or `manual`",
    )
    rank: int | None = setting(
        None,
        "`cluster=manual`: this machine's number, from 0 to `trainer.num_nodes` - 1; `serve`: the server's number "
        "within its role, null for the next free one",
    )
    rendezvous: str | None = setting(
        None,
        "meeting point of processes started by hand: `tcp://host:port`, on the machine with `cluster.rank=0`, or "
        "`file:///path` on a shared disk",
    )
    key_file: str | None = setting(
        None, "keys of the job, made by `gtrain key`; a job of several machines needs them, or `cluster.isolated`"
    )
    isolated: bool = setting(
        False,
        "the network is private: a job of several machines uses no keys, and whoever reaches it can join",
    )
    timeout_seconds: float = setting(300.0, "time limit of waiting for the others at the rendezvous", above=0)
    standalone: list[str] = setting(
        [], "roles whose servers are started by hand with `gtrain serve`, and not by the workers' commands"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.isolated and self.key_file is not None:
            raise ConfigError(
                f"cluster.isolated=true and cluster.key_file={self.key_file} were set; a job with keys uses them.",
                hint="leave out one of the two.",
            )
        if self.rank is not None and self.rank < 0:
            raise ConfigError(f"cluster.rank={self.rank} was set; it must be 0 or more.", hint="ranks count from 0.")


@dataclass
class PathsConfig:
    """Folders, relative to the current one."""

    data: str = setting("data", "raw data sets; `data.root` follows it")
    stores: str = setting("data/stores", "partitioned stores; `data.store` follows it", follows="${paths.data}/stores")
    runs: str = setting("runs", "all runs, and `index.txt`, in which `ckpt_path=last` finds them")
    run: str = setting(
        MISSING, "this run; Hydra sets it: change `hydra.run.dir`", follows="${hydra:runtime.output_dir}"
    )


DROPOUT = {
    "exact": "a mask depends on seed, step, layer and row, and not on ranks or partitioning",
    "torch": "torch's own random numbers, which differ from rank to rank",
}


@dataclass
class StrategyConfig(Settings):
    """What every backend's settings have. A backend extends it; more checks go into ``__post_init__``."""

    group: ClassVar[str] = "strategy"
    name: str = setting(MISSING, "entry point of the backend; set by the option")
    timeout_seconds: float = setting(300.0, "time without a heartbeat after which a rank counts as lost", above=0)
    dropout: str = setting("exact", "random numbers of dropout", words=DROPOUT)


def register(*, sweep: bool = False) -> None:
    """Put the schemas of the trainer, the data sources and every backend into Hydra's store, and add our resolver.

    The schemas of strategies let other keys pass, which an experiment made for another strategy may set:
    :func:`fit_strategy` sorts them out when the configuration is composed.

    Args:
        sweep: let the strategies' keys outside of ``strategy`` pass too, for another job of the sweep may have them.
    """
    from gtrain.data import config as data

    register_resolver("gtrain.score", _score)
    register_resolver("gtrain.fan_out", _fan_out)

    store = ConfigStore.instance()
    store.store(group="schema", name="job", node=OmegaConf.create(defaults(JobConfig)))
    store.store(group="schema/trainer", name="trainer", node=schema(TrainerConfig))
    store.store(group="schema/cluster", name="cluster", node=schema(ClusterConfig))
    store.store(group="schema/paths", name="paths", node=schema(PathsConfig))
    data.register()
    usable = backends.usable()
    for name, backend in usable.items():
        store.store(group="schema/strategy", name=name, node=schema(backend.load_config(), flags={"struct": False}))
    shortcuts = [key for backend in usable.values() for key in backend.shortcuts] if sweep else []
    store.store(group="schema", name="shortcuts", node=OmegaConf.create(dict.fromkeys(shortcuts)))


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register or replace a resolver under the name that this release of OmegaConf has for doing so."""
    register = OmegaConf.register_new_resolver
    if not omegaconf.__version__.startswith("2.3."):  # 2.4 renames it; in 2.3 this name is an older function
        register = OmegaConf.register_resolver  # type: ignore[assignment]
    register(name, resolver, replace=True)


def _score(score: str | None, task: str) -> str:
    """Return the metric of the best checkpoint: the model's, or that of its task; ``auto`` needs the labels."""
    return score or ("val/mrr" if task == "link" else "auto")


def _fan_out(layers: Any) -> ListConfig:
    """Neighbours to draw for each of a network's layers, where the user does not say; hops grow fast."""
    count = layers if isinstance(layers, int) and layers > 0 else 2  # what else it is, _check_model refuses
    return OmegaConf.create([15, 10, *[5] * count][:count])


def fit_strategy(
    cfg: DictConfig, typed: Sequence[str] = (), *, sweep: bool = False, experiment: str | None = None
) -> str:
    """Take out of a composed configuration what its strategy lacks, where it was set for another strategy.

    That is what an experiment sets, and what a sweep sets for all of its jobs. What was typed on a single command stays
    a mistake.

    Args:
        cfg: the composed configuration; changed in place.
        typed: keys that the command line sets.
        sweep: whether the job is one of a sweep.
        experiment: the experiment that the job is of.

    Returns:
        One line that lists what was left out; empty: nothing.

    Raises:
        ConfigError: a key that the strategy lacks was set for no other strategy.
    """
    left, name = [], cfg.strategy.name
    backend = backends.get(name)

    def origin(key: str) -> str | None:
        """Who set a key for another strategy; None: a mistake."""
        if key in typed:
            return "the sweep" if sweep else None
        return None if experiment is None else f"experiment={experiment}"

    for key, value in _foreign(cfg, backend):
        source = origin(key)
        if source is None or not messages.strategies_with(key):
            raise messages.unknown_key(cfg, key, value)
        left.append(f"{key}={backends.as_set(value)} ({source})")
    for key, _ in list(_foreign(cfg, backend)):
        _drop(cfg, key)
    for key, limit in backend.serves.violated(settings_of(cfg)).items():
        source = origin(key)
        if source is not None:
            left.append(f"{key}={backends.as_set(plain(OmegaConf.select(cfg, key)))} ({source})")
            OmegaConf.update(cfg, key, limit.allowed[0])
    for key in [key for key, value in cfg.items() if value is None and key in _shortcuts() - {*backend.shortcuts}]:
        _drop(cfg, str(key))
    OmegaConf.set_struct(cfg.strategy, True)
    return f"strategy={name} leaves out settings that it does not serve: {', '.join(left)}" if left else ""


def settings_of(cfg: DictConfig) -> dict[str, Any]:
    """The settings of a composed configuration that strategies have limits for, by key."""
    keys = {key for backend in backends.usable().values() for key in backend.serves.limits} | {"data.task"}
    return {key: plain(OmegaConf.select(cfg, key)) for key in sorted(keys) if _has(cfg, key)}


def _has(cfg: DictConfig, key: str) -> bool:
    group, _, name = key.partition(".")
    return group in cfg and name in cfg[group]


def _foreign(cfg: DictConfig, backend: backends.Backend) -> list[tuple[str, Any]]:
    """Keys and values of a composed configuration that its strategy does not have."""
    fields = backend.load_config().__dataclass_fields__
    own = [(f"strategy.{key}", plain(cfg.strategy[key])) for key in cfg.strategy if key not in fields]
    others = _shortcuts() - {*backend.shortcuts}
    return own + [(key, plain(cfg[key])) for key in sorted(others) if cfg.get(key) is not None]


def _shortcuts() -> set[str]:
    return {key for backend in backends.usable().values() for key in backend.shortcuts}


def _drop(cfg: DictConfig, key: str) -> None:
    group, _, name = key.rpartition(".")
    node = cfg[group] if group else cfg
    with open_dict(node):
        del node[name]


def validate(cfg: DictConfig) -> None:
    """Resolve every interpolation and check every value that can be checked before a process is started.

    Raises:
        ConfigError: what was set, what is allowed, and what to do.
    """
    fit_strategy(cfg)
    _check_keys(cfg)
    _check_seed(cfg)  # other settings refer to it
    try:
        OmegaConf.resolve(cfg)
        missing = sorted(OmegaConf.missing_keys(cfg))
        if not missing:
            OmegaConf.to_object(cfg.strategy)  # runs the dataclass's own checks
            OmegaConf.to_object(cfg.cluster)
            OmegaConf.to_object(cfg.data)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], hint="gtrain --cfg job shows the configuration.") from error
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be set.", hint=f"add {missing[0]}=... to the command.")
    if cfg.verb not in VERBS:
        raise ConfigError(f"verb={cfg.verb} was set.", hint=f"the verbs are {', '.join(VERBS)}.")
    _check_finite(plain(cfg))
    _check_trainer(cfg)
    _check_model(cfg.model)


def _check_keys(cfg: DictConfig) -> None:
    """Refuse keys that nothing reads, at the top and in groups of gtrain's own, unless another setting refers to them.

    Raises:
        ConfigError: lists the keys that there are.
    """
    known = {
        "": {*_top_keys(), *_shortcuts()},
        "cluster": {*defaults(ClusterConfig)},
        "paths": {*defaults(PathsConfig)},
    }
    source = OmegaConf.get_type(cfg.data)
    if (
        dataclasses.is_dataclass(source) and cfg.data.get("_target_") == defaults(source)["_target_"]
    ):  # not a user's own
        known["data"] = {*defaults(source)} - {"_target_"}
    for group, names in known.items():
        for key in map(str, cfg[group] if group else cfg):
            full_key = f"{group}.{key}" if group else key
            text = str(OmegaConf.to_container(cfg, resolve=False))
            if key not in {*names, "_target_"} and not re.search(rf"\$\{{{re.escape(full_key)}[.}}\[]", text):
                raise messages.unknown_key_of(full_key, plain(OmegaConf.select(cfg, full_key)), sorted(names))


@functools.cache
def _top_keys() -> frozenset[str]:
    """The keys of a job: those of :class:`JobConfig`, and the groups that ``conf/config.yaml`` chooses from."""
    content = OmegaConf.create((importlib.resources.files("gtrain.conf") / "config.yaml").read_text())
    chosen = [entry for entry in content.defaults if not isinstance(entry, str)]
    groups = {str(group) for entry in chosen for group, option in entry.items() if option is not None}
    return frozenset({*defaults(JobConfig), *groups})


def _check_finite(node: Any, key: str = "") -> None:
    """Refuse numbers that are infinite or none (NaN): most of them would be taken without a word.

    Raises:
        ConfigError: names the setting.
    """
    if isinstance(node, float) and not math.isfinite(node):
        raise ConfigError(f"{key}={node} was set; it must be a finite number.", hint=f"correct or leave out {key}.")
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        if key or name not in ("callbacks", "logger"):  # theirs may be open ends, such as a threshold
            _check_finite(value, f"{key}.{name}" if key else str(name))


def _check_seed(cfg: DictConfig) -> None:
    try:
        seed = cfg.seed
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], hint="gtrain --cfg job shows the configuration.") from error
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} was set; it must be a whole number from 0 to 2**32 - 1.", hint="set seed=0.")


def _check_trainer(cfg: DictConfig) -> None:
    for key in ("num_nodes", "devices"):
        if cfg.trainer[key] < 1:
            raise ConfigError(
                f"trainer.{key}={cfg.trainer[key]} was set; it must be at least 1.",
                hint="ranks = trainer.num_nodes * trainer.devices.",
            )
    epochs = cfg.trainer.max_epochs
    if epochs is not None and epochs < -1:
        raise ConfigError(
            f"trainer.max_epochs={epochs} was set; it must be -1 (no limit), 0 or more.", hint="set a number of epochs."
        )
    if cfg.trainer.accelerator not in ACCELERATORS:
        raise ConfigError(
            f"trainer.accelerator={cfg.trainer.accelerator} was set; gtrain trains on {', '.join(ACCELERATORS)}.",
            hint="set trainer.accelerator=cpu, or gpu where torch finds one (gtrain doctor says so).",
        )
    clip, algorithm = cfg.trainer.gradient_clip_val, cfg.trainer.gradient_clip_algorithm
    if clip is not None and clip < 0:
        raise ConfigError(
            f"trainer.gradient_clip_val={clip} was set; it must be 0 or more, or null.",
            hint="it bounds the gradients' norm (or each value); 0 and null switch clipping off.",
        )
    if algorithm not in (None, "norm", "value"):
        raise ConfigError(
            f"trainer.gradient_clip_algorithm={algorithm} was set.", hint="set norm (the default) or value."
        )
    if cfg.trainer.accumulate_grad_batches < 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={cfg.trainer.accumulate_grad_batches} was set; it must be at least 1.",
            hint="leave it at 1 to step after every batch.",
        )


def _check_model(model: DictConfig) -> None:
    """Model settings are open, for any network may be named; those that are declared are held to types and limits."""
    for field in dataclasses.fields(NetworkConfig):
        value = OmegaConf.select(model, field.name, default=field.default)
        _check_type(field.name, value, str(field.type))
        check("model", field, value)
    for name in ("lr", "weight_decay"):
        _check_type(f"optimizer.{name}", OmegaConf.select(model, f"optimizer.{name}", default=0.0), "float")
    for key in ("optimizer", "sparse_optimizer"):
        for name in ("lr", "weight_decay"):
            value = OmegaConf.select(model, f"{key}.{name}", default=None)
            if isinstance(value, (int, float)) and value < 0:
                raise ConfigError(
                    f"model.{key}.{name}={value} was set; it must be 0 or more.", hint=f"correct model.{key}.{name}."
                )


_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "None": (type(None),)}


def _check_type(key: str, value: Any, annotation: str) -> None:
    """Refuse a value of another type than an annotation such as ``str | None`` names; ``Any`` is every type."""
    if annotation == "Any":
        return
    types = [one for name in annotation.split(" | ") for one in _TYPES[name]]
    if not isinstance(value, tuple(types)) or isinstance(value, bool):
        wanted = " or ".join(one.__name__ for one in types if one is not type(None))
        raise ConfigError(
            f"model.{key}={value} was set; it must be of type {wanted}, not {type(value).__name__}.",
            hint=f"give model.{key} a value of that type.",
        )


def plain(node: Any) -> Any:
    """A resolved configuration node as dictionaries, lists and values."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
