"""Processes from outside that speak to a job: idle, garbage, oversize and mutated, over TCP, and with other keys."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Sequence
from pathlib import Path

import msgpack
import torch
from helpers import LIMIT

from gtrain.errors import GtrainError
from gtrain.launch import links
from gtrain.wire import Client, Limits, RemoteError, Security, WireError
from gtrain.wire.header import Header, MessageType, pack_body, pack_header
from gtrain.wire.message import to_frames

IDLE, GARBAGE, OVERSIZE, MUTATED = 500, 600, 200, 500
_RECORD = 5
"""As much of a greeting as TLS takes for the head of a record, of a wrong version, and answers at once."""
_GREETING = b"\xff" + bytes(8) + b"\x7f"
"""What a ZeroMQ socket says to whoever connects: by this a server is told from gloo and from the key-value store."""


def attack(pids: list[int], seed: int = 0) -> int:
    """:func:`attack_servers` where these processes listen."""
    return attack_servers([address for pid in pids for address in listening(pid)], seed)


def attack_servers(addresses: Sequence[tuple[str, int]], seed: int = 0) -> int:
    """Do all of it to every server among these addresses; returns how many there are.

    Sockets that say nothing are held open to the end. What has the shape of a message has the name of no rank.
    """
    chance = random.Random(seed)
    addresses = [address for address in addresses if _is_server(address)]
    for address in addresses:
        with contextlib.ExitStack() as held:
            for _ in range(IDLE):
                held.enter_context(socket.create_connection(address))
            for _ in range(GARBAGE):
                _say(address, chance.randbytes(chance.randrange(1, 4096)))
            for number in range(OVERSIZE):
                _say(address, _oversize(chance, keys=number % 2 == 0))
            for number in range(MUTATED):
                _say(address, _mutated(chance, keys=number % 2 == 0))
    return len(addresses)


def attack_stores(addresses: Sequence[tuple[str, int]], payload: bytes, seed: int = 0) -> None:
    """Say to each address what the key-value store, or a rank that others connect to, would read from a peer.

    A rank listens until the others are connected, and the files of a checkpoint are served until the next one: an
    address that has gone is passed over.

    Args:
        addresses: where processes of a job listen.
        payload: bytes that stand where messages carry values.
        seed: of the bytes that mean nothing.
    """
    chance = random.Random(seed)
    request = msgpack.packb(["set", "gtrain-agreed/1", payload])
    for address in addresses:
        with contextlib.suppress(ConnectionError), contextlib.ExitStack() as held:
            for _ in range(IDLE):
                held.enter_context(socket.create_connection(address))
            for text in (payload, b"gtrain 1?\n" + payload, len(request).to_bytes(4, "big") + request):
                _say(address, text)
            for _ in range(GARBAGE):
                _say(address, chance.randbytes(chance.randrange(1, 4096)))


def let_in(addresses: Sequence[tuple[str, int]], key_file: str, seconds: float) -> list[str]:
    """Try to join at each address with the keys of a file, for so long; returns the addresses that let it in."""
    entered, keys = [], Security.load(key_file)
    for host, port in addresses:
        address = f"tcp://{host}:{port}"
        if not _is_server((host, port)):
            with contextlib.suppress(GtrainError), links.connect(address, key_file, seconds, listens=True):
                entered.append(address)
            continue
        with Client(address, peer="server", security=keys) as client:
            try:
                client.request("gtrain.figures", timeout_seconds=seconds)
            except RemoteError:  # it has answered that it has no such method
                entered.append(address)
            except WireError:
                continue
            else:
                entered.append(address)
    return entered


def listening(pid: int) -> list[tuple[str, int]]:
    """Where a process listens by TCP."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        local, _, state, *_, inode = line.split()[1:10]
        if state == "0A" and f"socket:[{inode}]" in inodes:
            host, port = local.split(":")
            number = socket.inet_ntoa(bytes.fromhex(host)[::-1])
            found.append(("127.0.0.1" if number == "0.0.0.0" else number, int(port, 16)))
    return found


def _is_server(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=LIMIT) as line:
        line.sendall(_GREETING[:_RECORD])
        return line.recv(1) == _GREETING[:1]
    return False


def _say(address: tuple[str, int], text: bytes) -> None:
    """Send something, and leave; who is listening may end the connection at any byte."""
    with socket.create_connection(address) as line, contextlib.suppress(OSError):
        line.sendall(text)


def _oversize(chance: random.Random, keys: bool) -> bytes:
    """A frame, or a part of the handshake, that claims to be larger than anything may be."""
    size = chance.choice([1 << 32, 1 << 40, 1 << 62, (1 << 64) - 1]).to_bytes(8, "big")
    return b"".join([*_opening(chance, keys), bytes([chance.choice([2, 3, 6])]) + size + chance.randbytes(1000)])


def _mutated(chance: random.Random, keys: bool) -> bytes:
    """A greeting, a handshake and a request, of which one to three bytes are changed, inserted or removed."""
    tensors = [torch.arange(4), torch.ones(2, 2)]
    specs, frames = to_frames(tensors, Limits())
    pieces = _opening(chance, keys)
    for kind, method in (
        (MessageType.HELLO, ""),
        (MessageType.REQUEST, chance.choice(["read", "acquire", "rows", "gtrain.figures"])),
    ):
        header = Header(kind, method, "stranger", 1, 1, 0)
        body = pack_body(method, {"key": "node-0", "step": 1, "a": [1, {"b": b"x"}]}, specs, Limits())
        message = (
            [pack_header(header, body), *map(bytes, frames)] if kind == MessageType.REQUEST else [pack_header(header)]
        )
        pieces += [_frame(part, more=part is not message[-1]) for part in message]
    text = bytearray(b"".join(pieces))
    for _ in range(chance.randint(1, 3)):
        at, change = chance.randrange(len(text)), chance.randrange(3)
        if change == 0:
            text[at] = chance.randrange(256)
        elif change == 1:
            text[at:at] = chance.randbytes(chance.randint(1, 5))
        else:
            del text[at : at + chance.randint(1, 5)]
    return bytes(text)


def _opening(chance: random.Random, keys: bool) -> list[bytes]:
    """The greeting and the first command of ZMTP 3.1, with CURVE or without."""
    mechanism = b"CURVE" if keys else b"NULL"
    greeting = _GREETING + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)
    hello = b"\x05HELLO\x01\x00" + bytes(72) + chance.randbytes(120)
    ready = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    command = hello if keys else ready
    return [greeting, b"\x04" + bytes([len(command)]) + command]


def _frame(part: bytes, more: bool) -> bytes:
    if len(part) < 256:
        return bytes([int(more), len(part)]) + part
    return bytes([2 | int(more)]) + len(part).to_bytes(8, "big") + part
