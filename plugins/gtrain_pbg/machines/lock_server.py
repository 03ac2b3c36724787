"""The lock server: grants buckets with leases, detects lost machines, and serves the collectives of all ranks.

It may be killed at any moment. It saves its state before it replies, in memory of the agent; a restarted server
continues from there. Clients repeat pending requests, and every request may be executed twice without harm:
collectives, epochs and requests for buckets are numbered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgpack
import torch

from gtrain.errors import PeerLostError
from gtrain.launch.environment import say_waiting
from gtrain.strategy.server import LastingState, ServerContext
from gtrain.wire import Caller, Message
from gtrain_pbg.buckets import bucket_order
from gtrain_pbg.config import EACH, PBGConfig
from gtrain_pbg.edges import mixed
from gtrain_pbg.machines.heartbeat import (
    ENDED,
    REPORT_SECONDS,
    FailureDetector,
    is_rank,
    next_report,
    pid_namespace,
)
from gtrain_pbg.machines.members import DeferredReplies, JobEndedError, Membership, Reply
from gtrain_pbg.machines.scheduler import BucketScheduler

CHECK_SECONDS = 0.1
STOOD_STILL_SECONDS = 1.0
"""A longer delay between two checks means that this process or its machine was stopped."""


def main(context: ServerContext) -> None:
    """Serve until asked to end."""
    settings, trainer = PBGConfig(**context.config["strategy"]), context.config["trainer"]
    state = None if context.lasting_file is None else LastingState(context.lasting_file)
    lock = LockServer(settings, trainer["num_nodes"], trainer["devices"], state=state, tell=context.say)
    if context.restarts:
        print(f"restarted in round {lock.round}", flush=True)
    watch = threading.Thread(target=lock.watch, args=(context.stop,), name="gtrain-leases", daemon=True)
    watch.start()
    context.serve(lock.methods())
    watch.join()


class LockServer:
    """The methods of the lock server. Handlers run in the server's loop, :meth:`watch` in a background thread.

    Args:
        settings: of the strategy.
        machines: number of machines.
        devices: workers on each.
        clock: returns seconds.
        state: outlives this process; a restarted server continues from its value.
        tell: prints a line to the terminal.
        tell_waiting: prints the process that the job waits for.

    Attributes:
        round: number of started epochs, or of their parts between checkpoints.
    """

    def __init__(
        self,
        settings: PBGConfig,
        machines: int,
        devices: int,
        clock: Callable[[], float] = time.monotonic,
        state: LastingState | None = None,
        tell: Callable[[str], None] = print,
        tell_waiting: Callable[[str, float, str], None] = say_waiting,
    ) -> None:
        self._settings, self._lock, self._clock = settings, threading.RLock(), clock
        self._state, self._report, self._report_waiting = state, tell, tell_waiting
        self._deferred: DeferredReplies = []
        self.members = Membership(machines, devices, self._deferred)
        self._detector = FailureDetector(settings.lease_seconds, pid_namespace(), clock)
        self._scheduler: BucketScheduler | None = None
        self._scheduler_fields: dict[str, Any] = {}  # its arguments
        self.round, self._number = 0, 0
        self._requests: dict[int, int] = {}  # number of each machine's last request for a bucket
        self._granted: dict[int, dict[str, Any]] = {}  # replay buffer: the reply to that request
        self._started: set[int] = set()  # machines that have had a bucket in this epoch
        self._waiting: dict[int, Reply] = {}
        self._ended = ""
        self._holding: set[int] | None = None  # parameter servers that store parameters; None: not yet known
        self._unreported: list[str] = []  # losses, reported once it is certain that the job is not over
        self._joined: set[int] = set()  # ranks that are not restarted if they die
        self._lost_servers: list[str] = []  # servers without which the job continues
        self._absent_since: float | None = None  # others wait for ranks that have not joined
        self._absence_report_at = REPORT_SECONDS
        saved = state.load() if state is not None else b""
        if saved:
            self._restore(msgpack.unpackb(saved, strict_map_key=False, use_list=False))

    def methods(self) -> dict[str, Any]:
        """Return the handlers by the names of their methods."""
        names = ("join", "stay", "meet", "number", "begin", "acquire", "release")
        saving = {name: self._checked(getattr(self, name), saves=True) for name in names}
        return saving | {"beat": self._checked(self.beat), "serve": self.serve, "pulse": self.pulse}

    def _checked(self, handler: Callable[[Message, int], Any], saves: bool = False) -> Callable[[Message, Caller], Any]:
        def handle(message: Message, caller: Caller) -> Message | Future[Message | None] | None:
            with self._lock:
                rank = _rank(caller.client)
                self.members.check(rank)
                if self._ended:
                    raise JobEndedError(self._ended)
                reply: Message | Future[Message | None] | None = handler(message, rank)
                if saves:
                    self._commit()
                return reply

        return handle

    # ------------------------------------------------------------------------------------------ restart

    def _commit(self) -> None:
        """Save the state, then send the replies that depend on it."""
        if self._state is not None:
            # Saved first: a reply that a client has acted on must not be forgotten by a restarted server.
            self._state.save(msgpack.packb(self._saved()))
        while self._deferred:
            self._deferred.pop(0)()

    def _saved(self) -> dict[str, Any]:
        return {
            # Packed separately, so that lists in the results of collectives stay lists.
            "members": msgpack.packb(self.members.state()),
            "detector": self._detector.state(),
            "made": self._scheduler_fields,
            "scheduler": None if self._scheduler is None else self._scheduler.state(),
            "numbers": [self.round, self._number],
            "turns": self._requests,
            "granted": self._granted,
            "started": sorted(self._started),
            "ended": self._ended,
            "holding": None if self._holding is None else sorted(self._holding),
            "lost_servers": self._lost_servers,
            "stay": sorted(self._joined),
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        self.members.restore(msgpack.unpackb(saved["members"], strict_map_key=False))
        self._detector.restore(saved["detector"])
        self.round, self._number = saved["numbers"]
        self._requests, self._granted, self._started = saved["turns"], saved["granted"], set(saved["started"])
        self._ended, self._lost_servers = saved["ended"], list(saved["lost_servers"])
        self._joined = set(saved["stay"])
        self._holding = None if saved["holding"] is None else set(saved["holding"])
        if saved["scheduler"] is not None:
            self._scheduler_fields = saved["made"]
            self._scheduler = self._make_scheduler(self._scheduler_fields)
            self._scheduler.restore(saved["scheduler"])

    # ------------------------------------------------------------------------------------------ membership

    def join(self, message: Message, rank: int) -> Message:
        """Add a rank. Fields: ``place`` (:func:`pid_namespace`) and ``pid``. The reply has this process's ``place``."""
        self._detector.join(f"rank {rank}", message.fields["place"], message.fields["pid"])
        return Message({"place": pid_namespace()})

    def stay(self, message: Message, rank: int) -> None:
        """Record that a rank has joined for good: its death is the loss of its machine from now on."""
        if rank not in self._joined:
            print(f"rank {rank} has joined", flush=True)
            self._joined.add(rank)

    def beat(self, message: Message, rank: int) -> Message:
        """Record the heartbeat of a rank. The reply has ``lost_servers``: those without which the job continues."""
        self._detector.beat(f"rank {rank}")
        return Message({"lost_servers": self._lost_servers})

    def serve(self, message: Message, caller: Caller) -> None:
        """Add a server, perhaps a restarted one. Fields: as for :meth:`join`."""
        with self._lock:
            self._detector.join(caller.client, message.fields["place"], message.fields["pid"])
            self._commit()

    def pulse(self, message: Message, caller: Caller) -> None:
        """Record the heartbeat of a server."""
        with self._lock:
            self._detector.beat(caller.client)

    def meet(self, message: Message, rank: int) -> Reply:
        """Take part in a collective; see :class:`Membership`. Fields: ``number`` and ``value``."""
        for line in self._unreported:
            self._report(line)
        self._unreported.clear()
        return self.members.contribute(rank, message.fields["number"], message)

    def number(self, message: Message, rank: int) -> Message:
        """Return a number larger than that of any lease so far."""
        return Message({"number": self._next()})

    def watch(self, stop: threading.Event) -> None:
        """Check for failed members until asked to end."""
        checked = self._clock()
        while not stop.wait(CHECK_SECONDS):
            stood_still = self._clock() - checked - CHECK_SECONDS
            if stood_still > STOOD_STILL_SECONDS:
                with self._lock:
                    self._detector.forgive(stood_still)
            checked = self._clock()
            self.check_members()

    def check_members(self) -> None:
        """Drop machines whose processes ended or whose leases expired; end the job if it needs a lost server."""
        with self._lock:
            if self._settings.lease_seconds > REPORT_SECONDS:
                self._report_silence()
            self._report_absence()
            lost = self._detector.find_lost()
            waited_for = {name for name in lost if self._is_waited_for(name)}
            for name, how in lost.items():
                if how != ENDED and name in waited_for:
                    if self._detector.silence(name) < self._patience:
                        continue
                    how = f"sent no heartbeat for {self._patience:g} s"
                if is_rank(name) and how == ENDED and _rank(name) not in self._joined:
                    # It had not joined: its agent restarts it.
                    self._detector.await_return(name)
                elif is_rank(name):
                    self._lose_machine(self.members.machine_of(_rank(name)), f"{name} {how}")
                elif name.startswith("partition ") and how == ENDED:
                    # Its agent restarts it, or ends the job.
                    self._detector.await_return(name)
                else:
                    self._detector.forget(name)
                    self._lose_server(name, how)
            if lost:
                self._commit()

    def _report_silence(self) -> None:
        """Name members that do not answer before their leases end, and those that answer again."""
        silent, back = self._detector.late()
        if self._ended:
            return
        for name, seconds in silent.items():
            limit = self._patience if self._is_waited_for(name) else self._settings.lease_seconds
            if seconds < limit:
                self._report_waiting(self._name_of(name), seconds, f"; lost after {limit:g} s without a heartbeat")
        if back:
            self._report(f"heartbeats from {', '.join(map(self._name_of, back))} again")

    def _report_absence(self) -> None:
        """Name ranks that have not joined, while others wait for them."""
        absent = [rank for rank in sorted(self.members.awaited()) if not self._detector.knows(f"rank {rank}")]
        if not absent or self._ended:
            self._absent_since, self._absence_report_at = None, REPORT_SECONDS
            return
        now = self._clock()
        self._absent_since = now if self._absent_since is None else self._absent_since
        seconds = now - self._absent_since
        if seconds >= self._absence_report_at:
            self._absence_report_at = next_report(seconds)
            for rank in absent:
                self._report_waiting(f"{self._name_of(f'rank {rank}')} to come", seconds, "")

    @property
    def _patience(self) -> float:
        return max(self._settings.lease_seconds, self._settings.timeout_seconds)

    def _is_waited_for(self, name: str) -> bool:
        """Return whether a member may be silent for longer than its lease.

        Its process exists, so it is stopped or slow, and the job would end with its loss.
        """
        return self._detector.watches(name) and not (is_rank(name) and self.members.machine_of(_rank(name)) > 0)

    def _name_of(self, name: str) -> str:
        """``rank 1 (machine 1)``; server n is on machine n, unless it was started by hand."""
        number = _rank(name)
        if name.startswith("partition ") and self._settings.partition_servers != EACH:
            return name
        return f"{name} (machine {self.members.machine_of(number) if is_rank(name) else number})"

    def _lose_server(self, name: str, how: str) -> None:
        """Handle the loss of a server, and for a parameter server of its machine: go on if it stored nothing."""
        number, settings, holder = _rank(name), self._settings, name
        if name.startswith("parameter ") and self._holding is not None and number not in self._holding:
            holder = f"partition {number}" if settings.partition_servers == EACH else ""
        if holder or settings.on_trainer_loss == "stop":
            data = f", and the data of {holder} is lost with it" if holder else ""
            self._end(f"{name} is lost: it {how}{data}; resume from the last checkpoint (ckpt_path=last)")
            return
        print(f"the job goes on without {name}, which stored nothing: it {how}", flush=True)
        self._lost_servers.append(name)

    def _lose_machine(self, machine: int, reason: str) -> None:
        if machine in self.members.lost:
            return
        print(f"machine {machine} is lost: {reason}", flush=True)
        for rank in self.members.ranks_of(machine):
            self._detector.forget(f"rank {rank}")
        self.members.lose(machine, reason)
        if self._ended:
            return
        waiting = self._waiting.pop(machine, None)
        if waiting is not None:
            self._deferred.append(partial(waiting.set_exception, PeerLostError(reason)))
        if machine == 0 or self._settings.on_trainer_loss == "stop":
            self._end(f"machine {machine} is lost: {reason}")
            return
        again = 0
        if self._scheduler is not None:
            before = self._scheduler.again
            self._scheduler.lose(machine)
            again = self._scheduler.again - before
            self._grant_waiting()
        trained = {0: "", 1: "; its bucket is trained again"}.get(again, f"; its {again} buckets are trained again")
        line = f"machine {machine} is lost ({reason}); the job goes on without it{trained}"
        if reason.endswith(ENDED) and (self._scheduler is None or self._scheduler.over):
            # Not reported at once: a rank also ends when the job is over.
            self._unreported.append(line)
        else:
            self._report(line)

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        print(reason, flush=True)
        self._ended = reason
        self.members.end(reason)
        for reply in self._waiting.values():
            self._deferred.append(partial(reply.set_exception, JobEndedError(reason)))
        self._waiting.clear()

    # ------------------------------------------------------------------------------------------ buckets

    def begin(self, message: Message, rank: int) -> None:
        """Start an epoch.

        Fields: ``round`` (from 1), ``epoch``, ``seed``, ``as_tree``, ``table``, the edge chunks ``first`` to
        ``chunks - 1``, and ``holding``, the parameter servers that store parameters. A tensor bool ``[P, P]``: which
        buckets have edges.
        """
        fields = message.fields
        # Every machine's leader sends the request; the first starts the epoch, repetitions change nothing.
        if fields["round"] <= self.round:
            return
        self.round, self._started, self._holding = fields["round"], set(), set(fields["holding"])
        self._scheduler_fields = fields | {"filled": message.tensors[0].tolist()}
        self._scheduler = self._make_scheduler(self._scheduler_fields)

    def _make_scheduler(self, fields: dict[str, Any]) -> BucketScheduler:
        settings, filled = self._settings, torch.tensor(fields["filled"], dtype=torch.bool)
        nonempty = set(map(tuple, filled.nonzero().tolist()))

        def order(chunk: int) -> list[tuple[int, int]]:
            key = fields["seed"], fields["epoch"], chunk
            buckets = bucket_order(settings.bucket_order, settings.num_partitions, 2, mixed(*key))
            return [bucket for bucket in buckets if bucket in nonempty]

        return BucketScheduler(
            fields["table"],
            order,
            fields["chunks"],
            fields["as_tree"],
            fields["first"],
            ahead=settings.buffer_partitions != 2,
        )

    def acquire(self, message: Message, rank: int) -> Message | Reply:
        """Grant a bucket to a machine.

        Fields: ``turn``, number of the request, from 1, and ``edges`` trained in its last bucket; None: it has none.

        The reply has ``bucket``, ``chunk``, ``leases`` and ``ahead``; or ``give_back``: other machines may need the
        partitions that it holds; or ``over``, with ``edges`` and ``again`` of the epoch. It is sent as soon as one of
        these is the case.
        """
        scheduler, machine, fields = self._epoch, self.members.machine_of(rank), message.fields
        if fields["turn"] > self._requests.get(machine, 0):
            self._requests[machine] = fields["turn"]
            self._granted.pop(machine, None)
            if fields["edges"] is not None:
                scheduler.trained(machine, fields["edges"])
        elif machine in self._granted:
            # A repeated request: the lock server was restarted before it replied.
            return Message(self._granted[machine])
        answer = self._try_grant(machine)
        if answer is not None:
            self._grant_waiting()
            return answer
        reply = self._waiting[machine] = Reply()
        return reply

    def release(self, message: Message, rank: int) -> None:
        """Release leases of partitions that a machine has written back. Fields: ``keys``."""
        self._epoch.released(self.members.machine_of(rank), message.fields["keys"])
        self._grant_waiting()

    @property
    def _epoch(self) -> BucketScheduler:
        if self._scheduler is None:
            raise ValueError("no epoch has started")
        return self._scheduler

    def _try_grant(self, machine: int) -> Message | None:
        scheduler = self._epoch
        grant = scheduler.acquire(machine, self._next)
        if grant is not None:
            if machine not in self._started:
                self._started.add(machine)
                print(f"round {self.round}: machine {machine} begins with bucket {grant.bucket}", flush=True)
            fields = {"bucket": list(grant.bucket), "chunk": grant.chunk, "ahead": grant.ahead, "leases": grant.leases}
            self._granted[machine] = fields
            return Message(fields)
        if scheduler.holds(machine):
            return Message({"give_back": True})
        if scheduler.over:
            return Message({"over": True, "edges": sum(scheduler.edges.values()), "again": scheduler.again})
        return None

    def _grant_waiting(self) -> None:
        """Reply to waiting machines for which a bucket has become free."""
        for machine, reply in list(self._waiting.items()):
            answer = self._try_grant(machine)
            if answer is not None:
                del self._waiting[machine]
                self._deferred.append(partial(reply.set_result, answer))

    def _next(self) -> int:
        self._number += 1
        return self._number


def _rank(name: str) -> int:
    """Return the number in a client's name."""
    return int(name.rpartition(" ")[2])
