"""Heartbeats of servers and ranks, and the failure detector with which the lock server evaluates them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from gtrain.errors import GtrainError
from gtrain.launch.sockets import wait_readable
from gtrain.strategy.server import ServerContext
from gtrain.wire import Client, DeadlineError, PeerRestartedError

ENDED = "has ended"
BEATS_PER_LEASE = 4
"""Heartbeats per lease, at least; a member of the job that sends none for a whole lease is lost."""
REPORT_SECONDS = 10.0
"""Seconds without a heartbeat after which the terminal names a member, if its lease is longer."""
REPORT_AGAIN_SECONDS = 30.0
"""Seconds between later reports of the same member."""
MAX_INTERVAL = 1.0
"""Most seconds between heartbeats: the reply to a rank also reports the end of the job."""


def start_heartbeat(context: ServerContext) -> None:
    """Send heartbeats of this server to the lock server from a thread, until the job is over."""
    threading.Thread(target=_beat, args=(context,), name="gtrain-heartbeat", daemon=True).start()


def _beat(context: ServerContext) -> None:
    seconds: float = context.config["strategy"]["lease_seconds"]
    try:
        with context.client("lock", 0) as lock:
            _join(context, lock)
            while not context.stop.wait(heartbeat_interval(seconds)):
                # The lock server is being restarted, or is stopped.
                with suppress(PeerRestartedError, DeadlineError):
                    lock.request("pulse", timeout_seconds=seconds)
    except GtrainError as error:
        if not context.stop.is_set():
            print(f"the lock server is lost: {error.message}", flush=True)


def _join(context: ServerContext, lock: Client) -> None:
    while not context.stop.is_set():
        with suppress(PeerRestartedError, DeadlineError):
            lock.request("serve", {"place": pid_namespace(), "pid": os.getpid()})
            return


def heartbeat_interval(lease_seconds: float) -> float:
    """Return the seconds between heartbeats."""
    return min(lease_seconds / BEATS_PER_LEASE, MAX_INTERVAL)


def next_report(seconds: float) -> float:
    """Return the seconds of silence at which a member is reported next."""
    return REPORT_AGAIN_SECONDS * (seconds // REPORT_AGAIN_SECONDS + 1)


def pid_namespace() -> str:
    """Return host and PID namespace, within which a process id is unique."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


class FailureDetector:
    """Detects failed ranks and servers by missing heartbeats and, on this machine, by ended processes (pidfd).

    Args:
        lease_seconds: a member without heartbeats for longer is lost.
        here: this process's :func:`pid_namespace`.
        clock: returns seconds.
    """

    def __init__(self, lease_seconds: float, here: str, clock: Callable[[], float]) -> None:
        self._lease_seconds, self._here, self._clock = lease_seconds, here, clock
        self._heard: dict[str, float] = {}
        self._processes: dict[str, int] = {}  # pidfds
        self._joined: dict[str, tuple[str, int]] = {}  # PID namespace and process id
        self._late: dict[str, float] = {}  # seconds of silence at which a member is reported next

    def join(self, name: str, namespace: str, pid: int) -> None:
        """Add a member, or replace it after its restart.

        Args:
            name: of the member.
            namespace: its :func:`pid_namespace`.
            pid: its process id.
        """
        self.forget(name)
        self._joined[name] = namespace, pid
        self.beat(name)
        if namespace == self._here:
            try:
                self._processes[name] = os.pidfd_open(pid)
            except OSError:
                # It has ended; missing heartbeats will show it.
                return

    def beat(self, name: str) -> None:
        """Record a heartbeat."""
        self._heard[name] = self._clock()

    def forget(self, name: str) -> None:
        """Remove a member."""
        self._heard.pop(name, None)
        self._joined.pop(name, None)
        self._late.pop(name, None)
        self.await_return(name)

    def state(self) -> dict[str, tuple[str, int]]:
        """Return PID namespaces and process ids by member."""
        return dict(self._joined)

    def restore(self, state: dict[str, tuple[str, int]]) -> None:
        """Continue from what :meth:`state` returned; all members count as heard from now."""
        for name, (namespace, pid) in state.items():
            self.join(name, namespace, pid)

    def forgive(self, seconds: float) -> None:
        """Extend all leases by the seconds for which the lock server itself was stopped."""
        # Members could not be heard in that time, whether they sent heartbeats or not.
        self._heard = {name: heard + seconds for name, heard in self._heard.items()}

    def knows(self, name: str) -> bool:
        """Return whether a member has joined."""
        return name in self._heard

    def watches(self, name: str) -> bool:
        """Return whether the end of a member's process is noticed at once."""
        return name in self._processes

    def silence(self, name: str) -> float:
        """Return the seconds since a member's last heartbeat."""
        return self._clock() - self._heard[name]

    def late(self) -> tuple[dict[str, float], list[str]]:
        """Return silent members to report, with their seconds of silence, and members heard from again.

        A member is reported after :data:`REPORT_SECONDS`, and then every :data:`REPORT_AGAIN_SECONDS`.
        """
        silent = {name: self.silence(name) for name in sorted(self._heard)}
        silent = {name: seconds for name, seconds in silent.items() if seconds > REPORT_SECONDS}
        back = sorted(self._late.keys() - silent.keys())
        due = {name: seconds for name, seconds in silent.items() if seconds > self._late.get(name, 0.0)}
        self._late = {name: next_report(silent[name]) if name in due else self._late[name] for name in silent}
        return due, back

    def await_return(self, name: str) -> None:
        """Stop watching a member's process: it is being restarted."""
        process = self._processes.pop(name, None)
        if process is not None:
            os.close(process)

    def find_lost(self) -> dict[str, str]:
        """Return lost members and the reason; servers first, because their loss can end the job."""
        ended = wait_readable(self._processes.values(), 0)  # a pidfd is readable when its process has ended
        lost = {name: ENDED for name, process in self._processes.items() if process in ended}
        silent = {name for name in self._heard if self.silence(name) > self._lease_seconds} - lost.keys()
        lost |= dict.fromkeys(silent, f"sent no heartbeat for {self._lease_seconds:g} s")
        return dict(sorted(lost.items(), key=lambda item: (is_rank(item[0]), item[0])))


def is_rank(name: str) -> bool:
    """Return whether a member is a worker, not a server."""
    return name.startswith("rank ")
