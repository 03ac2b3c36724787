"""The wire between processes: killed servers, forks, and what is left behind."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers import LIMIT, alive, clean_environment, until

from gtrain.wire import Client, DeadlineError, Limits, PeerRestartedError, SharedTensors, WireError, ipc_folder

SERVERS = """
    import os, signal, sys
    from gtrain.wire import Message, Server

    descriptor, address, log = int(sys.argv[1]), sys.argv[2] or None, sys.argv[3]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def serve():
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

        def record(message, caller):
            os.write(file, b"%d\\n" % message.fields["value"])
            return Message({"value": message.fields["value"], "pid": os.getpid()}, message.tensors)

        adopt = {"descriptor": descriptor} if address is None else {"address": address}
        Server({"record": record}, name="recorder", **adopt).run()

    for line in sys.stdin:  # each line asks for one more server, forked from here
        pid = os.fork()
        if pid == 0:
            serve()
        print(pid, flush=True)
"""


@contextmanager
def script(source: str, *arguments: str, descriptors: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """A Python process with pipes, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        pass_fds=descriptors,
        cwd="/",
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Servers:
    """Servers on one address, one after the other, from a process that forks them."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log, self.pid = process, log, 0
        self.start()

    def start(self) -> None:
        """Start one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("start\n")
        self._process.stdin.flush()
        self.pid = int(self._process.stdout.readline())

    def kill(self) -> None:
        """kill -9 the present one."""
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: not alive(self.pid), self._log.parent)

    def executed(self) -> list[int]:
        """Values that were executed, in order."""
        return [int(line) for line in self._log.read_text().split()] if self._log.exists() else []


@contextmanager
def recorder(kind: str, folder: Path) -> Iterator[tuple[Servers, str]]:
    """A server that writes down what it executes, on an adopted descriptor or an ipc path; and its address."""
    log = folder / "executed"
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if kind == "descriptor":
            address, argument = f"tcp://127.0.0.1:{bound.getsockname()[1]}", ""
        else:
            argument = address = f"ipc://{folder / 's'}"
        with script(SERVERS, str(bound.fileno()), argument, str(log), descriptors=(bound.fileno(),)) as process:
            servers = Servers(process, log)
            try:
                yield servers, address
            finally:
                os.kill(servers.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "requests", "kills"), [pytest.param("descriptor", 10_000, 5, marks=pytest.mark.slow), ("ipc", 2_000, 2)]
)
def test_every_request_is_executed_once_or_raises(kind: str, requests: int, kills: int) -> None:
    """A server is killed and restarted at the same address while requests are under way."""
    under_way = 64
    with ipc_folder() as folder, recorder(kind, folder.path) as (servers, address):

        def kill_and_restart() -> None:
            for place in range(kills):
                threshold = requests * (place + 1) // (kills + 1) - under_way * kills
                until(lambda: len(servers.executed()) >= threshold, folder.path)  # noqa: B023
                servers.kill()
                servers.start()

        killer = threading.Thread(target=kill_and_restart)
        with Client(address, peer="recorder", limits=Limits(max_requests_in_flight=under_way)) as client:
            client.request("record", {"value": 0})
            killer.start()
            tensor, futures = torch.arange(100), {}
            for value in itertools.count(1):
                is_last = value >= requests and not killer.is_alive()  # requests are under way at each kill
                futures[value] = client.submit("record", {"value": value}, [tensor])
                if is_last:
                    break
            wait(futures.values(), timeout=LIMIT)
            restarts = client.counters.restarts
        executed = Counter(servers.executed())
    answered = {value for value, future in futures.items() if future.exception(0) is None}
    raised = {value: future.exception(0) for value, future in futures.items() if value not in answered}
    assert all(futures[value].result().fields["value"] == value for value in answered)
    assert [value for value in answered if executed[value] != 1] == []
    assert [value for value in raised if executed[value] > 1] == []
    assert {type(error) for error in raised.values()} <= {PeerRestartedError}
    assert restarts == kills
    assert len(answered) >= len(futures) - under_way * kills  # no more were lost than were under way at each kill


# ------------------------------------------------------------------------------------------------------- forks


FORK = """
    import os, sys, torch
    from gtrain.errors import GtrainError
    from gtrain.wire import Client, Message, Server, ipc_folder

    with ipc_folder() as folder:
        with Server({"echo": lambda message, caller: message}, name="a", address=folder.address("a")) as server:
            large = torch.arange(100_000)
            unused = Client(server.address, peer="a")
            with Client(server.address, peer="a") as client:
                assert torch.equal(client.request("echo", {}, [large]).tensors[0], large)
                pid = os.fork()
                if pid == 0:  # the parent has contexts, sockets and zmq's threads
                    try:
                        client.request("echo")
                        os._exit(2)
                    except GtrainError as error:
                        assert "forked" in str(error), error
                    assert torch.equal(unused.request("echo", {}, [large]).tensors[0], large)
                    unused.close()
                    handlers = {"echo": lambda message, caller: message}
                    with Server(handlers, name="b", address=folder.address("b")) as own:
                        with Client(own.address, peer="b") as other:
                            assert torch.equal(other.request("echo", {}, [large]).tensors[0], large)
                    client.close()
                    server.close()
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
                assert torch.equal(client.request("echo", {}, [large]).tensors[0], large)
    print("ended well")
"""


def test_contexts_are_not_inherited() -> None:
    with script(FORK) as process:
        out, _ = process.communicate(timeout=LIMIT)
    assert out.split("\n")[0] == "ended well"


# ---------------------------------------------------------------------------------------------- what is left


MAKER = """
    import os, sys, time, torch
    from gtrain.wire import SharedTensors
    from gtrain.wire.shared import SharedDirectory

    directory = SharedDirectory()
    shared = SharedTensors.create(directory.name, "table", {"x": torch.arange(1000.0), "n": ((3, 4), torch.int64)})
    print(directory.name, flush=True)
    print(os.readlink(f"/proc/self/fd/{shared._descriptor}"), flush=True)
    sys.stdin.readline()
"""


def files_of_shared_memory(pid: int | str = "self") -> set[str]:
    """The files of /dev/shm that a process maps: such a file outlives a process that is killed."""
    return {line.split(maxsplit=5)[5] for line in maps(pid).splitlines() if " /dev/shm/" in line}


def test_shared_tensors_leave_nothing_after_a_kill() -> None:
    """The memory is the same, outlives its maker in those attached, and is gone with them; so is the directory."""
    before = files_of_shared_memory()
    with script(MAKER) as maker:
        assert maker.stdout is not None
        directory = maker.stdout.readline().strip()
        memory = maker.stdout.readline().split()[0]
        shared = SharedTensors.attach(directory, "table", timeout_seconds=LIMIT)
        again = SharedTensors.attach(directory, "table", timeout_seconds=LIMIT)
        with pytest.raises(WireError, match="shared tensors 'table' exist already"):
            SharedTensors.create(directory, "table", {})
        made = SharedTensors.create(directory, "mine", {"x": torch.ones(2)})
        with made, SharedTensors.attach(directory, "mine", timeout_seconds=LIMIT) as mine:
            assert float(mine["x"].sum()) == 2
        shared["n"][1, 2] = 7
        assert int(again["n"][1, 2]) == 7
        assert float(again["x"].sum()) == 499_500
        assert memory in maps(maker.pid) and not files_of_shared_memory(maker.pid)
        maker.kill()
        maker.wait(LIMIT)
        with pytest.raises(DeadlineError, match="no live process has shared tensors 'table'"):
            SharedTensors.attach(directory, "table", timeout_seconds=0.1)
        with pytest.raises(WireError, match="the process that created the directory of shared tensors is gone"):
            SharedTensors.create(directory, "more", {})
    again["n"][0, 0] = 5
    assert int(shared["n"][0, 0]) == 5
    assert files_of_shared_memory() == before
    assert memory in maps()
    shared.close()
    again.close()
    del shared, again
    until(lambda: memory not in maps(), Path("/nowhere"))


def maps(pid: int | str = "self") -> str:
    """Memory mappings of a process, which is this one by default."""
    return Path(f"/proc/{pid}/maps").read_text()


def test_a_folder_outlives_its_maker_only_while_a_fork_lives() -> None:
    """The guard waits for the last process that the folder's maker forked, and is then gone itself."""
    source = """
        import os, sys
        from gtrain.wire.addresses import ipc_folder
        folder = ipc_folder()
        pid = os.fork()
        if pid == 0:
            sys.stdin.readline()
            os._exit(0)
        print(folder.path, pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    with script(source) as maker:
        assert maker.stdout is not None and maker.stdin is not None
        path, pid = maker.stdout.readline().split()
        maker.wait(LIMIT)
        assert alive(int(pid))
        assert Path(path).is_dir()
        assert Path(path).stat().st_mode & 0o777 == 0o700
        maker.stdin.write("end\n")
        maker.stdin.flush()
        until(lambda: not Path(path).exists(), Path("/nowhere"))
        until(lambda: not guards(path), Path("/nowhere"))


def guards(path: str) -> list[int]:
    """Processes that have a folder's path among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if path.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_waiting_client_says_so_and_finds_a_late_server(caplog: pytest.LogCaptureFixture) -> None:
    with ipc_folder() as folder:
        log = folder.path / "executed"
        with Client(folder.address("s"), peer="recorder 3") as client:
            future = client.submit("record", {"value": 1})
            until(lambda: "waiting for recorder 3" in caplog.text, folder.path)
            with script(SERVERS, "0", folder.address("s"), str(log)) as process:
                servers = Servers(process, log)
                try:
                    assert future.result(LIMIT).fields["value"] == 1
                finally:
                    os.kill(servers.pid, signal.SIGKILL)
    assert caplog.text.count("waiting for recorder 3") == 1
