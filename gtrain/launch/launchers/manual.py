"""``cluster=manual``: the command is started by hand on each machine; ``gtrain serve`` starts a server by hand."""

from __future__ import annotations

import contextlib
from typing import Any

from omegaconf import DictConfig

from gtrain import backends, config
from gtrain.backends import RolePlan
from gtrain.errors import ConfigError
from gtrain.launch import rendezvous
from gtrain.launch.agent import run
from gtrain.launch.children import resolve
from gtrain.launch.job import Job, posts_of
from gtrain.launch.launchers.base import Launcher
from gtrain.launch.request import JobRequest
from gtrain.launch.roles import check_shape
from gtrain.launch.shipping import read_result, result_file
from gtrain.launch.sockets import Listener, listen_here

RUN_WORKER, RUN_SERVER = "gtrain.launch.joining:run_worker", "gtrain.launch.joining:run_server"


class Manual(Launcher):
    """The same command, started by hand on each machine; their ranks meet at cluster.rendezvous."""

    name = "manual"

    def check(self, cfg: DictConfig) -> None:
        """Its own settings are checked when they are used."""

    def owns_run_folder(self, cluster: Any) -> bool:
        """The machines of a job may share its folder: that of rank 0 holds it."""
        return cluster.rank in (None, 0)

    def launch(self, request: JobRequest) -> Any:
        """Start this machine's share of the ranks and servers."""
        cfg = request.cfg
        request.settled()  # rank 0's folder will be that of the run, and all else follows it
        target = rendezvous.parse(cfg.cluster.rendezvous)
        nodes, devices, machine = cfg.trainer.num_nodes, cfg.trainer.devices, cfg.cluster.rank
        if machine is None:
            raise ConfigError(
                "cluster=manual was set, and cluster.rank is not.",
                hint=f"number the machines: cluster.rank=0 on one, up to {nodes - 1} (trainer.num_nodes={nodes}).",
            )
        check_shape(nodes, devices, machine)
        key_file = request.key_file()
        job = Job(nodes, devices, request.log_dir, machine, roles=request.plans(), config=cfg, key_file=key_file)
        rendezvous.check_secure(target, key_file is not None)
        request.preflight(request.settled())
        if machine == 0:
            with rendezvous.hold(target, key_file is not None) as store:
                return _run_at(store, job, request)
        store = rendezvous.find(target, cfg.cluster.timeout_seconds, key_file is not None)
        return _run_at(store, job, request)

    def serve(self, request: JobRequest) -> None:
        """``gtrain serve``: one server, in this process, until it is asked to end or the job is over.

        Raises:
            ConfigError: the strategy has no such server, or its place is taken.
        """
        cfg = request.cfg
        config.validate(cfg)
        plan = _server_plan(cfg)
        target, key_file = rendezvous.parse(cfg.cluster.rendezvous), request.key_file()
        rendezvous.check_secure(target, key_file is not None)
        store = rendezvous.find(target, cfg.cluster.timeout_seconds, key_file is not None)
        resolve(RUN_SERVER)(cfg, plan, store, key_file)


def _run_at(store: rendezvous.StorePlace, job: Job, request: JobRequest) -> Any:
    job.host, job.port, job.route, job.store_address = store.host, store.port, store.route, store.address
    with contextlib.ExitStack() as at_the_end:
        if store.socket is not None:
            inside = listen_here()  # what this machine's processes connect to, and all that have no keys
            at_the_end.callback(inside.close)
            job.store, job.store_address = (inside, Listener(store.socket, store.address)), inside.address
        job.result = at_the_end.enter_context(result_file())
        at_the_end.enter_context(request.hinting_at_resume())
        run(job, lambda: posts_of(job, RUN_WORKER, (request.cfg, request.choices, job.roles)))
        return read_result(job.result)


def _server_plan(cfg: DictConfig) -> RolePlan:
    """The role of ``gtrain serve``, with its numbers."""
    name = cfg.strategy.name
    backend = backends.get(name)
    if cfg.role is None:
        raise ConfigError(
            "gtrain serve was given, and role is not set.",
            hint=f"the servers of strategy={name} are {', '.join(backend.server_roles) or 'none'}.",
        )
    role = backends.check_role(name, backend, cfg.role)
    plan = next((plan for plan in backend.plan(cfg) if plan.name == cfg.role), RolePlan(cfg.role, role.target))
    if cfg.cluster.rank is not None and cfg.cluster.rank >= plan.count:
        raise ConfigError(
            f"cluster.rank={cfg.cluster.rank} was set; strategy={name} has {plan.count} servers of role {cfg.role} "
            "here.",
            hint=f"their ranks are 0 to {plan.count - 1}." if plan.count else "set the number of servers above 0.",
        )
    return plan
