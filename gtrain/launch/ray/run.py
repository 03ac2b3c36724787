"""Run a job on a Ray cluster: the main function of the command with ``cluster=ray``."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayError

from gtrain import __version__
from gtrain.backends import RolePlan
from gtrain.config import APPLYING, plain
from gtrain.errors import ConfigError, RankFailedError, restored
from gtrain.keys import ISOLATED
from gtrain.launch import agent, shipping
from gtrain.launch.children import ProcessSpec
from gtrain.launch.job import STORE_SLOT, counts_of, restarts_of, server_slots, worker_slots
from gtrain.launch.ray.cluster import (
    Connection,
    Placement,
    bundles_of,
    call,
    command_leaves,
    draining_nodes,
    gpus_per_rank,
)
from gtrain.launch.ray.driver import RayJob, specification
from gtrain.launch.request import JobRequest
from gtrain.launch.slot import WORKER, ServerRoster
from gtrain.run import runs

_PASSED_ON = ("GTRAIN_", "OMP_", "MKL_", "OPENBLAS_", "NUMBA_", "TORCH", "THP_", "PYTHON", "TMPDIR", "XDG_CACHE_HOME")
"""Starts of the names of environment variables that ranks need from the command; others are those of the node."""

_LOGS_SECONDS = 60.0
_LEFT = "The node of the command leaves the Ray cluster too, and Ray starts nothing more for the command."
_MOST_CODE = 64 << 20  # bytes of the modules that are copied to nodes without the folder of the command


def run(request: JobRequest, num_nodes: int, devices: int) -> Any:
    """Run a job, and again from its last checkpoint after a failure, ``cluster.max_restarts`` times.

    Args:
        request: the job, with its configuration resolved.
        num_nodes: machines of the job.
        devices: ranks per machine.
    """
    _find_checkpoint(request.cfg)
    plans = request.plans()
    bundles = bundles_of(request.cfg, num_nodes, devices, plans)
    key_file = request.key_file()
    key = key_file if key_file in (None, ISOLATED) else Path(str(key_file)).read_text()
    with Connection(request.cfg, bundles) as connection, agent.terminate_on_signals():

        def attempted(attempt: int) -> Any:
            connection.renew()
            return _Attempt(request, num_nodes, devices, plans, key, attempt, connection).run(bundles)

        return request.run_restarting(attempted)


def _find_checkpoint(cfg: DictConfig) -> None:
    """Replace ``last`` and ``best`` in ``ckpt_path`` by a path: machine 0 may not see the index of runs.

    Raises:
        CheckpointError: no run has such a checkpoint.
    """
    reads = cfg.verb in APPLYING
    if cfg.ckpt_path in runs.NAMES or (reads and cfg.ckpt_path is None):
        cfg.ckpt_path = str(runs.resolve(cfg.ckpt_path or "best", Path(cfg.paths.runs).absolute(), plain(cfg)))


class _Attempt:
    """One start of the whole job."""

    def __init__(
        self,
        request: JobRequest,
        num_nodes: int,
        devices: int,
        plans: Sequence[RolePlan],
        key: str | None,
        attempt: int,
        connection: Connection,
    ) -> None:
        self._request, self._plans, self._key, self._connection = request, plans, key, connection
        self._simulated = False
        self._separate: list[int] = []  # machines that do not see the run's folder
        self._job = RayJob(
            num_nodes,
            devices,
            request.log_dir,
            attempt=attempt,
            roles=plans,
            roster=ServerRoster(counts_of(plans)),
            draining=draining_nodes if request.cfg.verb == "train" else dict,
            lost=lambda: connection.lost,
        )

    def run(self, bundles: Sequence[Mapping[str, float]]) -> Any:
        """Run the job; return the value of rank 0.

        Raises:
            RankFailedError: a process failed, or the cluster is lost.
        """
        try:
            return self._run(bundles)
        except (RankFailedError, RayError) as error:
            if (lost := self._connection.lost) is None:
                raise
            raise RankFailedError(f"{lost}.", external=True) from error

    def _run(self, bundles: Sequence[Mapping[str, float]]) -> Any:
        job = self._job
        if job.attempt and command_leaves():
            raise RankFailedError(_LEFT, external=False)
        resources = [dict(bundle) for bundle in bundles]
        with Placement(self._request.cfg, resources, job.attempt, self._connection) as placement:
            job.nodes, job.machines = placement.nodes, placement.start_machines(self._environment())
            self._simulated = placement.on_one_node
            self._start_supervisors(placement)
            try:
                agent.supervise(job, self._set_up)
            finally:
                self._fetch_logs()
            if self._connection.lost is not None:
                raise RankFailedError(self._connection.lost)
            if job.leaves is not None:
                left = command_leaves()
                raise RankFailedError(f"{job.leaves}. {_LEFT}" if left else f"{job.leaves}.", external=not left)
            return job.value

    def _fetch_logs(self) -> None:
        """Write the logs of machines that do not see the run's folder into it."""
        logs = str(self._job.log_dir)
        for number in self._separate:
            with contextlib.suppress(RayError):  # the machine is lost
                reference = self._job.machines[number].logs.remote(logs)
                for name, content in ray.get(reference, timeout=_LOGS_SECONDS).items():
                    (self._job.log_dir / name).write_bytes(content)

    def _start_supervisors(self, placement: Placement) -> None:
        job, workers = self._job, restarts_of(self._plans, WORKER)
        slots = [(slot, workers) for slot in worker_slots(job.num_nodes, job.devices, None)]
        slots += [(slot, plan.restarts) for slot, plan in server_slots(self._plans, job.num_nodes, None)]
        job.supervisors = {
            slot.label: placement.start_supervisor(slot.label, slot.role, slot.node, restarts)
            for slot, restarts in slots
        }
        if workers:
            label = STORE_SLOT.label
            job.supervisors[label] = placement.start_supervisor(label, STORE_SLOT.role, 0, 0, reserve=False)

    def _set_up(self) -> list[ProcessSpec]:
        """Prepare the agents of all machines, check the job there, and return its processes, servers first."""
        job, specs, addresses = self._job, [], []
        shared: dict[str, Any] = {"store": None, "key": self._key}
        machines = job.machines[:1] if self._simulated else job.machines
        with _token(job.log_dir) as token:
            paths = [os.getcwd(), str(job.log_dir / token)]
            calls = [(machine.node.remote(), machine.sees.remote(paths)) for machine in machines]
            hosts = [call(node, f"machine {number}")[0] for number, (node, _) in enumerate(calls)]
            sees_all = [call(sees, f"machine {number}") for number, (_, sees) in enumerate(calls)]
            code = None if all(sees_all) else modules_below(Path.cwd())
            for number, machine in enumerate(machines):
                own = {"release": __version__, "machine": None if self._simulated else number, "host": hosts[number]}
                settings = self._settings(number, token, None if sees_all[number] else code)
                reply = self._ask(machine.set_up.remote(settings, **own, **shared), number)
                shared = {name: reply[name] for name in shared}
                addresses.append(reply["address"])
                specs += [specification(description) for description in reply["specs"]]
                if not reply["sees_run"]:
                    self._separate.append(number)
        job.addresses = addresses * job.num_nodes if self._simulated else addresses
        if job.attempt == 0:
            self._ask(job.machines[0].preflight.remote(), 0)
        return sorted(specs, key=lambda spec: (spec.terminates, spec.slot == STORE_SLOT))

    def _ask(self, reference: Any, number: int) -> dict[str, Any]:
        reply: dict[str, Any] = call(reference, f"machine {number}")
        if "error" in reply:
            raise restored(reply["error"])
        return reply

    def _settings(self, number: int, token: str, code: Mapping[str, bytes] | None) -> bytes:
        """Return what the agent of a machine needs of the job, pickled."""
        job, request = self._job, self._request
        return shipping.dump_settings(
            {
                "job": {
                    "num_nodes": job.num_nodes,
                    "devices": job.devices,
                    "log_dir": job.log_dir,
                    "attempt": job.attempt,
                    "roles": job.roles,
                },
                "config": request.cfg,
                "choices": request.choices,
                "overrides": list(request.overrides),
                "token": token,
                "environment": self._gpus(number),
                "folder": os.getcwd(),
                "code": code,
                "modules": _modules(),
                "argv": sys.argv,
                "logging": _logging(),
                "terminal": [_terminal_size(stream) for stream in (sys.stdout, sys.stderr)],
            }
        )

    def _gpus(self, number: int) -> dict[str, str]:
        """Return the variable that names the GPUs of a machine's ranks, in their order."""
        job = self._job
        if not gpus_per_rank(self._request.cfg):
            return {"CUDA_VISIBLE_DEVICES": ""} if self._request.cfg.trainer.accelerator != "cpu" else {}
        labels = [slot.label for slot in worker_slots(job.num_nodes, job.devices, None if self._simulated else number)]
        calls = {label: job.supervisors[label].gpus.remote() for label in labels}
        ids = [gpu for label, reference in calls.items() for gpu in call(reference, label)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(ids))}

    def _environment(self) -> dict[str, str]:
        """Return the environment variables of the command that its ranks need."""
        named = tuple(self._request.cfg.cluster.environment)
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON) or name in named}
        cpus = self._request.cfg.cluster.cpus_per_rank
        return {**({} if cpus is None else {"OMP_NUM_THREADS": str(max(1, int(cpus)))}), **passed_on}


def modules_below(folder: Path) -> dict[str, bytes]:
    """Return the Python files below a folder by their paths in it, without hidden folders and virtual environments.

    Raises:
        ConfigError: they have more than :data:`_MOST_CODE` bytes.
    """
    files: dict[str, bytes] = {}
    size = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not Path(parent, name, "pyvenv.cfg").exists()
        ]
        for path in (Path(parent, name) for name in sorted(names) if name.endswith(".py")):
            size += path.stat().st_size
            if size > _MOST_CODE:
                raise ConfigError(
                    f"the command was started in {folder}, which nodes of the Ray cluster lack; its Python files have "
                    f"more than {_MOST_CODE >> 20} MiB.",
                    hint="start it in a folder that has only the modules of the job, or that the nodes share.",
                )
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def _modules() -> list[str]:
    """Return the folders of this process's ``sys.path`` that do not belong to its installation."""
    installed = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    folders = [os.path.abspath(folder) for folder in sys.path if not folder.endswith(".zip")]
    return [folder for folder in folders if not folder.startswith(installed) and os.path.isdir(folder)]


@contextlib.contextmanager
def _token(log_dir: Path) -> Iterator[str]:
    """Provide the name of a file in the run's folder, by which a machine recognises that it sees the same folder."""
    log_dir.mkdir(parents=True, exist_ok=True)
    token = log_dir / f".gtrain-{secrets.token_hex(8)}"
    token.touch()
    try:
        yield token.name
    finally:
        token.unlink(missing_ok=True)


def _logging() -> dict[str, Any]:
    """Return Hydra's settings of a job's log, which forked ranks would inherit."""
    hydra = HydraConfig.get()
    verbose = plain(hydra.verbose)
    return {
        "log_config": OmegaConf.create(plain(hydra.job_logging)),
        "verbose_config": OmegaConf.create(verbose) if isinstance(verbose, list) else verbose,
    }


def _terminal_size(stream: Any) -> list[int] | None:
    """Return columns and lines of a stream's terminal; None if it is not a terminal."""
    try:
        return list(os.get_terminal_size(stream.fileno()))
    except (OSError, ValueError, AttributeError):
        return None
