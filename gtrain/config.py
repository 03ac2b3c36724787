"""The typed part of the configuration, and the checks that need no torch."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
import re
from collections.abc import Callable, Mapping, Sequence
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
from gtrain.settings import Settings, as_typed, check, defaults, names_of, nested, schema, setting

VERBS = {
    "train": "fit, then test with the best checkpoint (the default)",
    "test": "test a checkpoint: test run=FOLDER, or ckpt_path=best unless set",
    "predict": "write the predictions of a checkpoint for every node to output=: predict run=FOLDER, or ckpt_path=best",
    "export": "write the embedding of every node by name (format=npy, parquet, tsv or pbg_hdf5) to output=",
    "partition": "make the partitioned store and print edge cut, halo sizes and balance",
    "schema": "print what becomes of each column of data=tables (format=json for programs)",
    "score": "print the best answers of a model=kg by name: score run=FOLDER 'HEAD,RELATION,?' [k=N] [filtered=true]",
    "neighbors": "print the nearest entities of a model=kg by name: neighbors run=FOLDER NAME... [k=N] [index=FILE]",
    "plan": "print what every strategy would cost with these settings, and recommend one; trains nothing",
    "serve": "start one server of role= by hand, at cluster.rendezvous=",
    "key": "make the file cluster.key_file=, with which a job's processes authenticate each other on a network",
    "explain": "print what settings mean: explain KEY, GROUP=OPTION or GROUP, as data.split, strategy=single, trainer",
    "runs": "list runs with their scores and how they ended: runs [FOLDER] [limit=N] [format=json]",
    "report": "write an HTML page of a run, or a comparison: report RUN... [output=FILE] [files=svg]",
    "trace": "merge the spans of all ranks and servers of a run with debug=profile, for ui.perfetto.dev: trace RUN",
    "watch": "show a run in progress, also one that others started, until it ends: watch RUN",
    "doctor": "print the capabilities and problems of this machine and installation (format=json for programs)",
}

PREPARING = ("partition", "schema")
"""The verbs of which one process of one machine does all."""
APPLYING = ("test", "predict", "export")
"""The verbs that apply a checkpoint."""
VERBS_WITH_WORDS = ("explain", "neighbors", "report", "runs", "score", "trace", "watch")
"""Verbs that are followed by words: topics, folders of runs, names, or questions."""

VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
"""Keyword arguments of Hydra's entry points; releases after 1.3 deprecate the keyword and always behave so."""


ACCELERATORS = ("cpu", "gpu", "cuda", "auto")
_RANKS = "ranks = trainer.num_nodes * trainer.devices."


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
        "`last` or `best` of the newest run with equal data, model and strategy, a path, or an address such as "
        "`s3://bucket/prefix/last.ckpt`; `train` resumes from it, "
        "`test` and `predict` read it",
    )
    run: str | None = setting(
        None,
        "folder of an earlier run, or `last`, the newest with a checkpoint: all settings are those of [that run]"
        "(runs.md), except those on the command line; `train` goes on from its last checkpoint, `test`, `predict` and "
        "`export` read its best one, `ckpt_path` names another",
    )
    output: str | None = setting(
        None,
        "`predict`, `export`: the file to write, which must not exist yet; null: `predictions.<format>` or "
        "`embeddings.<format>` in the run's folder",
    )
    format: str | None = setting(
        None,
        "format of `output`; null: the ending of `output`, or else `npy`",
        words={
            "npy": "one row per node, in the order of the source data's ids",
            "parquet": "columns `id` (the name, if nodes have names), `values` and, for scores of classes, "
            "`prediction`",
            "tsv": "`export`: a name and its values on each line, see [pbg](pbg.md#evaluation-and-checkpoints)",
            "pbg_hdf5": "`export`: PyTorch-BigGraph's files, see [pbg](query.md#in-pytorch-biggraph)",
        },
    )
    allow_targets: list[str] = setting(
        [],
        "packages, modules or classes that files may name as `_target_`, in addition to "
        "[the allowed ones](configuration.md#code-that-a-file-names)",
    )
    explain: bool = setting(False, "`plan`: print the formulas with their numbers")
    embeddings: bool = setting(False, "`predict`: write the input of the network's last layer instead of scores")
    correct_and_smooth: Any = setting(
        False,
        "`predict`, in one process: correct the scores of classes by the labels of training nodes, see "
        "[models](models.md#correct-and-smooth); a dictionary sets arguments of PyG's `CorrectAndSmooth`",
        type="bool or dict",
    )
    report: bool = setting(False, "`train`, `test`: write [the report](report.md) of the run at its end")


@dataclass
class TrainerConfig:
    """Arguments of Lightning's Trainer that a job may set; ``num_nodes`` * ``devices`` ranks."""

    accelerator: str = setting(
        "cpu",
        "device of the tensors: `cpu`, or [`gpu`](launchers.md#gpus)",
        words=ACCELERATORS,
        hint="gtrain trains on cpu, gpu, cuda and auto; gtrain doctor says whether torch finds a GPU.",
    )
    num_nodes: int = setting(1, "machines; strategies set their own defaults", least=1, hint=_RANKS)
    devices: int = setting(1, "ranks on each machine", least=1, hint=_RANKS)
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
        None, "bound of the gradients' norm, or of each value; 0 and null: no clipping", least=0
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
        "the launcher of the ranks, see [launchers](launchers.md): `auto`, `local` (gtrain's agent), `torchrun`, "
        "`mpi`, `slurm`, `kubernetes`, `manual` or `ray`",
    )
    rank: int | None = setting(
        None,
        "`cluster=manual`: this machine's number, from 0 to `trainer.num_nodes` - 1; `serve`: the server's number "
        "within its role, null for the next free one",
    )
    rendezvous: str | None = setting(
        None,
        "meeting point of processes started by hand, of pods, and of several machines with `cluster=mpi`: "
        "`tcp://host:port`, on the machine with `cluster.rank=0` or of rank 0, or `file:///path` on a shared disk",
    )
    key_file: str | None = setting(
        None,
        "keys of the job, from `gtrain key`; a job of several machines needs them, or `cluster.isolated`",
        path=True,
    )
    isolated: bool = setting(
        False,
        "the network is private: a job of several machines uses no keys, and whoever reaches it can join",
    )
    timeout_seconds: float = setting(
        300.0, "time limit of waiting for the others at the rendezvous, or for the resources of a Ray cluster", above=0
    )
    max_restarts: int = setting(
        0,
        "times that the whole job restarts from its last checkpoint after a rank was killed or fell silent; with "
        "`cluster=local` and `cluster=ray`",
        least=0,
    )
    grace_seconds: float = setting(
        20.0,
        "time limit of the checkpoint that the ranks save after SIGTERM, before they are killed; by gtrain's agent",
        least=0,
    )
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
class RayClusterConfig(ClusterConfig):
    """Resources of the actors of a Ray job, and the cluster that provides them."""

    address: str | None = setting(
        None,
        "address of the Ray cluster, as `host:6379`; null: `RAY_ADDRESS`, or a cluster that the command starts on its "
        "machine and ends with the job",
    )
    placement: str = setting(
        "SPREAD",
        "nodes of the cluster that the machines of the job are on; a machine is a bundle of one placement group",
        words={
            "SPREAD": "different nodes as far as possible",
            "STRICT_SPREAD": "different nodes",
            "PACK": "as few nodes as possible",
            "STRICT_PACK": "one node",
        },
    )
    first_machine: str = setting(
        "any",
        "node of machine 0, which reads the data and writes the run's folder",
        words={"any": "as `cluster.placement` says", "command": "the node on which the command runs"},
    )
    cpus_per_rank: float | None = setting(
        None,
        "CPUs that Ray reserves for each rank, which uses as many threads; null: it reserves one, and ranks share the "
        "cores of their node evenly",
        above=0,
    )
    cpus_per_server: float = setting(1.0, "CPUs that Ray reserves for each server", above=0)
    gpus_per_rank: float | None = setting(
        None, "GPUs that Ray reserves for each rank; null: 1 with `trainer.accelerator=gpu`, else 0", least=0
    )
    memory_per_rank: int | None = setting(None, "memory in bytes that Ray reserves for each rank", least=1)
    memory_per_server: int | None = setting(None, "memory in bytes that Ray reserves for each server", least=1)
    resources_per_rank: dict[str, float] = setting({}, "custom resources of Ray that each rank needs, by name")
    resources_per_server: dict[str, float] = setting({}, "custom resources of Ray that each server needs, by name")
    environment: list[str] = setting(
        [], "names of environment variables of the command that ranks and servers need, besides those of gtrain"
    )


@dataclass
class PathsConfig:
    """Folders, relative to the current one."""

    data: str = setting("data", "raw data sets; `data.root` follows it", path=True)
    stores: str = setting(
        "data/stores", "partitioned stores; `data.store` follows it", follows="${paths.data}/stores", path=True
    )
    runs: str = setting("runs", "all runs, and `index.txt`, in which `ckpt_path=last` finds them")
    run: str = setting(
        MISSING, "this run; Hydra sets it: change `hydra.run.dir`", follows="${hydra:runtime.output_dir}"
    )


@dataclass
class PlanConfig(Settings):
    """Settings of ``gtrain plan``, and of ``strategy=auto``, see [plan](plan.md)."""

    group: ClassVar[str] = "plan"
    machine: str | None = setting(
        None,
        "file that describes a [machine](plan.md#machines), of which a job has `trainer.num_nodes`; null: this one",
        path=True,
    )
    memory: float | None = setting(
        None, "memory that the job may use on a machine, if that is less than the machine has", above=0, unit="bytes"
    )
    least: bool = setting(False, "also print the smallest number of machines on which each strategy fits")
    prepare: bool = setting(
        True, "prepare the store if the data have none, so that edge cut and halo are counted, and not assumed"
    )
    cut: float = setting(
        0.25, "assumed fraction of the edges between different parts, for data without a store", least=0, most=1
    )
    chosen: str | None = setting(None, "what `strategy=auto` chose; the command sets it")
    format: str = setting(
        "table", "what is printed; `plan.json` in the run's folder has all of it", words=("table", "json")
    )


DROPOUT = {
    "exact": "a mask depends on seed, step, layer and row, and not on ranks or partitioning",
    "torch": "torch's own random numbers, which differ from rank to rank",
}


LAYERS = {
    "auto": "known convolutions by compiled kernels, to rounding the same results; others as PyG wrote them",
    "plain": "all as PyG wrote them",
}


@dataclass
class StrategyConfig(Settings):
    """The settings of every backend. A backend extends this class, and adds checks in ``__post_init__``."""

    group: ClassVar[str] = "strategy"
    name: str = setting(MISSING, "entry point of the backend; set by the option")
    timeout_seconds: float = setting(300.0, "time without a heartbeat after which a rank counts as lost", above=0)
    dropout: str = setting("exact", "random numbers of dropout", words=DROPOUT)


AUTO = "auto"
"""The value of ``strategy`` that leaves the choice to the plan."""


@dataclass
class AutoConfig(StrategyConfig):
    """The strategy that `gtrain plan` recommends for these settings, chosen before ranks start."""

    race_seconds: float = setting(
        0.0,
        "time for which each of the two best strategies trains; the one with the better validation score then goes on "
        "from its checkpoint; 0: no race, the plan decides",
        least=0,
        unit="seconds",
    )


AUTO_SETTINGS = tuple({*defaults(AutoConfig)} - {*defaults(StrategyConfig)})
"""Settings of ``strategy=auto`` that other strategies lack."""


def register(*, sweep: bool = False) -> None:
    """Register the schemas of the trainer, the data sources and every backend, and gtrain's resolvers, with Hydra.

    The schemas of strategies accept unknown keys, because an experiment for another strategy may set them.
    :func:`fit_strategy` removes or refuses them when the configuration is composed.

    Args:
        sweep: accept every strategy's shortcuts, because another job of the sweep may use them.
    """
    from gtrain.data import config as data

    register_resolver("gtrain.score", _score)
    register_resolver("gtrain.fan_out", _fan_out)

    store = ConfigStore.instance()
    # Hydra copies the whole store for each configuration that it composes, and then each node that it loads.
    store.__deepcopy__ = lambda memo: store  # type: ignore[attr-defined]
    store.store(group="schema", name="job", node=OmegaConf.create(defaults(JobConfig)))
    store.store(group="schema/trainer", name="trainer", node=schema(TrainerConfig))
    store.store(group="schema/cluster", name="cluster", node=schema(ClusterConfig))
    store.store(group="schema/cluster", name="ray", node=schema(RayClusterConfig))
    store.store(group="schema/plan", name="plan", node=schema(PlanConfig))
    store.store(group="schema/paths", name="paths", node=schema(PathsConfig))
    data.register()
    usable = backends.usable()
    for name, backend in usable.items():
        store.store(group="schema/strategy", name=name, node=schema(backend.load_config(), flags={"struct": False}))
    store.store(group="schema/strategy", name=AUTO, node=schema(AutoConfig, flags={"struct": False}))
    shortcuts = [key for backend in usable.values() for key in backend.shortcuts] if sweep else []
    store.store(group="schema", name="shortcuts", node=OmegaConf.create(dict.fromkeys(shortcuts)))


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register or replace a resolver, with any release of OmegaConf."""
    register = OmegaConf.register_new_resolver
    if not omegaconf.__version__.startswith("2.3."):
        # OmegaConf 2.4 renames this function; in 2.3 the new name belongs to an older one.
        register = OmegaConf.register_resolver  # type: ignore[assignment]
    register(name, resolver, replace=True)


def _score(score: str | None, task: str) -> str:
    """Return the metric of the best checkpoint: the model's, or that of its task; ``auto`` needs the labels."""
    return score or ("val/mrr" if task == "link" else "auto")


def _fan_out(layers: Any) -> ListConfig:
    """Return the default fan-out of a network with this number of layers."""
    count = layers if isinstance(layers, int) and layers > 0 else 2  # _check_model refuses other values
    return OmegaConf.create([15, 10, *[5] * count][:count])


def fit_strategy(
    cfg: DictConfig,
    typed: Sequence[str] = (),
    *,
    sweep: bool = False,
    experiment: str | None = None,
    setter: str = "the sweep",
    inherited: Mapping[str, str] | None = None,
) -> str:
    """Remove from a composed configuration the settings for other strategies.

    An experiment may set them, and a sweep sets them for all of its jobs. On the command line of a single job they are
    a mistake.

    Args:
        cfg: the composed configuration; changed in place.
        typed: keys that the command line sets.
        sweep: whether the job is one of a sweep.
        experiment: the experiment of the job.
        setter: what sets keys for several strategies, for the line that lists them.
        inherited: what set the keys that come from an earlier run.

    Returns:
        One line that lists the removed settings; empty if nothing was removed.

    Raises:
        ConfigError: a key is unknown to the strategy, and no sweep, run or experiment sets it for another one.
    """
    removed, name = [], cfg.strategy.name
    backend = backends.get(name)

    def origin(key: str) -> str | None:
        """Return the sweep, run or experiment that set a key for another strategy; None if the key is a mistake."""
        if key in (inherited or {}):
            return (inherited or {})[key]
        if key in typed:
            return setter if sweep else None
        return None if experiment is None else f"experiment={experiment}"

    for key, value in _foreign(cfg, backend):
        source = origin(key)
        if source is None or not messages.strategies_with(key):
            raise messages.unknown_key(cfg, key, value)
        removed.append(f"{key}={as_typed(value)} ({source})")
        _drop(cfg, key)
    for key, limit in backend.serves.violated(settings_of(cfg)).items():
        source = origin(key)
        if source is not None:
            removed.append(f"{key}={as_typed(plain(OmegaConf.select(cfg, key)))} ({source})")
            OmegaConf.update(cfg, key, limit.allowed[0])
    for key in [key for key, value in cfg.items() if value is None and key in _shortcuts() - {*backend.shortcuts}]:
        _drop(cfg, str(key))
    OmegaConf.set_struct(cfg.strategy, True)
    return f"strategy={name} leaves out settings that it does not serve: {', '.join(removed)}" if removed else ""


def settings_of(cfg: DictConfig) -> dict[str, Any]:
    """Return the settings of a composed configuration for which strategies have limits, by key."""
    keys = {key for backend in backends.usable().values() for key in backend.serves.limits} | {"data.task"}
    return {key: plain(OmegaConf.select(cfg, key)) for key in sorted(keys) if _has(cfg, key)}


def _has(cfg: DictConfig, key: str) -> bool:
    group, _, name = key.partition(".")
    return group in cfg and name in cfg[group]


def _foreign(cfg: DictConfig, backend: backends.Backend) -> list[tuple[str, Any]]:
    """Return the keys and values of a composed configuration that its strategy lacks."""
    names = names_of(backend.load_config())
    unknown = [(f"strategy.{key}", plain(cfg.strategy[key])) for key in cfg.strategy if key not in names]
    shortcuts = _shortcuts() - {*backend.shortcuts}
    return unknown + [(key, plain(cfg[key])) for key in sorted(shortcuts) if cfg.get(key) is not None]


def _shortcuts() -> set[str]:
    return {key for backend in backends.usable().values() for key in backend.shortcuts}


def _drop(cfg: DictConfig, key: str) -> None:
    group, _, name = key.rpartition(".")
    node = cfg[group] if group else cfg
    with open_dict(node):
        del node[name]


def validate(cfg: DictConfig) -> None:
    """Resolve every interpolation, and check every value that can be checked before a process starts.

    Raises:
        ConfigError: a setting is unknown, missing, or not allowed.
    """
    fit_strategy(cfg)
    _check_keys(cfg)
    try:
        _check_seed(cfg.seed)  # other settings refer to it
        OmegaConf.resolve(cfg)
        missing = sorted(OmegaConf.missing_keys(cfg))
        if not missing:
            OmegaConf.to_object(cfg.strategy)  # runs the dataclass's own checks
            OmegaConf.to_object(cfg.cluster)
            OmegaConf.to_object(cfg.plan)
            OmegaConf.to_object(cfg.data)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], hint="gtrain --cfg job shows the configuration.") from error
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be set.", hint=f"add {missing[0]}=... to the command.")
    if cfg.verb not in VERBS:
        raise ConfigError(f"verb={cfg.verb} was set.", hint=f"the verbs are {', '.join(VERBS)}.")
    _check_finite(plain(cfg))
    for field in dataclasses.fields(TrainerConfig):
        check("trainer", field, cfg.trainer[field.name])
    _check_model(cfg.model)


def _check_keys(cfg: DictConfig) -> None:
    """Refuse unknown keys at the top and in gtrain's groups, unless another setting refers to them.

    Raises:
        ConfigError: a key is unknown; lists the known keys.
    """
    known = {
        "": {*_top_keys(), *_shortcuts()},
        "cluster": {*defaults(RayClusterConfig if cfg.cluster.get("kind") == "ray" else ClusterConfig)},
        "paths": {*defaults(PathsConfig)},
        "plan": {*defaults(PlanConfig)},
    }
    source = OmegaConf.get_type(cfg.data)
    declared = defaults(source) if dataclasses.is_dataclass(source) else {}  # empty for a user's data module
    if "_target_" in declared and cfg.data.get("_target_") == declared["_target_"]:
        known["data"] = {*declared} - {"_target_"}
    for group, names in known.items():
        for key in map(str, cfg[group] if group else cfg):
            if key in {*names, "_target_"}:
                continue
            full_key = f"{group}.{key}" if group else key
            text = str(OmegaConf.to_container(cfg, resolve=False))
            if not re.search(rf"\$\{{{re.escape(full_key)}[.}}\[]", text):
                raise messages.unknown_key_of(full_key, plain(OmegaConf.select(cfg, full_key)), sorted(names))


@functools.cache
def _top_keys() -> frozenset[str]:
    """Return the keys of a job: those of :class:`JobConfig`, and the groups in the defaults of ``conf/config.yaml``."""
    content = OmegaConf.create((importlib.resources.files("gtrain.conf") / "config.yaml").read_text())
    chosen = [entry for entry in content.defaults if not isinstance(entry, str)]
    groups = {str(group) for entry in chosen for group, option in entry.items() if option is not None}
    return frozenset({*defaults(JobConfig), *groups})


def _check_finite(config: dict[str, Any]) -> None:
    """Refuse NaN and infinity, most of which would be accepted without an error.

    Raises:
        ConfigError: names the setting.
    """
    for key, value in nested(config):
        in_open_group = key.partition(".")[0] in ("callbacks", "logger")  # their thresholds may be infinite
        if not in_open_group and isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"{key}={value} was set; it must be a finite number.", hint=f"correct or leave out {key}."
            )


def _check_seed(seed: Any) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} was set; it must be a whole number from 0 to 2**32 - 1.", hint="set seed=0.")


def _check_model(model: DictConfig) -> None:
    """Check the declared settings of a model; a network may have others, which nothing here knows."""
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
    """Refuse a value that does not match an annotation such as ``str | None``; ``Any`` matches every type."""
    if annotation == "Any":
        return
    types = [type_ for name in annotation.split(" | ") for type_ in _TYPES[name]]
    if not isinstance(value, tuple(types)) or isinstance(value, bool):
        expected = " or ".join(type_.__name__ for type_ in types if type_ is not type(None))
        raise ConfigError(
            f"model.{key}={value} was set; it must be of type {expected}, not {type(value).__name__}.",
            hint=f"give model.{key} a value of that type.",
        )


def key_of(override: str) -> str:
    """Return the key that an override sets."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def shape_of(cfg: DictConfig) -> tuple[int, int]:
    """Return the machines of a command, and the processes of each."""
    return (1, 1) if cfg.verb in PREPARING else (cfg.trainer.num_nodes, cfg.trainer.devices)


def plain(node: Any) -> Any:
    """Return a configuration node as resolved dictionaries, lists and values."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
