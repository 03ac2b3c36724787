"""Two ranks in network namespaces of their own, for bench_pyg.py: a limited rate and a delay between them.

Needs root, ``ip`` and ``tc``. Each rank has an interface that sends at a limited rate (``tc tbf``). In place of a
bridge a program carries the frames from one to the other and holds each for a while: kernels need not have netem.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sar_overlap import PORT, Network, address, call

_SOL_PACKET, _PACKET_VNET_HDR = 263, 15  # linux/if_packet.h
_EVERY_PROTOCOL = 0x0003
_LARGEST = (64 << 10) + 64  # a frame that the sender's kernel has not cut yet, and its description


class SlowNetwork(Network):
    """Two namespaces, at so many Mbit/s from each to the other, after so many milliseconds."""

    def __init__(self, mbit: int, milliseconds: float) -> None:
        super().__init__(2)
        self._mbit, self._milliseconds = mbit, milliseconds
        self._relay: subprocess.Popen[str] | None = None

    def make(self) -> None:
        super().make()
        for rank in range(2):
            call(f"ip -n {self.hub} link set port{rank} nomaster")
        command = ["ip", "netns", "exec", self.hub, sys.executable, __file__, str(self._milliseconds)]
        self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        self._relay.stdout.readline()  # it carries frames from now on
        self.limit(self._mbit)

    def remove(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        super().remove()

    def train(self, settings: list[str], run: Path, folder: Path) -> None:
        """One run whose ranks are started by hand, as on two machines."""
        common = [
            sys.executable,
            "-m",
            "gtrain",
            *settings,
            "trainer.devices=1",
            "cluster=manual",
        ]
        common += ["cluster.isolated=true", f"cluster.rendezvous=tcp://{address(0)}:{PORT}"]
        folders = [run, Path(f"{run}-1")]
        self.run([[*common, f"cluster.rank={r}", f"hydra.run.dir={f}"] for r, f in enumerate(folders)], folder)


@contextmanager
def slow_network(mbit: int, milliseconds: float) -> Iterator[SlowNetwork]:
    """Namespaces that are gone afterwards."""
    made = SlowNetwork(mbit, milliseconds)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def relay(names: list[str], seconds: float) -> None:
    """Carry the frames that arrive at either of two interfaces to the other one, each after so many seconds."""
    ends = [_open(name) for name in names]
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # for each end, what is to leave there
    print("ready", flush=True)
    while True:
        due = min((queue[0][0] for queue in waiting if queue), default=time.monotonic() + 1.0)
        ready = select.select(ends, [], [], max(0.0, due - time.monotonic()))[0]
        for end in ready:
            _read(end, waiting[1 - ends.index(end)], seconds)
        for end, queue in zip(ends, waiting, strict=True):
            while queue and queue[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # as any network, it may lose a frame
                    end.send(queue.popleft()[1])


def _open(name: str) -> socket.socket:
    """A socket for the frames of an interface, described so that nobody has to cut them or add them up on the way."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.bind((name, _EVERY_PROTOCOL))
    end.setblocking(False)
    return end


def _read(end: socket.socket, queue: deque[tuple[float, bytes]], seconds: float) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            frame, where = end.recvfrom(_LARGEST)
            if where[2] != socket.PACKET_OUTGOING:
                queue.append((time.monotonic() + seconds, frame))


if __name__ == "__main__":
    relay(["port0", "port1"], float(sys.argv[1]) / 1000)
