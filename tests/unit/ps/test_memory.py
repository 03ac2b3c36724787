"""Memory of a server that outlives its process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import torch

from gtrain.strategy.server import LastingState
from gtrain_ps.server.memory import PersistentServerMemory


def forked(work: Callable[[], None]) -> int:
    """Run a function in a child and return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_what_was_written_is_there_after_kill_9() -> None:
    descriptor = os.memfd_create("test")

    def first() -> None:
        memory = PersistentServerMemory(descriptor)
        assert memory.version == 0 and memory.notes == {}
        memory.tensor("rows", (3, 4), torch.float64).copy_(torch.arange(12.0).view(3, 4))
        memory.set_note("tables", {"wide": {"rows": 3}})
        memory.tensor("more", (100_000,), torch.int32)[99_999] = 7
        memory.set_version(5)
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(forked(first)) == signal.SIGKILL
    memory = PersistentServerMemory(descriptor)
    assert memory.version == 5 and memory.notes == {"tables": {"wide": {"rows": 3}}}
    rows = memory.tensor("rows", (3, 4), torch.float64)
    assert torch.equal(rows, torch.arange(12.0, dtype=torch.float64).view(3, 4))
    assert int(memory.tensor("more", (100_000,), torch.int32)[-1]) == 7
    os.close(descriptor)


def test_a_state_is_the_last_one_saved_whatever_was_being_written() -> None:
    descriptor = os.memfd_create("test")
    values = [bytes([number]) * (1 + number * 37 % 101) for number in range(60)]
    assert LastingState(descriptor).load() == b""
    for before, value in zip([b"", *values], values, strict=False):

        def killed(value: bytes = value) -> None:
            state = LastingState(descriptor)
            state._HEAD = None  # type: ignore[assignment]  # the process ends before it says where the value is
            state.save(value)

        forked(killed)
        assert LastingState(descriptor).load() == before
        LastingState(descriptor).save(value)
        assert LastingState(descriptor).load() == value
    assert os.fstat(descriptor).st_size < 1000  # room is used again
    os.close(descriptor)
