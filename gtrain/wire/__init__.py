"""The wire: requests and replies between processes that share no process group.

A :class:`Server` executes methods by name; a :class:`Client` sends requests to one server. ::

    def push(message: Message, caller: Caller) -> Message:
        table[message.tensors[0]] += message.tensors[1]
        return Message({"rows": len(message.tensors[0])})

    with Server({"push": push}, name="table 0", address="tcp://127.0.0.1:0") as server:
        with Client(server.address, peer="table 0") as client:
            reply = client.request("push", {}, [rows, gradients])     # raises RemoteError if push raises
            future = client.submit("push", {}, [rows, gradients])     # several requests may be in flight

**Messages** carry small fields (msgpack) and tensors of any dtype (raw frames, without copies if memory allows).
Nothing is unpickled, and no memory is allocated because a message claims to be large. See :class:`Message` and
:class:`Limits`.

**Exactly once.** An answered request was executed once; any other raises. A server identifies a request by (client,
incarnation, sequence) and keeps each reply until the client acknowledges it. A client repeats a request only to the
server incarnation that it was sent to; if that incarnation ended, pending requests raise :class:`PeerRestartedError`. A
restarted server starts without this memory: the application logs what must survive.

**Backpressure.** A client's unanswered requests, and the replies that a server keeps for a client, are bounded in
bytes: the client waits, or the server executes no more for it. Every request has a deadline.

**Authentication.** Within a machine, ``ipc://`` in a folder of mode 0700 (:func:`ipc_folder`) or the loopback; any
other address needs the job's keys (:class:`Security`). Keys may be used anywhere; they cost about 1.2 ms of CPU time
per MB, both sides together. zmq bounds the size of a frame but not the number of frames: a process that
has the keys, or the user's processes within a machine, could still fill a server's memory.

**Threads and forks.** Threads may share a client. Sockets and threads are created on first use, so clients and servers
may be created before a fork and used after it, in one process each. Handlers run one at a time in the server's loop; a
handler that must wait returns a future.
"""

from __future__ import annotations

from gtrain.wire.addresses import IpcFolder, ipc_folder, is_local
from gtrain.wire.client import Client
from gtrain.wire.counters import Counters
from gtrain.wire.errors import (
    DeadlineError,
    FrameError,
    PeerRestartedError,
    RefusedError,
    RemoteError,
    WireError,
)
from gtrain.wire.limits import Limits
from gtrain.wire.message import Message
from gtrain.wire.server import Handler, Server
from gtrain.wire.server_session import Caller
from gtrain.wire.shared import SharedTensors
from gtrain.wire.zeromq.security import Security

__all__ = [
    "Caller",
    "Client",
    "Counters",
    "DeadlineError",
    "FrameError",
    "Handler",
    "IpcFolder",
    "Limits",
    "Message",
    "PeerRestartedError",
    "RefusedError",
    "RemoteError",
    "Security",
    "Server",
    "SharedTensors",
    "WireError",
    "ipc_folder",
    "is_local",
]
