"""``cluster=local``: one agent starts all ranks and servers, on this machine, and simulates several machines."""

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
from gtrain.launch.launchers.base import Launcher
from gtrain.launch.request import TASK, JobRequest
from gtrain.launch.roles import check_shape


class Local(Launcher):
    """gtrain's own agent on this machine, which simulates several machines."""

    name = "local"

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        if cfg.cluster.standalone:
            raise ConfigError(
                f"cluster.standalone={list(cfg.cluster.standalone)} was set; servers that are started by hand need a "
                "rendezvous to be found.",
                hint="set cluster=manual with cluster.rank= and cluster.rendezvous=, or leave out cluster.standalone.",
            )

    def launch(self, request: JobRequest) -> Any:
        """Start all ranks and servers."""
        cfg = request.cfg
        configuration.validate(cfg)
        num_nodes, devices = (1, 1) if cfg.verb == "partition" else (cfg.trainer.num_nodes, cfg.trainer.devices)
        plans = request.plans()
        request.preflight(cfg)
        with request.hinting_at_resume():
            return run_local(
                TASK,
                cfg,
                request.choices,
                num_nodes=num_nodes,
                devices=devices,
                log_dir=request.log_dir,
                roles=plans,
                config=cfg,
                key_file=request.key_file(),
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
) -> Any:
    """Run ``task(*args)`` in ``num_nodes * devices`` processes of this machine and wait for all of them.

    A process with one thread forks them, so that they share its memory. One with threads, as any notebook, or one that
    uses CUDA has a clean interpreter started, which forks in its place: the function and its arguments are then copied
    (by cloudpickle, so that those of notebooks, lambdas and closures work), with the settings of torch, random numbers,
    warnings and logging. Other modules' state is that of a new import.

    Args:
        task: a function, or ``package.module:function``.
        args: passed to every rank.
        num_nodes: machines to simulate.
        devices: ranks on each of them.
        log_dir: each rank writes ``rank-<r>.log`` there, each server ``<role>-<r>.log``; rank 0 writes to the terminal
            or notebook too.
        roles: servers to start beside the ranks, and how often what died is restarted.
        config: what servers find as ``context.config``.
        key_file: keys of the job; with them servers listen on TCP with CURVE, and not at sockets of this machine.

    Returns:
        What rank 0 returned, pickled; None, with a message, where it cannot be.

    Raises:
        GtrainError: as a rank raised it, when the first failure is a user's mistake; or an argument cannot be copied.
        RankFailedError: names the process that failed first, how, and where its log is.
    """
    check_shape(num_nodes, devices, None)
    settings = {
        "num_nodes": num_nodes,
        "devices": devices,
        "log_dir": Path(log_dir).absolute(),
        "roles": roles,
        "config": config,
        "key_file": key_file,
    }
    with shipping.result_file() as result:
        reason = interpreter.obstacle()
        if reason is None:
            start_and_watch(task, args, settings, result)
        else:
            stop_seconds = max([GRACE_SECONDS, *(plan.stop_seconds for plan in roles)])
            with terminate_on_signals():
                interpreter.run(task, args, settings, result, stop_seconds, reason)
        return shipping.read_result(result)
