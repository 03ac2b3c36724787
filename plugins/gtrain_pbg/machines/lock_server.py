"""The lock server: grants buckets with leases, detects lost machines, and holds the meetings of all ranks.

It may be killed at any moment. Its state is saved before anybody is answered, in memory that the agent keeps; its next
life goes on from there. Whoever waits asks again, and every request may be executed twice without harm: meetings,
epochs and the turns in which machines ask for buckets are numbered.
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
from gtrain_pbg.machines.heartbeat import ENDED, REPORT_SECONDS, FailureDetector, is_rank, pid_namespace
from gtrain_pbg.machines.members import DeferredReplies, JobEndedError, Membership, Reply
from gtrain_pbg.machines.scheduler import BucketScheduler

CHECK_SECONDS = 0.1
STOOD_STILL_SECONDS = 1.0
"""A longer delay between two checks means that this process or its machine was stopped."""


def main(context: ServerContext) -> None:
    """Serve until asked to end."""
    settings, trainer = PBGConfig(**context.config["strategy"]), context.config["trainer"]
    state = None if context.lasting_file is None else LastingState(context.lasting_file)
    shape = trainer["num_nodes"], trainer["devices"]
    lock = LockServer(settings, *shape, state=state, tell=context.say, tell_waiting=say_waiting)
    if context.restarts:
        print(f"restarted in round {lock.round}", flush=True)
    watch = threading.Thread(target=lock.watch, args=(context.stop,), name="gtrain-leases", daemon=True)
    watch.start()
    context.serve(lock.methods())
    watch.join()


class LockServer:
    """The methods of the lock server. Handlers run in the server's loop, and :meth:`watch` in a thread beside it.

    Args:
        settings: of the strategy.
        machines: how many there are.
        devices: workers on each.
        clock: seconds.
        state: what outlives this process; where it has a value, an earlier life's, this one goes on from there.
        tell: prints a line to the terminal.
        tell_waiting: prints for whom the job waits; None: as ``tell``.

    Attributes:
        round: epochs, or parts of them between checkpoints, that have begun.
    """

    def __init__(
        self,
        settings: PBGConfig,
        machines: int,
        devices: int,
        clock: Callable[[], float] = time.monotonic,
        state: LastingState | None = None,
        tell: Callable[[str], None] = print,
        tell_waiting: Callable[[str], None] | None = None,
    ) -> None:
        self._settings, self._lock, self._clock = settings, threading.RLock(), clock
        self._state, self._report, self._report_waiting = state, tell, tell_waiting or tell
        self._settled: DeferredReplies = []
        self.members = Membership(machines, devices, self._settled)
        self._detector = FailureDetector(settings.lease_seconds, pid_namespace(), clock)
        self._scheduler: BucketScheduler | None = None
        self._scheduler_fields: dict[str, Any] = {}  # by which it was made
        self.round, self._number = 0, 0
        self._turns: dict[int, int] = {}  # of each machine, in which it asked for a bucket last
        self._granted: dict[int, dict[str, Any]] = {}  # what each machine was answered in that turn
        self._begun: set[int] = set()  # machines that have had a bucket in this epoch
        self._waiting: dict[int, Reply] = {}
        self._ended = ""
        self._holding: set[int] | None = None  # parameter servers that keep something; None: not yet known
        self._unreported: list[str] = []  # losses, reported once it is clear that the job is not over
        self._stay: set[int] = set()  # ranks that are not restarted if they die
        self._missing: list[str] = []  # servers that are lost, and that the job goes on without
        saved = state.load() if state is not None else b""
        if saved:
            self._restore(msgpack.unpackb(saved, strict_map_key=False))

    def methods(self) -> dict[str, Any]:
        """The handlers by the names of their methods."""
        names = ("join", "stay", "meet", "number", "begin", "acquire", "release")
        own = {name: self._checked(getattr(self, name), saves=True) for name in names}
        return own | {"beat": self._checked(self.beat), "serve": self.serve, "pulse": self.pulse}

    def _checked(self, handler: Callable[[Message, int], Any], saves: bool = False) -> Callable[[Message, Caller], Any]:
        def answer(message: Message, caller: Caller) -> Message | Future[Message | None] | None:
            with self._lock:
                rank = _rank(caller.client)
                self.members.check(rank)
                if self._ended:
                    raise JobEndedError(self._ended)
                found: Message | Future[Message | None] | None = handler(message, rank)
                if saves:
                    self._commit()
                return found

        return answer

    # ------------------------------------------------------------------------------------------ its next life

    def _commit(self) -> None:
        """Save the state, and then let replies have what was decided."""
        if self._state is not None:
            self._state.save(msgpack.packb(self._saved()))
        settled = list(self._settled)
        self._settled.clear()
        for settle in settled:
            settle()

    def _saved(self) -> dict[str, Any]:
        return {
            "members": self.members.state(),
            "detector": self._detector.state(),
            "made": self._scheduler_fields,
            "scheduler": None if self._scheduler is None else self._scheduler.state(),
            "numbers": [self.round, self._number],
            "turns": self._turns,
            "granted": self._granted,
            "begun": sorted(self._begun),
            "ended": self._ended,
            "holding": None if self._holding is None else sorted(self._holding),
            "missing": self._missing,
            "stay": sorted(self._stay),
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        self.members.restore(saved["members"])
        self._detector.restore(saved["detector"])
        self.round, self._number = saved["numbers"]
        self._turns, self._granted, self._begun = saved["turns"], saved["granted"], set(saved["begun"])
        self._ended, self._missing = saved["ended"], saved["missing"]
        self._stay = set(saved["stay"])
        self._holding = None if saved["holding"] is None else set(saved["holding"])
        if saved["scheduler"] is not None:
            self._scheduler_fields = saved["made"]
            self._scheduler = self._make_scheduler(self._scheduler_fields)
            self._scheduler.restore(saved["scheduler"])

    # ------------------------------------------------------------------------------------------ who is there

    def join(self, message: Message, rank: int) -> Message:
        """A rank is there. Fields: ``place`` and ``pid``, its process's. The answer has this process's ``place``."""
        self._detector.join(f"rank {rank}", message.fields["place"], message.fields["pid"])
        return Message({"place": pid_namespace()})

    def stay(self, message: Message, rank: int) -> None:
        """A rank is not restarted from now on: its end is the loss of its machine."""
        if rank not in self._stay:
            print(f"rank {rank} has joined", flush=True)
            self._stay.add(rank)

    def beat(self, message: Message, rank: int) -> Message:
        """A rank is still there. The answer has ``missing``: servers that the job goes on without."""
        self._detector.beat(f"rank {rank}")
        return Message({"missing": self._missing})

    def serve(self, message: Message, caller: Caller) -> None:
        """A server is there, perhaps restarted. Fields: as of :meth:`join`."""
        with self._lock:
            self._detector.join(caller.client, message.fields["place"], message.fields["pid"])
            self._commit()

    def pulse(self, message: Message, caller: Caller) -> None:
        """A server is still there."""
        with self._lock:
            self._detector.beat(caller.client)

    def meet(self, message: Message, rank: int) -> Reply:
        """See :class:`Membership`. Fields: ``number`` and ``value``."""
        for said in self._unreported:
            self._report(said)
        self._unreported.clear()
        return self.members.meet(rank, message.fields["number"], message)

    def number(self, message: Message, rank: int) -> Message:
        """A number larger than that of any lease so far."""
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
            gone = self._detector.gone()
            waited_for = {name for name in gone if self._is_waited_for(name)}
            for name, how in gone.items():
                if how != ENDED and name in waited_for:
                    if self._detector.silence(name) < self._patience:
                        continue
                    how = f"sent no heartbeat for {self._patience:g} s"
                if is_rank(name) and how == ENDED and _rank(name) not in self._stay:
                    self._detector.await_return(name)  # it had no part in the job yet: its agent restarts it
                elif is_rank(name):
                    self._lose_machine(self.members.machine_of(_rank(name)), f"{name} {how}")
                elif name.startswith("partition ") and how == ENDED:
                    self._detector.await_return(name)  # its agent restarts it, or ends the job
                else:
                    self._detector.forget(name)
                    self._lose_server(name, how)
            if gone:
                self._commit()

    def _report_silence(self) -> None:
        """Name members that do not answer before their leases end, and those that answer again."""
        silent, back = self._detector.late()
        if self._ended:
            return
        for name, seconds in silent.items():
            limit = self._patience if self._is_waited_for(name) else self._settings.lease_seconds
            waiting = f"waiting for {self._name_of(name)}, {seconds:.0f} s"
            if seconds < limit:
                self._report_waiting(f"{waiting}; lost after {limit:g} s without a heartbeat")
        if back:
            self._report(f"heartbeats from {', '.join(map(self._name_of, back))} again")

    @property
    def _patience(self) -> float:
        return max(self._settings.lease_seconds, self._settings.timeout_seconds)

    def _is_waited_for(self, name: str) -> bool:
        """Whether a member may be silent for longer than its lease.

        Its process is there, so it was stopped or is slow, and the job would end without it.
        """
        return self._detector.watches(name) and not (is_rank(name) and self.members.machine_of(_rank(name)) > 0)

    def _name_of(self, name: str) -> str:
        """``rank 1 (machine 1)``; server n is on machine n, unless it was started by hand."""
        number = _rank(name)
        if name.startswith("partition ") and self._settings.partition_servers != EACH:
            return name
        return f"{name} (machine {self.members.machine_of(number) if is_rank(name) else number})"

    def _lose_server(self, name: str, how: str) -> None:
        """A server is lost, and with a parameter server its machine: go on if nothing is lost with it."""
        number, settings, kept = _rank(name), self._settings, name
        if name.startswith("parameter ") and self._holding is not None and number not in self._holding:
            kept = f"partition {number}" if settings.partition_servers == EACH else ""
        if kept or settings.on_trainer_loss == "stop":
            what = f", and what {kept} kept is nowhere else" if kept else ""
            self._end(f"{name} is lost: it {how}{what}; go on from the last checkpoint (ckpt_path=last)")
            return
        print(f"the job goes on without {name}, which kept nothing: it {how}", flush=True)
        self._missing.append(name)

    def _lose_machine(self, machine: int, reason: str) -> None:
        if machine in self.members.lost:
            return
        print(f"machine {machine} is no longer there: {reason}", flush=True)
        for rank in self.members.ranks_of(machine):
            self._detector.forget(f"rank {rank}")
        self.members.lose(machine, reason)
        if self._ended:
            return
        waiting = self._waiting.pop(machine, None)
        if waiting is not None:
            self._settled.append(partial(waiting.set_exception, PeerLostError(reason)))
        if machine == 0 or self._settings.on_trainer_loss == "stop":
            self._end(f"machine {machine} is lost: {reason}")
            return
        again = 0
        if self._scheduler is not None:
            before = self._scheduler.again
            self._scheduler.lose(machine)
            again = self._scheduler.again - before
            self._answer_waiting()
        trained = {0: "", 1: "; its bucket is trained again"}.get(again, f"; its {again} buckets are trained again")
        said = f"machine {machine} is lost ({reason}); the job goes on without it{trained}"
        if reason.endswith(ENDED) and (self._scheduler is None or self._scheduler.over):
            self._unreported.append(said)  # a rank that has come to the end of the job has ended as well
        else:
            self._report(said)

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        print(reason, flush=True)
        self._ended = reason
        self.members.end(reason)
        for reply in self._waiting.values():
            self._settled.append(partial(reply.set_exception, JobEndedError(reason)))
        self._waiting.clear()

    # ------------------------------------------------------------------------------------------ buckets

    def begin(self, message: Message, rank: int) -> None:
        """A machine begins an epoch.

        Fields: ``round`` (from 1), ``epoch``, ``seed``, ``as_tree``, ``table``, ``chunks``, how often it goes through
        the buckets, ``first``, from which on, and ``holding``, the parameter servers that keep something. A tensor bool
        ``[P, P]``: which buckets have edges.
        """
        fields = message.fields
        if fields["round"] <= self.round:
            return
        self.round, self._begun, self._holding = fields["round"], set(), set(fields["holding"])
        self._scheduler_fields = fields | {"filled": message.tensors[0].tolist()}
        self._scheduler = self._make_scheduler(self._scheduler_fields)

    def _make_scheduler(self, fields: dict[str, Any]) -> BucketScheduler:
        settings, filled = self._settings, torch.tensor(fields["filled"], dtype=torch.bool)
        there = set(map(tuple, filled.nonzero().tolist()))

        def order(chunk: int) -> list[tuple[int, int]]:
            seed = mixed(fields["seed"], fields["epoch"], chunk)
            found = bucket_order(settings.bucket_order, settings.num_partitions, 2, seed)
            return [bucket for bucket in found if bucket in there]

        return BucketScheduler(
            fields["table"],
            order,
            fields["chunks"],
            fields["as_tree"],
            fields["first"],
            ahead=settings.buffer_partitions != 2,
        )

    def acquire(self, message: Message, rank: int) -> Message | Reply:
        """A machine wants a bucket.

        Fields: ``turn``, from 1, and ``edges`` that it trained of its last bucket; None: it has none.

        The answer has ``bucket``, ``chunk``, ``leases`` and ``ahead``; or ``give_back``: others may need what it holds;
        or ``over`` with ``edges`` and ``again`` of the epoch. It comes when one of these is the case.
        """
        scheduler, machine, fields = self._epoch, self.members.machine_of(rank), message.fields
        if fields["turn"] > self._turns.get(machine, 0):
            self._turns[machine] = fields["turn"]
            self._granted.pop(machine, None)
            if fields["edges"] is not None:
                scheduler.trained(machine, fields["edges"])
        elif machine in self._granted:  # it asks again, for the lock server was restarted before it heard
            return Message(self._granted[machine])
        answer = self._answer(machine)
        if answer is not None:
            self._answer_waiting()
            return answer
        reply = self._waiting[machine] = Reply()
        return reply

    def release(self, message: Message, rank: int) -> None:
        """A machine has written back partitions. Fields: ``keys``."""
        self._epoch.released(self.members.machine_of(rank), message.fields["keys"])
        self._answer_waiting()

    @property
    def _epoch(self) -> BucketScheduler:
        if self._scheduler is None:
            raise ValueError("no epoch has begun")
        return self._scheduler

    def _answer(self, machine: int) -> Message | None:
        scheduler = self._epoch
        grant = scheduler.acquire(machine, self._next)
        if grant is not None:
            if machine not in self._begun:
                self._begun.add(machine)
                print(f"round {self.round}: machine {machine} begins with bucket {grant.bucket}", flush=True)
            fields = {"bucket": list(grant.bucket), "chunk": grant.chunk, "ahead": grant.ahead}
            self._granted[machine] = {**fields, "leases": grant.leases}
            return Message(self._granted[machine])
        if scheduler.holds(machine):
            return Message({"give_back": True})
        if scheduler.over:
            return Message({"over": True, "edges": sum(scheduler.edges.values()), "again": scheduler.again})
        return None

    def _answer_waiting(self) -> None:
        """Answer waiting machines for which a bucket has become free."""
        for machine, reply in list(self._waiting.items()):
            answer = self._answer(machine)
            if answer is not None:
                del self._waiting[machine]
                self._settled.append(partial(reply.set_result, answer))

    def _next(self) -> int:
        self._number += 1
        return self._number


def _rank(name: str) -> int:
    """The rank that is called so on the wire."""
    return int(name.rpartition(" ")[2])
