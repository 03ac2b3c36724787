"""The registry of backends: each one, also gtrain's, is an entry point of the group ``gtrain.backends``.

An entry point names a :class:`Backend` object in the light part of a package. Only the ranks import the heavy part, the
strategy class, and only that of the chosen backend.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from omegaconf import DictConfig

from gtrain.errors import ConfigError
from gtrain.moved import renamed
from gtrain.settings import as_typed

GROUP = "gtrain.backends"
WORKER = "worker"
STOP_SECONDS = 10.0
Number = int | Callable[[DictConfig], int]
"""A number, or a function that returns it from the composed configuration."""


@dataclass(frozen=True)
class Role:
    """One role of a backend's servers, or with the name ``worker`` the restarts of its workers.

    Attributes:
        target: ``package.module:function`` that each server process calls with a
            ``gtrain.strategy.server.ServerContext``. Empty for ``worker``.
        count: servers in the whole job, such as ``lambda cfg: cfg.strategy.servers``; the machines take them in turn.
            Ignored for ``worker``.
        restarts: how many times a dead process is restarted.
        stop_seconds: seconds that a server may take to end when the job is over.
    """

    target: str = ""
    count: Number = 1
    restarts: Number = 0
    stop_seconds: float = STOP_SECONDS


@dataclass(frozen=True)
class RolePlan:
    """A :class:`Role` with the numbers of a resolved configuration.

    Attributes:
        name: the role's name in messages and logs; a plan named ``worker`` only sets the restarts of workers.
        target: ``package.module:function`` that each server process calls with a
            ``gtrain.strategy.server.ServerContext``.
        count: servers in the whole job.
        restarts: how many times a dead process is restarted.
        stop_seconds: seconds that a server may take to end after the request to stop.
        by_hand: whether the servers are started with ``gtrain serve`` instead of by the agent.
    """

    name: str
    target: str = ""
    count: int = 0
    restarts: int = 0
    stop_seconds: float = STOP_SECONDS
    by_hand: bool = False


@dataclass(frozen=True)
class Limit:
    """The values of one setting that a strategy honours.

    Attributes:
        allowed: the honoured values. The first replaces any other value that an experiment or a sweep sets.
        reason: the reason, a clause that follows the strategy's name: "trains on the whole graph at once".
        task: the ``data.task`` that the limit holds for; None: both.
    """

    allowed: tuple[Any, ...]
    reason: str
    task: str | None = None


CPU = {"trainer.accelerator": Limit(("cpu",), "trains on CPUs")}
"""Limit of a strategy that trains on CPUs alone."""
FULL_PRECISION = {
    "trainer.precision": Limit(("32-true", "64-true", "32", "64"), "computes exactly in 32-true and 64-true alone")
}
"""Limit of a strategy that is exact in single and double precision alone."""
BFLOAT16_TOO = {
    "trainer.precision": Limit(
        ("32-true", "64-true", "bf16-mixed", "bf16-true", "32", "64", "bf16"),
        "computes in 32-true, 64-true, bf16-mixed and bf16-true alone",
    )
}
"""Limit of a strategy that also multiplies in bfloat16."""
UNEQUAL_STEPS = {
    key: Limit(allowed, "lets ranks take unequal numbers of steps, which meet at the ends of epochs")
    for key, allowed in {"trainer.val_check_interval": (None, 1.0), "trainer.max_steps": (-1,)}.items()
}
"""Limits of a strategy whose ranks take unequal numbers of steps."""
_SAMPLING = {
    "data.num_neighbors": None,
    "data.replace": False,
    "data.disjoint": False,
    "data.subgraph_type": "directional",
    "data.temporal_strategy": None,
    "data.time_attr": None,
    "data.weight_attr": None,
}


def sampling_limits(reason: str, *, but: Sequence[str] = ()) -> dict[str, Limit]:
    """Return the limits of a strategy that does not sample neighbours, or honours only the settings in ``but``."""
    return {key: Limit((default,), reason) for key, default in _SAMPLING.items() if key not in but}


@dataclass(frozen=True)
class Serves:
    """The models, tasks and settings that a strategy trains exactly.

    Refusals, hints, sweeps and the documentation read this declaration.

    Attributes:
        models: kinds of models, see ``gtrain.model.kinds``; None for all.
        refusal: why the strategy does not train other models, a clause that follows "because".
        tasks: the supported kinds of seeds: ``node``, ``link`` (edges).
        heterogeneous: whether the strategy trains on graphs with several types of nodes or edges.
        needs_table: whether the model must have a table of ``gtrain.nn``, whose rows the strategy stores elsewhere.
        part_per_rank: whether the store must have one part per rank.
        limits: the settings of which the strategy honours some values only, by key.
    """

    models: frozenset[str] | None = None
    refusal: str = "it was not made for it"
    tasks: tuple[str, ...] = ("node",)
    heterogeneous: bool = False
    needs_table: bool = False
    part_per_rank: bool = False
    limits: Mapping[str, Limit] = field(default_factory=dict)

    def check_parts(self, name: str, num_parts: int, ranks: int) -> None:
        """Refuse a store whose number of parts differs from the number of ranks, if the strategy needs them equal.

        Raises:
            ConfigError: names both numbers.
        """
        if self.part_per_rank and num_parts != ranks:
            raise ConfigError(
                f"the store has {num_parts} parts and the job {ranks} ranks; strategy={name} gives each rank one part.",
                hint=f"leave data.num_parts unset: it defaults to the number of ranks; or start {num_parts} ranks.",
            )

    def violated(self, settings: Mapping[str, Any]) -> dict[str, Limit]:
        """Return the limits that the settings violate, by key.

        Args:
            settings: values by key; absent settings are not checked.
        """
        task = settings.get("data.task", "node")
        return {
            key: limit
            for key, limit in self.limits.items()
            if limit.task in (None, task) and key in settings and settings[key] not in limit.allowed
        }


@dataclass(frozen=True)
class Traits:
    """The properties of a model and its data that the choice of a strategy depends on; None if unknown.

    Attributes:
        kind: the kind of the model, see ``gtrain.model.kinds``.
        task: ``node`` or ``link``.
        heterogeneous: whether the graph has several types of nodes or edges.
        has_table: whether the model has a table of ``gtrain.nn``.
    """

    kind: str | None = None
    task: str | None = None
    heterogeneous: bool | None = None
    has_table: bool | None = None

    def refusal(self, serves: Serves) -> str | None:
        """Return a clause that says why a strategy does not train this; None if no known property prevents it."""
        if serves.models is not None and self.kind is not None and self.kind not in serves.models:
            return serves.refusal
        if self.task is not None and self.task not in serves.tasks:
            return f"it predicts {' and '.join(_TASKS[task] for task in serves.tasks)}, not {_TASKS[self.task]}"
        if self.heterogeneous and not serves.heterogeneous:
            return "it takes graphs with one type of nodes and one of edges"
        if serves.needs_table and self.has_table is False:
            return "it keeps tables of gtrain.nn on servers, and this model has none on this data"
        return None


_TASKS = {"node": "labels of nodes", "link": "edges"}


@dataclass(frozen=True)
class Backend:
    """The declaration of a backend, which the framework reads without importing its strategy.

    Attributes:
        description: one line for ``gtrain --help``.
        config: ``package.module:Class``, the dataclass that types and checks the ``strategy`` group. It must import
            the standard library, omegaconf, ``gtrain.config``, ``gtrain.settings`` and ``gtrain.errors`` only.
        strategy: ``package.module:Class``, the subclass of ``GraphStrategy``.
        conf: the package that contains ``strategy/<name>.yaml``.
        serves: what the strategy trains; the strategy class has the same object as ``serves``.
        roles: the roles of its servers by name; ``worker`` sets the restarts of its workers.
        store: ``package.module:function`` beside ``config``. It takes the composed configuration as a dictionary and
            returns settings of the job's store, which override those of ``data``: ``num_parts``, ``partitioner``, and
            ``buckets`` (see ``gtrain.graph.store``). Empty: the settings of ``data``, and one part per rank.
        parts_key: the setting that determines the store's number of parts, for messages.
        table_reader: ``package.module:function`` that locates the rows of a table in a checkpoint of this backend
            (``gtrain.strategy.checkpoint.SavedRows``). It takes the checkpoint's folder, the layer's name and its
            ``TableSpec``. Empty: the rows are in the module's state.
        shortcuts: keys outside of ``strategy`` that its YAML file adds to the configuration.
        gpu: what runs on a GPU with ``trainer.accelerator=gpu``, a clause for ``gtrain doctor``; empty: unknown, or
            nothing.
        less_memory: what reduces the memory that a rank needs on its device, clauses in the imperative, the most
            effective first; for the message of a rank that ran out of it.
        planner: ``package.module:Class``, the subclass of ``gtrain.plan.estimate.Planner`` with the formulas of memory,
            bytes and seconds, for ``gtrain plan`` and ``strategy=auto``. Empty: its row has no numbers, and
            ``strategy=auto`` never takes it.
    """

    description: str
    config: str
    strategy: str
    conf: str
    serves: Serves = field(default_factory=Serves)
    roles: Mapping[str, Role] = field(default_factory=dict)
    store: str = ""
    parts_key: str = "data.num_parts"
    table_reader: str = ""
    shortcuts: tuple[str, ...] = ()
    gpu: str = ""
    less_memory: tuple[str, ...] = ()
    planner: str = ""

    def load_table_reader(self) -> Callable[..., Any] | None:
        """Import the function of :attr:`table_reader`, and torch with it; None if the attribute is empty."""
        return load(self.table_reader) if self.table_reader else None

    def load_planner(self) -> Any:
        """Import and make the object of :attr:`planner`; None if the attribute is empty."""
        return load(self.planner)() if self.planner else None

    def store_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of :attr:`store`; empty if the attribute is empty.

        Raises:
            ConfigError: the settings of the data contradict those of the strategy.
        """
        return dict(load(self.store)(config)) if self.store else {}

    def load_config(self) -> type[Any]:
        """Import the configuration dataclass."""
        return load(self.config)

    def load_strategy(self) -> type[Any]:
        """Import the strategy class, and torch with it."""
        return load(self.strategy)

    @property
    def server_roles(self) -> list[str]:
        """Names of the roles that have servers."""
        return [name for name in self.roles if name != WORKER]

    def plan(self, cfg: DictConfig) -> tuple[RolePlan, ...]:
        """Return the roles with the numbers of a resolved configuration, without the roles that have no servers.

        Raises:
            ConfigError: a number is below 0, or ``cluster.standalone`` names an unknown role.
        """
        by_hand = list(cfg.cluster.standalone)
        for name in by_hand:
            check_role(cfg.strategy.name, self, name, "cluster.standalone")
        plans = [_plan(name, role, cfg, name in by_hand) for name, role in self.roles.items()]
        return tuple(plan for plan in plans if plan.name == WORKER or plan.count)


__getattr__ = renamed(__name__, {"Installed": "InstalledBackends"})


class InstalledBackends(dict[str, EntryPoint]):
    """Entry points by the name that ``strategy=`` takes, in alphabetical order.

    Attributes:
        outdated: folders with metadata of a distribution that is installed with other entry points.
    """

    outdated: list[str]


@cache
def installed() -> InstalledBackends:
    """Collect the entry points of all distributions.

    A folder on the path may contain stale metadata of a distribution that is installed elsewhere, such as a
    ``gtrain.egg-info`` of an older build in the current folder, and ``importlib.metadata`` would read the first copy
    only. Here an installed copy (with a RECORD) precedes a source tree, and the other copies add only entry points that
    can be imported.
    """
    copies: dict[str, list[Distribution]] = {}
    for distribution in distributions():
        if distribution.entry_points.select(group=GROUP):
            name = re.sub("[-_.]+", "-", distribution.metadata["Name"].lower())
            copies.setdefault(name, []).append(distribution)
    points: list[EntryPoint] = []
    outdated = []
    for distributions_of_name in copies.values():
        current, *others = sorted(
            distributions_of_name, key=lambda distribution: distribution.read_text("RECORD") is None
        )
        merged = {point.name: point for point in current.entry_points.select(group=GROUP)}
        values = {point.name: point.value for point in merged.values()}
        for other in others:
            other_points = {point.name: point for point in other.entry_points.select(group=GROUP)}
            if {point.name: point.value for point in other_points.values()} != values:
                outdated.append(os.path.abspath(str(other.locate_file(""))))
            merged = {name: point for name, point in other_points.items() if _is_importable(point)} | merged
        points += merged.values()
    result = InstalledBackends((point.name, point) for point in sorted(points, key=lambda point: point.name))
    result.outdated = list(dict.fromkeys(outdated))  # a folder may be on the path twice
    return result


def _is_importable(point: EntryPoint) -> bool:
    try:
        return importlib.util.find_spec(point.module.partition(".")[0]) is not None
    except ValueError:
        # A module in sys.modules without a spec, created by a program.
        return True


def get(name: str) -> Backend:
    """Return the backend of this name.

    Raises:
        ConfigError: the backend is not installed, or cannot be imported.
    """
    if name not in installed():
        raise ConfigError(
            f"strategy={name} was set, and no such strategy is installed.",
            hint=f"the installed strategies are {', '.join(installed())}.",
        )
    try:
        backend = installed()[name].load()
    except Exception as error:
        raise ConfigError(
            f"strategy={name} cannot be used: importing {installed()[name].value} failed with "
            f"{type(error).__name__}: {error}",
            hint="reinstall the package that provides it.",
        ) from error
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"the entry point {name} = {installed()[name].value} is not a gtrain.backends.Backend.",
            hint="name the Backend object of the package in the entry point.",
        )
    return backend


def usable() -> dict[str, Backend]:
    """Return the backends that can be imported, by name; choosing one of the others raises the error."""
    backends = {}
    for name in installed():
        with contextlib.suppress(ConfigError):
            backends[name] = get(name)
    return backends


def descriptions() -> str:
    """Return one line per strategy, for ``gtrain --help``."""
    lines = []
    for name in installed():
        try:
            text = get(name).description
        except ConfigError as error:
            text = f"(cannot be imported) {error.message}"
        lines.append(f"  {name:<12} {text}")
    return "\n".join(lines)


def check_role(strategy: str, backend: Backend, role: str, key: str = "role") -> Role:
    """Return the backend's role of this name.

    Raises:
        ConfigError: the backend has no such role of servers; lists its roles.
    """
    if role in backend.server_roles:
        return backend.roles[role]
    if not backend.server_roles:
        others = [name for name, other in usable().items() if other.server_roles]
        raise ConfigError(
            f"{key}={role} was set; strategy={strategy} has no servers.",
            hint=f"strategies with servers: {', '.join(others) or 'none is installed'}.",
        )
    raise ConfigError(
        f"{key}={role} was set; the servers of strategy={strategy} are {', '.join(backend.server_roles)}.",
        hint=f"choose one of these, such as {key}={backend.server_roles[0]}.",
    )


def _plan(name: str, role: Role, cfg: DictConfig, by_hand: bool) -> RolePlan:
    numbers = {}
    for key, number in (("count", role.count), ("restarts", role.restarts)):
        numbers[key] = number(cfg) if callable(number) else number
        if not isinstance(numbers[key], int) or numbers[key] < 0:
            raise ConfigError(
                f"strategy={cfg.strategy.name} sets {key}={numbers[key]} for its role {name}; it must be 0 or more.",
                hint="gtrain --cfg job --package strategy shows the settings that determine this number.",
            )
    return RolePlan(name, role.target, stop_seconds=role.stop_seconds, by_hand=by_hand, **numbers)


def serving(traits: Traits, settings: Mapping[str, Any] | None = None) -> list[str]:
    """Return the names of the strategies that train a model on its data.

    Args:
        traits: the properties of the model and the data.
        settings: values that the user chose, by key; strategies that do not honour one of them are omitted.
    """
    return [
        name
        for name, backend in usable().items()
        if traits.refusal(backend.serves) is None and not backend.serves.violated(settings or {})
    ]


def not_served(name: str, model: str, traits: Traits, reason: str, others: Sequence[str]) -> ConfigError:
    """Return the error for a model, or data, that a strategy does not train.

    Args:
        name: the strategy.
        model: what messages call the model.
        traits: the properties of the model and the data.
        reason: see :meth:`Traits.refusal`.
        others: names of the strategies that train it.
    """
    kind = f" (kind: {traits.kind})" if traits.kind else ""
    return ConfigError(
        f"strategy={name} does not serve {model}{kind}: {reason}. "
        f"Strategies that do: {', '.join(others) or 'none of those installed, with these settings'}.",
        hint=f"set strategy={others[0]}, or choose another model." if others else "choose another model.",
    )


def not_honoured(
    name: str, key: str, limits: Mapping[str, Limit], settings: Mapping[str, Any], others: Sequence[str] = ()
) -> ConfigError:
    """Return the error for a setting that a strategy does not honour.

    Args:
        name: the strategy.
        key: the key of the setting.
        limits: the strategy's limits by key.
        settings: values by key.
        others: names of the strategies that honour the setting.
    """
    limit = limits[key]
    advice = f"leave {key} out, or set {key}={as_typed(limit.allowed[0])}"
    advice += f"; or choose strategy={' or '.join(others)}" if others else ""
    return ConfigError(f"{key}={as_typed(settings[key])} was set; strategy={name} {limit.reason}.", hint=f"{advice}.")


def load(path: str) -> Any:
    """Import an object from its path, ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
