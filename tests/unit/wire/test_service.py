"""Servers and clients in one process: answers, errors, deadlines, back-pressure, duplicates."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from helpers import LIMIT, until

from gtrain.errors import ConfigError, DataError
from gtrain.wire import (
    Caller,
    Client,
    DeadlineError,
    FrameError,
    IpcFolder,
    Limits,
    Message,
    PeerRestartedError,
    RefusedError,
    RemoteError,
    Server,
    WireError,
    ipc_folder,
)
from gtrain.wire.header import EMPTY_BODY, Header, MessageType, decode_header, pack_body, pack_header

SOCKET_EXAMPLES = int(os.environ.get("GTRAIN_FUZZ_SOCKET_EXAMPLES", "3000"))
NOWHERE = Path("/nowhere")


@pytest.fixture(scope="module")
def folder() -> Iterator[IpcFolder]:
    """A folder for all sockets of this file."""
    with ipc_folder() as made:
        yield made


def echo(message: Message, caller: Caller) -> Message:
    """Give back what came."""
    return message


def fail(message: Message, caller: Caller) -> Message:
    """Raise what was asked for."""
    if message.fields["kind"] == "data":
        raise DataError("the table has no row 7", hint="ask for rows below 7")
    if message.fields["kind"] == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "log")
    return Message({"result": 1 / 0})


@contextmanager
def service(folder: IpcFolder, handlers: Mapping[str, Any], **options: Any) -> Iterator[tuple[Server, Client]]:
    """A running server and a client of it."""
    limits = options.pop("limits", Limits())
    address = options.pop("address", folder.address(f"s{random.getrandbits(40):x}"))
    with (
        Server(handlers, name="table 1", address=address, limits=options.pop("server_limits", limits)) as server,
        Client(server.address, peer="table 1", limits=limits, timeout_seconds=LIMIT, **options) as client,
    ):
        yield server, client


ZMQ = "tcp://127.0.0.1:0"
"""An address that zmq serves."""


class Raw:
    """A DEALER socket that sends whatever it is told to, with a greeting done."""

    def __init__(self, server: Server, name: str = "raw", life: int = 1) -> None:
        self.name, self.life, self.server = name, life, server.incarnation
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(1000 * LIMIT))
        self._socket.connect(server.address)
        self.send(MessageType.HELLO, 1, body=pack_body("", {"waiting": []}, (), Limits()))
        assert self.receive()[0].type == MessageType.WELCOME

    def send(self, kind: MessageType, sequence: int, *, low: int = 0, body: bytes = EMPTY_BODY, **changes: Any) -> None:
        """Send one message without tensors."""
        header = Header(kind, "count", self.name, self.life, sequence, self.server, low)
        for key, value in changes.items():
            setattr(header, key, value)
        self._socket.send(pack_header(header, body))

    def send_frames(self, frames: list[bytes]) -> None:
        """Send anything."""
        self._socket.send_multipart(frames)

    def receive(self) -> tuple[Header, list[bytes]]:
        """The next message."""
        frames = self._socket.recv_multipart()
        return decode_header(frames[0], Limits()), frames[1:]

    def silent(self) -> bool:
        """Whether nothing came back, once the server has answered something that was sent later."""
        self.send(MessageType.HELLO, 99, body=pack_body("", {"waiting": []}, (), Limits()))
        return self.receive()[0].type == MessageType.WELCOME

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


@contextmanager
def counting(folder: IpcFolder, **options: Any) -> Iterator[tuple[Server, Raw, list[int]]]:
    """A server that writes down what it executes, and a raw socket."""
    executed: list[int] = []

    def count(message: Message, caller: Caller) -> Message:
        executed.append(caller.sequence)
        return Message({"count": len(executed)})

    with service(folder, {"count": count, "echo": echo}, address=ZMQ, **options) as (server, _):
        raw = Raw(server)
        yield server, raw, executed
        raw.close()


# ------------------------------------------------------------------------------------------------------ answers


def test_requests_are_answered_with_fields_and_tensors(folder: IpcFolder) -> None:
    tensors = [torch.arange(6).view(2, 3), torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 4, dtype=torch.bool)]
    tensors += [torch.randn(100_000), torch.tensor([1 + 2j])]
    with service(folder, {"echo": echo}) as (server, client):
        answer = client.request("echo", {"a": [1, "b", None]}, tensors)
        assert client.server_incarnation == server.incarnation
        # the server counts an answer when it has left, which may be after it arrived
        until(lambda: server.counters.bytes_sent >= client.counters.bytes_received, NOWHERE)
        sent, received = replace(client.counters), replace(server.counters)
    assert answer.fields == {"a": [1, "b", None]}
    assert [(t.dtype, t.shape) for t in answer.tensors] == [(t.dtype, t.shape) for t in tensors]
    assert all(torch.equal(there, here) for there, here in zip(answer.tensors, tensors, strict=True))
    answer.tensors[3].add_(1)  # its memory is ours
    payload = sum(t.nbytes for t in tensors)
    assert payload < sent.bytes_sent < payload + 1000
    assert (sent.bytes_sent, sent.bytes_received) == (received.bytes_received, received.bytes_sent)
    assert (sent.requests, received.requests, sent.errors, received.errors) == (1, 1, 0, 0)


def test_many_requests_from_many_threads(folder: IpcFolder) -> None:
    """Some wait, some take futures; each gets its own answer, and each was executed once."""
    seen: list[tuple[int, int]] = []

    def square(message: Message, caller: Caller) -> Message:
        seen.append((message.fields["thread"], message.fields["value"]))
        return Message({"square": message.fields["value"] ** 2})

    results: dict[int, list[int]] = {}
    with service(folder, {"square": square}) as (_, client):

        def ask(thread: int) -> None:
            if thread % 2:
                futures = [client.submit("square", {"thread": thread, "value": value}) for value in range(300)]
                results[thread] = [future.result(LIMIT).fields["square"] for future in futures]
            else:
                answers = [client.request("square", {"thread": thread, "value": value}) for value in range(300)]
                results[thread] = [answer.fields["square"] for answer in answers]

        threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
    assert results == {thread: [value**2 for value in range(300)] for thread in range(4)}
    assert sorted(seen) == [(thread, value) for thread in range(4) for value in range(300)]


def test_a_callback_may_ask_again_and_close(folder: IpcFolder) -> None:
    done: Future[list[int]] = Future()
    with service(folder, {"echo": echo}) as (_, client):

        def again(future: Future[Message]) -> None:
            inner = client.request("echo", {"value": future.result().fields["value"] + 1})
            later = client.submit("echo", {"value": inner.fields["value"] + 1})
            later.add_done_callback(lambda last: (client.close(), done.set_result([last.result().fields["value"]])))

        client.submit("echo", {"value": 1}).add_done_callback(again)
        assert done.result(LIMIT) == [3]
        with pytest.raises(WireError, match="the client of table 1 is closed"):
            client.request("echo")


def test_who_comes_for_an_answer_receives_it(folder: IpcFolder) -> None:
    """Two attended requests, answered in the other order; the thread that waits is the one that receives."""
    waiting: list[Future[Message | None]] = []
    receivers: list[str] = []

    def later(message: Message, caller: Caller) -> Future[Message | None]:
        waiting.append(Future())
        return waiting[-1]

    def release(message: Message, caller: Caller) -> Message:
        waiting[message.fields["number"]].set_result(Message({"value": message.fields["number"]}))
        return Message({})

    with service(folder, {"later": later, "release": release}) as (_, client):
        first, second = (client.submit("later", attended=True) for _ in range(2))
        for future in (first, second):
            future.add_done_callback(lambda _: receivers.append(threading.current_thread().name))
        with pytest.raises(TimeoutError):
            client.result(first, 0.05)
        client.submit("release", {"number": 1}, attended=True)
        assert client.result(second, LIMIT).fields == {"value": 1} and not first.done()
        client.submit("release", {"number": 0}, attended=True)
        assert client.result(first).fields == {"value": 0}
        assert receivers == [threading.current_thread().name] * 2
        assert client.result(first, 0).fields == {"value": 0}  # it is there already

        futures = [client.submit("later", attended=True) for _ in range(2)]  # only one of these threads receives
        threads = [threading.Thread(target=client.result, args=(future,)) for future in futures]
        for thread in threads:
            thread.start()
        for number, thread in enumerate(threads):  # the second goes on when the first has its answer
            client.request("release", {"number": 2 + number})
            thread.join(LIMIT)
            assert futures[number].done() and not thread.is_alive()

        left = client.submit("later", attended=True)
        left.add_done_callback(lambda _: receivers.append(threading.current_thread().name))
        client.request("release", {"number": 4})
        client.receive_in_background()
        assert left.result(LIMIT).fields == {"value": 4} and receivers[-1].startswith("gtrain-client-")


def test_the_loop_works_between_requests(folder: IpcFolder) -> None:
    """What work finishes is answered before it works again, though nobody wakes the loop."""
    asked: list[Future[Message | None]] = []
    threads = set[str]()

    def later(message: Message, caller: Caller) -> Future[Message | None]:
        threads.add(threading.current_thread().name)
        asked.append(Future())
        return asked[-1]

    def work() -> bool:
        threads.add(threading.current_thread().name)
        if asked:
            asked.pop(0).set_result(Message({"left": len(asked)}))
            return True
        return False

    server = Server({"later": later}, name="a server that works", address=folder.address("works")).start(work)
    try:
        with Client(server.address, peer=server.name) as client:
            futures = [client.submit("later") for _ in range(20)]
            assert all(future.result(LIMIT).fields["left"] < 20 for future in futures)
    finally:
        server.close()
    assert threads == {"gtrain-server-a server that works"}


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 12) or platform.machine() != "x86_64",
    reason="the kernel gives no thread a slice of its own",
)
def test_threads_that_carry_messages_have_short_slices(folder: IpcFolder) -> None:
    def slice_of(task: Path) -> int:
        attributes = ctypes.create_string_buffer(56)
        assert ctypes.CDLL(None).syscall(315, int(task.name), attributes, 56, 0) == 0  # sched_getattr
        return int.from_bytes(attributes.raw[24:32], "little") // 1000

    server = Server({"echo": echo}, name="a server", address=ZMQ)
    with server, Client(server.address, peer=server.name) as client:
        client.request("echo")
        tasks = list(Path("/proc/self/task").iterdir())
        carrying = {task for task in tasks if (task / "comm").read_text().startswith("ZMQbg/IO")}
        assert len(carrying) >= 2 and {slice_of(task) for task in carrying} == {100}
        assert min(slice_of(task) for task in tasks if task not in carrying) > 100


def test_a_server_that_was_started_is_not_started_again() -> None:
    """Two loops over one socket would take each other's messages, and one would close what the other reads."""
    with Server({"echo": echo}, name="one loop", address=ZMQ).start() as server:
        assert server.start() is server
        assert [one.name for one in threading.enumerate()].count("gtrain-server-one loop") == 1
        with Client(server.address, peer=server.name) as client:
            client.request("echo")


def test_handlers_may_answer_later(folder: IpcFolder) -> None:
    """Two clients meet: the first one's answer waits for the second."""
    waiting: list[Future[Message | None]] = []

    def meet(message: Message, caller: Caller) -> Future[Message | None]:
        waiting.append(Future())
        if len(waiting) == 3:
            waiting[0].set_result(Message({"met": 3}))
            waiting[1].set_exception(DataError("too many", hint="come alone"))
            waiting[2].cancel()
        return waiting[-1]

    with service(folder, {"meet": meet, "echo": echo}) as (_, client):
        futures = [client.submit("meet") for _ in range(2)]
        client.request("echo")  # the server goes on meanwhile
        assert not any(future.done() for future in futures)
        futures.append(client.submit("meet"))
        assert futures[0].result(LIMIT).fields == {"met": 3}
        with pytest.raises(RemoteError, match="too many"):
            futures[1].result(LIMIT)
        with pytest.raises(RemoteError, match="cancelled"):
            futures[2].result(LIMIT)


# ------------------------------------------------------------------------------------------------------- errors


def test_what_a_handler_raises_is_raised_at_the_asker(folder: IpcFolder, caplog: pytest.LogCaptureFixture) -> None:
    with service(folder, {"fail": fail, "echo": echo}) as (server, client):
        with pytest.raises(RemoteError) as planned:
            client.request("fail", {"kind": "data"})
        with pytest.raises(RemoteError, match="table 1 failed to answer 'fail': ZeroDivisionError: division by zero"):
            client.request("fail", {"kind": "zero"})
        with pytest.raises(RemoteError, match="log cannot be written: no space left on device.\nHINT: free space"):
            client.request("fail", {"kind": "disk"})
        with pytest.raises(RemoteError, match="'ecko'.*\nHINT: use one of: echo, fail"):
            client.request("ecko")
        assert client.request("echo", {"a": 1}).fields == {"a": 1}
        assert (client.counters.errors, server.counters.errors) == (4, 4)
    error = planned.value
    assert (error.peer, error.method, error.kind, error.remote_message, error.hint) == (
        *("table 1", "fail", "DataError", "the table has no row 7"),
        "ask for rows below 7",
    )
    logged = [record for record in caplog.records if record.name == "gtrain.wire.server"]
    assert [record.exc_info is not None for record in logged] == [True]  # a defect, with its traceback


@pytest.mark.parametrize("result", ["text", Message({"a": object()}), Message({}, [torch.zeros(200)])])
def test_an_answer_that_cannot_be_sent_is_an_error(folder: IpcFolder, result: Any) -> None:
    handlers = {"give": lambda message, caller: result}
    with (
        service(folder, handlers, limits=Limits(max_frame_bytes=500), server_limits=Limits()) as (_, client),
        pytest.raises(RemoteError, match="(TypeError|FrameError)"),
    ):
        client.request("give")


def test_a_late_answer_raises_and_is_dropped(folder: IpcFolder) -> None:
    release = threading.Event()

    def slow(message: Message, caller: Caller) -> None:
        release.wait(LIMIT)

    with service(folder, {"slow": slow, "echo": echo}) as (_, client):
        client.request("echo")
        with pytest.raises(DeadlineError, match="table 1 did not answer 'slow' within 0.2 s") as caught:
            client.request("slow", timeout_seconds=0.2)
        assert (caught.value.peer, caught.value.method, caught.value.seconds) == ("table 1", "slow", 0.2)
        future = client.submit("slow", timeout_seconds=0.1)
        with pytest.raises(DeadlineError):
            future.result(LIMIT)
        release.set()
        assert client.request("echo", {"a": 2}).fields == {"a": 2}


def test_a_server_that_is_not_there(folder: IpcFolder) -> None:
    with (
        Client(folder.address("none"), peer="table 9", timeout_seconds=0.2) as client,
        pytest.raises(DeadlineError, match=r"table 9 at ipc://.* was not reached within 0.2 s for the request 'echo'"),
    ):
        client.request("echo")


def test_closing_raises_what_is_under_way(folder: IpcFolder) -> None:
    with service(folder, {"wait": lambda message, caller: Future()}) as (_, client):
        future = client.submit("wait")
        client.close()
        with pytest.raises(WireError, match="was closed"):
            future.result(LIMIT)


def test_requests_beyond_the_limits_are_refused_where_they_are_made(folder: IpcFolder) -> None:
    with service(folder, {"echo": echo}, server_limits=Limits(max_message_bytes=1000, max_tensors=2)) as (_, client):
        with pytest.raises(FrameError, match="table 1 does not accept 'echo' with"):
            client.request("echo", {}, [torch.zeros(1000)])
        with pytest.raises(FrameError, match="in 3 tensors"):
            client.request("echo", {}, [torch.zeros(1)] * 3)
        with pytest.raises(FrameError, match="is not the name of a method"):
            client.request("")
        assert client.request("echo", {}, [torch.ones(2)]).tensors[0].tolist() == [1, 1]


@pytest.mark.parametrize("address", ["tcp://localhost", "http://a:1", "ipc://", "tcp://a:70000", "ipc:///" + "x" * 107])
def test_malformed_addresses_are_named(address: str) -> None:
    with pytest.raises(ConfigError):
        Client(address, peer="table 1")


# ------------------------------------------------------------------------------------------------- back-pressure


def test_a_client_waits_while_too_many_bytes_are_under_way(folder: IpcFolder) -> None:
    release = threading.Event()
    peak: list[int] = []

    def slow(message: Message, caller: Caller) -> None:
        release.wait(LIMIT)

    limits = Limits(max_bytes_in_flight=10_000)
    with service(folder, {"slow": slow}, limits=limits) as (_, client):
        futures = [client.submit("slow", {}, [torch.zeros(1000)]) for _ in range(2)]
        with pytest.raises(DeadlineError, match="'slow' of 4,0.. bytes had to wait and was not sent"):
            client.submit("slow", {}, [torch.zeros(1000)], timeout_seconds=0.1)
        release.set()
        for _ in range(20):
            futures.append(client.submit("slow", {}, [torch.zeros(1000)]))
            peak.append(client._session.pending.nbytes)
        assert not wait_for(futures, timeout=LIMIT).not_done
    assert max(peak) <= 10_000


def test_a_server_holds_only_so_many_bytes_of_answers(folder: IpcFolder) -> None:
    """A client that asks for much and takes nothing: the rest of its requests waits until it acknowledges."""
    limits, executed = Limits(max_bytes_in_flight=10_000), []

    def give(message: Message, caller: Caller) -> Message:
        executed.append(caller.sequence)
        return Message({}, [torch.zeros(1000)])

    with service(folder, {"count": give, "echo": echo}, address=ZMQ, limits=limits) as (server, client):
        raw = Raw(server)
        for sequence in range(1, 10):
            raw.send(MessageType.REQUEST, sequence)
        answers = [raw.receive()[0].sequence for _ in range(3)]
        client.request("echo")
        assert (answers, executed) == ([1, 2, 3], [1, 2, 3])  # 12,000 bytes
        raw.send(MessageType.ACK, 0, low=3)
        assert [raw.receive()[0].sequence for _ in range(2)] == [4, 5]
        client.request("echo")
        assert executed == [1, 2, 3, 4, 5]
        raw.close()
        many = [client.submit("count") for _ in range(50)]  # a client of ours acknowledges in time
        assert not wait_for(many, timeout=LIMIT).not_done


def test_large_answers_are_acknowledged_at_once(folder: IpcFolder) -> None:
    """A client that asks no more does not leave them in the server's memory; one that closes leaves nothing."""
    handlers = {"give": lambda message, caller: Message({}, [torch.zeros(message.fields["count"])])}
    with service(folder, handlers) as (server, client):
        client.request("give", {"count": 3_000_000})
        (session,) = server._sessions.values()
        until(lambda: session.unacknowledged_bytes == 0, NOWHERE)
        client.request("give", {"count": 1000})
        assert session.unacknowledged_bytes > 4000
        client.close()
        until(lambda: session.unacknowledged_bytes == 0, NOWHERE)


def test_a_server_takes_only_so_many_bytes_of_requests(folder: IpcFolder) -> None:
    limits = Limits(max_bytes_in_flight=200)
    with service(folder, {"count": lambda message, caller: Future()}, address=ZMQ, limits=limits) as (server, _):
        raw = Raw(server)
        for sequence in range(1, 9):
            raw.send(MessageType.REQUEST, sequence)
        header, _ = raw.receive()
        assert header.type == MessageType.ERROR
        assert "bytes more than the" in header.fields["message"]
        raw.close()


# --------------------------------------------------------------------------------------------------- exactly once


def test_a_duplicate_is_answered_from_memory(folder: IpcFolder) -> None:
    with counting(folder) as (server, raw, executed):
        for _ in range(3):
            raw.send(MessageType.REQUEST, 1)
            header, _ = raw.receive()
            assert (header.type, header.sequence, header.fields) == (MessageType.REPLY, 1, {"count": 1})
        raw.send(MessageType.REQUEST, 2, low=2)  # the first is acknowledged
        assert raw.receive()[0].fields == {"count": 2}
        raw.send(MessageType.REQUEST, 1)
        assert raw.silent()
        assert executed == [1, 2]
        assert server.counters.duplicates == 3


def test_a_duplicate_of_one_under_way_is_dropped(folder: IpcFolder) -> None:
    later: list[Future[Message | None]] = []

    def count(message: Message, caller: Caller) -> Future[Message | None]:
        later.append(Future())
        return later[-1]

    with service(folder, {"count": count}, address=ZMQ) as (server, _):
        raw = Raw(server)
        for _ in range(3):
            raw.send(MessageType.REQUEST, 1)
        assert raw.silent()
        later[0].set_result(Message({"a": 1}))
        assert raw.receive()[0].fields == {"a": 1}
        assert raw.silent()
        assert len(later) == 1
        raw.close()


def test_a_greeting_brings_back_what_was_lost(folder: IpcFolder) -> None:
    """After a reconnect: answers that were lost come again, requests that were lost are named."""
    with counting(folder) as (server, raw, executed):
        raw.send(MessageType.REQUEST, 1)
        raw.receive()
        other = Raw(server)  # the same client through another connection
        other.send(MessageType.HELLO, 2, body=pack_body("", {"waiting": [1, 2]}, (), Limits()))
        header, _ = other.receive()
        assert header.fields["missing"] == [2]
        assert other.receive()[0].fields == {"count": 1}
        assert executed == [1]
        other.close()


def test_requests_for_another_life_of_the_server_are_not_executed(folder: IpcFolder) -> None:
    with counting(folder) as (_, raw, executed):
        raw.server += 1
        raw.send(MessageType.REQUEST, 1)
        assert raw.receive()[0].type == MessageType.STALE
        assert executed == []


def test_requests_of_a_client_that_is_not_known_are_not_executed(folder: IpcFolder) -> None:
    with counting(folder) as (_, raw, executed):
        raw.send(MessageType.REQUEST, 1, client="stranger")
        assert raw.receive()[0].type == MessageType.STALE
        raw.send(MessageType.REQUEST, 1, client_incarnation=2)  # it has not said hello
        assert raw.receive()[0].type == MessageType.STALE
        assert executed == []


def test_a_newer_client_takes_the_place_of_an_older(folder: IpcFolder) -> None:
    with service(folder, {"echo": echo}, name="rank 1", incarnation=5) as (server, old):
        old.request("echo")
        with Client(server.address, peer="table 1", name="rank 1", incarnation=6) as new:
            new.request("echo")
            with pytest.raises(RefusedError, match="a newer incarnation of this client"):
                old.request("echo")
            with pytest.raises(RefusedError):
                old.submit("echo")
            assert new.request("echo", {"a": 1}).fields == {"a": 1}
        assert server.counters.refused == 1


def test_a_restarted_server_raises_what_was_under_way_and_serves_what_comes(folder: IpcFolder) -> None:
    address = folder.address("restart")
    with Client(address, peer="table 1", timeout_seconds=LIMIT) as client:
        with Server({"wait": lambda message, caller: Future()}, name="table 1", address=address) as first:
            future = client.submit("wait")
            until(lambda: first.counters.requests == 1, NOWHERE)
        waiting = client.submit("echo", {"a": 1})
        with Server({"echo": echo}, name="table 1", address=address) as second:
            with pytest.raises(PeerRestartedError, match="table 1 was restarted.* during the request 'wait'"):
                future.result(LIMIT)
            assert waiting.result(LIMIT).fields == {"a": 1}  # it had not been sent
            assert client.server_incarnation == second.incarnation
        with Server({"echo": echo}, name="table 1", address=address):
            assert client.request("echo", {"a": 2}).fields == {"a": 2}  # nothing was under way
        assert client.counters.restarts == 2


def test_a_second_server_cannot_take_the_address_of_a_live_one(folder: IpcFolder) -> None:
    with service(folder, {"echo": echo}) as (server, client):
        with pytest.raises(WireError, match="table 2 cannot listen at .*another server"):
            Server({}, name="table 2", address=server.address).run()
        assert client.request("echo", {"a": 1}).fields == {"a": 1}


def test_a_server_adopts_a_descriptor_again_and_again() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        with Client(address, peer="table 1", timeout_seconds=LIMIT) as client:
            for value in range(2):
                with Server({"echo": echo}, name="table 1", descriptor=bound.fileno()) as server:
                    assert server.address == address
                    assert client.request("echo", {"a": value}).fields == {"a": value}
            assert bound.getsockname()[1] == int(address.rpartition(":")[2])  # still ours


class Relay:
    """Passes bytes between a client and a server, until it is cut; then a new connection may be made through it."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target, self._listener = (host, int(port)), socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:  # closed
                return
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket) -> None:
        try:
            while chunk := source.recv(1000):
                sink.sendall(chunk)
        except OSError:  # cut
            return

    def cut(self) -> None:
        """End all connections, with what they carry."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends.clear()

    def close(self) -> None:
        """End."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def test_a_lost_connection_loses_no_request() -> None:
    """The server lives; connections break under load, requests and answers on the way are lost, and nothing raises."""
    executed: list[int] = []
    arrived, go_on = threading.Event(), threading.Event()

    def record(message: Message, caller: Caller) -> Message:
        value = message.fields["value"]
        executed.append(value)
        if value % 400 == 100:  # its answer finds the connection cut
            arrived.set()
            assert go_on.wait(LIMIT)
        return message

    with Server({"record": record}, name="table 1", address="tcp://127.0.0.1:0") as server:
        relay = Relay(server.address)
        with Client(relay.address, peer="table 1", timeout_seconds=LIMIT) as client:
            futures, tensor = [], torch.arange(50)
            for value in range(2000):
                futures.append(client.submit("record", {"value": value}, [tensor]))
                if value % 400 == 399:
                    assert arrived.wait(LIMIT)
                    arrived.clear()
                    relay.cut()
                    go_on.set()
                    until(lambda: len(executed) > value - 298, NOWHERE)  # noqa: B023
                    go_on.clear()
            assert [future.result(LIMIT).fields["value"] for future in futures] == list(range(2000))
            assert client.counters.restarts == 0
            resent = client.counters.resent + server.counters.resent
        relay.close()
    assert sorted(executed) == list(range(2000))
    assert resent > 0  # something was lost on the way


def test_a_silent_server_is_asked_again() -> None:
    """A false server loses a request and says so when it is asked; the client sends it once more."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.RCVTIMEO, int(1000 * LIMIT))
    router.bind("tcp://127.0.0.1:*")
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)

    def next_header() -> tuple[bytes, Header]:
        routing, frame = router.recv_multipart()
        return routing, decode_header(frame, Limits())

    def answer(routing: bytes, to: Header, kind: MessageType, fields: dict[str, Any]) -> None:
        header = Header(kind, "", to.client, to.client_incarnation, to.sequence, 77)
        router.send_multipart([routing, pack_header(header, pack_body("", fields, (), Limits()))])

    with Client(address, peer="table 1", limits=Limits(silence_seconds=0.2), timeout_seconds=LIMIT) as client:
        future, asked, requests = client.submit("push", {"a": 1}), [], 0
        while requests < 2:  # it may ask more often, if this thread is late
            routing, header = next_header()
            if header.type == MessageType.HELLO:
                asked.append(header.fields["waiting"])
                answer(routing, header, MessageType.WELCOME, {"missing": header.fields["waiting"]})
                continue
            assert (header.type, header.sequence, header.fields) == (MessageType.REQUEST, 1, {"a": 1})
            requests += 1
        answer(routing, header, MessageType.REPLY, {"b": 2})
        assert future.result(LIMIT).fields == {"b": 2}
        assert asked[0] == [] and [1] in asked
        assert client.counters.requests == 1 and client.counters.resent >= 1
    router.close()


@pytest.mark.parametrize("options", [{}, {"address": "ipc://folder/a", "descriptor": 0}, {"descriptor": 10**6}])
def test_a_server_needs_one_address(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Server({}, name="table 1", **options)


def test_run_ends_with_its_event(folder: IpcFolder) -> None:
    stop = threading.Event()
    server = Server({"echo": echo}, name="table 1", address=folder.address("run"))
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    with Client(folder.address("run"), peer="table 1", timeout_seconds=LIMIT) as client:
        client.request("echo")
        stop.set()
        thread.join(LIMIT)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------------------------- malformed


def test_a_malformed_request_is_answered_if_its_sender_is_known(folder: IpcFolder) -> None:
    with counting(folder) as (server, raw, executed):
        for sequence, body in enumerate(
            (pack_body("", {}, [("float32", (2,))], Limits()), pack_body("", {}, [("float32", (1 << 50,))], Limits())),
            1,
        ):
            raw.send(
                MessageType.REQUEST, sequence, body=body
            )  # announces a tensor that does not follow, and a huge one
            header, _ = raw.receive()
            assert (header.type, header.sequence, header.fields["kind"]) == (MessageType.ERROR, sequence, "FrameError")
        assert executed == []
        assert server.counters.malformed == 2


def test_malformed_messages_do_not_stop_a_server(folder: IpcFolder, caplog: pytest.LogCaptureFixture) -> None:
    """Mutated requests over a socket; afterwards the server answers as before."""
    caplog.set_level(logging.WARNING)
    random.seed(7)
    with counting(folder) as (server, raw, executed):
        body = pack_body("count", {"a": [1, {"b": b"x"}]}, [("float32", (4,))], Limits())
        for sequence in range(1, SOCKET_EXAMPLES + 1):
            header = Header(MessageType.REQUEST, "count", raw.name, raw.life, sequence, raw.server, sequence)
            raw.send_frames(mutated([pack_header(header, body), bytes(16)]))
        raw.send_frames([b""])
        raw.send_frames([b"", b"", b""])
        until(lambda: server.counters.malformed > SOCKET_EXAMPLES // 4, NOWHERE)
        fresh = Raw(server, "fresh")
        fresh.send(MessageType.REQUEST, 1)
        assert fresh.receive()[0].type == MessageType.REPLY
        fresh.close()
        assert len(executed) == len(set(executed)) + executed.count(1) - 1
    lines = [record for record in caplog.records if "malformed" in record.message]
    assert 1 <= len(lines) <= 5  # not one for each


def mutated(frames: list[bytes]) -> list[bytes]:
    """Frames with one to three random bytes changed, inserted or removed, or a frame less or more."""
    frames = [bytearray(frame) for frame in frames]
    for _ in range(random.randint(1, 3)):
        frame = random.choice(frames)
        at = random.randrange(len(frame) + 1)
        change: Callable[[], Any] = random.choice(
            [
                lambda: frame.__setitem__(slice(at, at + 1), random.randbytes(1)),  # noqa: B023
                lambda: frame.__setitem__(slice(at, at), random.randbytes(random.randint(1, 5))),  # noqa: B023
                lambda: frame.__delitem__(slice(at, at + random.randint(1, 5))),  # noqa: B023
                lambda: frames.append(bytearray(random.randbytes(3))),
            ]
        )
        change()
    return [bytes(frame) for frame in frames]


def test_a_client_survives_malformed_answers() -> None:
    """A false server: what answers a request raises there, anything else is dropped."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.RCVTIMEO, int(1000 * LIMIT))
    router.bind("tcp://127.0.0.1:*")
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    with Client(address, peer="table 1", timeout_seconds=LIMIT) as client:
        future = client.submit("echo")
        routing, frame = router.recv_multipart()
        hello = decode_header(frame, Limits())
        welcome = Header(MessageType.WELCOME, "", hello.client, hello.client_incarnation, 1, 77)
        for nonsense in (b"", b"\xc1", pack_header(welcome, pack_body("", {"limits": 3, "missing": {}}, (), Limits()))):
            router.send_multipart([routing, nonsense])
        routing, frame = router.recv_multipart()
        request = decode_header(frame, Limits())
        reply = Header(MessageType.REPLY, "", request.client, request.client_incarnation, 1, 77)
        router.send_multipart([routing, pack_header(reply, pack_body("", {}, [("int8", (3,))], Limits())), b"ab"])
        with pytest.raises(FrameError, match="3 bytes; its frame has 2"):
            future.result(LIMIT)
        assert client.counters.malformed == 3
    router.close()
