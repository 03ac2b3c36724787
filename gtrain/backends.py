"""Finding backends: every one, ours included, is an entry point of the group ``gtrain.backends``.

An entry point names a :class:`Backend` object in the light part of a package; the heavy part (its strategy class) is
imported in the ranks, and only for the backend that was chosen.
"""

from __future__ import annotations

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

GROUP = "gtrain.backends"
WORKER = "worker"
STOP_SECONDS = 10.0
Number = int | Callable[[DictConfig], int]
"""A number, or a function that reads it out of the composed configuration."""


@dataclass(frozen=True)
class Role:
    """Processes that a backend has beside its workers; under the name ``worker``: the workers themselves.

    Attributes:
        target: ``package.module:function``, what a server runs; called with a ``gtrain.strategy.server.ServerContext``
            in a process of its own. Empty for ``worker``.
        count: servers in the whole job, such as ``lambda cfg: cfg.strategy.servers``; they are dealt to the machines in
            order. Ignored for ``worker``.
        restarts: how many times one of them is restarted after it died.
        stop_seconds: how long a server may take to end when the job is over.
    """

    target: str = ""
    count: Number = 1
    restarts: Number = 0
    stop_seconds: float = STOP_SECONDS


@dataclass(frozen=True)
class RolePlan:
    """A :class:`Role` with the numbers that a configuration gives it.

    Attributes:
        name: what messages and logs call it; ``worker`` only says how often a worker is restarted.
        target: ``package.module:function`` that a server runs, given a ``gtrain.strategy.server.ServerContext``.
        count: servers in the whole job.
        restarts: how many times one of them is restarted after it died.
        stop_seconds: how long a server may take to end once it is asked to.
        by_hand: whether someone starts them with ``gtrain serve``, and the agent does not.
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
        allowed: these values. The first replaces any other that an experiment or a sweep sets.
        reason: why no other, a clause that follows the strategy's name: "trains on the whole graph at once".
        task: the limit holds for this ``data.task`` alone; None: for both.
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
    """Limits of a strategy that does not draw neighbours, or honours only the settings ``but`` of sampling."""
    return {key: Limit((default,), reason) for key, default in _SAMPLING.items() if key not in but}


@dataclass(frozen=True)
class Serves:
    """What a strategy trains exactly: the one declaration that refusals, hints, sweeps and the documentation read.

    Attributes:
        models: kinds of models, see ``gtrain.model.kinds``; None for all.
        refusal: why it does not train others, a clause that follows "because".
        tasks: what the seeds of its batches may be: ``node``, ``link`` (edges).
        heterogeneous: whether it trains on graphs with several types of nodes or edges.
        needs_table: whether the model must have a table of ``gtrain.nn``, whose rows the strategy keeps elsewhere.
        part_per_rank: whether the store must have one part for each rank.
        limits: settings of which it honours some values only, by their key.
    """

    models: frozenset[str] | None = None
    refusal: str = "it was not made for it"
    tasks: tuple[str, ...] = ("node",)
    heterogeneous: bool = False
    needs_table: bool = False
    part_per_rank: bool = False
    limits: Mapping[str, Limit] = field(default_factory=dict)

    def check_parts(self, name: str, num_parts: int, ranks: int) -> None:
        """Refuse a store whose number of parts does not suit the number of ranks.

        Raises:
            ConfigError: with both numbers.
        """
        if self.part_per_rank and num_parts != ranks:
            raise ConfigError(
                f"the store has {num_parts} parts and the job {ranks} ranks; strategy={name} gives each rank one part.",
                hint=f"leave data.num_parts unset: it defaults to the number of ranks; or start {num_parts} ranks.",
            )

    def violated(self, settings: Mapping[str, Any]) -> dict[str, Limit]:
        """The limits that settings break, by key.

        Args:
            settings: values by key; settings without a value here are not checked.
        """
        task = settings.get("data.task", "node")
        return {
            key: limit
            for key, limit in self.limits.items()
            if limit.task in (None, task) and key in settings and settings[key] not in limit.allowed
        }


@dataclass(frozen=True)
class Traits:
    """What the choice of a strategy depends on in a model and its data; None where it is not known yet.

    Attributes:
        kind: of the model, see ``gtrain.model.kinds``.
        task: ``node`` or ``link``.
        heterogeneous: whether the graph has several types of nodes or edges.
        has_table: whether the model has a table of ``gtrain.nn``.
    """

    kind: str | None = None
    task: str | None = None
    heterogeneous: bool | None = None
    has_table: bool | None = None

    def refusal(self, serves: Serves) -> str | None:
        """Why a strategy does not train this, a clause; None: it does, as far as is known."""
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
    """What the framework knows of a backend before it imports it.

    Attributes:
        description: one line for ``gtrain --help``.
        config: ``package.module:Class``, the dataclass that types and checks the ``strategy`` group. It must import
            the standard library, omegaconf and ``gtrain.errors`` only.
        strategy: ``package.module:Class``, the subclass of ``GraphStrategy``.
        conf: package that holds ``strategy/<name>.yaml``.
        serves: what it trains; its strategy class has the same object as ``serves``.
        roles: its servers by the role's name, and how often a ``worker`` is restarted.
        store: ``package.module:function`` beside ``config``, which says what settings the store of a job has, whatever
            the data's own are: ``num_parts``, ``partitioner``, and ``buckets`` (see ``gtrain.graph.store``). Given the
            composed configuration as a dictionary. Empty: the data's own settings, and one part a rank.
        parts_key: the setting that the store's number of parts comes from, for messages.
        table_reader: ``package.module:function`` that finds the rows of a table in a checkpoint of this backend
            (``gtrain.strategy.checkpoint.SavedRows``), given its folder, the layer's name and its ``TableSpec``. Empty:
            rows are in the module's state.
        shortcuts: keys outside of ``strategy`` that its YAML file adds to the configuration.
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

    def load_table_reader(self) -> Callable[..., Any] | None:
        """What :attr:`table_reader` names; imports torch."""
        return _load(self.table_reader) if self.table_reader else None

    def store_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What :attr:`store` says.

        Raises:
            ConfigError: the data's settings contradict the strategy's.
        """
        return dict(_load(self.store)(config)) if self.store else {}

    def load_config(self) -> type[Any]:
        """The configuration dataclass."""
        return _load(self.config)

    def load_strategy(self) -> type[Any]:
        """The strategy class; imports torch."""
        return _load(self.strategy)

    @property
    def server_roles(self) -> list[str]:
        """Names of the roles that have servers."""
        return [name for name in self.roles if name != WORKER]

    def plan(self, cfg: DictConfig) -> tuple[RolePlan, ...]:
        """The roles with the numbers of a resolved configuration; a role without servers is left out.

        Raises:
            ConfigError: a number is below 0, or ``cluster.standalone`` names a role that is not there.
        """
        by_hand = list(cfg.cluster.standalone)
        for name in by_hand:
            check_role(cfg.strategy.name, self, name, "cluster.standalone")
        plans = [_plan(name, role, cfg, name in by_hand) for name, role in self.roles.items()]
        return tuple(plan for plan in plans if plan.name == WORKER or plan.count)


class Installed(dict[str, EntryPoint]):
    """Entry points by the name that ``strategy=`` takes, in alphabetical order.

    Attributes:
        outdated: folders with metadata of a distribution that is installed with other entry points.
    """

    outdated: list[str]


@cache
def installed() -> Installed:
    """Find the entry points.

    A folder of the path may hold metadata of a distribution that is installed elsewhere, such as a ``gtrain.egg-info``
    that an older build has left in the current folder. ``importlib.metadata`` would read the first alone. Here what was
    installed (it has a RECORD) comes before what lies in a source tree, and others add only what can be imported.
    """
    copies: dict[str, list[Distribution]] = {}
    for distribution in distributions():
        if distribution.entry_points.select(group=GROUP):
            name = re.sub("[-_.]+", "-", distribution.metadata["Name"].lower())
            copies.setdefault(name, []).append(distribution)
    points: list[EntryPoint] = []
    outdated = []
    for found in copies.values():
        current, *others = sorted(found, key=lambda distribution: distribution.read_text("RECORD") is None)
        named = {point.name: point for point in current.entry_points.select(group=GROUP)}
        values = {point.name: point.value for point in named.values()}
        for other in others:
            theirs = {point.name: point for point in other.entry_points.select(group=GROUP)}
            if {point.name: point.value for point in theirs.values()} != values:
                outdated.append(os.path.abspath(str(other.locate_file(""))))
            named = {name: point for name, point in theirs.items() if _can_be_found(point)} | named
        points += named.values()
    result = Installed((point.name, point) for point in sorted(points, key=lambda point: point.name))
    result.outdated = list(dict.fromkeys(outdated))  # a folder may be on the path twice
    return result


def _can_be_found(point: EntryPoint) -> bool:
    try:
        return importlib.util.find_spec(point.module.partition(".")[0]) is not None
    except ValueError:  # a module that somebody has put together
        return True


def get(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ConfigError: none is installed under that name, or it cannot be imported.
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
            f"the entry point {name} = {installed()[name].value} is no gtrain.backends.Backend.",
            hint="let the entry point name the Backend object of the package.",
        )
    return backend


def usable() -> dict[str, Backend]:
    """The backends that can be imported; a broken one is left out here and named only when it is chosen."""
    found = {}
    for name in installed():
        try:
            found[name] = get(name)
        except ConfigError:
            continue
    return found


def descriptions() -> str:
    """One line a strategy, for ``gtrain --help``."""
    lines = []
    for name in installed():
        try:
            text = get(name).description
        except ConfigError as error:
            text = f"(cannot be imported) {error.message}"
        lines.append(f"  {name:<12} {text}")
    return "\n".join(lines)


def check_role(strategy: str, backend: Backend, role: str, key: str = "role") -> Role:
    """The role of that name.

    Raises:
        ConfigError: the backend has no servers, or none of that role; lists those that it has.
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
    for what in ("count", "restarts"):
        setting = getattr(role, what)
        numbers[what] = setting(cfg) if callable(setting) else setting
        if not isinstance(numbers[what], int) or numbers[what] < 0:
            raise ConfigError(
                f"strategy={cfg.strategy.name} gives its role {name} {what} {numbers[what]}; it must be 0 or more.",
                hint="gtrain --cfg job --package strategy shows the settings that this follows from.",
            )
    return RolePlan(name, role.target, stop_seconds=role.stop_seconds, by_hand=by_hand, **numbers)


def serving(traits: Traits, settings: Mapping[str, Any] | None = None) -> list[str]:
    """Names of the strategies that train a model on its data.

    Args:
        traits: of the model and the data.
        settings: values that the user chose, by key; a strategy that does not honour one of them is left out.
    """
    return [
        name
        for name, backend in usable().items()
        if traits.refusal(backend.serves) is None and not backend.serves.violated(settings or {})
    ]


def not_served(name: str, model: str, traits: Traits, reason: str, others: Sequence[str]) -> ConfigError:
    """The error for a model, or data, that a strategy does not train.

    Args:
        name: the strategy.
        model: what to call the model.
        traits: of the model and the data.
        reason: see :meth:`Traits.refusal`.
        others: names of strategies that do.
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
    """The error for a setting that a strategy does not honour.

    Args:
        name: the strategy.
        key: of the setting.
        limits: of the strategy.
        settings: values by key.
        others: names of strategies that honour it.
    """
    limit = limits[key]
    advice = f"leave {key} out, or set {key}={as_set(limit.allowed[0])}"
    advice += f"; or choose strategy={' or '.join(others)}" if others else ""
    return ConfigError(f"{key}={as_set(settings[key])} was set; strategy={name} {limit.reason}.", hint=f"{advice}.")


def as_set(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value).replace(" ", "") if isinstance(value, (list, tuple, Mapping)) else str(value)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
