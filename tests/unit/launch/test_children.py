"""What the agent prints of what its processes report."""

from __future__ import annotations

import pytest

from gtrain.launch import children
from gtrain.strategy.mesh import SAY_SECONDS


def test_a_second_wait_for_the_same_rank_is_reported_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several ranks report one wait within moments, and the earliest report of the next comes after SAY_SECONDS."""
    now = [100.0]
    monkeypatch.setattr(children.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(children, "_said_waiting", {})
    for at in (100.0, 101.0, 100.0 + SAY_SECONDS):
        now[0] = at
        children._say_waiting("waiting for rank 1 (machine 1), 10 s")
    assert capsys.readouterr().err.count("gtrain: waiting for rank 1 (machine 1), 10 s") == 2
