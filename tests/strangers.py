"""Processes from outside that speak to a job's servers: idle, garbage, oversize and mutated, over TCP."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

import torch

from gtrain.wire import Limits
from gtrain.wire.header import Header, MessageType, pack_body, pack_header
from gtrain.wire.message import to_frames

IDLE, GARBAGE, OVERSIZE, MUTATED = 500, 600, 200, 500
_WAIT_SECONDS = 0.5
_GREETING = b"\xff" + bytes(8) + b"\x7f"
"""What a ZeroMQ socket says to whoever connects: by this a server is told from gloo and from the key-value store."""


def attack(pids: list[int], seed: int = 0) -> int:
    """Do all of it to every server that these processes listen for; returns how many there are.

    Sockets that say nothing are held open to the end. What has the shape of a message has the name of no rank.
    """
    chance = random.Random(seed)
    addresses = [address for pid in pids for address in listening(pid) if _is_server(address)]
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
    with socket.create_connection(address, timeout=_WAIT_SECONDS) as line, contextlib.suppress(TimeoutError):
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
