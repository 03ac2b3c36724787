"""The processes of a job: how many of each role, and on which machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gtrain.backends import WORKER, RolePlan
from gtrain.errors import ConfigError
from gtrain.launch.slot import Slot

STORE = "store"


def restarts_of(plans: Iterable[RolePlan], role: str) -> int:
    """How many times a process of this role is restarted."""
    return next((plan.restarts for plan in plans if plan.name == role), 0)


def counts_of(plans: Iterable[RolePlan]) -> Mapping[str, int]:
    """Number of servers of each role."""
    return {plan.name: plan.count for plan in plans if plan.name != WORKER}


def worker_slots(num_nodes: int, devices: int, machine: int | None) -> list[Slot]:
    """The workers of one machine, or of all of them where ``machine`` is None."""
    machines = range(num_nodes) if machine is None else (machine,)
    return [Slot(WORKER, node * devices + local, node, local) for node in machines for local in range(devices)]


def machine_of_server(rank: int, count: int, machines: int) -> int:
    """Machine of server ``rank`` of ``count``: as many on each as the numbers allow, in order."""
    return rank * machines // count


def server_slots(plans: Iterable[RolePlan], machines: int, machine: int | None) -> list[tuple[Slot, RolePlan]]:
    """The servers that the agent of one machine starts, or of all of them where ``machine`` is None."""
    found: list[tuple[Slot, RolePlan]] = []
    for plan in plans:
        seen: dict[int, int] = {}
        for rank in range(0 if plan.by_hand or plan.name == WORKER else plan.count):
            node = machine_of_server(rank, plan.count, machines)
            local = seen.get(node, 0)
            seen[node] = local + 1
            if machine in (None, node):
                found.append((Slot(plan.name, rank, node, local), plan))
    return found


def check_shape(num_nodes: int, devices: int, machine: int | None) -> None:
    """Refuse a job without ranks, and a machine that is none of its machines.

    Raises:
        ConfigError: with the arithmetic.
    """
    if num_nodes < 1 or devices < 1:
        raise ConfigError(
            f"num_nodes={num_nodes} and devices={devices} were set; both must be at least 1.",
            hint="ranks = num_nodes * devices.",
        )
    if machine is not None and not 0 <= machine < num_nodes:
        raise ConfigError(
            f"cluster.rank={machine} was set; trainer.num_nodes={num_nodes} machines have the ranks 0 to "
            f"{num_nodes - 1}.",
            hint="give each machine a number of its own, from 0, and set the same trainer.num_nodes on all.",
        )
