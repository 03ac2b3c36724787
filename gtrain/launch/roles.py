"""The number of processes of each role, and the machines that they run on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gtrain.backends import WORKER, RolePlan
from gtrain.errors import ConfigError
from gtrain.launch.slot import Slot

STORE = "store"


def restarts_of(plans: Iterable[RolePlan], role: str) -> int:
    """Return how often a process of this role may be restarted."""
    return next((plan.restarts for plan in plans if plan.name == role), 0)


def counts_of(plans: Iterable[RolePlan]) -> Mapping[str, int]:
    """Return the number of servers of each role."""
    return {plan.name: plan.count for plan in plans if plan.name != WORKER}


def worker_slots(num_nodes: int, devices: int, machine: int | None) -> list[Slot]:
    """Return the workers of one machine, or of all machines if ``machine`` is None."""
    machines = range(num_nodes) if machine is None else (machine,)
    return [Slot(WORKER, node * devices + local, node, local) for node in machines for local in range(devices)]


def machine_of_server(rank: int, count: int, machines: int) -> int:
    """Return the machine of server ``rank`` of ``count``: contiguous ranks, spread evenly over the machines."""
    return rank * machines // count


def server_slots(plans: Iterable[RolePlan], machines: int, machine: int | None) -> list[tuple[Slot, RolePlan]]:
    """Return the servers that the agent of one machine starts, or of all machines if ``machine`` is None."""
    slots: list[tuple[Slot, RolePlan]] = []
    for plan in plans:
        placed: dict[int, int] = {}  # servers of the role by machine
        for rank in range(0 if plan.by_hand or plan.name == WORKER else plan.count):
            node = machine_of_server(rank, plan.count, machines)
            local = placed.get(node, 0)
            placed[node] = local + 1
            if machine in (None, node):
                slots.append((Slot(plan.name, rank, node, local), plan))
    return slots


def check_shape(num_nodes: int, devices: int, machine: int | None) -> None:
    """Refuse a job without ranks, and a machine number out of range.

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
            hint="number the machines differently, from 0, and set the same trainer.num_nodes on all.",
        )
