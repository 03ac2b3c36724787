"""Memory of a server that outlives its process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from helpers import alive, until

from gtrain_ps.server.memory import LastingRegion


def forked(work: Callable[[], None]) -> int:
    """Run a function in a child and return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def keeper_of(place: Path) -> int:
    return int(place.read_text().split()[0])


def test_what_was_written_is_there_after_kill_9_and_nothing_after_close(tmp_path: Path) -> None:
    place = tmp_path / "parameter-0.memory"

    def first() -> None:
        region = LastingRegion(place)
        assert region.version == 0 and region.notes == {}
        region.tensor("rows", (3, 4), torch.float64).copy_(torch.arange(12.0).view(3, 4))
        region.note("tables", {"wide": {"rows": 3}})
        region.tensor("more", (100_000,), torch.int32)[99_999] = 7
        region.set_version(5)
        os.kill(os.getpid(), signal.SIGKILL)

    def second() -> None:
        region = LastingRegion(place)
        rows = region.tensor("rows", (3, 4), torch.float64)
        right = region.version == 5 and region.notes == {"tables": {"wide": {"rows": 3}}}
        right = right and torch.equal(rows, torch.arange(12.0, dtype=torch.float64).view(3, 4))
        right = right and int(region.tensor("more", (100_000,), torch.int32)[-1]) == 7
        region.close()
        os._exit(0 if right else 1)

    # the first life's launcher is this process: its keeper ends with it, or when it is told to
    assert os.WTERMSIG(forked(first)) == signal.SIGKILL
    keeper = keeper_of(place)
    assert forked(second) == 0
    until(lambda: not alive(keeper), tmp_path)
    assert not place.exists()


def test_the_keeper_ends_with_the_launcher(tmp_path: Path) -> None:
    """The launcher is killed: server and keeper have nobody to serve."""
    place = tmp_path / "parameter-0.memory"

    def launcher() -> None:
        def server() -> None:
            LastingRegion(place).tensor("rows", (10, 10), torch.float32)
            os.kill(os.getpid(), signal.SIGKILL)

        forked(server)
        os.kill(os.getpid(), signal.SIGKILL)

    forked(launcher)
    keeper = keeper_of(place)
    until(lambda: not alive(keeper), tmp_path)


def test_a_place_of_an_earlier_job_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    place = tmp_path / "parameter-0.memory"
    place.write_text(f"{os.getpid()} 0 gtrain-0123456789abcdef")
    region = LastingRegion(place)
    try:
        assert region.version == 0 and region.notes == {}
    finally:
        region.close()
