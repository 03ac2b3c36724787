"""The keeper: the agent of the servers of a machine whose ranks another launcher started.

Local rank 0 forks the keeper before it imports torch, so that the keeper has one thread and can fork servers. The
keeper dies with its rank, and the servers die with the keeper. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gtrain.backends import STOP_SECONDS, RolePlan
from gtrain.errors import GtrainError, RankFailedError
from gtrain.launch.agent import run
from gtrain.launch.children import GRACE_SECONDS, die_with_parent
from gtrain.launch.job import Job, server_slots, server_specs
from gtrain.launch.launchers.base import RankInfo
from gtrain.launch.sockets import wait_readable


class Keeper:
    """A rank's handle on its keeper; does nothing if the machine has no servers."""

    def __init__(
        self, pid: int | None = None, pipe: int = -1, machine: int = 0, stop_seconds: float = STOP_SECONDS
    ) -> None:
        self._pid, self._pipe, self._stop_seconds = pid, pipe, stop_seconds
        self._name = f"the keeper of the servers of machine {machine} (process {pid})"
        if pid is not None:
            signal.signal(signal.SIGCHLD, self._check)  # a thread would prevent the rank from forking

    def _check(self, *_: Any) -> None:
        """End the rank when its keeper was killed: the kernel killed the servers too, and nothing else reports it.

        Nobody waits for a keeper that was stopped, because its servers go on; so this process names it.

        Raises:
            RankFailedError: names the keeper.
        """
        with contextlib.suppress(ChildProcessError):
            # WNOWAIT leaves the status for the waitid of stop_servers; SIGCHLD also reports other children.
            ended = os.waitid(os.P_PID, self._pid or 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None and ended.si_code != os.CLD_EXITED:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                raise RankFailedError(
                    f"{self._name} was killed by {signal.Signals(ended.si_status).name}, and its servers with it.",
                    hint="the kernel kills with SIGKILL when memory runs out; ckpt_path=last resumes from the last "
                    "checkpoint.",
                )
            # Without WNOWAIT, so that each stop is reported once.
            stopped = os.waitid(os.P_PID, self._pid or 0, os.WSTOPPED | os.WNOHANG)
            if stopped is not None:
                number = signal.Signals(stopped.si_status).name
                self._say(f"was stopped by {number}; until it continues, no server that dies is restarted")

    def _say(self, clause: str) -> None:
        os.write(2, f"gtrain: {self._name} {clause}\n".encode())  # a signal handler may not print

    def start_servers(self, log_dir: Path, key_file: str | None, host: str, store_address: str) -> None:
        """Start the servers; called once the run's folder and the key-value store on machine ``host`` are known."""
        self._send({"log_dir": str(log_dir), "key_file": key_file, "host": host, "store": store_address})

    def stop_servers(self) -> None:
        """Stop the servers and wait until they have ended; a keeper that does not stop them is killed with them."""
        if self._pid is None:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._send({})
        os.close(self._pipe)
        seconds = self._stop_seconds + GRACE_SECONDS
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            descriptor = os.pidfd_open(self._pid)
            try:
                if not wait_readable([descriptor], seconds):
                    self._say(f"did not stop them in {seconds:g} s and is killed")
                    os.kill(self._pid, signal.SIGKILL)
            finally:
                os.close(descriptor)
            os.waitpid(self._pid, 0)

    def _send(self, message: dict[str, Any]) -> None:
        if self._pid is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, (json.dumps(message) + "\n").encode())


@contextlib.contextmanager
def keeper_for(rank_info: RankInfo, plans: Sequence[RolePlan], config: Any) -> Iterator[Keeper]:
    """Run a keeper for this machine's servers within the context, if this is the machine's local rank 0."""
    if rank_info.local > 0 or not server_slots(plans, rank_info.machines, rank_info.machine):
        yield Keeper()
        return
    read_end, write_end = os.pipe()
    rank = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        _run_keeper(rank, read_end, rank_info, plans, config)
    os.close(read_end)
    keeper = Keeper(pid, write_end, rank_info.machine, max(plan.stop_seconds for plan in plans))
    try:
        yield keeper
    finally:
        keeper.stop_servers()


def _run_keeper(rank: int, pipe: int, rank_info: RankInfo, plans: Sequence[RolePlan], config: Any) -> None:
    """Run the keeper in the forked process; never returns."""
    code = 0
    try:
        die_with_parent(rank)
        os.setpgid(0, 0)  # a Ctrl-C in the terminal then reaches the rank, which stops the servers in order
        # SLURM sends it to every process of a job: the ranks still need the servers, for a checkpoint
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The first line starts the servers; an empty object, or the end of the pipe, means that none are needed.
        message = json.loads(os.read(pipe, 65536).split(b"\n")[0] or b"{}")
        if message:
            job = Job(
                num_nodes=rank_info.machines,
                devices=rank_info.local_size,
                log_dir=Path(message["log_dir"]),
                machine=rank_info.machine,
                host=message["host"],
                store_address=message["store"],
                route=message["host"],
                roles=plans,
                config=config,
                key_file=message["key_file"],
                end_descriptor=pipe,
            )
            run(job, lambda: [replace(spec, stop_signal=signal.SIGINT) for spec in server_specs(job)])
    except SystemExit:
        code = 1
    except BaseException as error:  # noqa: BLE001 - the rank must not wait for servers that are gone
        code = 1
        message = str(error) if isinstance(error, GtrainError) else f"{type(error).__name__}: {error}"
        print(f"gtrain: {message}", file=sys.stderr, flush=True)
        _end_rank(rank)
    finally:
        os._exit(code)


def _end_rank(rank: int) -> None:
    """End the rank after a server failed for good; its launcher then ends the job."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, number)
        time.sleep(GRACE_SECONDS)  # this process dies with the rank, so SIGKILL is rarely reached
