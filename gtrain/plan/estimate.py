"""The protocol by which a backend states what a run will cost: terms, each a formula with the numbers put in."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from gtrain.plan.machine import Machine
    from gtrain.plan.workload import Workload

MEMORY = "memory"
SERVER_MEMORY = "server memory"
SENT = "sent"
DISK = "disk"
ARITHMETIC = "arithmetic"
BANDWIDTH = "memory bandwidth"
NETWORK = "network"
DISK_TIME = "disk time"
OVERHEAD = "overhead"
UNITS = {
    MEMORY: "bytes",
    SERVER_MEMORY: "bytes",
    SENT: "bytes",
    DISK: "bytes",
    ARITHMETIC: "s",
    BANDWIDTH: "s",
    NETWORK: "s",
    DISK_TIME: "s",
    OVERHEAD: "s",
}
"""Unit of each quantity: the anonymous memory of the largest rank and of the largest server at its peak, the bytes that
the rank which sends most sends in an epoch, the files of a machine, and the seconds of an epoch by resource."""
ON_CORES = (ARITHMETIC, BANDWIDTH, OVERHEAD)
"""Resources of time that the cores of a rank spend one after the other; the others run beside them."""
_FUNCTIONS = {"__builtins__": {}, "ceil": math.ceil, "exp": math.exp, "log": math.log, "max": max, "min": min}


@dataclass(frozen=True)
class Term:
    """One summand of a quantity.

    Attributes:
        quantity: a key of :data:`UNITS`.
        name: what it is, such as ``halo rows of layer 2``.
        formula: an arithmetic expression of Python over the names of ``numbers``, with ``max``, ``min``, ``ceil``,
            ``exp`` and ``log``.
        numbers: the values that are put in.
    """

    quantity: str
    name: str
    formula: str
    numbers: Mapping[str, float]

    @cached_property
    def value(self) -> float:
        """The value of the formula, in the unit of the quantity."""
        return float(eval(self.formula, dict(_FUNCTIONS), dict(self.numbers)))

    def as_dict(self) -> dict[str, Any]:
        """Return the term for JSON."""
        return {
            "quantity": self.quantity,
            "name": self.name,
            "formula": self.formula,
            "numbers": dict(self.numbers),
            "value": self.value,
            "unit": UNITS[self.quantity],
        }


@dataclass
class Estimate:
    """What a run of one strategy and mode will cost.

    Attributes:
        hidden: the share of the shorter of two resources that is spent while the other is busy: of the transfers and
            disk accesses behind the cores' work, or of that work behind them. 0 to 1.
        terms: the summands of all quantities.
        assumptions: what was assumed instead of counted, a clause each.
    """

    hidden: float = 0.0
    terms: list[Term] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)

    def add(self, quantity: str, name: str, formula: str, **numbers: float) -> None:
        """Add a :class:`Term`."""
        self.terms.append(Term(quantity, name, formula, numbers))

    def total(self, quantity: str) -> float:
        """Return the sum of a quantity's terms, in its unit."""
        return sum(term.value for term in self.terms if term.quantity == quantity)

    @property
    def seconds_by_resource(self) -> dict[str, float]:
        """Seconds of an epoch by resource, as if each were the only one."""
        return {name: self.total(name) for name in (*ON_CORES, NETWORK, DISK_TIME)}

    @property
    def seconds(self) -> float:
        """Seconds of an epoch: the busiest resource, and what is not hidden behind it of the others."""
        by_resource = self.seconds_by_resource
        cores = sum(by_resource[name] for name in ON_CORES)
        resources = (cores, by_resource[NETWORK], by_resource[DISK_TIME])
        return max(resources) + (1 - self.hidden) * (sum(resources) - max(resources))

    @property
    def limit(self) -> str:
        """The resource that takes most of an epoch."""
        by_resource = self.seconds_by_resource
        return max(by_resource, key=lambda name: by_resource[name])

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate for JSON."""
        return {
            "memory_bytes": self.total(MEMORY),
            "server_memory_bytes": self.total(SERVER_MEMORY),
            "sent_bytes_per_epoch": self.total(SENT),
            "disk_bytes": self.total(DISK),
            "seconds_per_epoch": self.seconds,
            "seconds_by_resource": self.seconds_by_resource,
            "limit": self.limit,
            "assumptions": list(self.assumptions),
            "terms": [term.as_dict() for term in self.terms],
        }


@dataclass(frozen=True)
class PlannedRun:
    """A run to estimate, as a backend sees it.

    Attributes:
        config: the resolved configuration, with the groups ``strategy``, ``trainer``, ``data`` and ``model``.
        workload: the data and the model.
        machine: one of the machines, which are alike.
        num_machines: machines. Ranks that simulate several machines on one count as ranks of that one.
        servers: server processes of the job.
    """

    config: Mapping[str, Any]
    workload: Workload
    machine: Machine
    num_machines: int
    servers: int = 0

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the strategy."""
        return self.config["strategy"]

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return int(self.config["trainer"]["num_nodes"]) * int(self.config["trainer"]["devices"])

    @property
    def ranks_per_machine(self) -> int:
        """Ranks on the machine that has most."""
        return -(-self.ranks // self.num_machines)

    @property
    def servers_per_machine(self) -> int:
        """Servers on the machine that has most."""
        return -(-self.servers // self.num_machines)

    @property
    def cores(self) -> float:
        """What a rank's threads compute, in parts of one core that computes alone; below 1 if ranks share cores."""
        cores = self.machine.cores / self.ranks_per_machine
        threads = cores if cores <= 1 else 1 + (cores - 1) * self.machine.threads
        return threads if self.ranks_per_machine == 1 else threads * self.machine.together

    @property
    def flops(self) -> float:
        """Floating-point operations of a rank in a second, in dense products of the run's precision."""
        precision = str(self.config["trainer"]["precision"])
        if precision.startswith("bf16"):
            return self.cores * self.machine.flops_bfloat16
        return self.cores * self.machine.flops / (2 if precision.startswith("64") else 1)

    @property
    def gather(self) -> float:
        """Bytes of rows at random places that a rank sums in a second."""
        return min(self.cores * self.machine.gather, self.machine.bandwidth / self.ranks_per_machine)

    @property
    def stream(self) -> float:
        """Bytes that a rank reads and writes in a second, in order."""
        return min(self.cores * self.machine.stream, self.machine.bandwidth / self.ranks_per_machine)

    @property
    def fresh(self) -> float:
        """Bytes of newly allocated memory that a rank writes in a second."""
        return self.cores * self.machine.fresh

    @property
    def link(self) -> float:
        """Bytes that a rank sends to others in a second."""
        if self.num_machines == 1:
            return self.machine.link / max(self.ranks_per_machine / self.machine.cores, 1.0)
        return self.machine.network / self.ranks_per_machine

    @property
    def latency(self) -> float:
        """Seconds of a message without content between two ranks."""
        return self.machine.latency if self.num_machines > 1 else self.machine.wake


class Planner(ABC):
    """The formulas of a backend, which :attr:`gtrain.backends.Backend.planner` names.

    Attributes:
        exact_validation: settings of the group ``strategy`` with which the run validates on all neighbours, as other
            strategies do, for ``strategy.race_seconds``.
    """

    exact_validation: ClassVar[Mapping[str, Any]] = {}

    def variants(self, config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the modes that have a row each, as settings of the group ``strategy`` by name; ``{}``: as they are.

        Args:
            config: the composed configuration. The first variant is the one that it sets.
        """
        return [{}]

    @abstractmethod
    def estimate(self, run: PlannedRun) -> Estimate:
        """Return what a run will cost.

        Raises:
            NotEstimated: no formula covers this model or these data.
        """


class NotEstimated(Exception):
    """No formula covers a run; the text is a clause that says why."""
