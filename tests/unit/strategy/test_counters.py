"""gtrain.strategy.counters: what a transfer and a collective add to a rank's figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gtrain.strategy import counters as module
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group


class Connections:
    """Stands for the connections of rank 0 with two others; the first wait of a tag takes two seconds."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.seen = clock, set[int]()
        self.expected: dict[int, list[memoryview]] = {}

    def send(self, view: memoryview, to: int, tag: int) -> int:
        for expected in self.expected.pop(tag, []):  # the others have what this rank has
            expected[:] = view
        return tag

    def receive(self, view: memoryview, source: int, tag: int) -> int:
        self.expected.setdefault(tag, []).append(view)
        return tag

    def wait(self, tag: int) -> None:
        if tag not in self.seen:
            self.seen.add(tag)
            self.clock[0] += 2.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test moves on."""
    now = [10.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])  # group.py reads the same module
    return now


@pytest.fixture
def group(clock: list[float]) -> Group:
    """Rank 0 of three, recording."""
    made = Group(0, 3, Connections(clock))
    made.counters.start()
    return made


def test_a_transfer_is_under_way_from_its_posting_and_waited_for_from_the_wait(
    group: Group, clock: list[float]
) -> None:
    arriving = group.receive(torch.empty(6), 1, 0)
    clock[0] += 5.0  # the rank computes meanwhile
    arriving.wait()
    assert (group.counters.comm_seconds, group.counters.wait_seconds) == (7.0, 2.0)
    assert (group.counters.bytes_sent, group.counters.bytes_received) == (0, 24)


@pytest.mark.parametrize(
    ("call", "sent", "received", "waits"),
    [
        (lambda group: group.send(torch.ones(6), 2, 0).wait(), 24, 0, 1),
        (lambda group: group.all_reduce(torch.ones(6)), 24, 24, 1),
        (lambda group: group.broadcast(torch.ones(6)), 48, 0, 1),
        (lambda group: group.broadcast(torch.ones(6), source=1), 0, 24, 1),
        (lambda group: group.barrier(), 0, 0, 1),
    ],
    ids=["send", "all-reduce", "broadcast", "broadcast to this rank", "barrier"],
)
def test_what_each_communication_counts(group: Group, call: Any, sent: int, received: int, waits: int) -> None:
    call(group)
    found = group.counters
    assert (found.bytes_sent, found.bytes_received, found.wait_seconds) == (sent, received, 2.0 * waits)


def test_an_all_gather_counts_once_for_each_receiver(group: Group) -> None:
    assert [row.tolist() for row in group.all_gather(torch.ones(6))] == [[1.0] * 6] * 3
    assert group.counters.bytes_sent == group.counters.bytes_received == 2 * (8 + 1024)  # shape and content in one
    assert group.counters.wait_seconds == 2.0


def test_nothing_counts_outside_of_training(group: Group) -> None:
    group.counters.stop()
    group.send(torch.ones(6), 1, 0).wait()
    group.all_reduce(torch.ones(6))
    group.counters.needed(24)
    assert group.counters == Counters()


def test_waits_are_spans_of_a_timeline(group: Group) -> None:
    seen: list[str] = []

    @contextmanager
    def span(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    group.counters.span = span
    group.send(torch.ones(1), 2, 0).wait()
    group.receive(torch.ones(1), 1, 0).wait()
    group.all_reduce(torch.ones(1))
    assert seen == ["wait: send to rank 2", "wait: receive from rank 1", "wait: all-reduce"]
