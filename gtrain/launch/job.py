"""A job as its agent sees it: its size, the processes to start, and how one is started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gtrain.backends import RolePlan
from gtrain.errors import ConfigError
from gtrain.launch.children import Child, ProcessSpec, fork
from gtrain.launch.slot import WORKER, JobBase, JobContext, ServerRoster, Slot
from gtrain.launch.sockets import Listener, listen_here, listen_tcp, own_address
from gtrain.settings import part

SERVER = "gtrain.strategy.server:run"  # the task of a server process, which calls the function of its role
STORE_SERVER = "gtrain.launch.job_store:serve_store"
STORE = "store"
SAVE_SECONDS = 20.0
"""Time for a checkpoint after SIGTERM: with the 10 s of servers it fits into the 30 s of Kubernetes and SLURM."""
STORE_SLOT = Slot(STORE, 0, 0, 0)
"""The process that serves the key-value store if rank 0 may be restarted."""


@dataclass
class Job(JobBase):
    """A job, or one machine's share of it, as its agent sees it.

    Attributes:
        machine: number of this machine; None if this machine simulates all of them.
        store: the store's listening sockets, if this machine serves it.
        roles: the servers, and how often a worker is restarted.
        config: the configuration of the servers.
        key_file: path of the job's key file.
        end_descriptor: becomes readable when the job is over; for an agent that has only servers.
        line: a connection to the key-value store, which closes when the job ends.
        result: descriptor of the file for rank 0's return value, or None.
        grace_seconds: how long ranks may take after SIGTERM to save a checkpoint.
        tell_ranks_to_save: asks the ranks of other agents to save a checkpoint and to end; for an agent that has only a
            server.
        listeners: the sockets of the servers.
        memories: descriptors of the files in which restarted servers keep their state.
        children: the processes, one per specification.
    """

    machine: int | None = None
    store: Sequence[Listener] = ()
    roles: Sequence[RolePlan] = ()
    config: Any = None
    key_file: str | None = None
    end_descriptor: int | None = None
    line: socket.socket | None = None
    result: int | None = None
    grace_seconds: float = SAVE_SECONDS
    tell_ranks_to_save: Callable[[], None] = lambda: None
    listeners: list[Listener] = field(default_factory=list)
    memories: list[int] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)

    def size(self, role: str) -> int:
        """Return the number of processes of a role in the whole job."""
        return self.world_size if role == WORKER else self.roster.counts.get(role, 1)

    def is_over(self) -> bool:
        """Whether to end the job although its processes run; the agent asks after each event, and every second."""
        return False

    def start(self, spec: ProcessSpec, restarts: int, *not_inherited: int) -> Child:
        """Start a process.

        Args:
            spec: what the process runs.
            restarts: how many processes of this slot came before.
            not_inherited: further descriptors of the agent that the process closes, besides its siblings'.
        """
        store_fds = tuple(listener.descriptor for listener in self.store if listener.descriptor >= 0)
        to_close = [fd for child in self.children if not child.closed for fd in (child.reports, child.pidfd)]
        to_close += [listener.descriptor for listener in self.listeners if listener is not spec.listener]
        to_close += [file for file in self.memories if file != spec.lasting_file]
        if not spec.serves_store:
            to_close += store_fds

        def context(report_fd: int) -> JobContext:
            return JobContext(
                **vars(part(JobBase, self)),
                slot=spec.slot,
                store_fds=store_fds if spec.serves_store else (),
                report_fd=report_fd,
                store_server=STORE_SLOT.label if restarts_of(self.roles, WORKER) else "rank 0",
                simulated=self.machine is None,
                restarts=restarts,
                descriptor=spec.listener.descriptor if spec.listener is not None else None,
                address=spec.listener.address if spec.listener is not None else None,
                lasting_file=spec.lasting_file,
            )

        return fork(spec, context, [*to_close, *not_inherited], restarts)

    @property
    def lasting(self) -> list[Child]:
        """The workers; the job ends when they have ended."""
        return [child for child in self.children if child.spec.terminates]


def process_specs(job: Job, task: str | Callable[..., Any], args: Sequence[Any]) -> list[ProcessSpec]:
    """Return the processes that this agent starts: servers, whose sockets are bound here, and workers.

    If rank 0 may be restarted, a separate process serves the key-value store.
    """
    specs = server_specs(job)
    restarts = restarts_of(job.roles, WORKER)
    if restarts and job.store:
        specs.append(ProcessSpec(STORE_SLOT, STORE_SERVER, serves_store=True))
    for slot in worker_slots(job.num_nodes, job.devices, job.machine):
        serves = slot.rank == 0 and not restarts and bool(job.store)
        first = slot.rank == 0
        result = job.result if first else None
        specs.append(
            ProcessSpec(slot, task, args, restarts, serves_store=serves, terminates=True, terminal=first, result=result)
        )
    return specs


def server_specs(job: Job) -> list[ProcessSpec]:
    """Return the servers that this agent starts; binds their sockets and sets ``job.roster``."""
    slots = server_slots(job.roles, job.num_nodes, job.machine)
    specs = [server_spec(job, slot, plan) for slot, plan in slots]
    addresses: dict[str, tuple[str, ...]] = {}
    for spec in specs if job.machine is None else ():  # addresses on other machines are not known here
        assert spec.listener is not None
        addresses[spec.slot.role] = (*addresses.get(spec.slot.role, ()), spec.listener.address)
    standalone = frozenset(plan.name for plan in job.roles if plan.by_hand)
    job.roster = ServerRoster(counts_of(job.roles), addresses, job.key_file, standalone)
    return specs


def server_spec(job: Job, slot: Slot, plan: RolePlan) -> ProcessSpec:
    """Return a server's specification with its socket, on the network if the job has keys, else local to the machine.

    A restarted server continues from a file in the agent's memory. The servers die with the agent, so no other process
    has to keep that state.
    """
    listener = listen_tcp(own_address(job.route, job.port)) if job.key_file else listen_here()
    job.listeners.append(listener)
    task, lasting = (plan.target, job.config), None
    if plan.restarts:
        lasting = os.memfd_create(f"gtrain-{slot.role}-{slot.rank}")
        job.memories.append(lasting)
    return ProcessSpec(
        slot, SERVER, task, plan.restarts, stop_seconds=plan.stop_seconds, listener=listener, lasting_file=lasting
    )


# ---------------------------------------------------------------------------------------------- roles and machines


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
