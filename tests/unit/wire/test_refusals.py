"""Which refused connections a server's log names."""

from __future__ import annotations

import pytest

from gtrain.wire.counters import Counters
from gtrain.wire.logs import ENDED, MAX_LOGGED, RefusalLog

WRONG_KEY = "it does not know this job's keys"


@pytest.fixture
def refusals() -> RefusalLog:
    return RefusalLog("table 1", Counters())


def test_each_address_and_reason_is_logged_once(refusals: RefusalLog, caplog: pytest.LogCaptureFixture) -> None:
    for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2"):
        refusals.report(address, WRONG_KEY)
    assert caplog.messages == [f"table 1 refused a connection from 10.0.0.{number}: {WRONG_KEY}" for number in (1, 2)]


def test_a_handshake_that_ends_adds_nothing_to_an_address_that_is_explained(
    refusals: RefusalLog, caplog: pytest.LogCaptureFixture
) -> None:
    refusals.report("10.0.0.1", WRONG_KEY)
    refusals.report("10.0.0.1", ENDED)
    assert len(caplog.messages) == 1 and refusals.is_logged(ENDED)
    refusals.report("10.0.0.2", ENDED)
    assert len(caplog.messages) == 2 and ENDED in caplog.messages[1]


def test_strangers_cannot_fill_the_log(refusals: RefusalLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2 * MAX_LOGGED):
        refusals.report(f"address {number}", WRONG_KEY)
    assert len(caplog.messages) == MAX_LOGGED
