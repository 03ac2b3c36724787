"""gtrain.strategy.mesh and gtrain.launch.links: messages between ranks, who is let in, and who is waited for."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LIMIT

from gtrain.errors import PeerLostError, SilentRankError
from gtrain.keys import ISOLATED
from gtrain.launch import environment, job_store, key_value, links, sockets
from gtrain.launch.environment import WaitReport
from gtrain.launch.job_store import JobNetwork
from gtrain.launch.key_value import KeyValueServer, KeyValueStore, await_end
from gtrain.launch.links import AuthenticatedListener, RefusedConnectionError
from gtrain.launch.sockets import Listener, listen_here, listen_tcp
from gtrain.strategy import membership
from gtrain.strategy import mesh as module
from gtrain.strategy.group import Group
from gtrain.strategy.membership import GroupFormation
from gtrain.strategy.mesh import EAGER_BYTES, Mesh
from gtrain.wire import Security

LOOPBACK = "127.0.0.1"


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "job.key"
    Security.create().save(path)
    return str(path)


@contextlib.contextmanager
def meshes(size: int, key_file: str | None = None, seconds: float = LIMIT, **settings: Any) -> Iterator[list[Mesh]]:
    """The ranks of a group, all in this process."""
    listeners = [listen_here() if key_file is None else listen_tcp(LOOPBACK) for _ in range(size)]
    made = [Mesh(rank, size, seconds, **settings) for rank in range(size)]

    def connect(rank: int) -> None:
        made[rank].connect(
            [listeners[rank].socket], key_file, None, "tests", lambda other: listeners[other].address, LIMIT
        )

    try:
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(connect, range(size)))
        yield made
    finally:
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(Mesh.close, made))
        for listener in listeners:
            listener.close()


def on_all(groups: list[Group], act: Callable[[Group], Any]) -> list[Any]:
    """What an act returns on each rank; where one fails, the others do not wait for it."""

    def run(group: Group) -> Any:
        try:
            return act(group)
        except BaseException:
            group.close()
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(run, groups))


class Clock:
    """The seconds of :mod:`gtrain.strategy.mesh`: each answered heartbeat of a rank takes a quarter of one.

    A rank that answers is then never silent for long, however late a loaded machine lets its threads run.
    """

    def __init__(self, mesh: Mesh, rank: int, until: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seconds, self._until, self._peer = 0.0, until, mesh._peers[rank]
        self._send = self._peer.send_control
        monkeypatch.setattr(self._peer, "send_control", self._ping)
        monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self._seconds

    def _ping(self, *frame: Any) -> None:
        self._peer.waits_for = None  # type: ignore[assignment]  # until the answer has it
        self._send(*frame)
        while self._peer.waits_for is None:
            time.sleep(0.001)
        self._seconds = min(self._until, self._seconds + 0.25)


def watching(mesh: Mesh) -> None:
    """Return when a rank sends heartbeats to the one that it waits for."""
    while not mesh._waiting:
        time.sleep(0.001)


@pytest.mark.parametrize("keys", [False, True], ids=["within a machine", "encrypted"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_collectives(size: int, keys: bool, key_file: str) -> None:
    with meshes(size, key_file if keys else None) as made:
        groups = [Group(rank, size, mesh) for rank, mesh in enumerate(made)]
        for count in (0, 1, 7, EAGER_BYTES, 3 * EAGER_BYTES + 1):
            parts = [torch.randn(count, dtype=torch.float64) * 10.0**rank for rank in range(size)]
            expected = torch.stack(parts)
            total = parts[0].clone()
            for part in parts[1:]:
                total += part  # in the order of the ranks
            sums = on_all(groups, lambda group, parts=parts: group.all_reduce(parts[group.rank].clone()))
            assert all(torch.equal(one, total) for one in sums)
            most = on_all(groups, lambda group, parts=parts: group.all_reduce(parts[group.rank].clone(), "max"))
            assert all(torch.equal(one, expected.amax(0)) for one in most)
            rows = on_all(groups, lambda group, parts=parts: group.all_gather(parts[group.rank][group.rank :]))
            cut = [part[rank:] for rank, part in enumerate(parts)]
            assert all(torch.equal(one, two) for gathered in rows for one, two in zip(gathered, cut, strict=True))
            for source in range(size):
                copies = [part.clone() for part in parts]
                on_all(groups, lambda group, to=copies, source=source: group.broadcast(to[group.rank], source))
                assert all(torch.equal(copy, parts[source]) for copy in copies)
        on_all(groups, Group.barrier)


def test_messages_of_one_tag_keep_their_order_whatever_their_sizes() -> None:
    sizes = [4, EAGER_BYTES + 1, 3, 5 * EAGER_BYTES, 2, 1, EAGER_BYTES + 2]
    contents = [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(sizes)]
    with meshes(2) as made:
        one, two = (Group(rank, 2, mesh) for rank, mesh in enumerate(made))
        sends = [one.send(content, 1, 7) for content in contents]
        late = [two.receive(torch.empty(size, dtype=torch.uint8), 0, 7) for size in sizes[:3]]
        sends += [one.send(content, 1, 7) for content in contents]
        late += [two.receive(torch.empty(size, dtype=torch.uint8), 0, 7) for size in sizes[3:] + sizes]
        for number, transfer in enumerate(late):
            assert torch.equal(transfer.wait(), contents[number % len(contents)])
        for transfer in sends:
            transfer.wait()


@pytest.mark.parametrize("size", [8, EAGER_BYTES + 8])
def test_a_message_of_another_size_than_expected_is_an_error(size: int) -> None:
    with meshes(2) as made:
        one, two = (Group(rank, 2, mesh) for rank, mesh in enumerate(made))
        transfer = two.receive(torch.empty(size + 1, dtype=torch.uint8), 0, 1)
        sent = one.send(torch.zeros(size, dtype=torch.uint8), 1, 1)
        with pytest.raises(PeerLostError, match=f"rank 0 sent .*{size} bytes, but {size + 1} bytes were expected"):
            transfer.wait()
        with contextlib.suppress(PeerLostError):
            sent.wait()


def test_who_leaves_is_gone_for_those_who_wait_for_it() -> None:
    with meshes(3) as made:
        works = [made[rank].receive(memoryview(bytearray(4)), 0, 1) for rank in (1, 2)]
        work = made[0].send(memoryview(b"last"), 2, 2)
        made[0].wait(work)
        made[0].close()
        for rank, work in zip((1, 2), works, strict=True):
            with pytest.raises(PeerLostError, match="rank 0 is gone: it left the group"):
                made[rank].wait(work)
        last = bytearray(4)
        made[2].wait(made[2].receive(memoryview(last), 0, 2))  # what it had sent before has arrived
        assert last == b"last"
        made[1].wait(made[1].send(memoryview(b"more"), 2, 1))  # and the others go on


def test_a_silent_rank_is_named_by_all_who_wait_for_it_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which says nothing."""
    for name, seconds in (("_PING_SECONDS", 0.05), ("_CHECK_SECONDS", 0.05), ("SAY_SECONDS", 0.5)):
        monkeypatch.setattr(module, name, seconds)
    said: list[str] = []
    with meshes(
        3, seconds=3.0, say=lambda name, _: said.append(name), name_of=lambda rank: f"rank {rank} (machine {rank})"
    ) as made:
        for peer in made[2]._peers.values():
            monkeypatch.setattr(peer, "send_control", lambda *_: None)  # rank 2 is stopped
        for mesh in made:
            for peer in mesh._peers.values():
                peer.last_heard = 0.0
        Clock(made[0], 1, 4.0, monkeypatch)
        with ThreadPoolExecutor(2) as pool:
            second = pool.submit(lambda: made[1].wait(made[1].receive(memoryview(bytearray(4)), 2, 1)))
            watching(made[1])
            first = pool.submit(lambda: made[0].wait(made[0].receive(memoryview(bytearray(4)), 1, 1)))
            with pytest.raises(SilentRankError, match=r"rank 2 \(machine 2\) has sent no heartbeat for \d+ s"):
                second.result()
            made[1].send(memoryview(b"late"), 0, 1)
            first.result()  # rank 1 gave signs of life, and was waited for
    assert said and set(said) == {"rank 2 (machine 2)"}


def test_a_rank_that_is_waited_for_by_other_connections_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for a message of rank 1, which waits for a reply of rank 2 that the group does not carry."""
    for name, seconds in (("_PING_SECONDS", 0.05), ("_CHECK_SECONDS", 0.05), ("SAY_SECONDS", 0.5)):
        monkeypatch.setattr(module, name, seconds)
    said: list[str] = []
    reply = threading.Event()
    with meshes(3, seconds=3.0, say=lambda name, _: said.append(name)) as made:
        for peer in made[2]._peers.values():
            monkeypatch.setattr(peer, "send_control", lambda *_: None)  # rank 2 is stopped
        for mesh in made:
            for peer in mesh._peers.values():
                peer.last_heard = 0.0
        Clock(made[0], 1, 4.0, monkeypatch)
        with ThreadPoolExecutor(2) as pool:
            second = pool.submit(lambda: made[1].watch(2, reply.wait))
            watching(made[1])
            first = pool.submit(lambda: made[0].wait(made[0].receive(memoryview(bytearray(4)), 1, 1)))
            with pytest.raises(SilentRankError, match=r"rank 2 has sent no heartbeat for \d+ s"):
                second.result()
            made[1].send(memoryview(b"late"), 0, 1)
            first.result()
        made[2].close()
        with pytest.raises(PeerLostError, match="rank 2 is gone"):
            made[0].watch(2, reply.wait)
    assert said and set(said) == {"rank 2"}


@pytest.mark.parametrize("silent", ["at once", "after it let the others in"])
def test_a_rank_that_does_not_come_is_named(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, and is stopped before it has welcomed the others, or before it connects to them."""
    for where, name, seconds in (
        (environment, "SAY_SECONDS", 0.3),
        (module, "_CHECK_SECONDS", 0.05),
        (links, "HANDSHAKE_SECONDS", 0.1),
    ):
        monkeypatch.setattr(where, name, seconds)
    said: list[str] = []
    listeners = [listen_here() for _ in range(3)]

    def connect(rank: int) -> None:
        mesh = Mesh(rank, 3, LIMIT, say=lambda name, _: said.append(name))
        try:
            mesh.connect([listeners[rank].socket], None, None, "tests", lambda other: listeners[other].address, 3.0)
        finally:
            mesh.close()

    with contextlib.ExitStack() as stack:
        for listener in listeners[:2]:
            stack.callback(listener.close)
        if silent == "at once":
            stack.callback(listeners[2].close)
        else:
            stack.enter_context(door(listeners[2], None))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        for attempt in [pool.submit(connect, rank) for rank in range(2)]:
            with pytest.raises(PeerLostError, match="rank 2 (cannot be reached|did not connect within 3 s)"):
                attempt.result()
    # On a busy machine the other rank may have been waited for, too, until it came.
    assert said and said[-1] == "rank 2 to connect"


# ---------------------------------------------------------------------------------------------------- who is let in


@contextlib.contextmanager
def door(listener: Listener, key_file: str | None, pointer: str | None = None) -> Iterator[list[socket.socket]]:
    """A door, and the connections that it let in."""
    entered: list[socket.socket] = []
    made = AuthenticatedListener([listener.socket], key_file, pointer, entered.append, "the test")
    try:
        yield entered
    finally:
        made.close()
        for line in entered:
            line.close()
        listener.close()


def test_who_lacks_the_key_is_refused_at_once_on_both_sides(
    key_file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.key"
    Security.create().save(other)
    listener = listen_tcp(LOOPBACK)
    with door(listener, key_file) as entered:
        for wrong in (str(other), None, ISOLATED):
            with pytest.raises(RefusedConnectionError, match="has another key"):
                links.connect(listener.address, wrong, LIMIT)
        assert not entered
        links.connect(listener.address, key_file, LIMIT).close()
    refused, said = "the test refused a connection from 127.0.0.1: it lacks the job's key", ""
    while refused not in (said := said + capfd.readouterr().err):  # the listener's thread prints it a moment later
        time.sleep(0.001)
    assert said.count(refused) == 1


def test_the_time_between_attempts_to_send_again_is_limited(key_file: str) -> None:
    """At both ends of a connection, where the kernel has such a limit."""
    listener = listen_tcp(LOOPBACK)
    try:
        listener.socket.getsockopt(socket.IPPROTO_TCP, sockets._TCP_RTO_MAX_MS)
    except OSError:
        listener.close()
        pytest.skip("Linux limits the time between retransmissions since 6.15")
    with door(listener, key_file) as entered, links.connect(listener.address, key_file, LIMIT) as line:
        while not entered:
            time.sleep(0.001)
        options = (sockets._TCP_RTO_MAX_MS, socket.TCP_USER_TIMEOUT)
        limits = [[end.getsockopt(socket.IPPROTO_TCP, each) for each in options] for end in (line, entered[0])]
    # The kernel derives from the first how long it tries to send: without the second, about a minute.
    assert limits == [[5000, 3_600_000]] * 2


def test_a_process_with_a_key_does_not_speak_to_one_without(key_file: str) -> None:
    inside = listen_here()
    listener = listen_tcp(LOOPBACK)
    with door(inside, None), door(listener, None, inside.address):
        with pytest.raises(RefusedConnectionError, match="has another key"):
            links.connect(listener.address, key_file, LIMIT)
        links.connect(listener.address, None, LIMIT).close()  # it is told where the Unix socket is


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can be played by root alone")
def test_another_user_of_this_machine_is_refused() -> None:
    """At a Unix socket that he can reach, and at one that he set up in the job's place."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as bound:
        os.chmod(folder, 0o777)
        ours, theirs = f"{folder}/ours", f"{folder}/theirs"
        bound.bind(ours)
        bound.listen()
        os.chmod(ours, 0o777)
        with door(Listener(bound, f"ipc://{ours}"), None) as entered:
            assert _ended(_as_nobody(lambda: links.connect(f"ipc://{ours}", None, 0.0))) != 0
            assert not entered
        pid = _as_nobody(lambda: _listen_once(theirs))
        with pytest.raises(RefusedConnectionError, match="runs as user 65534"):
            links.connect(f"ipc://{theirs}", None, LIMIT)
        assert _ended(pid) == 0


def _listen_once(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.accept()[0].recv(1)


def _as_nobody(act: Callable[[], object]) -> int:
    """Start a process of another user that does this; returns its number."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            act()
        except BaseException:  # noqa: BLE001 - whatever it is, the exit code tells
            os._exit(1)
        os._exit(0)
    return pid


def _ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_strangers_do_not_keep_the_job_out(key_file: str) -> None:
    """Who connects and is silent, sends garbage, or says that something endless comes.

    Both ends are descriptors of this process, of which many systems allow 1,024.
    """
    listener = listen_tcp(LOOPBACK)
    port = listener.socket.getsockname()[1]
    with door(listener, key_file) as entered, contextlib.ExitStack() as strangers:
        for number in range(300):
            line = strangers.enter_context(socket.create_connection((LOOPBACK, port)))
            with contextlib.suppress(OSError):
                if number % 3 == 1:
                    line.sendall(os.urandom(200))
                elif number % 3 == 2:
                    line.sendall(b"\x16\x03\x01\xff\xff" + bytes(100))
        with links.connect(listener.address, key_file, LIMIT):
            while not entered:  # it is let in a moment after it was welcomed
                time.sleep(0.001)
        assert len(entered) == 1


# ---------------------------------------------------------------------------------------------------- the store


@contextlib.contextmanager
def job() -> Iterator[list[KeyValueStore]]:
    """Two connections to a job's store."""
    listener = listen_here()
    server = KeyValueServer([listener.socket], None, None)
    yield [KeyValueStore(listener.address, None, LIMIT) for _ in range(2)]
    server.close()
    listener.close()


def test_the_key_value_store() -> None:
    listener = listen_here()
    server = KeyValueServer([listener.socket], None, None)
    stores = [KeyValueStore(listener.address, None, LIMIT) for _ in range(2)]
    one, two = stores[0].prefixed("part"), stores[1]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(two.get, "part/key")
        assert not one.check(["key"])
        one.set("key", "value")
        assert waiting.result() == b"value"
    assert [one.add("count", 2), two.add("part/count", 3), one.add("count", 0)] == [2, 5, 5]
    assert [one.compare_set("once", "", text) for text in ("first", "second")] == [b"first", b"first"]
    assert two.compare_set("nothing", "something", "other") == b""
    assert one.check(["key", "count", "once"])
    with pytest.raises(PeerLostError, match="has no key part/never"):
        one.get("never", 0.1)
    server.close()
    listener.close()


def test_a_store_that_does_not_answer_is_waited_for_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value, "_WAIT_SECONDS", 0.05)
    listener = listen_here()
    reports: list[int] = []
    with door(listener, None):  # it lets a process in, and reads nothing
        store = KeyValueStore(listener.address, None, 0.5, lambda: lambda: reports.append(1))
        with pytest.raises(PeerLostError, match="is gone: no answer for 0.5 s"):
            store.set("key", "value")
    assert len(reports) > 2


def test_who_does_not_set_a_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(environment, "SAY_SECONDS", 0.1)
    monkeypatch.setattr(job_store, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(job_store, "WaitReport", partial(WaitReport, say=lambda name, _: said.append(name)))
    with job() as stores:
        with pytest.raises(PeerLostError, match=r"rank 0 \(machine 0\) did not join within 0.5 s"):
            job_store.await_key(stores[0], "folder", "rank 0 (machine 0)", 0.5)
        stores[1].set("folder", "run")
        assert job_store.await_key(stores[0], "folder", "rank 0 (machine 0)", 0.5) == b"run"
    assert said == ["rank 0 (machine 0) to join"]


# ------------------------------------------------------------------------------------- groups that form again


def formations(stores: list[KeyValueStore], monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[GroupFormation]:
    """Those of the two ranks of a job, each with its connection to the job's store."""
    monkeypatch.setattr(membership, "job_network", lambda _: JobNetwork(None, None, 1, 2))
    monkeypatch.setattr(membership, "job_store", lambda rank: stores[rank])
    return [GroupFormation(rank, "1", rank, 2, seconds) for rank in range(2)]


def test_a_rank_that_does_not_return_to_its_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(environment, "SAY_SECONDS", 0.1)
    monkeypatch.setattr(membership, "say_waiting", lambda name, _: said.append(name))
    with job() as stores:
        for after in (-1, 0):  # the first time, and after a loss
            first, _ = formations(stores, monkeypatch, 0.5)
            with pytest.raises(PeerLostError, match=r"^rank 1 \(machine 1\) did not join within 0.5 s to form"):
                first.meet(after)
    assert said == ["rank 1 (machine 1) to join"] * 2


def test_a_rank_that_dies_while_the_group_forms_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others form the group with the process that takes its place, as soon as that one comes."""
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.05)
    listener = listen_here()
    with job() as stores, door(listener, None):  # the rank lets the other in, and dies before it connects
        first, second = formations(stores, monkeypatch, LIMIT)
        group = stores[1].prefixed("gtrain-group-1")
        group.set("0/address/1", listener.address)
        group.set("0/here/1", "")
        with ThreadPoolExecutor(1) as pool:
            forming = pool.submit(first.meet, -1)
            group.get("0/address/0")
            second.announce("back")
            made = [second.meet(-1), forming.result()]
        assert [(incarnation, members) for incarnation, members, _ in made] == [(1, (0, 1))] * 2
        for _, _, mesh in made:
            assert mesh is not None
            mesh.close()


# ---------------------------------------------------------------------------------------------------- the store's end


def test_the_end_of_the_store_is_noticed() -> None:
    listener = listen_here()
    lines: list[socket.socket] = []
    made = AuthenticatedListener([listener.socket], None, None, lines.append, "the store")
    ended: list[object] = []
    thread = threading.Thread(target=lambda: ended.append(await_end(listener.address, None)))
    thread.start()
    links.connect(listener.address, None, LIMIT).close()
    while len(lines) < 2:
        thread.join(0.01)
    assert thread.is_alive()
    for line in lines:
        line.shutdown(socket.SHUT_RDWR)
    thread.join(LIMIT)
    assert ended == [None]
    made.close()
    listener.close()


def test_another_version_of_connections_is_refused_by_both_names() -> None:
    listener = listen_here()

    def answer() -> None:
        line, _ = listener.socket.accept()
        with line:
            line.sendall(b"gtrain 2\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(RefusedConnectionError, match="its protocol is 'gtrain 2', that of this process 'gtrain 1'"):
        links.connect(listener.address, None, LIMIT)
    thread.join()
    listener.close()
