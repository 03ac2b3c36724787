"""The checks that every strategy passes, run against this one: ``pytest test_replicated.py`` where it is installed."""

from __future__ import annotations

from gtrain.testing.conformance import Conformance


class TestReplicated(Conformance):
    strategy = "replicated"
