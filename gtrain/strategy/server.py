"""Server processes of a backend's roles: the entry points, and the context that a role's function receives.

A role's function has this form and returns when the server is to stop::

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
from gtrain.launch.environment import divide_cores, find_environment, ranks_on_this_machine
from gtrain.launch.job_store import job_store
from gtrain.launch.key_value import KeyValueStore, await_end
from gtrain.launch.logs import log_path
from gtrain.launch.slot import JobContext, Slot
from gtrain.record.collecting import own_events, own_files
from gtrain.record.process_log import ProcessLog
from gtrain.record.spans import write_spans
from gtrain.strategy.counters import Counters, PeakMemory, cpu_seconds
from gtrain.strategy.servers import FIGURES, RECORD, START_SECONDS, Servers, server_directory, server_key
from gtrain.wire import Caller, Client, Message, Security, Server, tracing

Handler = Callable[[Message, Caller], Message | None]


class LastingState:
    """A value that survives restarts of the process, in the file of :attr:`ServerContext.lasting_file`.

    A process that is killed during :meth:`save` leaves the previous value: the new one is written to other bytes of the
    file, and one write of 16 bytes then makes it the current one.

    Args:
        descriptor: file descriptor of the file.
    """

    _HEAD = struct.Struct("<qq")  # offset and length of the value

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        head = os.pread(descriptor, self._HEAD.size, 0)
        self._begin, self._length = self._HEAD.unpack(head) if head else (self._HEAD.size, 0)

    def load(self) -> bytes:
        """Return the value that was saved last; empty if none was."""
        return os.pread(self._descriptor, self._length, self._begin)

    def save(self, value: bytes) -> None:
        """Replace the value."""
        start = self._HEAD.size
        # Never over the current value: before it if there is room, otherwise behind it.
        begin = start if self._begin >= start + len(value) else self._begin + self._length
        os.pwrite(self._descriptor, value, begin)
        os.pwrite(self._descriptor, self._HEAD.pack(begin, len(value)), 0)
        self._begin, self._length = begin, len(value)


@dataclass
class ServerContext:
    """The identity, resources and configuration of a server process.

    Attributes:
        slot: role, rank and machine.
        config: the composed configuration as dictionaries, lists and values.
        restarts: how many times this server was restarted.
        descriptor: file descriptor of its listening socket, which the agent bound and keeps over restarts.
        address: address that clients connect to.
        security: the job's keys; None if the address is local to the machine.
        run_dir: the run's folder.
        stop: set when the server is to stop, because the job has ended or was interrupted.
        known: whether workers know the address; otherwise the server publishes it in the job's key-value store.
        memory: peak memory since the imports.
        lasting_file: file descriptor of an anonymous file that the agent keeps open over restarts, initially empty;
            None if the role is not restarted. :class:`LastingState` stores a value in it.
        spans_file: file of the executed requests; None if they are not recorded.
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
    spans_file: Path | None = None

    @property
    def store(self) -> KeyValueStore:
        """Key-value store of the job."""
        return job_store(find_environment())

    def client(self, role: str, rank: int) -> Client:
        """Wait for another server of the job and return a client of it, named by this server's label.

        Raises:
            PeerLostError: the server did not start in time.
        """
        address = Servers(find_environment(), Counters(), START_SECONDS).address(role, rank)
        return Client(address, peer=f"{role} {rank}", name=self.slot.label, security=self.security)

    def say(self, text: str) -> None:
        """Print a line to the terminal, through the agent."""
        slots.print_line(text)

    def serve(self, handlers: Mapping[str, Handler], work: Callable[[], bool] | None = None) -> None:
        """Answer requests until :attr:`stop` is set.

        Args:
            handlers: the handler of each method; ``gtrain.figures`` and ``gtrain.record`` are added.
            work: called between requests; see :meth:`gtrain.wire.Server.run`.
        """
        self.server(handlers).run(self.stop, work)

    def server(self, handlers: Mapping[str, Handler]) -> Server:
        """Create the server and publish its address, without running it; see :meth:`serve`."""

        def figures(message: Message, caller: Caller) -> Message:
            return Message(self._figures(server))

        def record(message: Message, caller: Caller) -> Message:
            self.write_spans()
            first, label = message.fields["first"], self.slot.label
            files = own_files(self.run_dir, label, first) | own_events(self.run_dir, label, first)
            contents = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in files.values()]
            return Message({"names": list(files)}, contents)

        server = Server(
            {**handlers, FIGURES: figures, RECORD: record},
            name=self.slot.label,
            descriptor=self.descriptor,
            security=self.security,
        )
        if not self.known:
            location = {"address": self.address, "machine": socket.gethostname()}
            server_directory(self.store).set(server_key(self.slot.role, self.slot.rank), json.dumps(location))
            self.known = True
        return server

    def write_spans(self) -> None:
        """Write the requests that were executed so far to :attr:`spans_file`."""
        if self.spans_file is not None and (recording := tracing.active()) is not None:
            write_spans(self.spans_file, self.slot.label, {"executed": recording.kept_executed()})

    def _figures(self, server: Server) -> dict[str, Any]:
        """Return this server's entry in ``ranks`` of ``summary.json``, and its incarnation."""
        return {
            "rank": self.slot.rank,
            "role": self.slot.role,
            "host": socket.gethostname(),
            **self.memory.figures(),
            "bytes_sent": server.counters.bytes_sent,  # since its start; see ServerMeter
            "bytes_received": server.counters.bytes_received,
            "comm_seconds": 0.0,
            "wait_seconds": 0.0,
            "comm_bound_bytes": None,
            "cpu_seconds": cpu_seconds(),
            "incarnation": self.restarts,
        }


def run(target: str, config: Any) -> None:
    """Run a server that an agent started; the main function of its process.

    Args:
        target: ``package.module:function`` of the role.
        config: the composed configuration.
    """
    stop, job = stop_event(), slots.current()
    assert job is not None
    serve_role(target, job, config, stop)


def run_by_hand(target: str, config: Any) -> None:
    """Run a server that was started by hand, until the job's key-value store closes; see :func:`run`."""
    stop, job = stop_event(), slots.current()
    assert job is not None
    watch = threading.Thread(
        target=_watch, args=(job.store_address, job.roster.key_file, stop), name="gtrain-job", daemon=True
    )
    watch.start()
    print(f"{job.slot.label} listens at {job.address}", flush=True)
    serve_role(target, job, config, stop)


def _watch(address: str, key_file: str | None, stop: threading.Event) -> None:
    """Set ``stop`` when the job's key-value store ends, as it does with rank 0, or the connection to it is lost."""
    if (error := await_end(address, key_file)) is not None:
        print(f"the job's key-value store is lost: {error.message}", flush=True)
    print("the job is over", flush=True)
    stop.set()


def serve_role(target: str, job: JobContext, config: Any, stop: threading.Event) -> None:
    """Call a role's function in a server's process."""
    assert job.descriptor is not None and job.address is not None
    find_cache()
    divide_cores(ranks_on_this_machine() + (sum(job.roster.counts.values()) if job.simulated else 1))
    log = ProcessLog(job.log_dir.parent, job.slot.label, append=bool(job.restarts or job.attempt))
    memory = PeakMemory(log)
    memory.start()
    context = ServerContext(
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
    settings = context.config or {}  # a server of a program may have none
    timeline = settings.get("callbacks", {}).get("timeline") if settings.get("verb") == "train" else None
    if timeline:
        context.spans_file = log_path(Path(timeline["folder"]), f"spans {job.slot.label}").with_suffix(".json")
        tracing.start()
    resolve(target)(context)
    context.write_spans()
