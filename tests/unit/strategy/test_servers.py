"""What a worker learns of its job's servers."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from gtrain.launch import environment
from gtrain.strategy import servers
from gtrain.wire import Message


def test_a_server_that_does_not_say_what_it_spent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0 asks each at the beginning and the end of an epoch."""
    answer: Future[Message] = Future()
    said: list[str] = []

    def say(name: str, seconds: float) -> None:
        said.append(name)
        if len(said) == 2:
            answer.set_result(Message({"cpu_seconds": 1.5}))

    for name, seconds in (("SAY_SECONDS", 0.01), ("REPORT_SECONDS", 0.01)):
        monkeypatch.setattr(environment, name, seconds)
    monkeypatch.setattr(servers, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(servers, "WaitReport", partial(environment.WaitReport, say=say))
    client: Any = SimpleNamespace()
    assert servers._wait_for_reply(client, answer, "parameter 1 (machine 1)").fields == {"cpu_seconds": 1.5}
    assert set(said) == {"parameter 1 (machine 1)"}
