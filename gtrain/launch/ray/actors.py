"""The actors of a Ray job: one per machine, and one for each rank and server.

A machine's actor starts the agent of that machine (:mod:`gtrain.launch.ray.machine`). A supervisor connects to it,
starts its process, and streams to the driver what the process reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from gtrain.launch.children import die_with_parent
from gtrain.launch.ray.channel import encode

_PIECE = 1 << 16
_STOP_SECONDS = 10.0
_OF_RAY = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Environment variables that Ray sets for its workers, and the start of their names."""
_START = """
import json, sys
parent = json.loads(sys.stdin.buffer.readline())
sys.path[:] = parent["path"]
from gtrain.launch.ray.machine import serve
serve(parent)
"""


class MachineActor:
    """Starts the agent of a machine and passes on requests of the driver to it.

    Args:
        environment: environment variables for the machine's processes; those of the node are used otherwise.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        die_with_parent(os.getppid())  # Ray's raylet, without which a call that runs would go on for a minute
        self._environment = dict(environment)
        self._control, theirs = socket.socketpair()
        self._settings = os.memfd_create("gtrain-settings")
        self._replies = self._control.makefile("rb")
        started: list[subprocess.Popen[bytes]] = []
        ready = threading.Event()
        # the kernel kills the agent when the thread that started it ends, so the thread lives as long as the agent
        thread = threading.Thread(target=self._run, args=(theirs, started, ready), name="gtrain-agent", daemon=True)
        thread.start()
        ready.wait()
        (self._process,) = started

    def _run(self, theirs: socket.socket, started: list[subprocess.Popen[bytes]], ready: threading.Event) -> None:
        with theirs:
            files = (theirs.fileno(), self._settings)
            of_ray = os.path.dirname(ray.__file__)
            path = [folder for folder in sys.path if not folder.startswith(of_ray)]  # Ray's own copies of packages
            parent = {"path": path, "pid": os.getpid(), "control": files[0], "settings": files[1]}
            process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=subprocess.PIPE,
                env={**_environment_of_node(), **self._environment},
                pass_fds=files,
                process_group=0,
            )
        started.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(parent).encode() + b"\n")
        ready.set()
        process.wait()

    def node(self) -> tuple[str, str]:
        """Return this node's address for other nodes, and its id."""
        return str(ray.util.get_node_ip_address()), str(ray.get_runtime_context().get_node_id())

    def sees(self, paths: Sequence[str]) -> bool:
        """Whether this node has files or folders of all of these paths."""
        return all(map(os.path.exists, paths))

    def logs(self, folder: str) -> dict[str, bytes]:
        """Return the logs in a folder by name."""
        paths = sorted(Path(folder).glob("*.log"))
        return {path.name: path.read_bytes() for path in paths}

    def set_up(self, settings: bytes, **message: Any) -> dict[str, Any]:
        """Pass the settings of the job to the agent; see :class:`gtrain.launch.ray.machine.MachineAgent`."""
        os.ftruncate(self._settings, 0)
        os.pwrite(self._settings, settings, 0)
        return self._ask(do="setup", **message)

    def preflight(self) -> dict[str, Any]:
        """Run the checks that need no data."""
        return self._ask(do="preflight")

    def _ask(self, **message: Any) -> dict[str, Any]:
        """Send a request to the agent and return its reply, in which ``error`` describes an exception."""
        try:
            self._control.sendall(encode(message))
            line = self._replies.readline()
        except OSError:
            line = b""
        if not line:
            status = self._process.wait()
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
            raise RuntimeError(f"the agent of the machine {how}")
        return dict(json.loads(line))

    @ray.method(concurrency_group="control")
    def is_alive(self) -> bool:
        """Whether the agent runs."""
        return self._process.poll() is None

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the agent, and with it all processes of the machine."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._process.kill()


class SupervisorActor:
    """Owns the process of one rank or server."""

    def __init__(self) -> None:
        die_with_parent(os.getppid())
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._start = -1  # number of earlier processes of the current one
        self._early: list[tuple[int, int]] = []  # signals that came before the process was started

    def ready(self) -> None:
        """Return when the actor has been started."""

    def gpus(self) -> list[str]:
        """Return the ids of the GPUs that Ray assigned to this actor."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def run(self, address: str, label: str, restarts: int) -> Iterator[bytes]:
        """Start the process and yield the messages about it, pieces of JSON lines, until it has ended.

        Args:
            address: where the machine's agent listens.
            label: the slot of the process, as ``rank 2``.
            restarts: how many processes of this slot came before.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address.removeprefix("ipc://"))
            with self._lock:
                connection.sendall(encode({"start": label, "restarts": restarts}))
                self._connection, self._start = connection, restarts
                early, self._early = self._early, []
            for number, of in early:
                self._send(number, of)
            try:
                while data := connection.recv(_PIECE):  # the agent closes the connection after the process's end
                    yield data
            finally:
                with self._lock:
                    self._connection = None

    @ray.method(concurrency_group="control")
    def signal(self, number: int, restarts: int) -> None:
        """Send a signal to the process.

        Args:
            number: the signal.
            restarts: how many processes of this slot came before the one that the signal is for.
        """
        self._send(number, restarts)

    def _send(self, number: int, restarts: int) -> None:
        with self._lock:
            if restarts > self._start:
                self._early.append((number, restarts))
            elif self._connection is not None and restarts == self._start:
                with contextlib.suppress(OSError):
                    self._connection.sendall(encode({"signal": number}))


def _environment_of_node() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}


def actor(cls: type, **options: Any) -> Any:
    """Return a class of this module as a class of Ray's actors, whose control calls run beside the others.

    Args:
        cls: the class.
        options: resources and names, see Ray's ``ActorClass.options``.
    """
    remote: Any = ray.remote  # its stub lacks concurrency_groups
    return remote(concurrency_groups={"control": 2})(cls).options(**options)
