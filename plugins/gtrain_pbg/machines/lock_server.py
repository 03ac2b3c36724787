"""The lock server: grants buckets by leases, notices machines that are lost, and is where all ranks meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gtrain.errors import PeerLostError
from gtrain.strategy.server import ServerContext
from gtrain.wire import Caller, Message
from gtrain_pbg.config import EACH, PBGConfig
from gtrain_pbg.edges import mixed
from gtrain_pbg.machines.board import Board
from gtrain_pbg.machines.heart import place
from gtrain_pbg.machines.members import JobEndedError, Members, Reply
from gtrain_pbg.machines.pulses import ENDED, Pulses, is_rank
from gtrain_pbg.order import bucket_order

LOOK_SECONDS = 0.1


def main(context: ServerContext) -> None:
    """Serve until asked to end."""
    settings, trainer = PBGConfig(**context.config["strategy"]), context.config["trainer"]
    lock = LockServer(settings, trainer["num_nodes"], trainer["devices"])
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
    """

    def __init__(
        self, settings: PBGConfig, machines: int, devices: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._lock = settings, threading.RLock()
        self.members = Members(machines, devices)
        self._pulses = Pulses(settings.lease_seconds, place(), clock)
        self._board: Board | None = None
        self._round, self._number = 0, 0
        self._begun: set[int] = set()  # machines that have had a bucket in this epoch
        self._waiting: dict[int, Reply] = {}
        self._ended = ""
        self._holding: set[int] | None = None  # parameter servers that keep something; None: not yet known
        self._missing: list[str] = []  # servers that are lost, and that the job goes on without

    def methods(self) -> dict[str, Any]:
        """The handlers by the names of their methods."""
        names = ("join", "beat", "meet", "number", "begin", "acquire", "release")
        own = {name: self._checked(getattr(self, name)) for name in names}
        return own | {"serve": self.serve, "pulse": self.pulse}

    def _checked(self, handler: Callable[[Message, int], Any]) -> Callable[[Message, Caller], Any]:
        def answer(message: Message, caller: Caller) -> Message | Future[Message | None] | None:
            with self._lock:
                rank = _rank(caller.client)
                self.members.check(rank)
                if self._ended:
                    raise JobEndedError(self._ended)
                return handler(message, rank)

        return answer

    # ------------------------------------------------------------------------------------------ who is there

    def join(self, message: Message, rank: int) -> None:
        """A rank is there. Fields: ``place`` and ``pid``, its process's."""
        self._pulses.join(f"rank {rank}", message.fields["place"], message.fields["pid"])

    def beat(self, message: Message, rank: int) -> Message:
        """A rank is still there. The answer has ``missing``: servers that the job goes on without."""
        self._pulses.beat(f"rank {rank}")
        return Message({"missing": self._missing})

    def serve(self, message: Message, caller: Caller) -> None:
        """A server is there, perhaps started again. Fields: as of :meth:`join`."""
        with self._lock:
            self._pulses.join(caller.client, message.fields["place"], message.fields["pid"])

    def pulse(self, message: Message, caller: Caller) -> None:
        """A server is still there."""
        with self._lock:
            self._pulses.beat(caller.client)

    def meet(self, message: Message, rank: int) -> Reply:
        """See :class:`Members`. Fields: ``number`` and ``value``."""
        return self.members.meet(rank, message.fields["number"], message)

    def number(self, message: Message, rank: int) -> Message:
        """A number larger than that of any lease so far."""
        return Message({"number": self._next()})

    def watch(self, stop: threading.Event) -> None:
        """Look for machines that are lost until asked to end."""
        while not stop.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Take machines for lost whose processes have ended here, or that were not heard of; end without servers."""
        with self._lock:
            for name, how in self._pulses.gone().items():
                if is_rank(name):
                    self._lose(self.members.machine_of(_rank(name)), f"{name} {how}")
                elif name.startswith("partition ") and how == ENDED:
                    self._pulses.await_return(name)  # its agent starts it again, or ends the job
                else:
                    self._pulses.forget(name)
                    self._miss(name, how)

    def _miss(self, name: str, how: str) -> None:
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

    def _lose(self, machine: int, reason: str) -> None:
        if machine in self.members.lost:
            return
        print(f"machine {machine} is no longer there: {reason}", flush=True)
        for rank in self.members.ranks_of(machine):
            self._pulses.forget(f"rank {rank}")
        self.members.lose(machine, reason)
        waiting = self._waiting.pop(machine, None)
        if waiting is not None:
            waiting.set_exception(PeerLostError(reason))
        if machine == 0 or self._settings.on_trainer_loss == "stop":
            self._end(f"machine {machine} is lost: {reason}")
        elif self._board is not None:
            self._board.lose(machine)
            self._look_again()

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        print(reason, flush=True)
        self._ended = reason
        self.members.end(reason)
        for reply in self._waiting.values():
            reply.set_exception(JobEndedError(reason))
        self._waiting.clear()

    # ------------------------------------------------------------------------------------------ buckets

    def begin(self, message: Message, rank: int) -> None:
        """A machine begins an epoch.

        Fields: ``round`` (from 1), ``epoch``, ``seed``, ``as_tree``, ``table``, ``chunks``, how often it goes through
        the buckets, ``first``, from which on, and ``holding``, the parameter servers that keep something. A tensor bool
        ``[P, P]``: which buckets have edges.
        """
        fields, settings = message.fields, self._settings
        if fields["round"] <= self._round:
            return
        self._round, self._begun, self._holding = fields["round"], set(), set(fields["holding"])
        there = set(map(tuple, message.tensors[0].nonzero().tolist()))

        def order(chunk: int) -> list[tuple[int, int]]:
            seed = mixed(fields["seed"], fields["epoch"], chunk)
            found = bucket_order(settings.bucket_order, settings.num_partitions, 2, seed)
            return [bucket for bucket in found if bucket in there]

        place = fields["chunks"], fields["as_tree"], fields["first"]
        self._board = Board(fields["table"], order, *place, settings.buffer_partitions != 2)

    def acquire(self, message: Message, rank: int) -> Message | Reply:
        """A machine wants a bucket. Fields: ``edges`` that it trained of its last one; None: it has none.

        The answer has ``bucket``, ``chunk``, ``leases`` and ``ahead``; or ``give_back``: others may need what it holds;
        or ``over`` with ``edges`` and ``again`` of the epoch. It comes when one of these is the case.
        """
        board, machine = self._epoch, self.members.machine_of(rank)
        if message.fields["edges"] is not None:
            board.trained(machine, message.fields["edges"])
        answer = self._answer(machine)
        if answer is not None:
            self._look_again()
            return answer
        reply = self._waiting[machine] = Reply()
        return reply

    def release(self, message: Message, rank: int) -> None:
        """A machine has written back partitions. Fields: ``keys``."""
        self._epoch.released(self.members.machine_of(rank), message.fields["keys"])
        self._look_again()

    @property
    def _epoch(self) -> Board:
        if self._board is None:
            raise ValueError("no epoch has begun")
        return self._board

    def _answer(self, machine: int) -> Message | None:
        board = self._epoch
        grant = board.acquire(machine, self._next)
        if grant is not None:
            if machine not in self._begun:
                self._begun.add(machine)
                print(f"round {self._round}: machine {machine} begins with bucket {grant.bucket}", flush=True)
            fields = {"bucket": list(grant.bucket), "chunk": grant.chunk, "ahead": grant.ahead}
            return Message({**fields, "leases": grant.leases})
        if board.holds(machine):
            return Message({"give_back": True})
        if board.over:
            return Message({"over": True, "edges": sum(board.edges.values()), "again": board.again})
        return None

    def _look_again(self) -> None:
        """Something has changed: answer those who wait, if there is something for them."""
        for machine, reply in list(self._waiting.items()):
            answer = self._answer(machine)
            if answer is not None:
                del self._waiting[machine]
                reply.set_result(answer)

    def _next(self) -> int:
        self._number += 1
        return self._number


def _rank(name: str) -> int:
    """The rank that is called so on the wire."""
    return int(name.rpartition(" ")[2])
