"""A job as its agent sees it: its size, the processes to start, and how one is started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtrain.launch import roles as role_plans
from gtrain.launch.children import Child, ProcessSpec, fork
from gtrain.launch.roles import STORE, RolePlan
from gtrain.launch.slot import LOOPBACK, WORKER, JobContext, ServerRoster, Slot
from gtrain.launch.sockets import Listener, listen_here, listen_tcp, own_address

SERVER = "gtrain.strategy.server:run"  # the task of a server process, which calls the function of its role
STORE_SERVER = "gtrain.launch.job_store:serve_store"


@dataclass
class Job:
    """A job, or one machine's share of it.

    Attributes:
        num_nodes: machines of the job.
        devices: workers per machine.
        log_dir: folder of the logs.
        machine: number of this machine; None if this machine simulates all of them.
        host: host name of the job's key-value store.
        port: port of the store.
        route: how other machines reach the store; their own addresses lie on the same network.
        store: the store's listening sockets, if this machine serves it.
        store_address: how this machine's processes reach the store.
        roles: the servers, and how often a worker is restarted.
        config: the configuration of the servers.
        key_file: path of the job's key file.
        end_descriptor: becomes readable when the job is over; for an agent that has only servers.
        line: a connection to the key-value store, which closes when the job ends.
        result: descriptor of the file for rank 0's return value, or None.
        attempt: how many times the job was started before.
        listeners: the sockets of the servers.
        memories: descriptors of the files in which restarted servers keep their state.
        children: the processes, one per specification.
        roster: the addresses of the servers.
    """

    num_nodes: int
    devices: int
    log_dir: Path
    machine: int | None = None
    host: str = LOOPBACK
    port: int = 0
    route: str = LOOPBACK
    store: Sequence[Listener] = ()
    store_address: str = ""
    roles: Sequence[RolePlan] = ()
    config: Any = None
    key_file: str | None = None
    end_descriptor: int | None = None
    line: socket.socket | None = None
    result: int | None = None
    attempt: int = 0
    listeners: list[Listener] = field(default_factory=list)
    memories: list[int] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)
    roster: ServerRoster = field(default_factory=ServerRoster)

    def size(self, role: str) -> int:
        """Return the number of processes of a role in the whole job."""
        return self.num_nodes * self.devices if role == WORKER else self.roster.counts.get(role, 1)

    @property
    def lasting(self) -> list[Child]:
        """The workers; the job ends when they have ended."""
        return [child for child in self.children if child.spec.terminates]


def process_specs(job: Job, task: str | Callable[..., Any], args: Sequence[Any]) -> list[ProcessSpec]:
    """Return the processes that this agent starts: servers, whose sockets are bound here, and workers.

    If rank 0 may be restarted, a separate process serves the key-value store.
    """
    specs = server_specs(job)
    restarts = role_plans.restarts_of(job.roles, WORKER)
    if restarts and job.store:
        specs.append(ProcessSpec(Slot(STORE, 0, job.machine or 0, 0), STORE_SERVER, serves_store=True))
    for slot in role_plans.worker_slots(job.num_nodes, job.devices, job.machine):
        serves = slot.rank == 0 and not restarts and bool(job.store)
        first = slot.rank == 0
        result = job.result if first else None
        specs.append(
            ProcessSpec(slot, task, args, restarts, serves_store=serves, terminates=True, terminal=first, result=result)
        )
    return specs


def server_specs(job: Job) -> list[ProcessSpec]:
    """Return the servers that this agent starts; binds their sockets and sets ``job.roster``."""
    slots = role_plans.server_slots(job.roles, job.num_nodes, job.machine)
    specs = [server_spec(job, slot, plan) for slot, plan in slots]
    addresses: dict[str, tuple[str, ...]] = {}
    for spec in specs if job.machine is None else ():  # addresses on other machines are not known here
        assert spec.listener is not None
        addresses[spec.slot.role] = (*addresses.get(spec.slot.role, ()), spec.listener.address)
    standalone = frozenset(plan.name for plan in job.roles if plan.by_hand)
    job.roster = ServerRoster(role_plans.counts_of(job.roles), addresses, job.key_file, standalone)
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


def start(job: Job, spec: ProcessSpec, restarts: int, *not_inherited: int) -> Child:
    """Start a process of a job.

    Args:
        job: the job.
        spec: what the process runs.
        restarts: how many processes of this slot came before.
        not_inherited: further descriptors of the agent that the process closes, besides its siblings'.
    """
    store_fds = tuple(listener.descriptor for listener in job.store if listener.descriptor >= 0)
    to_close = [fd for child in job.children if not child.closed for fd in (child.reports, child.pidfd)]
    to_close += [listener.descriptor for listener in job.listeners if listener is not spec.listener]
    to_close += [file for file in job.memories if file != spec.lasting_file]
    if not spec.serves_store:
        to_close += store_fds

    def context(report_fd: int) -> JobContext:
        return JobContext(
            slot=spec.slot,
            num_nodes=job.num_nodes,
            devices=job.devices,
            port=job.port,
            store_fds=store_fds if spec.serves_store else (),
            store_address=job.store_address,
            report_fd=report_fd,
            log_dir=job.log_dir,
            host=job.host,
            route=job.route,
            simulated=job.machine is None,
            restarts=restarts,
            attempt=job.attempt,
            descriptor=spec.listener.descriptor if spec.listener is not None else None,
            address=spec.listener.address if spec.listener is not None else None,
            lasting_file=spec.lasting_file,
            roster=job.roster,
        )

    return fork(spec, context, [*to_close, *not_inherited], restarts)
