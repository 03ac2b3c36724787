"""``hydra/launcher=side_by_side``: run several jobs of a sweep at a time, each in a process of its own. Light."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from gtrain.errors import GtrainError, restored
from gtrain.launch import slot
from gtrain.launch.agent import terminate_on_signals
from gtrain.launch.children import die_with_parent, fork_with_pipe
from gtrain.launch.sockets import wait_readable

log = logging.getLogger(__name__)
TERMINAL = "terminal.log"
"""The file in a job's folder with what the job prints."""
_END_SECONDS = 20.0  # the servers of a job have up to 10 s to end


class SideBySide(Launcher):
    """Runs the jobs of a sweep in forked processes, several at a time; each prints into a file in its folder.

    Args:
        jobs: how many jobs run at a time.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise GtrainError(f"hydra.launcher.jobs={jobs} was set; it must be 1 or more.", hint="2 is the default.")
        self._jobs = jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what jobs need; Hydra calls this before :meth:`launch`."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return their results in order."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        waiting = list(enumerate(job_overrides, start=initial_job_idx))
        running: dict[int, _Job] = {}  # by the read end of their pipes
        results: dict[int, JobReturn] = {}
        with terminate_on_signals(), selectors.DefaultSelector() as selector:
            try:
                while waiting or running:
                    while waiting and len(running) < self._jobs:
                        job = self._start(*waiting.pop(0))
                        running[job.pipe] = job
                        selector.register(job.pipe, selectors.EVENT_READ)
                    for key, _ in selector.select():
                        if running[key.fd].read():
                            continue
                        selector.unregister(key.fd)
                        job = running.pop(key.fd)
                        results[job.number] = job.result()
            finally:
                for job in running.values():
                    job.end()
        return [results[number] for number in sorted(results)]

    def _start(self, number: int, overrides: Sequence[str]) -> _Job:
        log.info("job %d: %s", number, " ".join(filter_overrides(overrides)))
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        folder = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
        pid, pipe = fork_with_pipe(partial(self._run, config, folder, os.getpid()))
        return _Job(number, overrides, pid, pipe, folder / TERMINAL)

    def _run(self, config: DictConfig, folder: Path, parent: int, write_end: int) -> NoReturn:
        """Run a job in the forked process, and write its result into the pipe."""
        reply: dict[str, Any] = {}
        code = 1
        try:
            die_with_parent(parent)
            os.setpgid(0, 0)  # Ctrl-C reaches only the command, which ends the jobs in order
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            folder.mkdir(parents=True, exist_ok=True)
            output = os.open(folder / TERMINAL, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            for number in (1, 2):
                os.dup2(output, number)
            done = run_job(
                hydra_context=self._context,
                task_function=self._task,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            failed = done.status != JobStatus.COMPLETED
            value = vars(done)["_return_value"]
            reply = {"error": slot.describe(value)} if failed else {"value": value}
            code = 0
        except (SystemExit, KeyboardInterrupt):
            reply = {"error": slot.describe(GtrainError("the job was interrupted."))}
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
                with open(write_end, "w") as pipe:
                    json.dump(reply, pipe)
            os._exit(code)


class _Job:
    """A running job of a sweep."""

    def __init__(self, number: int, overrides: Sequence[str], pid: int, pipe: int, terminal: Path) -> None:
        self.number, self.pipe = number, pipe
        self._overrides, self._pid, self._terminal = overrides, pid, terminal
        self._content = b""

    def read(self) -> bool:
        """Read from the pipe; return False at its end."""
        data = os.read(self.pipe, 1 << 16)
        self._content += data
        return bool(data)

    def result(self) -> JobReturn:
        """Collect the process and return the job's result, which raises its error when Hydra reads it."""
        os.close(self.pipe)
        _, status = os.waitpid(self._pid, 0)
        reply = json.loads(self._content or b"{}")
        result = JobReturn(overrides=self._overrides, status=JobStatus.COMPLETED)
        # By which a sweeper knows the job's folder, as from Hydra's launchers.
        result.hydra_cfg = OmegaConf.create({"hydra": {"runtime": {"output_dir": str(self._terminal.parent)}}})
        if "value" in reply:
            result.return_value = reply["value"]
            log.info("job %d is done: %s", self.number, self._terminal)
            return result
        code = os.waitstatus_to_exitcode(status)
        error = restored(reply["error"]) if "error" in reply else GtrainError(f"its process ended with {code}.")
        error.add_hint(f"the job's output is in {self._terminal}")
        result.status, result.return_value = JobStatus.FAILED, error
        log.info("job %d failed: %s", self.number, error.message)
        return result

    def end(self) -> None:
        """End the job in order, and wait for it; kill it if it has not ended in time."""
        # Twice: Python drops an exception of a signal's handler that is raised in a callback of the interpreter.
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            os.kill(self._pid, number)
            deadline = time.monotonic() + _END_SECONDS
            while wait_readable([self.pipe], max(0.0, deadline - time.monotonic())):
                if not self.read():
                    os.close(self.pipe)
                    os.waitpid(self._pid, 0)
                    return
        print(f"gtrain: job {self.number} did not end and was killed", file=sys.stderr)
        os.close(self.pipe)
        os.waitpid(self._pid, 0)


def register() -> None:
    """Register the launcher with Hydra, which creates plugins of the package ``hydra_plugins`` only."""
    name = f"hydra_plugins.gtrain.{SideBySide.__name__}"
    Plugins.instance().class_name_to_class[name] = SideBySide
    node = {"_target_": name, "jobs": 2}
    ConfigStore.instance().store(group="hydra/launcher", name="side_by_side", node=node, provider="gtrain")
