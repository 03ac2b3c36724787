"""The cluster of a Ray job: connecting to it, and reserving resources for actors."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gtrain.backends import RolePlan
from gtrain.errors import ConfigError, RankFailedError
from gtrain.launch.job import server_slots
from gtrain.launch.ray.actors import MachineActor, SupervisorActor, actor
from gtrain.launch.slot import WORKER

_REPORT_SECONDS = 3.0
_STOP_SECONDS = 10.0
_CLUSTER_SECONDS = 30.0
_LONGEST_FOLDER = 20
"""Length of the temporary folder's path; Ray's sockets in it have paths of at most 107 bytes."""
_UNITS = 10_000
"""Ray counts a resource in units of 1e-4, and drops the rest of an amount."""
_WAIT_SECONDS = 0.5
"""Of one wait in Ray, in which no handler of a signal runs."""
Resources = dict[str, float]


# ---------------------------------------------------------------------------------------------------- connecting


class Connection:
    """The Ray cluster of a job: the one that the configuration or ``RAY_ADDRESS`` names, or one on this machine.

    Args:
        cfg: the composed configuration.
        needed: the resources of each machine of the job. If the command starts the cluster, it gives it their sum.

    Raises:
        ConfigError: the cluster cannot be reached.
        RankFailedError: a cluster of the command's own cannot be started.
    """

    def __init__(self, cfg: DictConfig, needed: Sequence[Resources]) -> None:
        self._cfg, self._needed = cfg, needed
        self._own: OwnCluster | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Connection:
        with contextlib.ExitStack() as stack:
            if not ray.is_initialized():  # by a program that uses Ray itself
                self._connect(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._own = None

    @property
    def lost(self) -> str | None:
        """How a cluster of the command's own ended, a sentence; None if it runs, or is not its own."""
        return None if self._own is None else self._own.lost

    def renew(self) -> None:
        """Start another cluster of the command's own if the last one is lost."""
        if self.lost is not None:
            self.__exit__()
            self.__enter__()

    def _connect(self, stack: contextlib.ExitStack) -> None:
        address = self._cfg.cluster.address or os.environ.get("RAY_ADDRESS")
        if address is not None and "://" in address:
            raise ConfigError(
                f"{address} was set as the address of the Ray cluster; it is that of a Ray client.",
                hint="run the command on a node of the cluster, with the address of its head: HOST:6379, or auto.",
            )
        if address is None:
            self._own = stack.enter_context(OwnCluster(self._needed))
            address = self._own.address
        stack.callback(ray.shutdown)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"the Ray cluster at {address} cannot be used: {reason}",
                hint="ray status shows the cluster that cluster.address= or RAY_ADDRESS names; if it has a token, set "
                "RAY_AUTH_MODE=token. Without an address gtrain starts a cluster on this machine.",
            ) from error


class OwnCluster:
    """A cluster whose only node, this machine, has all that the job needs, in a process of its own.

    Args:
        needed: the resources of each machine of the job.

    Attributes:
        address: of the cluster, in the context.
    """

    address: str

    def __init__(self, needed: Sequence[Resources]) -> None:
        total = _sum(needed)
        cores = max(len(os.sched_getaffinity(0)), math.ceil(total.pop("CPU", 0.0)))
        named = {"num_gpus": total.pop("GPU", None), "_memory": total.pop("memory", None)}
        self._options: dict[str, Any] = {"num_cpus": cores, "resources": total}
        self._options |= {name: amount for name, amount in named.items() if amount}
        self._folder: str | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> OwnCluster:
        """Start it.

        Raises:
            RankFailedError: it cannot be started.
        """
        with contextlib.ExitStack() as stack:
            parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_FOLDER else "/tmp"
            self._errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "gtrain.launch.ray.own_cluster",
                    json.dumps({**self._options, "parent": parent}),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                process_group=0,
            )
            stack.callback(self._end)
            assert self._process.stdout is not None
            lines = [self._process.stdout.readline() for _ in range(2)]
            if lines[0]:
                self._folder = str(json.loads(lines[0]))
            if not lines[1]:
                self._process.wait()
                raise RankFailedError(
                    f"the Ray cluster of this machine cannot be started: {self._reason()}",
                    hint="run the command again if the machine was busy; or start a cluster with ray start --head, and "
                    "set cluster.address=auto.",
                )
            self.address = str(json.loads(lines[1]))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it, and remove its files."""
        self._stack.close()

    @property
    def lost(self) -> str | None:
        """How it ended, a sentence; None while it runs."""
        if self._process.poll() is None:
            return None
        return f"the Ray cluster that the command started on this machine ended: {self._reason()}"

    def _reason(self) -> str:
        self._errors.seek(0)
        lines, status = self._errors.read().strip().splitlines(), self._process.returncode
        if status < 0 or not lines:
            return f"its process {'was killed by signal' if status < 0 else 'ended with exit code'} {abs(status)}"
        return lines[-1]

    def _end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLUSTER_SECONDS)
        self._process.kill()
        if self._process.wait():  # it was killed, and agents of Ray would outlive it by a minute
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------- resources


def resources_of(cfg: DictConfig, role: str) -> Resources:
    """Return the resources of a process as Ray names them."""
    cluster = cfg.cluster
    if role != WORKER:
        return _named(cluster.cpus_per_server, 0.0, cluster.memory_per_server, cluster.resources_per_server)
    gpus = gpus_per_rank(cfg)
    return _named(cluster.cpus_per_rank, gpus, cluster.memory_per_rank, cluster.resources_per_rank)


def gpus_per_rank(cfg: DictConfig) -> float:
    """Return the number of GPUs of a rank: one with ``trainer.accelerator=gpu``, unless the configuration names it."""
    if cfg.cluster.gpus_per_rank is not None:
        return float(cfg.cluster.gpus_per_rank)
    return 1.0 if cfg.trainer.accelerator in ("gpu", "cuda") else 0.0


def _named(cpus: float | None, gpus: float, memory: int | None, others: Mapping[str, float]) -> Resources:
    named: Resources = {"CPU": 1.0 if cpus is None else float(cpus), "GPU": gpus, "memory": float(memory or 0)}
    named |= {str(name): float(amount) for name, amount in others.items()}
    return {name: _amount(round(amount * _UNITS)) for name, amount in named.items() if amount}


def _amount(units: int) -> float:
    """Return an amount that Ray counts as this many units, such as 0.57, of which it would drop one."""
    amount = units / _UNITS
    return amount if int(amount * _UNITS) >= units else math.nextafter(amount, math.inf)


def _sum(resources: Iterable[Resources]) -> Resources:
    """Return the sum of resources, in Ray's units: one that is too small would leave an actor without its share."""
    total: dict[str, int] = {}
    for each in resources:
        for name, amount in each.items():
            total[name] = total.get(name, 0) + int(amount * _UNITS)
    return {name: _amount(units) for name, units in total.items()}


def bundles_of(cfg: DictConfig, num_nodes: int, devices: int, plans: Sequence[RolePlan]) -> list[Resources]:
    """Return the resources of each machine: those of its ranks and its servers."""
    bundles: list[Resources] = []
    for machine in range(num_nodes):
        roles = [WORKER] * devices + [slot.role for slot, _ in server_slots(plans, num_nodes, machine)]
        bundles.append(_sum(resources_of(cfg, role) for role in roles))
    return bundles


# ---------------------------------------------------------------------------------------------------- actors


class Placement:
    """The placement group of a job and its actors, which end with it.

    Args:
        cfg: the composed configuration.
        bundles: the resources of each machine.
        attempt: how many times the job was started before.
        connection: to the cluster.

    Raises:
        ConfigError: the cluster does not have the resources in time.
    """

    def __init__(self, cfg: DictConfig, bundles: Sequence[Resources], attempt: int, connection: Connection) -> None:
        self._cfg, self._attempt, self._connection = cfg, attempt, connection
        selectors: list[dict[str, str]] = [{} for _ in bundles]
        if cfg.cluster.first_machine == "command":
            selectors[0]["ray.io/node-id"] = ray.get_runtime_context().get_node_id()
        self._group = placement_group(
            list(bundles), strategy=cfg.cluster.placement, name="gtrain", bundle_label_selector=selectors
        )
        self._actors: list[Any] = []
        self._machines: list[Any] = []
        try:
            self._await_resources(bundles)
            placed = placement_group_table(self._group)["bundles_to_node_id"]
            self.nodes: list[str] = [placed[machine] for machine, _ in enumerate(bundles)]
            """Id of the cluster's node that each machine is on."""
        except BaseException:
            remove_placement_group(self._group)
            raise

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        """End all actors, and free the resources. Those of a cluster that is lost have ended with it."""
        if self._connection.lost is not None:
            return
        with contextlib.suppress(RayError):
            ends = [machine.stop.remote() for machine in self._machines]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=_STOP_SECONDS)
        for each in (*self._actors, *self._machines):
            ray.kill(each, no_restart=True)
        remove_placement_group(self._group)

    def _await_resources(self, bundles: Sequence[Resources]) -> None:
        start = time.monotonic()
        deadline, report_time = start + self._cfg.cluster.timeout_seconds, start + _REPORT_SECONDS
        while not self._group.wait(_WAIT_SECONDS):
            if self._connection.lost is not None:
                raise RankFailedError(self._connection.lost)
            asked = ", ".join(f"{{{_shown(bundle)}}}" for bundle in bundles)
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"the Ray cluster did not provide {asked} within {self._cfg.cluster.timeout_seconds:g} s; it has "
                    f"{{{_shown(ray.cluster_resources())}}}, of which {{{_shown(ray.available_resources())}}} are "
                    "free.",
                    hint="start fewer ranks, lower cluster.cpus_per_rank, wait until other jobs have ended, or raise "
                    "cluster.timeout_seconds.",
                )
            if time.monotonic() >= report_time:
                print(f"gtrain: waiting for the Ray cluster to provide {asked}", file=sys.stderr, flush=True)
                report_time = math.inf

    @property
    def on_one_node(self) -> bool:
        """Whether all machines are on one node, whose agent then simulates them as with local ranks."""
        return len(set(self.nodes)) == 1

    def start_machines(self, environment: Mapping[str, str]) -> list[Any]:
        """Start the actor of each machine, or one actor if all machines are on one node."""
        for machine, _ in enumerate(self.nodes[:1] if self.on_one_node else self.nodes):
            options = {"name": self._name(f"machine {machine}"), **self._options({}, machine)}
            self._machines.append(actor(MachineActor, **options).remote(environment))
        return self._machines * len(self.nodes) if self.on_one_node else list(self._machines)

    def start_supervisor(self, label: str, role: str, machine: int, restarts: int, *, reserve: bool = True) -> Any:
        """Start the actor of a process."""
        options = self._options(resources_of(self._cfg, role) if reserve else {}, machine)
        # with retries, Ray keeps calls of an actor that is being restarted, and does not refuse them
        supervisor = actor(
            SupervisorActor, name=self._name(label), max_restarts=restarts, max_task_retries=-1, **options
        ).remote()
        self._actors.append(supervisor)
        return supervisor

    def _name(self, label: str) -> str:
        """Return an actor's name; that of an earlier attempt may still be in use."""
        return f"{label} (start {self._attempt + 1})" if self._attempt else label

    def _options(self, resources: Mapping[str, float], machine: int) -> dict[str, Any]:
        others = dict(resources)
        options: dict[str, Any] = {"num_cpus": others.pop("CPU", 0), "num_gpus": others.pop("GPU", 0)}
        if memory := others.pop("memory", None):
            options["memory"] = memory
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=machine)
        return {**options, "resources": others, "scheduling_strategy": strategy}


def draining_nodes() -> dict[str, int]:
    """Return the ids of nodes that Ray drains, for example because they are preempted, and when they end.

    The times are milliseconds of Unix time; 0: unknown. Ray has no public function for this.
    """
    try:
        return dict(ray._private.state.state.get_draining_nodes())
    except (AttributeError, RuntimeError, RayError):
        return {}


def command_leaves() -> bool:
    """Return whether the node of the command is drained or lost: Ray then starts nothing more for the command."""
    own = ray.get_runtime_context().get_node_id()
    return own in draining_nodes() or not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == own)


def call(reference: Any, what: str) -> Any:
    """Return the value of a call of an actor.

    Args:
        reference: the call's object reference.
        what: name of the actor in messages.

    Raises:
        RankFailedError: the actor failed.
    """
    try:
        return ray.get(reference)
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines()
        raise RankFailedError(
            f"{what} failed: {lines[-1] if lines else type(cause).__name__}.",
            hint="Ray's logs of the node have more; gtrain must be installed on all nodes of the cluster.",
            external=True,
        ) from error


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in sorted(resources.items()) if ":" not in name)
