"""A rank's connection to the lock server: requests, heartbeats, and collectives that survive the loss of machines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import PeerLostError
from gtrain.launch.environment import say_waiting
from gtrain.launch.job_store import await_end_of_store
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain.wire import Client, Message, PeerRestartedError, RemoteError, WireError
from gtrain_pbg.machines.heartbeat import REPORT_SECONDS, heartbeat_interval, next_report, pid_namespace
from gtrain_pbg.machines.members import JobEndedError

FOREVER = 1e7
"""Time-out in seconds of requests for a bucket or a collective: they wait until it comes, or the job ends."""
RESTART_SECONDS = 15.0
"""Least seconds of silence before the lock server is declared lost: it may be restarting."""
_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class LockClient:
    """Sends requests and heartbeats to the lock server; learns within a second that this process must end.

    Args:
        client: of the lock server.
        lease_seconds: seconds of silence after which a rank, or the lock server, is declared lost.
        timeout_seconds: the same for a lock server on this machine: if it had ended, that would be known.
        store: address of the job's key-value store, which ends with the job; None for a rank of the machine
            that has it.
        mark_lost: called with the name of each lost server without which the job continues.
        tell: prints a line to the terminal; None: another rank of that terminal does so.
    """

    def __init__(
        self,
        client: Client,
        lease_seconds: float,
        store: str | None = None,
        mark_lost: Callable[[str], None] = lambda name: None,
        tell: Callable[[str], None] | None = None,
        timeout_seconds: float = 0.0,
    ) -> None:
        self._client, self._lease_seconds, self._mark_lost = client, lease_seconds, mark_lost
        self._report = tell
        self._over = threading.Event()
        self._lost: PeerLostError | None = None
        self._losing = threading.Lock()
        self._hooks: list[Callable[[PeerLostError], None]] = []
        place = self.request("join", {"place": pid_namespace(), "pid": os.getpid()}).fields["place"]
        self._patience = max(lease_seconds, timeout_seconds if place == pid_namespace() else RESTART_SECONDS)
        threading.Thread(target=self._beat, name="gtrain-heartbeat", daemon=True).start()
        if store is not None:
            threading.Thread(target=self._watch, args=(store,), name="gtrain-store", daemon=True).start()

    def on_loss(self, hook: Callable[[PeerLostError], None]) -> None:
        """Call a hook as soon as this process must end; the error is a :class:`JobEndedError` if the whole job ends."""
        with self._losing:
            self._hooks.append(hook)
            lost = self._lost
        if lost is not None:
            hook(lost)

    def request(self, method: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> Message:
        """Send a request, again if the lock server was restarted, and wait for the reply without a time-out.

        Raises:
            PeerLostError: the lock server is lost, this machine was declared lost, or the job cannot go on.
        """
        while True:
            try:
                return self._client.request(method, fields, tensors, timeout_seconds=FOREVER)
            except PeerRestartedError:
                continue
            except WireError as error:
                lost = _reported_loss(error)
                if lost is None:
                    raise
                self._lose(lost)
                raise lost from error

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Replace a refused write's error by the lock server's reason for this machine's loss, if it has one.

        Raises:
            PeerLostError: as :meth:`request`, or the original error.
        """
        try:
            yield
        except PeerLostError:
            # Raises the reason if the lock server has declared this machine lost.
            self.request("beat", {})
            raise

    def close(self) -> None:
        """Stop the heartbeats."""
        self._over.set()

    def _beat(self) -> None:
        while not self._over.wait(heartbeat_interval(self._lease_seconds)):
            try:
                for name in self._answer_to_beat().fields["lost_servers"]:
                    self._mark_lost(name)
            except PeerRestartedError:
                continue
            except (WireError, PeerLostError) as error:
                self._lose(_reported_loss(error) or JobEndedError(f"the lock server is lost: {error.message}"))
                return

    def _answer_to_beat(self) -> Message:
        """Send a heartbeat and wait for the reply; report to the terminal while it takes long."""
        beat, start = self._client.submit("beat", timeout_seconds=self._patience, attended=True), time.monotonic()
        report_at = REPORT_SECONDS
        while True:
            try:
                answer = self._client.result(beat, max(0.0, start + report_at - time.monotonic()))
            except TimeoutError:
                waited = time.monotonic() - start
                report_at = next_report(waited)
                note = f"; the job ends after {self._patience:g} s without a reply"
                say_waiting("lock 0 (machine 0)", waited, note)
            else:
                if report_at > REPORT_SECONDS and self._report is not None:
                    self._report("lock 0 (machine 0) replies again")
                return answer

    def _watch(self, store: str) -> None:
        await_end_of_store(store)
        self._lose(
            JobEndedError("machine 0 is lost, or its rank 0: the connection to the job's key-value store on it broke")
        )

    def _lose(self, error: PeerLostError) -> None:
        """Abort pending requests with this error."""
        with self._losing:
            # Only the first loss counts; hooks run once.
            if self._lost is not None or self._over.is_set():
                return
            self._lost, hooks = error, list(self._hooks)
        for hook in hooks:
            hook(error)
        self._client.close(error)


def _reported_loss(error: BaseException | None) -> PeerLostError | None:
    """Return the loss that an error of the lock server reports; None: it reports none."""
    if isinstance(error, PeerLostError):
        return error
    if isinstance(error, RemoteError):
        types = {error_type.__name__: error_type for error_type in (PeerLostError, JobEndedError)}
        if error.kind in types:
            return types[error.kind](error.remote_message, hint=error.hint)
    return None


class MachinesGroup(Group):
    """Collectives of all ranks that are not lost, for small values: metrics, paths, the model's small parameters.

    The contribution of a rank that was lost afterwards counts. Values are plain data, as a message's fields; objects
    are not pickled.

    Args:
        rank: this process.
        size: number of ranks.
        lock: client of the lock server.
        counters: of traffic.

    Attributes:
        members: the ranks that contributed to the last collective, ascending.
    """

    def __init__(self, rank: int, size: int, lock: LockClient, counters: Counters) -> None:
        super().__init__(rank, size, counters=counters)
        self._lock, self._collectives = lock, 0
        self.members = list(range(size))

    @property
    def share(self) -> tuple[int, int]:
        """This rank's number among the members, and the number of members."""
        return self.members.index(self.rank), len(self.members)

    def reform(self) -> None:
        raise PeerLostError("this group is never formed again: it survives losses")

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        tensor.copy_(reduce(_OPS[op], self.all_gather(tensor)))
        return tensor.div_(self.size) if op in ("mean", "avg") else tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [
            gathered.to(tensor.device)
            for gathered in self._contribute(None, [tensor.detach().cpu().contiguous()]).tensors
        ]

    def all_gather_object(self, value: Any) -> list[Any]:
        return list(self._contribute(_plain(value)).fields["values"])

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        reply = self._contribute(_plain(value) if self.rank == source else None)
        return reply.fields["values"][self._position(reply, source)]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        reply = self._contribute(None, [tensor.detach().cpu().contiguous()] if self.rank == source else [])
        self._position(reply, source)
        return tensor if self.rank == source else tensor.copy_(reply.tensors[0])

    def barrier(self) -> None:
        self._contribute(None)

    def close(self) -> None:
        self._lock.close()

    def _position(self, reply: Message, source: int) -> int:
        ranks: list[int] = reply.fields["ranks"]
        if source not in ranks:
            raise PeerLostError(f"rank {source}, the source of a broadcast, is lost")
        return ranks.index(source)

    def _contribute(self, value: Any, tensors: list[Tensor] | None = None) -> Message:
        self._collectives += 1
        with self.counters.span("wait: meeting"):
            reply = self._lock.request("meet", {"number": self._collectives, "value": value}, tensors or [])
        self.members = reply.fields["ranks"]
        self.size = len(self.members)
        return reply


def _plain(value: Any) -> Any:
    """Return paths as text, and other values unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value
