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
from gtrain.launch.job import Job, check_shape, process_specs
from gtrain.launch.launchers.base import Launcher
from gtrain.launch.request import JobRequest
from gtrain.launch.shipping import read_result, result_file
from gtrain.launch.sockets import Listener, listen_here

RUN_WORKER, RUN_SERVER = "gtrain.launch.joining:run_worker", "gtrain.launch.joining:run_server"


class Manual(Launcher):
    """The same command, started by hand on each machine; their ranks meet at cluster.rendezvous."""

    name = "manual"

    def check(self, cfg: DictConfig) -> None:
        """The other settings of this launcher are checked where they are used."""
        self.check_restarts(cfg)

    def owns_run_folder(self, cluster: Any) -> bool:
        """The machines of a job may share the run's folder; the machine of rank 0 owns it."""
        return cluster.rank in (None, 0)

    def launch(self, request: JobRequest) -> Any:
        """Start this machine's share of the ranks and servers."""
        cfg = request.cfg
        request.resolved()  # every setting but the run's folder, which is that of rank 0
        target = rendezvous.parse(cfg.cluster.rendezvous)
        nodes, devices, machine = cfg.trainer.num_nodes, cfg.trainer.devices, cfg.cluster.rank
        if machine is None:
            raise ConfigError(
                "cluster=manual was set, and cluster.rank is not.",
                hint=f"number the machines: cluster.rank=0 on one, up to {nodes - 1} (trainer.num_nodes={nodes}).",
            )
        check_shape(nodes, devices, machine)
        plans, key_file = request.plans(), request.key_file()
        rendezvous.check_secure(target, key_file is not None)
        request.preflight(request.resolved())
        attempt = self.continue_job(request)
        job = Job(
            *(nodes, devices, request.log_dir),
            machine=machine,
            attempt=attempt,
            roles=plans,
            config=cfg,
            key_file=key_file,
            grace_seconds=cfg.cluster.grace_seconds,
        )
        if machine == 0:
            with rendezvous.hold(target, key_file is not None, self.wait_seconds(cfg)) as store:
                return _run_with_store(store, job, request)
        store = rendezvous.find(target, cfg.cluster.timeout_seconds, key_file is not None)
        return _run_with_store(store, job, request)

    def continue_job(self, request: JobRequest) -> int:
        """Return how many times the job was started before, and have it continue from the last checkpoint."""
        return 0

    def wait_seconds(self, cfg: DictConfig) -> float:
        """Return how long the machine of rank 0 waits for its own name to be known."""
        return 0.0

    def serve(self, request: JobRequest) -> None:
        """``gtrain serve``: run one server in this process until it is stopped or the job is over.

        Raises:
            ConfigError: the strategy has no such server, or its rank is taken.
        """
        cfg = request.cfg
        config.validate(cfg)
        plan = _server_plan(cfg)
        target, key_file = rendezvous.parse(cfg.cluster.rendezvous), request.key_file()
        rendezvous.check_secure(target, key_file is not None)
        store = rendezvous.find(target, cfg.cluster.timeout_seconds, key_file is not None)
        resolve(RUN_SERVER)(cfg, plan, store, key_file)


def _run_with_store(store: rendezvous.StoreLocation, job: Job, request: JobRequest) -> Any:
    job.host, job.port, job.route, job.store_address = store.host, store.port, store.route, store.address
    with contextlib.ExitStack() as stack:
        if store.socket is not None:
            inside = listen_here()  # for this machine's processes; without keys, for all processes
            stack.callback(inside.close)
            job.store, job.store_address = (inside, Listener(store.socket, store.address)), inside.address
        job.result = stack.enter_context(result_file())
        stack.enter_context(request.hinting_at_resume())
        run(job, lambda: process_specs(job, RUN_WORKER, (request.cfg, request.choices, job.roles)))
        return read_result(job.result)


def _server_plan(cfg: DictConfig) -> RolePlan:
    """Return the role that ``gtrain serve`` runs, with its number of servers."""
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
