"""Processes of a job that are started by hand: workers of ``cluster=manual``, and ``gtrain serve``."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtrain import backends
from gtrain.errors import ConfigError
from gtrain.launch import agent
from gtrain.launch import slot as slots
from gtrain.launch.children import Post
from gtrain.launch.environment import find_environment
from gtrain.launch.job import Job, server_post
from gtrain.launch.meeting import Place
from gtrain.launch.roles import RolePlan
from gtrain.launch.slot import Roster, Slot
from gtrain.strategy import server
from gtrain.strategy.key_value import KeyValueStore, await_end
from gtrain.strategy.rendezvous import job_store
from gtrain.strategy.settings_check import check_release, check_same, comparable
from gtrain.strategy.stopping import stop_event

BY_HAND, BY_AGENT = "by hand", "by the agents"


def run(cfg: DictConfig, choices: dict[str, str]) -> Any:
    """The task of a worker: the same as everywhere, once it is clear that it belongs to the job."""
    from gtrain import task  # the rank is known by now, and Lightning reads it when it is imported

    job = slots.current()
    assert job is not None
    job_values = job_store(find_environment())
    store = _signs(job_values)
    _check_shape(store, f"{job.num_nodes} machines with {job.devices} workers each")
    _claim(store, job.slot, job.restarts)
    check_same(job_values, job.slot.rank, f"machine {job.slot.node}", comparable(cfg))
    if job.slot.rank == 0:
        for plan in backends.get(choices["strategy"]).plan(cfg):
            store.set(f"role/{plan.name}", BY_HAND if plan.by_hand else BY_AGENT)
    cfg.paths.run = task.shared_run_dir(str(Path(cfg.paths.run).absolute()))
    return task.run(cfg, choices)


def serve(cfg: DictConfig, plan: RolePlan, place: Place, key_file: str | None) -> None:
    """``gtrain serve``: one server, until it is told to end or the job is over; restarted if its role says so.

    Args:
        cfg: the composed configuration.
        plan: the server's role.
        place: where the job's key-value store is.
        key_file: the keys of the job.

    Raises:
        ConfigError: its rank is taken, or all are.
    """
    job_values = KeyValueStore(place.address, key_file, cfg.cluster.timeout_seconds)
    store = _signs(job_values)
    _check_wanted(store, plan)
    check_release(job_values, f"gtrain serve role={plan.name}")
    rank = _free_rank(store, plan, cfg.cluster.rank)
    job = Job(
        num_nodes=cfg.trainer.num_nodes,
        devices=cfg.trainer.devices,
        log_dir=Path(cfg.paths.run, "logs").absolute(),
        machine=0,
        host=place.host,
        port=place.port,
        store_address=place.address,
        route=place.route,
        roles=(plan,),
        config=cfg,
        key_file=key_file,
        roster=Roster({plan.name: plan.count}, {}, key_file),
    )

    def posts() -> list[Post]:
        post = server_post(job, Slot(plan.name, rank, 0, 0), plan)
        return [replace(post, task=serve_here, has_end=True, terminal=True)]

    try:
        agent.run(job, posts)
    except KeyboardInterrupt:
        return
    except SystemExit as ended:
        if ended.code != 128 + signal.SIGTERM:
            raise


def serve_here(target: str, config: Any) -> None:
    """The task of a server that was started by hand."""
    stop = stop_event()
    job = slots.current()
    assert job is not None
    watch = threading.Thread(
        target=_watch, args=(job.store_address, job.roster.key_file, stop), name="gtrain-job", daemon=True
    )
    watch.start()
    print(f"{job.slot.label} listens at {job.address}", flush=True)
    server.serve_role(target, job, config, stop)


def _watch(address: str, key_file: str | None, stop: threading.Event) -> None:
    """Set ``stop`` once the job's key-value store is gone: it ends with rank 0, and a connection to it does as well."""
    error = await_end(address, key_file)
    if error is not None:
        print(f"the job's key-value store is lost: {error.message}", flush=True)
    print("the job is over", flush=True)
    stop.set()


def _signs(store: KeyValueStore) -> KeyValueStore:
    """The part of the store in which processes that were started by hand tell of themselves."""
    return store.prefixed("gtrain-by-hand")


def _check_shape(store: KeyValueStore, shape: str) -> None:
    """All machines must have been given the same numbers."""
    first = store.compare_set("shape", "", shape).decode()
    if first != shape:
        raise ConfigError(
            f"{shape} were set here, and {first} by another machine of the job.",
            hint="give every machine the same trainer.num_nodes and trainer.devices.",
        )


def _claim(store: KeyValueStore, slot: Slot, restarts: int) -> None:
    """Refuse a second worker of the same rank; one that was restarted is not a second one."""
    if restarts == 0 and store.add(f"worker/{slot.rank}", 1) > 1:
        raise ConfigError(
            f"cluster.rank={slot.node} was set; the job has a machine of that number already.",
            hint="give each machine a number of its own, from 0 to trainer.num_nodes - 1.",
        )


def _check_wanted(store: KeyValueStore, plan: RolePlan) -> None:
    """Rank 0 says which servers are to be started by hand; the agents start all others."""
    if store.get(f"role/{plan.name}").decode() != BY_HAND:
        raise ConfigError(
            f"role={plan.name} was set; the job's own commands start these servers.",
            hint=f"start the workers with cluster.standalone=[{plan.name}], or no {plan.name} by hand.",
        )


def _free_rank(store: KeyValueStore, plan: RolePlan, wanted: int | None) -> int:
    """The rank of a new server: the one that was asked for, or the first that is free."""
    for rank in range(plan.count) if wanted is None else (wanted,):
        if store.add(f"server/{plan.name}/{rank}", 1) == 1:
            return rank
    if wanted is not None:
        raise ConfigError(
            f"cluster.rank={wanted} was set; the job has a {plan.name} {wanted} already.",
            hint="leave out cluster.rank to take the next that is free.",
        )
    raise ConfigError(
        f"role={plan.name} was set; all {plan.count} servers of that role are there already.",
        hint="start no more of them, or raise the number of servers in every command of the job.",
    )
