"""The agent of one machine of a Ray job: a clean interpreter that forks the machine's ranks and servers.

A worker of Ray has threads and must not fork. The machine's actor therefore starts this interpreter. It imports once
what all ranks need, binds the servers' sockets, and holds the files from which restarted servers continue. Each process
belongs to one supervisor actor, which connects to a Unix socket of this agent: it starts the process, forwards its
reports and its output to the driver, and passes on signals. When the connection closes because the supervisor died, the
process is killed. The agent dies with the machine's actor, and all processes with the agent.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import fcntl
import hashlib
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import termios
import traceback
import tty
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.utils import configure_log

from gtrain import __version__
from gtrain.errors import ConfigError, GtrainError
from gtrain.files import user_cache
from gtrain.keys import ISOLATED
from gtrain.launch import agent, interpreter, links, shipping, slot
from gtrain.launch.children import PRELOAD, Child, ProcessSpec, die_with_parent
from gtrain.launch.job import Job, process_specs
from gtrain.launch.ray.channel import Channel
from gtrain.launch.rendezvous import StoreLocation
from gtrain.launch.request import TASK, JobRequest
from gtrain.launch.sockets import listen_here, listen_tcp

_PIECE = 1 << 16


def serve(parent: Mapping[str, Any]) -> NoReturn:
    """Run as the agent of a machine until its actor closes the control connection; never returns."""
    code = 1
    try:
        die_with_parent(parent["pid"])
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block SIGINT, and children inherit that
        MachineAgent(socket.socket(fileno=parent["control"]), parent["settings"]).run()
        code = 0
    except BaseException:  # noqa: BLE001 - a defect: print its traceback
        traceback.print_exc()
    finally:
        interpreter.leave(code)


class MachineAgent:
    """The loop of a machine's agent.

    Args:
        control: connection to the machine's actor.
        settings_file: descriptor of the file into which the actor writes the settings of the job.
    """

    def __init__(self, control: socket.socket, settings_file: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._settings_file = settings_file
        self._door = listen_here()
        self._job: Job | None = None
        self._request: JobRequest | None = None
        self._specs: dict[str, ProcessSpec] = {}
        self._running: dict[str, _Running] = {}
        self._terminal: Sequence[list[int] | None] = (None, None)
        self._ended = False
        self._control = Channel(control, self._selector, self._handle_control, self._end)
        self._selector.register(self._door.socket, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Serve the actor and the supervisors until the actor closes its connection."""
        from gtrain.kernel_cache import find_cache

        agent.preload()
        find_cache()  # before any rank imports a kernel
        sys.modules[PRELOAD].place_kernels(None)
        sys.modules[PRELOAD].share_compiler()
        try:
            while not self._ended:
                for key, events in self._selector.select():
                    key.data(events)
        finally:
            for running in list(self._running.values()):
                running.kill()

    def _end(self, _: Channel) -> None:
        self._ended = True

    # ------------------------------------------------------------------------------------------ the machine's actor

    def _handle_control(self, channel: Channel, message: dict[str, Any]) -> None:
        requests: dict[str, Callable[..., dict[str, Any]]] = {"setup": self._set_up, "preflight": self._check}
        try:
            channel.send(**requests[message.pop("do")](**message))
        except GtrainError as error:
            channel.send(error=slot.describe(error))
        except Exception as error:
            traceback.print_exc()
            channel.send(error=slot.describe(GtrainError(f"{type(error).__name__}: {error}")))

    def _set_up(
        self, release: str, machine: int | None, host: str, store: Sequence[Any] | None, key: str | None
    ) -> dict[str, Any]:
        """Bind the sockets of the machine's processes.

        Args:
            release: the driver's release of gtrain.
            machine: number of this machine; None if this agent simulates all machines of the job.
            host: this machine's address for others.
            store: host and port of the job's key-value store, on other machines than its own.
            key: content of the job's key file; None: machine 0 makes keys for a job of several machines.

        Returns:
            The processes to start, this agent's address, whether it sees the run's folder, and ``store`` and ``key``
            for the other machines.
        """
        if release != __version__:
            raise ConfigError(
                f"machine {machine or 0} ({host}) has gtrain {__version__}, and the command has gtrain {release}.",
                hint="install the same release on all nodes of the Ray cluster.",
            )
        settings, _ = shipping.receive_settings(self._settings_file)
        sees_run = enter_folders(settings, machine or 0, host)
        os.environ.update(settings["environment"])
        sys.argv[:] = settings["argv"]
        configure_log(**settings["logging"])
        self._terminal = settings["terminal"]
        self._request = JobRequest(settings["config"], settings["choices"], settings["overrides"])
        job = Job(**settings["job"], config=settings["config"], machine=machine)
        distributed = machine is not None and job.num_nodes > 1
        if distributed:
            key = key or _new_keys()
        if key is not None:
            job.key_file = _key_file(key)
        if not machine:
            inside = listen_here()
            job.store, job.store_address = (inside,), inside.address
            if distributed:
                outside = listen_tcp(host)
                job.store = (inside, outside)
                store = outside.socket.getsockname()[:2]
        if store is not None:
            job.host, job.route, job.port = store[0], store[0], store[1]
            if machine:
                job.store_address = StoreLocation(store[0], store[1], store[0]).address
        self._job, specs = job, process_specs(job, TASK, (settings["config"], settings["choices"]))
        job.result = os.memfd_create("gtrain-result")
        self._specs = {spec.slot.label: spec for spec in specs}
        return {
            "specs": [
                {"slot": vars(spec.slot), **{name: getattr(spec, name) for name in ("restarts", "stop_seconds")}}
                | {"terminates": spec.terminates}
                for spec in specs
            ],
            "address": self._door.address,
            "sees_run": sees_run,
            "store": store,
            "key": key,
        }

    def _check(self) -> dict[str, Any]:
        """Run the checks that need no data."""
        assert self._request is not None
        self._request.preflight(self._request.cfg)
        return {}

    # ------------------------------------------------------------------------------------------ the supervisors

    def _accept(self, _: int) -> None:
        connection, _peer = self._door.socket.accept()
        try:
            links.check_user(connection, "the agent of a machine")
        except links.RefusedConnectionError:
            connection.close()
            return
        Channel(connection, self._selector, self._handle_supervisor, self._close_supervisor)

    def _handle_supervisor(self, channel: Channel, message: dict[str, Any]) -> None:
        match message:
            case {"start": label, "restarts": restarts}:
                self._start(channel, label, restarts)
            case {"signal": number}:
                for running in self._of(channel):
                    running.child.deliver(number, group=number in (signal.SIGTERM, signal.SIGKILL))

    def _close_supervisor(self, channel: Channel) -> None:
        for running in self._of(channel):
            running.kill()

    def _of(self, channel: Channel) -> list[_Running]:
        return [running for running in self._running.values() if running.channel is channel]

    def _start(self, channel: Channel, label: str, restarts: int) -> None:
        assert self._job is not None
        if label in self._running:  # the supervisor died, and the end of its connection has not been read yet
            self._running[label].kill()
        spec = self._specs[label]
        with _Output(self._terminal if spec.terminal else ()) as output:
            own = {self._selector.fileno(), *(key.fd for key in self._selector.get_map().values())}
            own |= {*output.descriptors, *(() if self._door.holder is None else (self._door.holder,))}
            own -= {fd for child in self._job.children for fd in (child.reports, child.pidfd)}
            child = self._job.start(spec, restarts, *own)
        self._job.children.append(child)
        channel.send(started=child.pid)
        self._running[label] = _Running(channel, child, output, self._selector, self._forget)

    def _forget(self, running: _Running) -> dict[str, Any]:
        """Remove a process that has ended, and return the value of its task."""
        assert self._job is not None
        self._job.children.remove(running.child)
        del self._running[running.child.slot.label]
        result = running.child.spec.result
        return {} if result is None else {"result": shipping.read_result(result)}


class _Running:
    """A process, and the connection of the supervisor that it belongs to.

    Args:
        channel: the connection.
        child: the process.
        output: the pipes of its output.
        selector: calls the handlers of its descriptors.
        on_end: called once the process has ended; returns further fields of the last message.
    """

    def __init__(
        self,
        channel: Channel,
        child: Child,
        output: _Output,
        selector: selectors.BaseSelector,
        on_end: Callable[[_Running], dict[str, Any]],
    ) -> None:
        self.channel, self.child = channel, child
        self._output, self._selector, self._on_end = output, selector, on_end
        self._decoders = {
            end: (number, codecs.getincrementaldecoder("utf-8")(errors="replace"))
            for number, end in enumerate(output.ends, start=1)
        }
        for end in output.ends:
            os.set_blocking(end, False)
            selector.register(end, selectors.EVENT_READ, lambda _, end=end: self._forward(end))
        selector.register(child.reports, selectors.EVENT_READ, lambda _: self._forward(child.reports))
        selector.register(child.pidfd, selectors.EVENT_READ, lambda _: self._finish())

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.child.deliver(signal.SIGKILL)
        self.child.reap(wait=True)
        self._finish()

    def _forward(self, descriptor: int) -> bool:
        """Send what a pipe contains to the supervisor; return whether there was something."""
        if self.child.closed:  # an event from before its end
            return False
        try:
            data = os.read(descriptor, _PIECE)
        except BlockingIOError:
            return False
        except OSError:  # EIO: the last process that had the terminal open has ended
            data = b""
        if not data:
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            return False
        if descriptor == self.child.reports:
            self.channel.send(reports=data.decode())  # JSON with ASCII only
        else:
            number, decoder = self._decoders[descriptor]
            self.channel.send(output=number, text=decoder.decode(data))
        return True

    def _finish(self) -> None:
        """Collect the exit status, and send it after everything else that the process wrote."""
        if self.child.closed or not self.child.reap():
            return
        for descriptor in (*self._output.ends, self.child.reports):
            while self._forward(descriptor):
                pass
        for descriptor in (*self._output.ends, self.child.reports, self.child.pidfd):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        self._output.close()
        self.channel.send(ended=self.child.status, **self._on_end(self))
        self.channel.finish()
        self.child.close()


class _Output:
    """Pipes for the standard output and error of a process, pseudo-terminals where the driver has a terminal.

    Within the context, this process's own descriptors 1 and 2 lead to them, so that a forked process inherits them.

    Args:
        terminals: columns and lines of the driver's terminal, or None, for each of the two; empty: no pipes.
    """

    def __init__(self, terminals: Sequence[Sequence[int] | None]) -> None:
        self._terminals = terminals
        self._own: list[int] = []
        self.ends: list[int] = []
        """Read ends."""

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that the forked process does not use."""
        return [*self.ends, *self._own]

    def __enter__(self) -> _Output:
        self._own = [os.dup(number) for number, _ in enumerate(self._terminals, start=1)]
        for number, size in enumerate(self._terminals, start=1):
            read_end, write_end = os.pipe() if size is None else _pseudo_terminal(size)
            self.ends.append(read_end)
            os.dup2(write_end, number)
            os.close(write_end)
        return self

    def __exit__(self, *_: object) -> None:
        for number, own in enumerate(self._own, start=1):
            os.dup2(own, number)
            os.close(own)
        self._own = []

    def close(self) -> None:
        """Close the read ends."""
        while self.ends:
            os.close(self.ends.pop())


def _pseudo_terminal(size: Sequence[int]) -> tuple[int, int]:
    """Return both ends of a pseudo-terminal that passes on what is written as it is."""
    read_end, write_end = os.openpty()
    tty.setraw(write_end)
    columns, lines = size
    fcntl.ioctl(write_end, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
    return read_end, write_end


def enter_folders(settings: Mapping[str, Any], machine: int, host: str) -> bool:
    """Change to the folder of the command, from which relative paths count, and add its folders of modules.

    A machine that does not see the folders of the command gets the modules in ``settings["code"]`` in a temporary
    folder. It works in its folder of the command's path; without one, in a folder of the user's cache, so that later
    jobs find the stores that were fetched. A machine that does not see the run's folder makes a folder of the same path
    for its logs, and removes it at the end.

    Args:
        settings: the settings of the job.
        machine: number of this machine.
        host: address of this machine, for messages.

    Returns:
        Whether this machine sees the run's folder.

    Raises:
        ConfigError: machine 0, which writes the run's folder, does not see it.
    """
    log_dir, folder = Path(settings["job"]["log_dir"]), settings["folder"]
    sees_run = (log_dir / settings["token"]).exists()
    if machine == 0 and not sees_run:
        raise ConfigError(
            f"machine 0 ({host}) does not see the run's folder {log_dir.parent}.",
            hint="cluster.first_machine=command places it on the node of the command; or choose a folder that both "
            "share: paths.runs=FOLDER.",
        )
    if not sees_run and not log_dir.parent.exists():
        missing = [path for path in log_dir.parents if not path.exists()]
        log_dir.mkdir(parents=True)
        atexit.register(_remove_folders, missing)
    modules = folder
    if settings["code"] is not None:
        modules = tempfile.mkdtemp(prefix="gtrain-modules-")
        atexit.register(shutil.rmtree, modules, ignore_errors=True)
        for name, content in settings["code"].items():
            path = Path(modules, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        folder = _lasting_folder(Path(folder)) or modules
    os.chdir(folder)
    sys.path[:0] = [path for path in dict.fromkeys([modules, *settings["modules"]]) if path not in sys.path]
    return sees_run


def _lasting_folder(folder: Path) -> str | None:
    """Return a folder in place of the command's: of the same path, or in the user's cache; None if neither is there."""
    if folder.is_dir() and os.access(folder, os.W_OK):
        return str(folder)
    try:
        name = f"{folder.name}-{hashlib.blake2b(bytes(folder), digest_size=4).hexdigest()}"
        cached = user_cache() / "folders" / name
        cached.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return None
    return str(cached) if os.access(cached, os.W_OK) else None


def _remove_folders(folders: Sequence[Path]) -> None:
    """Remove a folder with its contents, and those above it that are then empty."""
    shutil.rmtree(folders[0], ignore_errors=True)
    with contextlib.suppress(OSError):
        for folder in folders[1:]:
            folder.rmdir()


def _new_keys() -> str:
    """Return the content of a new key file."""
    from gtrain.wire import Security

    return Security.create().text()


def _key_file(key: str) -> str:
    """Write the job's keys into an anonymous file of this process, and return its path."""
    if key == ISOLATED:
        return key
    memory = os.memfd_create("gtrain-key")
    os.fchmod(memory, 0o600)
    os.write(memory, key.encode())
    return f"/proc/{os.getpid()}/fd/{memory}"
