"""Connections within a machine: framing, partial writes, what is refused, and losses."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import LIMIT, until

from gtrain.wire import Client, IpcFolder, Limits, Message, RefusedError, Security, Server
from gtrain.wire.unix.stream import MAGIC, ConnectionEndedError, ProtocolError, Stream

LIMITS, NOWHERE = Limits(), Path("/nowhere")


@pytest.fixture
def ends() -> Iterator[tuple[Stream, Stream]]:
    pair = socket.socketpair()
    streams = Stream(pair[0], LIMITS), Stream(pair[1], LIMITS)
    yield streams
    for stream in streams:
        stream.close()


def frame(size: int, seed: int) -> memoryview:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).data


def test_messages_of_any_size_arrive_whole_and_in_order(ends: tuple[Stream, Stream]) -> None:
    random.seed(3)
    left, right = ends
    sizes = [0, 1, 63, 4096, 16_384, 16_385, 200_000, 9_000_000]
    messages = [
        (
            random.randbytes(random.choice([1, 300, 20_000])),
            [frame(random.choice(sizes), 9 * number + k) for k in range(number % 5)],
        )
        for number in range(40)
    ]  # more than the kernel takes at once
    got: list[list[bytes]] = []
    nbytes = [left.send(header, frames) for header, frames in messages]
    assert left.unsent and nbytes == [len(header) + sum(map(len, frames)) for header, frames in messages]
    while len(got) < len(messages):
        left.flush()
        while (pieces := right.receive()) is not None:
            got.append([bytes(piece) for piece in pieces])
    assert got == [[header, *(bytes(one) for one in frames)] for header, frames in messages]
    assert not left.unsent and right.receive() is None


def test_received_memory_is_writable_and_no_one_elses(ends: tuple[Stream, Stream]) -> None:
    left, right = ends
    sent = frame(100_000, 1)
    left.send(b"h", [sent, sent])
    pieces = right.receive()
    assert pieces is not None
    pieces[1][0] ^= 255
    assert pieces[2] == sent and pieces[1] != sent


@pytest.mark.parametrize(
    ("said", "zmq"),
    [
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", True),
        (b"GET / HTTP/1.1\r\n\r\n", False),
        (struct.pack("=4sI", MAGIC, 0), False),
        (struct.pack("=4sI", MAGIC, LIMITS.max_tensors + 2), False),
        (struct.pack("=4sIQ", MAGIC, 1, LIMITS.max_frame_bytes + 1), False),
    ],
)
def test_what_is_no_message_is_refused_before_anything_is_allocated(said: bytes, zmq: bool) -> None:
    ours, theirs = socket.socketpair()
    stream = Stream(ours, LIMITS)
    with theirs:
        theirs.sendall(said)
        with pytest.raises(ProtocolError) as caught:
            stream.receive()
    assert caught.value.is_zmq == zmq
    stream.close()


def test_a_peer_that_goes_in_the_middle_of_a_message_has_ended(ends: tuple[Stream, Stream]) -> None:
    left, right = ends
    left.send(b"first", [frame(10, 1)])
    left._socket.send(struct.pack("=4sIQQ", MAGIC, 2, 5, 1000) + b"he")
    left.close()
    first = right.receive()
    assert first is not None and first[0] == b"first"  # what was there before is not lost
    with pytest.raises(ConnectionEndedError):
        right.receive()
    with pytest.raises(ConnectionEndedError):
        right.send(b"answer", [])


def test_large_messages_pass_both_ways_at_once(folder: IpcFolder) -> None:
    """Far beyond what the kernel buffers; the server computes meanwhile, and nobody waits for an answer at first."""
    handlers = {"double": lambda message, caller: Message({}, [2 * message.tensors[0]])}
    address = folder.address("large")
    with (
        Server(handlers, name="table", address=address),
        Client(address, peer="table", timeout_seconds=LIMIT) as client,
    ):
        rows = [torch.full((4_000_000,), float(number)) for number in range(6)]
        futures = [client.submit("double", {}, [row], attended=number % 2 == 0) for number, row in enumerate(rows)]
        for number, future in enumerate(futures):
            answer = client.result(future) if number % 2 == 0 else future.result(LIMIT)
            assert torch.equal(answer.tensors[0], 2 * rows[number])


def test_a_request_that_nobody_comes_for_leaves_all_the_same(folder: IpcFolder) -> None:
    """It is larger than the kernel's buffer, and its asker computes instead of waiting."""
    arrived = threading.Event()

    def take(message: Message, caller: object) -> None:
        if message.tensors:
            arrived.set()

    address = folder.address("alone")
    with Server({"take": take}, name="table", address=address), Client(address, peer="table") as client:
        client.request("take")
        future = client.submit("take", {}, [torch.zeros(8_000_000)], attended=True)
        assert arrived.wait(LIMIT)
        client.result(future)


@pytest.mark.parametrize("server_has_keys", [True, False])
def test_keys_on_one_side_only_are_told_apart(folder: IpcFolder, server_has_keys: bool) -> None:
    security, address = Security.create(), folder.address(f"keys{server_has_keys}")
    server = Server({}, name="table", address=address, security=security if server_has_keys else None)
    keys = None if server_has_keys else security
    client = Client(address, peer="table", security=keys, timeout_seconds=LIMIT)
    with server, client, pytest.raises(RefusedError, match="keys"):
        client.request("x")


def test_a_foreign_peer_is_counted_and_told_of_once(folder: IpcFolder, caplog: pytest.LogCaptureFixture) -> None:
    address = folder.address("foreign")
    handlers = {"echo": lambda message, caller: message}
    with Server(handlers, name="table 1", address=address) as server, Client(address, peer="table 1") as client:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(address.removeprefix("ipc://"))
                peer.sendall(b"hello, is it me?")
                assert peer.recv(1) == b""
        until(lambda: server.counters.refused == 3, NOWHERE)
        assert client.request("echo", {"a": 1}).fields == {"a": 1}
    assert [record.message for record in caplog.records] == [
        "table 1 refused a connection from a process of this machine: it does not speak this protocol"
    ]


@pytest.fixture
def folder() -> Iterator[IpcFolder]:
    with IpcFolder() as made:
        yield made
