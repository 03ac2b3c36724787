"""The built-in strategies and the example against what every strategy must do."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from subprocess import CompletedProcess
from typing import Any

import forked
import pytest
from helpers import example_site

from gtrain.testing.conformance import BATCHES_OF_NODES, ROWS, TRIPLES
from gtrain.testing.conformance import Conformance as Checks


class Conformance(Checks):
    """Forks of one process, which are faster than commands; ``cli/test_example_backend.py`` starts commands."""

    __test__ = False
    command = staticmethod(forked.gtrain)


def slow(*names: str) -> Callable[[type[Conformance]], type[Conformance]]:
    """Mark some of a class's checks slow."""

    def mark(cls: type[Conformance]) -> type[Conformance]:
        for name in names:
            check = vars(Checks)[f"test_{name}"]
            copy = types.FunctionType(check.__code__, check.__globals__, check.__name__, None, check.__closure__)
            setattr(cls, check.__name__, pytest.mark.slow(copy))
        return cls

    return mark


@slow("a_resumed_run_is_the_unbroken_run", "a_killed_rank_is_named_and_nothing_is_left")
@slow("a_damaged_checkpoint_is_refused")
@slow("the_plan_is_the_measured_run")
class TestSingle(Conformance):
    __test__ = True
    strategy = "single"
    ranks = {1: 1e-10}


@slow("ranks_may_have_no_seed", "a_damaged_checkpoint_is_refused")
@slow("the_plan_is_the_measured_run")
class TestSar(Conformance):
    __test__ = True
    strategy = "sar"


@slow("a_resumed_run_is_the_unbroken_run", "ranks_may_have_unequal_parts_of_the_data")
@slow("a_killed_rank_is_named_and_nothing_is_left", "a_damaged_checkpoint_is_refused")
@slow("the_plan_is_the_measured_run")
class TestPyg(Conformance):
    __test__ = True
    strategy = "pyg"
    workload = BATCHES_OF_NODES
    settings = ("data.num_neighbors=[-1,-1]", "strategy.seeds=global")


@slow("a_resumed_run_is_the_unbroken_run", "ranks_may_have_no_seed", "a_damaged_checkpoint_is_refused")
@slow("the_plan_is_the_measured_run")
class TestPs(Conformance):
    __test__ = True
    strategy = "ps"
    workload = ROWS
    fragile = ("strategy.max_restarts=0",)


@slow("a_resumed_run_is_the_unbroken_run", "a_killed_rank_is_named_and_nothing_is_left")
@slow("the_plan_is_the_measured_run")
class TestPbg(Conformance):
    """Several workers are Hogwild: their steps are not those of one, and differ from run to run."""

    __test__ = True
    strategy = "pbg"
    workload = TRIPLES
    ranks = {1: 1e-10, 2: 0.2}
    ranks_key = "trainer.devices"


@slow("a_resumed_run_is_the_unbroken_run", "ranks_may_have_unequal_parts_of_the_data", "ranks_may_have_no_seed")
@slow("a_killed_rank_is_named_and_nothing_is_left", "a_damaged_checkpoint_is_refused")
@slow("the_plan_is_the_measured_run")
class TestReplicated(Conformance):
    """The example backend, as an outsider's package is installed."""

    __test__ = True
    strategy = "replicated"

    @staticmethod
    def command(*args: str, env: Mapping[str, str], **options: Any) -> CompletedProcess[str]:
        return forked.gtrain(*args, env={**env, "PYTHONPATH": str(example_site())}, **options)
