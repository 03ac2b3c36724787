"""One launch: its shape, the posts that it has to fill, and starting a process for a post."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtrain.launch import roles as role_plans
from gtrain.launch.children import Child, Post, fork
from gtrain.launch.roles import STORE, RolePlan
from gtrain.launch.slot import LOOPBACK, WORKER, JobContext, Roster, Slot
from gtrain.launch.sockets import Listener, listen_here, listen_tcp, own_address

SERVER = "gtrain.strategy.server:run"  # what a server's process runs: it calls the role's own function
STORE_SERVER = "gtrain.launch.job_store:serve"


@dataclass
class Job:
    """The processes of one launch.

    Attributes:
        num_nodes: machines of the job.
        devices: workers of each.
        log_dir: folder of the logs.
        machine: this machine's number; None where all of them are simulated here.
        host: where the job's key-value store is.
        port: its port.
        route: how other machines reach it; their own addresses lie on the same network.
        store: its listening sockets, if it is served here.
        store_address: how this machine's processes reach it.
        roles: the servers, and how often a worker is restarted.
        config: what servers get as their configuration.
        key_file: the keys of the job.
        leash: a descriptor that can be read once the job is over: of an agent that has servers alone.
        line: a connection to the job's key-value store, which ends with the job.
        result: a file for what rank 0 returns, or None.
        listeners: the servers' sockets.
        memories: files that outlive the servers which have them.
        children: the processes, one a post.
        roster: what the processes know of the servers.
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
    leash: int | None = None
    line: socket.socket | None = None
    result: int | None = None
    listeners: list[Listener] = field(default_factory=list)
    memories: list[int] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)
    roster: Roster = field(default_factory=Roster)

    def size(self, role: str) -> int:
        """How many processes of a role the whole job has."""
        return self.num_nodes * self.devices if role == WORKER else self.roster.counts.get(role, 1)

    @property
    def lasting(self) -> list[Child]:
        """The children that the job lasts as long as: the workers."""
        return [child for child in self.children if child.post.has_end]


def posts_of(job: Job, task: str | Callable[..., Any], args: Sequence[Any]) -> list[Post]:
    """What one agent is to fill: servers, whose sockets are bound here, the store where rank 0 may die, workers."""
    posts = server_posts(job)
    restarts = role_plans.restarts_of(job.roles, WORKER)
    if restarts and job.store:  # rank 0 may die; what all ranks meet at must not
        posts.append(Post(Slot(STORE, 0, job.machine or 0, 0), STORE_SERVER, serves_store=True))
    for slot in role_plans.worker_slots(job.num_nodes, job.devices, job.machine):
        serves = slot.rank == 0 and not restarts and bool(job.store)
        first = slot.rank == 0
        result = job.result if first else None
        posts.append(Post(slot, task, args, restarts, serves_store=serves, has_end=True, terminal=first, result=result))
    return posts


def server_posts(job: Job) -> list[Post]:
    """The servers that this agent starts; binds their sockets and fills in ``job.roster``."""
    slots = role_plans.server_slots(job.roles, job.num_nodes, job.machine)
    posts = [server_post(job, slot, plan) for slot, plan in slots]
    addresses: dict[str, tuple[str, ...]] = {}
    for post in posts if job.machine is None else ():  # those of other machines are not known here
        assert post.listener is not None
        addresses[post.slot.role] = (*addresses.get(post.slot.role, ()), post.listener.address)
    standalone = frozenset(plan.name for plan in job.roles if plan.by_hand)
    job.roster = Roster(role_plans.counts_of(job.roles), addresses, job.key_file, standalone)
    return posts


def server_post(job: Job, slot: Slot, plan: RolePlan) -> Post:
    """A server's post, with its socket: on the network if there are keys, else within the machine.

    A server that is restarted finds what its former life left in memory of the agent's, not in a process of its own:
    whatever ends the agent ends its servers, so nothing else has to be watched.
    """
    listener = listen_tcp(own_address(job.route, job.port)) if job.key_file else listen_here()
    job.listeners.append(listener)
    task, lasting = (plan.target, job.config), None
    if plan.restarts:
        lasting = os.memfd_create(f"gtrain-{slot.role}-{slot.rank}")
        job.memories.append(lasting)
    return Post(
        slot, SERVER, task, plan.restarts, stop_seconds=plan.stop_seconds, listener=listener, lasting_file=lasting
    )


def start(job: Job, post: Post, restarts: int, *not_inherited: int) -> Child:
    """Fork a process for a post.

    Args:
        job: the launch.
        post: what the process does.
        restarts: how many times the post was filled before.
        not_inherited: descriptors of the agent's that the process closes, besides its siblings'.
    """
    store_fds = tuple(listener.descriptor for listener in job.store if listener.descriptor >= 0)
    to_close = [fd for child in job.children if not child.closed for fd in (child.reports, child.pidfd)]
    to_close += [listener.descriptor for listener in job.listeners if listener is not post.listener]
    to_close += [file for file in job.memories if file != post.lasting_file]
    if not post.serves_store:
        to_close += store_fds

    def context(report_fd: int) -> JobContext:
        return JobContext(
            slot=post.slot,
            num_nodes=job.num_nodes,
            devices=job.devices,
            port=job.port,
            store_fds=store_fds if post.serves_store else (),
            store_address=job.store_address,
            report_fd=report_fd,
            log_dir=job.log_dir,
            host=job.host,
            route=job.route,
            simulated=job.machine is None,
            restarts=restarts,
            descriptor=post.listener.descriptor if post.listener is not None else None,
            address=post.listener.address if post.listener is not None else None,
            lasting_file=post.lasting_file,
            roster=job.roster,
        )

    return fork(post, context, [*to_close, *not_inherited], restarts)
