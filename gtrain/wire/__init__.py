"""The wire: requests and answers between processes that share no process group.

A :class:`Server` answers methods by name; a :class:`Client` asks one server, waits or gets futures. ::

    def push(message: Message, caller: Caller) -> Message:
        table[message.tensors[0]] += message.tensors[1]
        return Message({"rows": len(message.tensors[0])})

    with Server({"push": push}, name="table 0", address="tcp://127.0.0.1:0") as server:
        with Client(server.address, peer="table 0") as client:
            answer = client.request("push", {}, [rows, gradients])    # raises what push raises, as RemoteError
            future = client.submit("push", {}, [rows, gradients])     # several may be under way

**Messages** carry small fields (msgpack) and tensors of any dtype (raw frames, no copies where memory allows). Nothing
is ever unpickled, and nothing is allocated because a message claims to be large. See :class:`Message`, :class:`Limits`.

**Exactly once.** An answered request was executed once; any other raises. A server remembers (client, incarnation,
sequence) and each answer until the client has it; a client sends a request again only to the server's life that it was
meant for. If that life ended, what was under way raises :class:`PeerRestartedError`. What a server executed before it
was killed is for its own log to remember: a restarted server begins without memory.

**Bounds.** A client's unanswered requests, and the answers that a server holds for a client, are bounded in bytes: the
client waits, or the server executes no more for it. Every request has a deadline.

**Who may ask.** Within a machine ``ipc://`` in a folder of mode 0700 (:func:`ipc_folder`) or the loopback; any other
address needs the job's keys (:class:`Security`). Keys may be used anywhere; they cost about 1.2 ms of CPU for each MB,
both sides together. zmq bounds a frame but not the number of frames of a message, so who has the keys, or the user's
own processes within a machine, could still fill a server's memory.

**Threads and forks.** Clients may be shared by threads. Nothing is made before first use, so clients and servers may be
made before a fork and used after it, in one process each. Handlers run one at a time in the server's loop; one that has
to wait returns a future.
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
from gtrain.wire.session import Caller
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
