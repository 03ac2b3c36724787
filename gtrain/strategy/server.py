"""What runs in a server's process, and what a role's function is given.

A role's function has this form; it returns when the server is asked to end::

    def main(context: ServerContext) -> None:
        table = torch.zeros(context.config["strategy"]["rows"])

        def pull(message: Message, caller: Caller) -> Message:
            return Message({}, [table[message.tensors[0]]])

        context.serve({"pull": pull})
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gtrain.config import plain
from gtrain.kernel_cache import find_cache
from gtrain.launch import slot as slots
from gtrain.launch.children import resolve, stop_event
from gtrain.launch.environment import find_environment, ranks_on_this_machine
from gtrain.launch.job_store import job_store
from gtrain.launch.key_value import KeyValueStore, await_end
from gtrain.launch.slot import JobContext, Slot
from gtrain.strategy.counters import Counters, PeakMemory, cpu_seconds
from gtrain.strategy.servers import FIGURES, START_SECONDS, Servers, directory, entry
from gtrain.wire import Caller, Client, Message, Security, Server

Handler = Callable[[Message, Caller], Message | None]


class LastingState:
    """A value that outlives the process, in the file of :attr:`ServerContext.lasting_file`.

    A process that is killed while it saves leaves the value before: the new one is written beside it, and one write of
    16 bytes then says where the value is.

    Args:
        descriptor: of the file.
    """

    _HEAD = struct.Struct("<qq")  # where the value begins, and its bytes

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        head = os.pread(descriptor, self._HEAD.size, 0)
        self._begin, self._length = self._HEAD.unpack(head) if head else (self._HEAD.size, 0)

    def load(self) -> bytes:
        """What was saved last; empty if nothing was."""
        return os.pread(self._descriptor, self._length, self._begin)

    def save(self, value: bytes) -> None:
        """Have this value from now on."""
        first = self._HEAD.size
        begin = first if self._begin >= first + len(value) else self._begin + self._length
        os.pwrite(self._descriptor, value, begin)
        os.pwrite(self._descriptor, self._HEAD.pack(begin, len(value)), 0)
        self._begin, self._length = begin, len(value)


@dataclass
class ServerContext:
    """A server's place in its job, and what it serves with.

    Attributes:
        slot: role, rank and machine.
        config: the whole composed configuration as dictionaries, lists and values.
        restarts: how many times this server was restarted: 0 in its first life.
        descriptor: its listening socket, bound before it existed; the same in every life.
        address: what others connect to in order to reach it.
        security: the job's keys; None where the address does not leave the machine.
        run_dir: the run's folder.
        stop: set when the server is asked to end, because the job is over or was interrupted.
        known: whether workers know the address already; else it is told them through the job's key-value store.
        memory: what the server has had since its imports.
        lasting_file: an anonymous file, empty in the first life, which the agent keeps open over all of them; None
            where the role is not restarted. :class:`LastingState` keeps a value in it.
    """

    slot: Slot
    config: Any
    restarts: int
    descriptor: int
    address: str
    security: Security | None
    run_dir: Path
    stop: threading.Event
    known: bool
    memory: PeakMemory
    lasting_file: int | None = None

    @property
    def store(self) -> KeyValueStore:
        """The job's key-value store."""
        return job_store(find_environment())

    def client(self, role: str, rank: int) -> Client:
        """A client of another server of the job, under this server's label; waits until that is there.

        Raises:
            PeerLostError: it is not there in time.
        """
        address = Servers(find_environment(), Counters(), START_SECONDS).address(role, rank)
        return Client(address, peer=f"{role} {rank}", name=self.slot.label, security=self.security)

    def say(self, text: str) -> None:
        """Have the agent print a line to the terminal."""
        slots.say(text)

    def serve(self, handlers: Mapping[str, Handler], work: Callable[[], bool] | None = None) -> None:
        """Answer requests until :attr:`stop` is set.

        Args:
            handlers: what answers each method; ``gtrain.figures`` is added.
            work: what to do between requests; see :meth:`gtrain.wire.Server.run`.
        """
        server = self.server(handlers)
        server.run(self.stop, work)

    def server(self, handlers: Mapping[str, Handler]) -> Server:
        """The server of :meth:`serve`, for a role that runs it by itself; others find it from now on."""

        def figures(message: Message, caller: Caller) -> Message:
            return Message(self._figures(server))

        server = Server(
            {**handlers, FIGURES: figures},
            name=self.slot.label,
            descriptor=self.descriptor,
            security=self.security,
        )
        if not self.known:
            where = {"address": self.address, "machine": socket.gethostname()}
            directory(self.store).set(entry(self.slot.role, self.slot.rank), json.dumps(where))
            self.known = True
        return server

    def _figures(self, server: Server) -> dict[str, Any]:
        """This server's entry of ``summary.json``'s ``ranks``, and which of its lives it is from."""
        return {
            "rank": self.slot.rank,
            "role": self.slot.role,
            "host": socket.gethostname(),
            **self.memory.figures(),
            "bytes_sent": server.counters.bytes_sent,  # of its whole life; see ServerMeter
            "bytes_received": server.counters.bytes_received,
            "comm_seconds": 0.0,
            "wait_seconds": 0.0,
            "comm_bound_bytes": None,
            "cpu_seconds": cpu_seconds(),
            "incarnation": self.restarts,
        }


def run(target: str, config: Any) -> None:
    """The task of a server's process.

    Args:
        target: ``package.module:function`` of its role.
        config: the composed configuration.
    """
    stop = stop_event()
    job = slots.current()
    assert job is not None
    serve_role(target, job, config, stop)


def run_by_hand(target: str, config: Any) -> None:
    """The task of a server that was started by hand."""
    stop = stop_event()
    job = slots.current()
    assert job is not None
    watch = threading.Thread(
        target=_watch, args=(job.store_address, job.roster.key_file, stop), name="gtrain-job", daemon=True
    )
    watch.start()
    print(f"{job.slot.label} listens at {job.address}", flush=True)
    serve_role(target, job, config, stop)


def _watch(address: str, key_file: str | None, stop: threading.Event) -> None:
    """Set ``stop`` once the job's key-value store is gone: it ends with rank 0, and a connection to it does as well."""
    error = await_end(address, key_file)
    if error is not None:
        print(f"the job's key-value store is lost: {error.message}", flush=True)
    print("the job is over", flush=True)
    stop.set()


def serve_role(target: str, job: JobContext, config: Any, stop: threading.Event) -> None:
    """Call a role's function, in a process that the agent forked."""
    find_cache()
    resolve(target)(_context(job, config, stop))


def _context(job: JobContext, config: Any, stop: threading.Event) -> ServerContext:
    assert job.descriptor is not None and job.address is not None
    if "OMP_NUM_THREADS" not in os.environ:
        servers = sum(job.roster.counts.values()) if job.simulated else 1
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (ranks_on_this_machine() + servers)))
    memory = PeakMemory()
    memory.start()
    return ServerContext(
        slot=job.slot,
        config=plain(config),
        restarts=job.restarts,
        descriptor=job.descriptor,
        address=job.address,
        security=Security.load(job.roster.key_file) if job.roster.key_file else None,
        run_dir=job.log_dir.parent,
        stop=stop,
        memory=memory,
        known=job.slot.role in job.roster.addresses,
        lasting_file=job.lasting_file,
    )
