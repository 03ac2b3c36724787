"""The ranks of a job: the parts that each owns and reads itself, arrays that a machine's ranks share, and requests.

Owners of nodes and edges are P + 1 offsets per type, instead of an array of all nodes or edges. Each rank serves its
part to the ranks that do not host it, over gtrain.wire.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.graph.owners import owner_of
from gtrain.graph.sampling.scratch import read_only
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType, edge_key
from gtrain.launch.sockets import Listener, listen_here, listen_tcp, own_address
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain.wire import Caller, Client, DeadlineError, Message, Security, Server, SharedTensors
from gtrain.wire.shared import SharedDirectory

Array = NDArray[Any]
NodeOrEdgeType = str | EdgeType

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_COUNTED = "gtrain.counted"
"""Field of a request that is made while its rank records."""
Handler = Callable[[Message], Message]


@dataclass(frozen=True)
class PartBook:
    """The ranges of the parts of a store, in the two id spaces that identify a batch's nodes and edges.

    A *global id* is a node's number in the store; part p owns ``offsets[type][p] .. offsets[type][p+1]-1``. A *global
    edge position* is an edge's index in the columns of all parts laid end to end; part p has
    ``edge_offsets[type][p] .. edge_offsets[type][p+1]-1``, the edges that point at its nodes.

    Attributes:
        num_parts: P.
        offsets: by node type, int64 ``[P + 1]``.
        edge_offsets: by edge type, int64 ``[P + 1]``.
    """

    num_parts: int
    offsets: dict[str, Array]
    edge_offsets: dict[EdgeType, Array]

    @classmethod
    def of(cls, store: Store) -> PartBook:
        """Read the offsets of a store's manifest."""
        nodes, counts = store.manifest.node_types, store.manifest.partition.edges_by_type
        return cls(
            store.num_parts,
            {name: np.array(spec.offsets, np.int64) for name, spec in nodes.items()},
            {t: np.concatenate([[0], np.cumsum(counts[edge_key(t)], dtype=np.int64)]) for t in store.edge_types},
        )

    @property
    def all_offsets(self) -> dict[NodeOrEdgeType, Array]:
        """Return the offsets of all node types and edge types."""
        offsets: dict[NodeOrEdgeType, Array] = dict(self.offsets.items())
        offsets.update(self.edge_offsets.items())
        return offsets

    def range(self, graph_type: NodeOrEdgeType, part: int) -> tuple[int, int]:
        """Return the first id of a part, and the first after it."""
        starts = self.all_offsets[graph_type]
        return int(starts[part]), int(starts[part + 1])

    def count(self, graph_type: NodeOrEdgeType) -> int:
        """Return the nodes, or edges, of a type over all parts."""
        return int(self.all_offsets[graph_type][-1])

    def owner(self, graph_type: NodeOrEdgeType, ids: Any) -> Array:
        """Return the part of each global id, or global edge position: int64, of the same shape."""
        return owner_of(ids, self.all_offsets[graph_type])


@dataclass(frozen=True)
class Hosting:
    """The location of a job's parts, as one rank sees it. Rank p serves part p.

    Attributes:
        rank: this rank.
        machines: for each rank the lowest rank of its machine. The simulated machines of one computer count as one.
        parts: the parts whose files this rank reads itself, ascending, with its own; it requests all others.
        complete: whether every rank hosts every part, so that no rank sends requests.
        loopback: whether all ranks reach each other at the loopback address.
    """

    rank: int
    machines: tuple[int, ...]
    parts: tuple[int, ...]
    complete: bool
    loopback: bool

    @property
    def world(self) -> int:
        """Return the number of ranks, and of parts."""
        return len(self.machines)


def detect_hosting(group: Group, transport: str = "auto") -> Hosting:
    """Exchange the ranks' machines; collective.

    Args:
        group: the job's ranks.
        transport: ``shm`` or ``auto``: ranks host the parts of all ranks of their machine; ``tcp``: their own part.
    """
    identities = group.all_gather_object(_machine_identity())
    machines = [identity[:2] for identity in identities]
    lowest = tuple(machines.index(machine) for machine in machines)
    local = tuple(rank for rank, machine in enumerate(lowest) if machine == lowest[group.rank])
    return Hosting(
        rank=group.rank,
        machines=lowest,
        parts=(group.rank,) if transport == "tcp" else local,
        complete=group.size == 1 or (transport != "tcp" and len(set(lowest)) == 1),
        loopback=len(set(identities)) == 1,
    )


def _machine_identity() -> tuple[str, str, str]:
    """Return the host name and the boot id, which identify the machine, and the network namespace within it."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    network = os.readlink(_NETWORK) if _NETWORK.exists() else ""
    return socket.gethostname(), boot, network


class SharedArrays:
    """Arrays that one rank of a machine computes and all its ranks read.

    Args:
        rank: this rank.
        directory: name of the machine's directory of shared memory; None shares nothing.
        created: the directory, in the rank that created it.
        group: the job's ranks; its heartbeats show whether a rank that computes arrays is alive.
    """

    def __init__(
        self,
        rank: int,
        directory: str | None = None,
        created: SharedDirectory | None = None,
        group: Group | None = None,
    ) -> None:
        self._rank, self._directory, self._created, self._group = rank, directory, created, group
        self._memory: list[SharedTensors] = []
        self._arrays: dict[str, dict[str, Array]] = {}

    @classmethod
    def create(cls, group: Group, hosting: Hosting) -> SharedArrays:
        """Agree on a directory with the other ranks of the machine; collective.

        Ranks that host one part each share nothing, as if they were on different machines.
        """
        creates = hosting.machines[hosting.rank] == hosting.rank and len(hosting.parts) > 1
        created = SharedDirectory() if creates else None
        names = group.all_gather_object(None if created is None else created.name)
        return cls(hosting.rank, names[hosting.machines[hosting.rank]], created, group)

    def arrays(self, name: str, maker: int, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        """Return read-only arrays that rank ``maker`` computes once and the other ranks of its machine read.

        Args:
            name: a name of letters, digits and dashes.
            maker: the rank that computes them, which has to call this too. Without sharing every rank computes them.
            make: computes them.

        Raises:
            PeerLostError: the other rank is gone, or sends no heartbeats.
        """
        if name not in self._arrays:
            self._arrays[name] = self._open(name, maker, make)
        return self._arrays[name]

    def _open(self, name: str, maker: int, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        if self._directory is None:
            return {key: read_only(array) for key, array in make().items()}
        if maker == self._rank:
            tensors = {key: torch.from_numpy(array) for key, array in make().items()}
            shared = SharedTensors.create(self._directory, name, tensors)
        else:
            shared = self._attach(self._directory, name, maker)
        self._memory.append(shared)
        return {key: read_only(tensor.numpy()) for key, tensor in shared.items()}

    def _attach(self, directory: str, name: str, maker: int) -> SharedTensors:
        """Wait for arrays that another rank of the machine computes."""
        attached: list[SharedTensors] = []

        def done_within(seconds: float) -> bool:
            with contextlib.suppress(DeadlineError):
                attached.append(SharedTensors.attach(directory, name, seconds))
            return bool(attached)

        assert self._group is not None  # ranks that share a directory agreed on it
        self._group.watch(maker, done_within)
        return attached[0]

    def close(self) -> None:
        """Release the memory. Arrays that are referenced stay valid; other ranks cannot attach to them any more."""
        for shared in self._memory:
            shared.close()
        self._memory, self._arrays = [], {}
        if self._created is not None:
            self._created.close()


class Peers:
    """The ranks of a job as servers of their parts.

    Unless every rank hosts every part, each rank runs a server in a thread, in which its handlers run one at a time. ::

        peers = Peers(group, detect_hosting(group, "tcp"), counters=strategy.counters)
        peers.handle("rows", rows)             # before open()
        peers.open()                           # every rank
        reply = peers.wait(1, peers.request(1, "rows", {}, [ids]))

    Args:
        group: the job's ranks; its heartbeats show whether an owner that does not reply is alive.
        hosting: the parts that this rank hosts.
        counters: count bytes and the time of waiting; None counts nothing.
        timeout: deadline of a request, seconds.
        security: the job's keys; needed if its ranks are on several machines.
        main_address: host of the ranks' rendezvous. This machine's address is that of the interface that leads there;
            None: the host name.

    Attributes:
        hosting: as passed.
    """

    def __init__(
        self,
        group: Group,
        hosting: Hosting,
        *,
        counters: Counters | None = None,
        timeout: float = 300.0,
        security: Security | None = None,
        main_address: str | None = None,
    ) -> None:
        self.hosting = hosting
        self._group, self._counters, self._timeout = group, counters, timeout
        self._security, self._main_address = security, main_address
        self._handlers: dict[str, Any] = {}
        self._server: Server | None = None
        self._listener: Listener | None = None
        self._addresses: list[str] = []
        self._clients: dict[int, Client] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._counted: WeakSet[Future[Message]] = WeakSet()  # replies to come that are counted
        self._sent = self._received = 0  # bytes that the counters do not have yet
        if counters is not None:
            counters.meters.append(self)

    def handle(self, name: str, handler: Handler) -> None:
        """Reply to requests of that name, from any rank, with what ``handler`` returns.

        The requesting rank raises the handler's exceptions. The tensors of a reply must not be written to while
        anything refers to them.
        """

        def answer(message: Message, caller: Caller) -> Message:
            counted = message.fields.pop(_COUNTED, False) is True
            received = message.nbytes
            reply = handler(message)
            if counted:
                self._count(reply.nbytes, received)
            return reply

        self._handlers[name] = answer

    def open(self) -> None:
        """Start this rank's server and exchange addresses; collective, once."""
        if self.hosting.complete:
            return
        if not self.hosting.loopback and self._security is None:
            raise ConfigError(
                "the job's ranks are on several machines, and it has no keys.",
                hint="make keys with gtrain key cluster.key_file=job.key, and give all processes of the job the file.",
            )
        if self._security is None:
            self._listener = listen_here()
        else:
            host = own_address(self._main_address, 1) if self._main_address else socket.gethostname()
            self._listener = listen_tcp(host)
        name, descriptor = f"rank {self.hosting.rank}", self._listener.descriptor
        self._server = Server(self._handlers, name=name, descriptor=descriptor, security=self._security).start()
        self._addresses = self._group.all_gather_object(self._listener.address)

    def request(
        self, part: int, method: str, fields: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> Future[Message]:
        """Send a request to the owner of a part; the future has its reply or its exception.

        Args:
            part: the part, and the rank.
            method: the name of a handler.
            fields: small values; see :class:`gtrain.wire.Message`.
            tensors: not to be written to until the future is done.
        """
        client = self._client(part)
        if self._counters is None or not self._counters.recording:
            return client.submit(method, fields, tensors)
        reply = client.submit(method, {**(fields or {}), _COUNTED: True}, tensors)
        self._count(Message({}, list(tensors)).nbytes, 0)
        self._counted.add(reply)
        return reply

    def wait(self, part: int, reply: Future[Message]) -> Message:
        """Wait for the reply to a :meth:`request` to the owner of a part, and count the time.

        The terminal names an owner that is waited for long.

        Raises:
            RemoteError: the handler raised; has its message.
            DeadlineError: no reply arrived in time.
            SilentRankError: the owner sends no heartbeats.
            PeerLostError, PeerRestartedError, WireError: the owner died, or this rank is closing.
        """

        def done_within(seconds: float) -> bool:
            with contextlib.suppress(TimeoutError, CancelledError):
                reply.exception(seconds)
            return reply.done()

        if not reply.done():
            start = time.perf_counter()
            try:
                self._group.watch(part, done_within)
            finally:
                if self._counters is not None:
                    with self._lock:
                        self._counters.waited(start, start)
        message = reply.result()
        if reply in self._counted:
            self._counted.discard(reply)
            self._count(0, message.nbytes)
        return message

    def close(self) -> None:
        """Close all connections; pending requests raise. Idempotent, and safe after other ranks have died."""
        with self._lock:
            self._closed = True
            clients, self._clients = self._clients, {}
        for resource in (*clients.values(), self._server, self._listener):
            if resource is not None:
                resource.close()

    # ------------------------------------------------------------------------------------------ a meter of Counters

    def start(self) -> None:
        """Nothing: each request says whether it is counted."""

    def stop(self) -> None:
        """Add the tensors of requests that were made while recording, and of their replies, to the counters.

        The owner of a part counts a request as the rank that made it does: ranks start and stop at different moments.
        """
        assert self._counters is not None
        with self._lock:
            self._counters.bytes_sent += self._sent
            self._counters.bytes_received += self._received
            self._sent = self._received = 0

    def _count(self, sent: int, received: int) -> None:
        with self._lock:
            self._sent += sent
            self._received += received

    def _client(self, part: int) -> Client:
        # Without the lock first: nearly every request takes this path.
        client = self._clients.get(part)
        if client is not None:
            return client
        with self._lock:
            if self._closed or not self._addresses:
                state = "closed" if self._closed else "not open"
                raise ConfigError(
                    f"Rank {self.hosting.rank} requested data of part {part}, and its connections are {state}.",
                    hint="have every rank call Peers.open() before it samples, and Peers.close() at the end.",
                )
            if part not in self._clients:
                self._clients[part] = Client(
                    self._addresses[part],
                    peer=f"rank {part}",
                    name=f"rank {self.hosting.rank}",
                    security=self._security,
                    timeout_seconds=self._timeout,
                )
            return self._clients[part]
