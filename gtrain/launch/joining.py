"""Joining a job whose processes were started by different commands: ranks, and workers and servers started by hand."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from lightning.fabric.plugins.environments import ClusterEnvironment
from omegaconf import DictConfig, OmegaConf

from gtrain import config
from gtrain.backends import RolePlan
from gtrain.errors import ConfigError
from gtrain.launch import agent, leaving
from gtrain.launch import slot as slots
from gtrain.launch.children import ProcessSpec, resolve
from gtrain.launch.environment import WaitReport, find_environment
from gtrain.launch.job import Job, server_spec
from gtrain.launch.job_store import await_key, broadcast_text, job_store, store_address
from gtrain.launch.keeper import Keeper
from gtrain.launch.key_value import KeyValueStore
from gtrain.launch.launchers.base import RankInfo
from gtrain.launch.logs import capture, log_path
from gtrain.launch.rendezvous import StoreLocation
from gtrain.launch.request import TASK, JobRequest
from gtrain.launch.settings_check import check_release, check_same, comparable
from gtrain.launch.slot import ServerRoster, Slot
from gtrain.record import events
from gtrain.run import runs

SERVER_BY_HAND = "gtrain.strategy.server:run_by_hand"
BY_HAND, BY_AGENT = "by hand", "by the agents"
_FIRST = "rank 0 (machine 0)"


def run_worker(cfg: DictConfig, choices: dict[str, str], plans: Sequence[RolePlan]) -> Any:
    """The task of a worker of ``cluster=manual``: check that it belongs to the job, then run the common task.

    Args:
        cfg: the composed configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        plans: the job's servers.
    """
    job = slots.current()
    assert job is not None
    environment = find_environment()
    job_values = job_store(environment)
    store = _registrations(job_values)
    _check_shape(store, f"{job.num_nodes} machines with {job.devices} workers each")
    _claim(store, job.slot, job.restarts)
    _agree_on_run(cfg, environment)
    check_same(job_values, job.slot.rank, f"machine {job.slot.node}", comparable(cfg))
    if job.slot.rank == 0:
        for plan in plans:
            store.set(f"role/{plan.name}", BY_HAND if plan.by_hand else BY_AGENT)
    return resolve(TASK)(cfg, choices)


def run_rank(request: JobRequest, rank_info: RankInfo, servers: Keeper, job_id: str, agent_id: str = "") -> Any:
    """Run the task of a rank that another launcher started.

    Args:
        request: the job, with its configuration unresolved.
        rank_info: this rank.
        servers: the keeper of this machine's servers.
        job_id: the launcher's name of the job, the same in all attempts.
        agent_id: name of the process that starts this machine's ranks in all attempts; empty if there is none.
    """
    cfg, environment = request.cfg, find_environment()
    if cfg.verb == "train":
        earlier = _earlier_run(cfg, environment, rank_info, agent_id)
        if rank_info.rank == 0:
            resume_earlier_attempt(cfg, job_id, earlier)
    _agree_on_run(cfg, environment)
    if cfg.verb == "train" and agent_id and rank_info.local == 0:
        runs.record_job(Path(cfg.paths.runs).absolute(), _with_number(agent_id), Path(cfg.paths.run))
    check_same(job_store(environment), rank_info.rank, f"rank {rank_info.rank}", comparable(cfg))
    config.validate(cfg)
    title = f"rank {rank_info.rank} of {rank_info.size} is process {os.getpid()} on {socket.gethostname()}"
    log = log_path(request.log_dir, f"rank {rank_info.rank}")
    capture(log, terminal=True, append=slots.attempt() > 0, title=title)
    servers.start_servers(
        request.log_dir, slots.roster().key_file, environment.main_address, store_address(environment)
    )
    with request.hinting_at_resume() if rank_info.rank == 0 else contextlib.nullcontext():
        return resolve(TASK)(cfg, request.choices)


def _agree_on_run(cfg: DictConfig, environment: ClusterEnvironment) -> None:
    """Take the run's folder and the checkpoint to resume from those of rank 0."""
    mine = {"run": str(Path(cfg.paths.run).absolute()), "checkpoint": cfg.ckpt_path, "attempt": slots.attempt()}
    agreed = json.loads(broadcast_text(environment, json.dumps(mine)))
    cfg.paths.run, cfg.ckpt_path = agreed["run"], agreed["checkpoint"]
    slots.set_roster(slots.roster(), max(agreed["attempt"], slots.attempt()))


def _earlier_run(cfg: DictConfig, environment: ClusterEnvironment, rank_info: RankInfo, agent_id: str) -> Path | None:
    """Return, on rank 0, the folder of the job's earlier attempt that the agent of any machine took part in.

    The agents of an elastic job come and go, and each counts only some of the restarts.
    """
    if not agent_id:
        return None
    store, all_runs = job_store(environment).prefixed("gtrain-earlier"), Path(cfg.paths.runs).absolute()
    if rank_info.local == 0:
        store.set(str(rank_info.machine), str(runs.of_job(all_runs, _with_number(agent_id)) or ""))
    if rank_info.rank > 0:
        return None
    known = [store.get(str(machine)).decode() for machine in range(rank_info.machines)]
    return next((Path(text) for text in known if text), None)


def _with_number(job_id: str) -> str:
    """Return a job's name with its number in a sweep."""
    in_sweep = HydraConfig.initialized() and not OmegaConf.is_missing(HydraConfig.get().job, "num")
    return f"{job_id} {HydraConfig.get().job.num if in_sweep else 0}"


def resume_earlier_attempt(cfg: DictConfig, job_id: str, earlier: Path | None = None) -> None:
    """Continue in the folder of the job's earlier attempt, from its last checkpoint; called on rank 0.

    Args:
        cfg: the composed configuration; ``paths.run`` and ``ckpt_path`` are changed.
        job_id: see :func:`run_rank`.
        earlier: the folder, if it is known; otherwise that of the job's record, unless this is the first attempt.
    """
    job, all_runs = _with_number(job_id), Path(cfg.paths.runs).absolute()
    run_dir = earlier or (runs.of_job(all_runs, job) if slots.attempt() else None)
    if run_dir is not None and not slots.attempt():
        slots.set_roster(slots.roster(), 1)  # the launcher does not count restarts with other nodes
    if run_dir is None:
        runs.record_job(all_runs, job, Path(cfg.paths.run).absolute())
        return
    with contextlib.suppress(ConfigError):  # a network file system may keep the lock of a lost machine for a while
        runs.lock_folder(run_dir)
    new, origin = Path(cfg.paths.run), runs.resume(cfg, run_dir)
    cfg.paths.run = str(run_dir)
    events.resumes(run_dir, new, slots.attempt(), f"restarting the job from {origin}")
    print(f"gtrain: restarting the job from {origin} in {run_dir}", file=sys.stderr, flush=True)


def run_server(cfg: DictConfig, plan: RolePlan, store_location: StoreLocation, key_file: str | None) -> None:
    """``gtrain serve``: run one server until it is stopped or the job is over; restart it as its role says.

    Args:
        cfg: the composed configuration.
        plan: the server's role.
        store_location: the job's key-value store.
        key_file: path of the job's key file.

    Raises:
        ConfigError: its rank, or every rank, is taken.
    """
    job_values = KeyValueStore(
        store_location.address, key_file, cfg.cluster.timeout_seconds, lambda: WaitReport(_FIRST)
    )
    store = _registrations(job_values)
    _check_by_hand(store, plan)
    check_release(job_values, f"gtrain serve role={plan.name}")
    rank = _free_rank(store, plan, cfg.cluster.rank)
    slot = Slot(plan.name, rank, 0, 0)
    job = Job(
        num_nodes=cfg.trainer.num_nodes,
        devices=cfg.trainer.devices,
        log_dir=Path(cfg.paths.run, "logs").absolute(),
        machine=0,
        host=store_location.host,
        port=store_location.port,
        store_address=store_location.address,
        route=store_location.route,
        roles=(plan,),
        config=cfg,
        key_file=key_file,
        roster=ServerRoster({plan.name: plan.count}, {}, key_file),
        grace_seconds=cfg.cluster.grace_seconds,
        tell_ranks_to_save=lambda: leaving.announce(slot.label, store_location.address, key_file),
    )

    def specs() -> list[ProcessSpec]:
        spec = server_spec(job, slot, plan)
        return [replace(spec, task=SERVER_BY_HAND, terminates=True, terminal=True)]

    try:
        agent.run(job, specs)
    except KeyboardInterrupt:
        return
    except SystemExit as ended:
        if ended.code != 128 + signal.SIGTERM:
            raise


def _registrations(store: KeyValueStore) -> KeyValueStore:
    """The part of the store in which processes that were started by hand register."""
    return store.prefixed("gtrain-by-hand")


def _check_shape(store: KeyValueStore, shape: str) -> None:
    """Refuse a machine that was started with other numbers of machines or workers than the first one."""
    first = store.compare_set("shape", "", shape).decode()
    if first != shape:
        raise ConfigError(
            f"{shape} were set here, and {first} by another machine of the job.",
            hint="give every machine the same trainer.num_nodes and trainer.devices.",
        )


def _claim(store: KeyValueStore, slot: Slot, restarts: int) -> None:
    """Refuse a second worker of the same rank, unless it replaces one that died."""
    if restarts == 0 and store.add(f"worker/{slot.rank}", 1) > 1:
        raise ConfigError(
            f"cluster.rank={slot.node} was set; the job already has a machine of that number.",
            hint="number the machines differently, from 0 to trainer.num_nodes - 1.",
        )


def _check_by_hand(store: KeyValueStore, plan: RolePlan) -> None:
    """Refuse a server that the agents start; rank 0 publishes which ones are started by hand."""
    if await_key(store, f"role/{plan.name}", _FIRST).decode() != BY_HAND:
        raise ConfigError(
            f"role={plan.name} was set; the job's own commands start these servers.",
            hint=f"start the workers with cluster.standalone=[{plan.name}], or no {plan.name} by hand.",
        )


def _free_rank(store: KeyValueStore, plan: RolePlan, requested: int | None) -> int:
    """Return the rank of a new server: the requested one, or the first free one."""
    for rank in range(plan.count) if requested is None else (requested,):
        if store.add(f"server/{plan.name}/{rank}", 1) == 1:
            return rank
    if requested is not None:
        raise ConfigError(
            f"cluster.rank={requested} was set; the job already has a {plan.name} {requested}.",
            hint="leave out cluster.rank to take the next free rank.",
        )
    raise ConfigError(
        f"role={plan.name} was set; all {plan.count} servers of that role have been started.",
        hint="start no more of them, or raise the number of servers in every command of the job.",
    )
