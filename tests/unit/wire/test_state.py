"""What both sides remember of requests, without sockets."""

from __future__ import annotations

import pytest

from gtrain.errors import ConfigError
from gtrain.wire import Limits, Message
from gtrain.wire.header import MAX_ACKNOWLEDGED, Header, MessageType
from gtrain.wire.pending import PendingRequest, PendingRequests
from gtrain.wire.server_session import Reply, RequestStatus, ServerSession

LIMITS = Limits(max_bytes_in_flight=100, max_requests_in_flight=3)


def pending(nbytes: int = 10, deadline: float = 1.0) -> PendingRequest:
    """A request of so many bytes."""
    return PendingRequest("push", bytes(nbytes), [], nbytes, deadline, 1.0)


def added(table: PendingRequests, count: int) -> list[PendingRequest]:
    """Requests in a table."""
    requests = [pending() for _ in range(count)]
    for request in requests:
        table.add(request)
    return requests


def test_room_is_counted_in_bytes_and_requests() -> None:
    table = PendingRequests()
    assert table.has_room(1000, LIMITS)  # alone, any size passes
    table.add(pending(60))
    assert table.has_room(40, LIMITS)
    assert not table.has_room(41, LIMITS)
    added(table, 2)
    assert table.nbytes == 80
    assert not table.has_room(1, LIMITS)


def test_requests_sent_ahead_leave_room_for_any_other() -> None:
    table = PendingRequests()
    assert table.has_room_ahead(25, LIMITS) and not table.has_room_ahead(26, LIMITS)
    table.add(pending(25))
    assert not table.has_room_ahead(1, LIMITS)
    assert table.has_room(1000, LIMITS)
    server = session()
    server.start(1, 30)  # with its header
    assert not server.overflows(1000)
    table.add(pending(1))
    assert not table.has_room(75, LIMITS)


def test_acknowledgements_tell_each_finished_request_once() -> None:
    table = PendingRequests()
    first, second, third, fourth = added(table, 4)
    table.finish(third)
    assert table.new_acknowledgements() == (1, [3])
    assert table.new_acknowledgements() == (1, [])
    table.finish(first)
    assert table.new_acknowledgements() == (2, [])
    assert table.all_acknowledgements() == (2, [3])  # all of them again, for a new connection
    table.finish(second)
    table.finish(fourth)
    assert table.new_acknowledgements() == (5, [])


def test_a_table_stays_small_and_its_reach_is_bounded() -> None:
    """One request is never answered, all others are."""
    table = PendingRequests()
    added(table, 1)
    count = 0
    while table.has_room(10, LIMITS):
        (request,) = added(table, 1)
        table.finish(request)
        count += 1
    assert count == MAX_ACKNOWLEDGED - 1
    low, finished = table.all_acknowledgements()
    assert (low, len(finished)) == (1, MAX_ACKNOWLEDGED - 1)
    free = PendingRequests()
    for _ in range(10 * MAX_ACKNOWLEDGED):
        (request,) = added(free, 1)
        free.finish(request)
    assert len(free._finished) <= 2 * MAX_ACKNOWLEDGED
    assert len(free._deadlines) <= 2 * MAX_ACKNOWLEDGED


def test_deadlines_expire_in_their_order() -> None:
    table = PendingRequests()
    late, soon, never = pending(deadline=5.0), pending(deadline=2.0), pending(deadline=9.0)
    for request in (late, soon, never):
        table.add(request)
    assert table.first_deadline == 2.0
    assert table.pop_expired(1.0) == []
    assert table.pop_expired(5.0) == [soon, late]


def session() -> ServerSession:
    """A client that begins."""
    return ServerSession("rank 0", 1, b"id", LIMITS)


def answer(nbytes: int = 40) -> Reply:
    """An answer of so many bytes."""
    return Reply(MessageType.REPLY, b"", [memoryview(bytes(nbytes))])


def test_a_request_passes_from_new_to_forgotten() -> None:
    client = session()
    assert client.status(1) == RequestStatus.NEW
    client.start(1, 10)
    assert client.status(1) == RequestStatus.IN_PROGRESS
    assert client.keep(1, answer())
    assert client.status(1) == RequestStatus.ANSWERED
    client.acknowledge(1, [])
    assert client.status(1) == RequestStatus.ANSWERED
    client.acknowledge(2, [])
    assert client.status(1) == RequestStatus.FINISHED
    assert (client.replies, client.unacknowledged_bytes, client.waiting_bytes) == ({}, 0, 0)


def test_answers_above_the_low_mark_are_forgotten_one_by_one() -> None:
    client = session()
    for sequence in (1, 2, 3):
        client.keep(sequence, answer())
    assert client.full
    client.acknowledge(1, [3])
    assert (sorted(client.replies), client.unacknowledged_bytes, client.full) == ([1, 2], 80, False)
    assert client.status(3) == RequestStatus.FINISHED


def test_an_answer_that_nobody_waits_for_is_not_kept() -> None:
    """Its deadline passed at the client while it was computed."""
    client = session()
    client.start(1, 10)
    client.acknowledge(2, [])
    assert not client.keep(1, answer())
    assert client.replies == {}
    assert client.waiting_bytes == 0


def test_a_client_may_have_so_much_waiting() -> None:
    client = session()
    assert not client.overflows(1000)  # alone, any size passes
    client.park(Header(MessageType.REQUEST, "push", "rank 0", 1, 1, 1), Message(), 60)
    assert not client.overflows(40)
    assert client.overflows(41)
    assert client.status(1) == RequestStatus.IN_PROGRESS
    assert client.unpark()[0].sequence == 1
    assert client.waiting_bytes == 0


def test_acknowledgements_cannot_fill_the_memory() -> None:
    client = session()
    client.acknowledge(1, range(1, 10**5))
    assert len(client.finished) <= 2 * MAX_ACKNOWLEDGED
    assert client.status(2 * MAX_ACKNOWLEDGED + 2) == RequestStatus.OUT_OF_RANGE


def test_limits_have_to_let_something_through() -> None:
    with pytest.raises(ConfigError, match="max_tensors is 0"):
        Limits(max_tensors=0)
    with pytest.raises(ConfigError, match="max_header_bytes is 1000"):
        Limits(max_header_bytes=1000)


def test_both_sides_keep_the_smaller_limits() -> None:
    ours = Limits(max_tensors=5, max_dimensions=9)
    agreed = ours.agreed(Limits(max_tensors=7, max_dimensions=2).announce())
    assert (agreed.max_tensors, agreed.max_dimensions) == (5, 2)
    assert ours.agreed({"max_tensors": "many", "max_dimensions": -1, "other": 3}) == ours
