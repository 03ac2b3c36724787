"""How processes that different commands started join their job: ranks, workers by hand and servers by hand."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtrain import config
from gtrain.backends import RolePlan
from gtrain.errors import ConfigError
from gtrain.launch import agent
from gtrain.launch import slot as slots
from gtrain.launch.children import Post, resolve
from gtrain.launch.environment import find_environment
from gtrain.launch.job import Job, server_post
from gtrain.launch.job_store import agree, job_store, store_address
from gtrain.launch.keeper import Keeper
from gtrain.launch.key_value import KeyValueStore
from gtrain.launch.launchers.base import RankInfo
from gtrain.launch.logs import capture, log_path
from gtrain.launch.rendezvous import StorePlace
from gtrain.launch.request import TASK, JobRequest
from gtrain.launch.settings_check import check_release, check_same, comparable
from gtrain.launch.slot import Roster, Slot

SERVER_BY_HAND = "gtrain.strategy.server:run_by_hand"
BY_HAND, BY_AGENT = "by hand", "by the agents"


def run_worker(cfg: DictConfig, choices: dict[str, str], plans: Sequence[RolePlan]) -> Any:
    """The task of a worker of ``cluster=manual``: the same as everywhere, once it is clear that it belongs to the job.

    Args:
        cfg: the composed configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        plans: the job's servers.
    """
    job = slots.current()
    assert job is not None
    environment = find_environment()
    job_values = job_store(environment)
    store = _signs(job_values)
    _check_shape(store, f"{job.num_nodes} machines with {job.devices} workers each")
    _claim(store, job.slot, job.restarts)
    check_same(job_values, job.slot.rank, f"machine {job.slot.node}", comparable(cfg))
    if job.slot.rank == 0:
        for plan in plans:
            store.set(f"role/{plan.name}", BY_HAND if plan.by_hand else BY_AGENT)
    cfg.paths.run = agree(environment, str(Path(cfg.paths.run).absolute()))
    return resolve(TASK)(cfg, choices)


def run_rank(request: JobRequest, rank_info: RankInfo, servers: Keeper) -> Any:
    """The task of a rank that another launcher started, in this process.

    Args:
        request: the job; its configuration is not resolved yet.
        rank_info: this rank.
        servers: starts the servers of this machine, if this is its local rank 0.
    """
    cfg, environment = request.cfg, find_environment()
    cfg.paths.run = agree(environment, cfg.paths.run)
    check_same(job_store(environment), rank_info.rank, f"rank {rank_info.rank}", comparable(cfg))
    config.validate(cfg)
    capture(log_path(request.log_dir, f"rank {rank_info.rank}"), terminal=True)
    servers.go(request.log_dir, slots.roster().key_file, environment.main_address, store_address(environment))
    with request.hinting_at_resume() if rank_info.rank == 0 else contextlib.nullcontext():
        return resolve(TASK)(cfg, request.choices)


def run_server(cfg: DictConfig, plan: RolePlan, store_place: StorePlace, key_file: str | None) -> None:
    """``gtrain serve``: one server, until it is told to end or the job is over; restarted if its role says so.

    Args:
        cfg: the composed configuration.
        plan: the server's role.
        store_place: where the job's key-value store is.
        key_file: the keys of the job.

    Raises:
        ConfigError: its rank is taken, or all are.
    """
    job_values = KeyValueStore(store_place.address, key_file, cfg.cluster.timeout_seconds)
    store = _signs(job_values)
    _check_wanted(store, plan)
    check_release(job_values, f"gtrain serve role={plan.name}")
    rank = _free_rank(store, plan, cfg.cluster.rank)
    job = Job(
        num_nodes=cfg.trainer.num_nodes,
        devices=cfg.trainer.devices,
        log_dir=Path(cfg.paths.run, "logs").absolute(),
        machine=0,
        host=store_place.host,
        port=store_place.port,
        store_address=store_place.address,
        route=store_place.route,
        roles=(plan,),
        config=cfg,
        key_file=key_file,
        roster=Roster({plan.name: plan.count}, {}, key_file),
    )

    def posts() -> list[Post]:
        post = server_post(job, Slot(plan.name, rank, 0, 0), plan)
        return [replace(post, task=SERVER_BY_HAND, has_end=True, terminal=True)]

    try:
        agent.run(job, posts)
    except KeyboardInterrupt:
        return
    except SystemExit as ended:
        if ended.code != 128 + signal.SIGTERM:
            raise


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
