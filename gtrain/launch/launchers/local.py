"""``cluster=local``: one agent starts all ranks and servers on this machine and can simulate several machines."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtrain import config as configuration
from gtrain.backends import RolePlan
from gtrain.errors import ConfigError
from gtrain.launch import interpreter, shipping
from gtrain.launch.agent import start_and_watch, terminate_on_signals
from gtrain.launch.children import GRACE_SECONDS
from gtrain.launch.job import SAVE_SECONDS, check_shape
from gtrain.launch.launchers.base import Launcher
from gtrain.launch.request import TASK, JobRequest


class Local(Launcher):
    """gtrain's own agent on this machine, which simulates several machines."""

    name = "local"
    restarts_job = True

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        if cfg.cluster.standalone:
            raise ConfigError(
                f"cluster.standalone={list(cfg.cluster.standalone)} was set; servers that are started by hand need a "
                "rendezvous.",
                hint="set cluster=manual with cluster.rank= and cluster.rendezvous=, or leave out cluster.standalone.",
            )

    def launch(self, request: JobRequest) -> Any:
        """Start all ranks and servers."""
        cfg = request.cfg
        configuration.validate(cfg)
        num_nodes, devices = configuration.shape_of(cfg)
        plans = request.plans()
        request.preflight(cfg)
        key_file = request.key_file()
        return request.run_restarting(
            lambda attempt: run_local(
                TASK,
                cfg,
                request.choices,
                num_nodes=num_nodes,
                devices=devices,
                log_dir=request.log_dir,
                roles=plans,
                config=cfg,
                key_file=key_file,
                attempt=attempt,
                grace_seconds=cfg.cluster.grace_seconds,
            )
        )


def run_local(
    task: str | Callable[..., Any],
    *args: Any,
    num_nodes: int = 1,
    devices: int = 1,
    log_dir: str | os.PathLike[str] = "logs",
    roles: Sequence[RolePlan] = (),
    config: Any = None,
    key_file: str | None = None,
    attempt: int = 0,
    grace_seconds: float = SAVE_SECONDS,
) -> Any:
    """Run ``task(*args)`` in ``num_nodes * devices`` processes of this machine and wait for all of them.

    A process with a single thread forks the ranks, which share its memory. A process with threads, such as a notebook,
    or one that uses CUDA starts a clean interpreter, which forks the ranks instead. The function and its arguments are
    then copied by cloudpickle (functions of notebooks, lambdas and closures work), together with the settings of torch,
    random numbers, warnings and logging. Other modules are imported afresh.

    Args:
        task: a function, or ``package.module:function``.
        args: passed to every rank.
        num_nodes: machines to simulate.
        devices: ranks on each of them.
        log_dir: folder of the logs, ``rank-<r>.log`` and ``<role>-<r>.log``; rank 0 also writes to the terminal or
            notebook.
        roles: servers to start besides the ranks, and how often a dead process is restarted.
        config: the configuration of the servers, ``context.config``.
        key_file: path of the job's key file; with it servers listen on TCP with CURVE instead of Unix sockets.
        attempt: how many times the job was started before; its logs are then appended.
        grace_seconds: how long ranks may take after SIGTERM to save a checkpoint; those of a clean interpreter save
            none.

    Returns:
        The return value of rank 0; None, with a message, if it cannot be pickled.

    Raises:
        GtrainError: the first failure is a user error that a rank raised, or an argument cannot be copied.
        RankFailedError: another failure; names the process that failed first, the reason, and its log file.
    """
    check_shape(num_nodes, devices, None)
    settings = {
        "num_nodes": num_nodes,
        "devices": devices,
        "log_dir": Path(log_dir).absolute(),
        "roles": roles,
        "config": config,
        "key_file": key_file,
        "attempt": attempt,
        "grace_seconds": grace_seconds,
    }
    with shipping.result_file() as result:
        reason = interpreter.fork_obstacle()
        if reason is None:
            start_and_watch(task, args, settings, result)
        else:
            stop_seconds = max([GRACE_SECONDS, *(plan.stop_seconds for plan in roles)])
            with terminate_on_signals():
                interpreter.run(task, args, settings, result, stop_seconds, reason)
        return shipping.read_result(result)
