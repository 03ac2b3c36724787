"""Round trips of the wire between two processes, beside plain zmq in the same run.

    python tests/benchmarks/bench_wire.py --rounds 5

A server in a process of its own sends back a tensor of the size that it gets. Prints for 1 KB and 1.6 MB each way: the
median round trip (us), GB/s with both directions counted, and CPU seconds of both processes for each GB (1.6 MB) or
CPU us for each round trip (1 KB); rounds of both are interleaved, so that a busy machine disturbs them alike. Targets:
1.6 MB at least 2.5 GB/s over ipc, 1 KB under 200 us. ``pipelined`` keeps four requests under way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import torch
import zmq

from gtrain.wire import Caller, Client, Message, Security, Server

SIZES = {"1 KB": (1024, 300), "1.6 MB": (1_600_000, 100)}


def cpu_seconds() -> float:
    """CPU time of this process, all threads."""
    times = os.times()
    return times.user + times.system


def fork(main: Callable[[Connection], None]) -> tuple[Connection, int]:
    """Run ``main`` in a forked process with the other end of a pipe."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            main(theirs)
        finally:
            os._exit(0)
    theirs.close()
    return ours, pid


def wire_server(address: str, security: Security | None) -> Callable[[Connection], None]:
    """What the wire's server process runs: an echo of the size asked for."""
    answers = {size: torch.zeros(size, dtype=torch.uint8) for size, _ in SIZES.values()}

    def echo(message: Message, caller: Caller) -> Message:
        return Message({}, [answers[len(message.tensors[0])]])

    def main(pipe: Connection) -> None:
        handlers = {"echo": echo, "cpu": lambda message, caller: Message({"seconds": cpu_seconds()})}
        server = Server(handlers, name="echo", address=address, security=security)
        pipe.send_bytes(server.address.encode())
        server.start()
        pipe.recv_bytes()
        server.close()

    return main


def raw_server(address: str, security: Security | None) -> Callable[[Connection], None]:
    """What the plain zmq process runs: the same with nothing around it."""

    def main(pipe: Connection) -> None:
        sock = zmq.Context().socket(zmq.ROUTER)
        if security is not None:
            security.guard(sock)
        sock.bind(address)
        pipe.send_bytes(str(sock.getsockopt_string(zmq.LAST_ENDPOINT)).encode())
        answers = {size: torch.zeros(size, dtype=torch.uint8).numpy().data for size, _ in SIZES.values()}
        while True:
            frame = sock.recv(copy=False)
            frames = [frame]
            while frame.more:
                frame = sock.recv(copy=False)
                frames.append(frame)
            reply = memoryview(str(cpu_seconds()).encode()) if len(frames) == 2 else answers[len(frame)]
            sock.send(frames[0].bytes, zmq.SNDMORE)
            sock.send(b"header", zmq.SNDMORE)
            sock.send(reply, copy=False)

    return main


class Wire:
    """The wire's client."""

    def __init__(self, address: str, security: Security | None) -> None:
        self._client = Client(address, peer="echo", security=security)

    def cpu(self) -> float:
        """CPU seconds of the server."""
        return float(self._client.request("cpu").fields["seconds"])

    def once(self, tensor: torch.Tensor) -> None:
        """One round trip."""
        assert len(self._client.request("echo", {}, [tensor]).tensors[0]) == len(tensor)

    def pipelined(self, tensor: torch.Tensor, count: int, depth: int = 4) -> None:
        """Round trips with several under way."""
        under_way = deque(self._client.submit("echo", {}, [tensor]) for _ in range(depth))
        for place in range(count):
            under_way.popleft().result()
            if place < count - depth:
                under_way.append(self._client.submit("echo", {}, [tensor]))


class Raw:
    """Plain zmq."""

    def __init__(self, address: str, security: Security | None) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        if security is not None:
            security.identify(self._socket)
        self._socket.connect(address)

    def cpu(self) -> float:
        """CPU seconds of the server."""
        self._socket.send(b"cpu")
        return float(self._socket.recv_multipart()[1])

    def once(self, tensor: torch.Tensor) -> None:
        """One round trip."""
        self._socket.send(b"header", zmq.SNDMORE)
        self._socket.send(tensor.numpy(), copy=False)
        self._socket.recv(copy=False)
        assert len(torch.frombuffer(self._socket.recv(copy=False).buffer, dtype=torch.uint8)) == len(tensor)


def measure(peers: dict[str, Wire | Raw], rounds: int) -> None:
    """Interleaved rounds; print a line for each peer and size."""
    print(f"{'':<26}{'size':>8}{'median us':>11}{'GB/s':>8}{'CPU':>9}")
    for label, (size, count) in SIZES.items():
        tensor = torch.ones(size, dtype=torch.uint8)
        seconds: dict[str, list[float]] = {name: [] for name in peers}
        cpu = dict.fromkeys(peers, 0.0)
        for _ in range(rounds):
            for name, peer in peers.items():
                for _ in range(10):
                    peer.once(tensor)
                before = cpu_seconds() + peer.cpu()
                for _ in range(count):
                    began = time.perf_counter()
                    peer.once(tensor)
                    seconds[name].append(time.perf_counter() - began)
                cpu[name] += cpu_seconds() + peer.cpu() - before
        for name in peers:
            median, trips = statistics.median(seconds[name]), rounds * count
            rate = 2 * size / median / 1e9
            used = (
                f"{cpu[name] / trips * 1e6:.0f} us" if size < 10_000 else f"{cpu[name] / trips / size / 2e-9:.2f} s/GB"
            )
            print(f"{name:<26}{label:>8}{median * 1e6:>11.0f}{rate:>8.2f}{used:>11}", flush=True)


def pipelined(name: str, peer: Wire, rounds: int) -> None:
    """Print the rate with four requests under way."""
    for label, (size, count) in SIZES.items():
        tensor, rates = torch.ones(size, dtype=torch.uint8), []
        for _ in range(rounds):
            began = time.perf_counter()
            peer.pipelined(tensor, count)
            rates.append(count / (time.perf_counter() - began))
        rate = statistics.median(rates)
        print(f"{name + ', pipelined':<26}{label:>8}{1e6 / rate:>11.0f}{2 * size * rate / 1e9:>8.2f}", flush=True)


def main() -> None:
    """Start the servers, measure, end them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        security = Security.create()
        plans = {
            "wire ipc": wire_server(f"ipc://{Path(scratch) / 'wire'}", None),
            "wire tcp": wire_server("tcp://127.0.0.1:0", None),
            "wire tcp, CURVE": wire_server("tcp://127.0.0.1:0", security),
            "plain zmq ipc": raw_server(f"ipc://{Path(scratch) / 'raw'}", None),
            "plain zmq tcp": raw_server("tcp://127.0.0.1:0", None),
            "plain zmq tcp, CURVE": raw_server("tcp://127.0.0.1:0", security),
        }
        servers = {name: fork(plan) for name, plan in plans.items()}
        addresses = {name: pipe.recv_bytes().decode() for name, (pipe, _) in servers.items()}
        peers: dict[str, Wire | Raw] = {
            name: (Wire if name.startswith("wire") else Raw)(address, security if "CURVE" in name else None)
            for name, address in addresses.items()
        }
        measure(peers, options.rounds)
        for name, peer in peers.items():
            if isinstance(peer, Wire):
                pipelined(name, peer, options.rounds)
        for _, pid in servers.values():
            os.kill(pid, 9)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
