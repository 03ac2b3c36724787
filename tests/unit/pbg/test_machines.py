"""What several machines of strategy=pbg agree by: grants of buckets, meetings, versions of partitions, parameters."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from gtrain.errors import ConfigError, DataError, PeerLostError
from gtrain.nn import TableSpec
from gtrain.strategy import tensor_files
from gtrain.strategy.server import LastingState
from gtrain.wire import Caller, Client, Message, Server
from gtrain_pbg.buckets import Bucket, bucket_order
from gtrain_pbg.checkpoints import preserve
from gtrain_pbg.config import PBGConfig, check_machines
from gtrain_pbg.machines.deployment import LeasedPartitions
from gtrain_pbg.machines.folder import PartitionFolder
from gtrain_pbg.machines.heartbeat import pid_namespace
from gtrain_pbg.machines.lock_client import LockClient
from gtrain_pbg.machines.lock_server import LockServer
from gtrain_pbg.machines.members import JobEndedError
from gtrain_pbg.machines.parameter_server import ParameterHandlers, SharedParameters
from gtrain_pbg.machines.partition_server import PartitionClient, PartitionHandlers
from gtrain_pbg.machines.scheduler import BucketScheduler, Grant
from gtrain_pbg.partition_store import ROWS, STATE, PartitionStore, partition_key
from gtrain_pbg.tables import Partitioning
from gtrain_pbg.typed import TypedTables, TypePartitioning

BEGIN = {"round": 1, "epoch": 0, "seed": 0, "as_tree": False, "table": "node", "chunks": 1, "first": 0, "holding": [0]}
"""What a machine says when an epoch begins."""


def make_scheduler(
    partitions: int = 4, chunks: int = 1, as_tree: bool = False, order: str = "inside_out", ahead: bool = False
) -> BucketScheduler:
    return BucketScheduler("node", lambda chunk: bucket_order(order, partitions, 2, chunk), chunks, as_tree, 0, ahead)


class Leases:
    """Numbers of leases."""

    def __init__(self) -> None:
        self.last = 0

    def __call__(self) -> int:
        self.last += 1
        return self.last


def names(bucket: Bucket) -> set[str]:
    return {partition_key("node", partition) for partition in bucket}


class Epoch:
    """Machines at random speeds, of which some are lost: what a scheduler grants, played through.

    Every version of a partition knows which buckets it was trained on, as its rows would.
    """

    def __init__(self, scheduler: BucketScheduler, machines: int, seed: int) -> None:
        self.scheduler, self.rng, self.lease = scheduler, random.Random(seed), Leases()
        self.alive = list(range(machines))
        self.saved: dict[str, set[tuple[int, Bucket]]] = {}
        self.memory: list[dict[str, set[tuple[int, Bucket]]]] = [{} for _ in range(machines)]
        self.grant: list[Grant | None] = [None] * machines
        self.grants: list[Grant] = []
        self.ahead: list[int | None] = [None] * machines

    def step(self) -> None:
        machine = self.rng.choice(self.alive)
        grant = self.grant[machine]
        if grant is not None:
            for key in names(grant.bucket):
                self.memory[machine][key].add((grant.chunk, grant.bucket))
            self.scheduler.trained(machine, 1)
        found = self.grant[machine] = self.scheduler.acquire(machine, self.lease)
        keep = names(found.bucket) if found else set()
        if found and found.ahead is not None:
            keep |= names((found.ahead, found.ahead))
        assert self.ahead[machine] is None or (found and self.ahead[machine] in found.bucket), "read in vain"
        self.ahead[machine] = found.ahead if found else None
        assert len(keep) <= 3 and (not found or keep == found.leases.keys())
        for key in sorted(self.memory[machine].keys() - keep):
            self.saved[key] = self.memory[machine].pop(key)
            self.scheduler.released(machine, [key])
        if found:
            self.grants.append(found)
            others = {key for other in self.alive if other != machine for key in self.memory[other]}
            assert not keep & others, "no partition is on two machines"
            for key in keep - self.memory[machine].keys():
                self.memory[machine][key] = set(self.saved.get(key, set()))

    def lose(self, machine: int) -> None:
        self.alive.remove(machine)
        self.memory[machine], self.grant[machine] = {}, None
        self.scheduler.lose(machine)


@pytest.mark.parametrize("seed", range(12))
def test_every_bucket_is_in_the_table_whoever_is_lost(seed: int) -> None:
    scheduler = make_scheduler(8, chunks=2, as_tree=seed % 2 == 0, ahead=True)
    epoch = Epoch(scheduler, 4, seed)
    deaths = sorted(epoch.rng.sample(range(5, 90), seed % 4))
    steps = 0
    while not scheduler.over:
        epoch.step()
        steps += 1
        if deaths and steps >= deaths[0] and not scheduler.over:
            deaths.pop(0)
            epoch.lose(epoch.rng.choice(epoch.alive[1:]))
        assert steps < 3000, "no machine gets on"
    every = [(i, j) for i in range(8) for j in range(8)]
    assert sorted(scheduler.edges) == [(chunk, bucket) for chunk in range(2) for bucket in every]
    for chunk, bucket in scheduler.edges:
        assert all((chunk, bucket) in epoch.saved[key] for key in names(bucket)), "what was trained is not lost"
    assert len(epoch.grants) == 128 + scheduler.again
    assert scheduler.again or not seed % 4 or not deaths


def test_machines_keep_a_partition_and_fetch_few() -> None:
    """Two machines in turn, 8 partitions: about one partition a bucket comes anew, and not two."""
    for ahead in (False, True):
        scheduler = make_scheduler(8, ahead=ahead)
        epoch = Epoch(scheduler, 2, 1)
        while not scheduler.over:
            epoch.step()
        assert len(epoch.grants) == 64 and epoch.lease.last < 1.2 * 64
        early = sum(grant.ahead is not None for grant in epoch.grants)
        assert early > 0.7 * epoch.lease.last if ahead else early == 0  # are there before their bucket begins
    alone = make_scheduler(4, order="sequential")
    found = Epoch(alone, 1, 0)
    while not alone.over:
        found.step()
    assert found.grants[0].bucket == (0, 0) and found.grants[1].bucket == (0, 1)


@pytest.mark.parametrize("types", [1, 2])
@pytest.mark.parametrize("slots", [2, 3])
def test_what_machines_train_is_in_the_table_while_they_read_ahead(tmp_path: Path, slots: int, types: int) -> None:
    """Each training of a bucket adds 1 to both of its partitions."""
    store, lease, book, rng = PartitionFolder(tmp_path / "store"), Leases(), threading.Lock(), random.Random(0)
    partitions = Partitioning(torch.arange(9) * 5, tuple(torch.arange(40).split(5)))
    names = [f"type_{number}" for number in range(types)]
    for name in names:
        for partition in range(8):
            store.save(partition_key(name, partition), lease(), tensors(0.0))
    width, state_width = (value.shape[-1] for value in tensors(0.0).values())
    cuts = [TypePartitioning(name, TableSpec(name, 40, width), partitions, (0,) * 8) for name in names]

    def make() -> TypedTables:
        memory = {
            f"{name}.{kind}": torch.full((slots, *value.shape), -1.0)
            for name in names
            for kind, value in tensors(0.0).items()
        }
        widths = [state_width] * types
        tables = TypedTables(cuts, partitions, slots, widths, torch.float32, tmp_path, memory, True)  # type: ignore[arg-type]
        tables.connect(store, False, lease)
        return tables

    def released(machine: int) -> Callable[[list[str]], None]:
        def release(keys: list[str]) -> None:
            with book:
                scheduler.released(machine, keys)

        return release

    machines = [make(), make()]
    held = [LeasedPartitions(tables, released(machine)) for machine, tables in enumerate(machines)]
    order = bucket_order("inside_out", 8, 2, 0)
    scheduler = BucketScheduler(machines[0].bundle, lambda chunk: order, 1, False, 0, ahead=slots > 2)
    active = [False, False]
    while not scheduler.over:
        machine = rng.randrange(2)
        held[machine].settle()
        with book:
            if active[machine]:
                scheduler.trained(machine, 1)
            grant = scheduler.acquire(machine, lease)
        active[machine] = grant is not None
        if grant is None:
            held[machine].give_back()
            continue
        visit = held[machine].load(grant)
        for number in range(types):
            for partition, slot in set(zip(visit.bucket, visit.slots, strict=True)):
                rows = machines[machine].tables[number].rows(slot, partition)
                rows.value.add_(1)
                rows.state.add_(2)
    for name in names:
        for partition in range(8):
            found = tensors(-1.0)
            store.load(partition_key(name, partition), found)
            assert {float(value) for value in found["rows"].unique()} == {15.0}  # of 8 * 8 buckets
            assert {float(value) for value in found["state"].unique()} == {30.0}


def test_the_first_epoch_grows_as_a_tree() -> None:
    scheduler, lease = make_scheduler(4, as_tree=True, order="sequential"), Leases()
    first = scheduler.acquire(0, lease)
    assert first is not None and first.bucket == (0, 1)  # two partitions at once, of which others need one
    assert scheduler.acquire(1, lease) is None  # nothing was trained yet
    scheduler.trained(0, 10)
    assert scheduler.acquire(1, lease) is None  # nor written back
    second = scheduler.acquire(0, lease)
    assert second is not None and second.bucket == (0, 2)  # one of the two is for who waits
    assert scheduler.acquire(1, lease) is None
    scheduler.released(0, ["node-1"])  # though the first bucket is not done before the other is there too
    other = scheduler.acquire(1, lease)
    assert other is not None and other.bucket == (1, 3) and not scheduler.edges
    scheduler.lose(0)
    assert scheduler.acquire(2, lease) is None  # 0 and 2 are as at the beginning
    assert make_scheduler(4).acquire(1, lease) is not None


@pytest.mark.parametrize("seed", range(6))
def test_buckets_without_edges_are_left_out_and_what_they_part_grows_by_itself(seed: int) -> None:
    """Three components: {0, 1, 2}, by a chain; {3, 4}; {5}, by its own edges."""
    filled = {(0, 1), (2, 1), (1, 1), (3, 4), (5, 5)}
    scheduler = BucketScheduler(
        "node", lambda chunk: [b for b in bucket_order("random", 6, 2, seed) if b in filled], 2, True
    )
    epoch, steps = Epoch(scheduler, 2, seed), 0
    while not scheduler.over:
        epoch.step()
        steps += 1
        assert steps < 500, "no machine gets on"
    assert sorted(scheduler.edges) == [(chunk, bucket) for chunk in range(2) for bucket in sorted(filled)]
    rest = BucketScheduler(
        "node", lambda chunk: sorted(filled), 2, False, first=1
    )  # the first chunk is in a checkpoint
    epoch = Epoch(rest, 2, seed)
    while not rest.over:
        epoch.step()
    assert sorted(rest.edges) == [(1, bucket) for bucket in sorted(filled)]
    apart = BucketScheduler("node", lambda chunk: [(3, 4), (0, 1), (2, 1), (4, 3)], 1, True)
    grants = [apart.acquire(machine, epoch.lease) for machine in range(3)]
    assert [grant and grant.bucket for grant in grants] == [(3, 4), (0, 1), None]  # each begins a component


def say_waiting_to(said: list[str]) -> Callable[[str, float, str], None]:
    """Like ``say_waiting``, into a list."""
    return lambda process, seconds, note: said.append(f"waiting for {process}, {seconds:.0f} s{note}")


def ask(server: LockServer, method: str, rank: int, **fields: object) -> object:
    if method == "acquire":
        fields.setdefault("turn", 1)
    tensors = [torch.ones(4, 4, dtype=torch.bool)] if method == "begin" else []
    return server.methods()[method](Message(fields, tensors), Caller(f"rank {rank}", 1, 1))


def test_an_epoch_has_the_buckets_that_the_store_has_edges_for() -> None:
    server, there = make_lock(), torch.zeros(4, 4, dtype=torch.bool)
    there[2, 3] = there[0, 0] = True
    fields = {**BEGIN, "as_tree": True}
    server.methods()["begin"](Message(fields, [there]), Caller("rank 0", 1, 1))
    granted = [ask(server, "acquire", rank, edges=None).fields["bucket"] for rank in (0, 2)]  # type: ignore[attr-defined]
    assert sorted(granted) == [[0, 0], [2, 3]]


class Killed:
    """A lock server that is killed after a request at random, before or after its answer leaves.

    Who asks does as :class:`LockClient` does: a request without an answer is made again.
    """

    def __init__(self, seed: int) -> None:
        self.rng, self.lives, self.descriptor = random.Random(seed), 0, os.memfd_create("test")
        self.begin_life()

    def begin_life(self) -> None:
        settings = PBGConfig(name="pbg", num_partitions=6, lease_seconds=10.0)
        self.server, self.lives = LockServer(settings, 3, 1, state=LastingState(self.descriptor)), self.lives + 1

    def request(self, method: str, rank: int, tensors: list[torch.Tensor], **fields: object) -> Message | None:
        """The answer; None: none yet, or this life was killed."""
        found = self.server.methods()[method](Message(dict(fields), tensors), Caller(f"rank {rank}", 1, 1))
        if self.rng.random() < 0.2:
            self.begin_life()
            return None
        if isinstance(found, Future):
            return found.result() if found.done() else None
        return found or Message()


@pytest.mark.parametrize("seed", range(8))
def test_a_lock_server_that_is_killed_goes_on_where_it_was(seed: int) -> None:
    """Three machines play an epoch and meet; each asks until it is answered, whichever life it is that answers."""
    lock = Killed(seed)

    def machine(rank: int) -> Iterator[None]:
        def insist(method: str, tensors: list[torch.Tensor], **fields: object) -> Iterator[Message | None]:
            while (answer := lock.request(method, rank, tensors, **fields)) is None:
                yield None
            yield answer

        def asked(method: str, *tensors: torch.Tensor, **fields: object) -> Iterator[None]:
            for answer in insist(method, list(tensors), **fields):
                if answer is None:
                    yield
                else:
                    answers[rank] = answer

        yield from asked(
            "begin", torch.ones(6, 6, dtype=torch.bool), **{**BEGIN, "chunks": 2, "as_tree": seed % 2 == 0}
        )
        edges, held, turn = None, set[str](), 0
        while True:
            turn += 1
            yield from asked("acquire", edges=edges, turn=turn)
            fields = answers[rank].fields
            if "over" in fields:
                break
            edges = None
            keep = set(fields["leases"]) if "bucket" in fields else set()
            for key in sorted(held - keep):
                yield from asked("release", keys=[key])
            held = keep
            if "bucket" in fields:
                edges = 1
                trained.append((fields["chunk"], *fields["bucket"]))
        totals.append((fields["edges"], fields["again"]))
        for number in (1, 2, 3):
            yield from asked("meet", torch.tensor([float(number * rank)]), number=number, value=f"{rank} at {number}")
            answer = answers[rank]
            met.setdefault(number, []).append((answer.fields["values"], [float(tensor) for tensor in answer.tensors]))

    answers: dict[int, Message] = {}
    trained: list[tuple[int, int, int]] = []
    totals: list[tuple[int, int]] = []
    met: dict[int, list[object]] = {}
    running = {rank: machine(rank) for rank in range(3)}
    for _ in range(20_000):
        if not running:
            break
        rank = lock.rng.choice(list(running))
        if next(running[rank], "over") == "over":
            del running[rank]
    assert not running and lock.lives > 10
    assert sorted(trained) == [(chunk, i, j) for chunk in range(2) for i in range(6) for j in range(6)]
    assert totals == [(72, 0)] * 3
    for number, found in met.items():
        values = [f"{rank} at {number}" for rank in range(3)]
        assert found == [(values, [0.0, 1.0 * number, 2.0 * number])] * 3
    os.close(lock.descriptor)


def test_a_lock_server_that_was_killed_knows_who_is_lost_and_whom_to_hear_of() -> None:
    now, state, said = [0.0], LastingState(os.memfd_create("test")), list[str]()
    settings = PBGConfig(name="pbg", num_partitions=4, lease_seconds=30.0)

    def life() -> LockServer:
        return LockServer(settings, 3, 1, lambda: now[0], state, said.append, say_waiting_to(said))

    server = life()
    for rank in range(3):
        ask(server, "join", rank, place="elsewhere", pid=0)
        ask(server, "stay", rank)
    ask(server, "begin", 0, **BEGIN)
    granted = ask(server, "acquire", 1, edges=None).fields  # type: ignore[attr-defined]
    now[0] = 11.0
    for rank in (0, 2):
        ask(server, "beat", rank)
    server.check_members()
    server.check_members()
    assert said == ["waiting for rank 1 (machine 1), 11 s; lost after 30 s without a heartbeat"]
    now[0] = 31.0
    for rank in (0, 2):
        ask(server, "beat", rank)
    server.check_members()
    assert said[1:] == [
        "machine 1 is lost (rank 1 sent no heartbeat for 30 s); the job goes on without it; its bucket is trained again"
    ]
    server = life()
    with pytest.raises(PeerLostError, match="machine 1 was declared lost: rank 1 sent no heartbeat for 30 s"):
        ask(server, "beat", 1)
    again = [ask(server, "acquire", rank, edges=None).fields for rank in (0, 2)]  # type: ignore[attr-defined]
    assert granted["bucket"] in [fields.get("bucket") for fields in again]
    now[0] = 63.0  # rank 2 was heard of by the former life alone
    ask(server, "beat", 0)
    server.check_members()
    assert list(server.members.lost) == [1, 2] and "its bucket is trained again" in said[-1]
    server._detector.forgive(100.0)  # it was stopped itself
    now[0] = 150.0
    server.check_members()
    assert list(server.members.lost) == [1, 2]


def make_lock(policy: str = "continue", clock: object = None, servers: int = -1) -> LockServer:
    settings = PBGConfig(
        name="pbg", num_partitions=4, on_trainer_loss=policy, lease_seconds=10.0, partition_servers=servers
    )
    return LockServer(settings, 2, 2, **({} if clock is None else {"clock": clock}))  # type: ignore[arg-type]


def test_meetings_go_on_without_who_is_lost_and_have_what_was_brought() -> None:
    now = [0.0]
    server = make_lock(clock=lambda: now[0])
    for rank in range(4):
        ask(server, "join", rank, place="elsewhere", pid=0)
    first = [ask(server, "meet", rank, number=1, value=rank) for rank in (0, 1, 3)]
    assert not any(reply.done() for reply in first)  # type: ignore[attr-defined]
    now[0] = 8.0
    for rank in (0, 1, 3):
        ask(server, "beat", rank)
    now[0] = 11.0
    server.check_members()  # rank 2 was silent for 11 s, and takes rank 3 with it
    for reply in first[:2]:
        assert reply.result().fields == {"ranks": [0, 1, 3], "values": [0, 1, 3]}  # type: ignore[attr-defined]
    for rank in (2, 3):
        with pytest.raises(PeerLostError, match="rank 2 sent no heartbeat for 10 s"):
            ask(server, "beat", rank)
    second = [ask(server, "meet", rank, number=2, value=None) for rank in (0, 1)]
    assert all(reply.result().fields["ranks"] == [0, 1] for reply in second)  # type: ignore[attr-defined]


def test_who_waits_gets_what_a_lost_machine_had() -> None:
    now = [0.0]
    server = make_lock(clock=lambda: now[0])
    for rank in (0, 2):
        ask(server, "join", rank, place="elsewhere", pid=0)
        ask(server, "begin", rank, **{**BEGIN, "as_tree": True})
    granted = ask(server, "acquire", 2, edges=None)
    waiting = ask(server, "acquire", 0, edges=None)
    assert not waiting.done()  # type: ignore[attr-defined]
    now[0] = 9.0
    ask(server, "beat", 0)
    now[0] = 11.0
    server.check_members()
    assert waiting.result().fields["bucket"] == granted.fields["bucket"]  # type: ignore[attr-defined]
    assert waiting.result().fields["leases"] != granted.fields["leases"]  # type: ignore[attr-defined]


def test_a_server_that_is_lost_ends_the_job_and_one_that_comes_back_does_not() -> None:
    now = [0.0]
    server = make_lock(clock=lambda: now[0])

    def serve(name: str, method: str, pid: int = 0) -> None:
        where = pid_namespace() if pid else "elsewhere"
        server.methods()[method](Message({"place": where, "pid": pid}), Caller(name, 1, 1))

    ask(server, "join", 0, place="elsewhere", pid=0)
    dead = subprocess.Popen(["sleep", "100"])
    serve("partition 1", "serve", dead.pid)
    serve("parameter 1", "serve")
    dead.kill()
    dead.wait()
    server.check_members()
    now[0] = 8.0
    serve("partition 1", "serve", os.getpid())  # its agent has started it again
    for name in ("partition 1", "parameter 1"):
        now[0] += 8.0
        ask(server, "beat", 0)
        serve("partition 1", "pulse")
        if name == "partition 1":
            serve("parameter 1", "pulse")
            server.check_members()
            ask(server, "beat", 0)
    now[0] = 30.0
    server.check_members()
    with pytest.raises(
        JobEndedError, match="parameter 1 is lost: it sent no heartbeat for 10 s, and the data of parameter 1"
    ):
        ask(server, "beat", 0)


def test_who_is_silent_is_waited_for_where_its_process_is_there_and_the_job_needs_it() -> None:
    now, said = [0.0], list[str]()
    settings = PBGConfig(name="pbg", num_partitions=4, lease_seconds=30.0, timeout_seconds=100.0)
    server = LockServer(settings, 2, 1, lambda: now[0], tell=said.append, tell_waiting=say_waiting_to(said))
    for rank in range(2):
        ask(server, "join", rank, place=pid_namespace(), pid=os.getpid())
    server.methods()["serve"](Message({"place": pid_namespace(), "pid": os.getpid()}), Caller("parameter 0", 1, 1))
    now[0] = 60.0
    server.check_members()
    assert list(server.members.lost) == [1]  # others train what it had; without rank 0 the job would be over
    missing = "waiting for {}, {} s; lost after 100 s without a heartbeat"
    assert said[:2] == [missing.format("parameter 0 (machine 0)", 60), missing.format("rank 0 (machine 0)", 60)]
    for now[0], last in ((89.0, None), (91.0, 91), (92.0, None)):  # every 30 s while it lasts
        said.clear()
        server.check_members()
        assert said == (
            [missing.format(f"{name} (machine 0)", last) for name in ("parameter 0", "rank 0")] if last else []
        )
    ask(server, "beat", 0)
    now[0] = 101.0
    with pytest.raises(JobEndedError, match="parameter 0 is lost: it sent no heartbeat for 100 s"):
        server.check_members()
        ask(server, "beat", 0)


def test_ranks_that_have_not_come_are_named_while_others_wait_for_them() -> None:
    now, said = [0.0], list[str]()
    settings = PBGConfig(name="pbg", num_partitions=4, lease_seconds=30.0)
    server = LockServer(settings, 3, 1, lambda: now[0], tell=said.append, tell_waiting=say_waiting_to(said))

    def check_at(seconds: float) -> list[str]:
        now[0] = seconds
        for rank in joined:
            ask(server, "beat", rank)
        said.clear()
        server.check_members()
        return list(said)

    joined = [0]
    ask(server, "join", 0, place="elsewhere", pid=0)
    assert check_at(20.0) == check_at(40.0) == []  # nobody waits for them
    ask(server, "meet", 0, number=1, value=None)
    assert check_at(41.0) == check_at(50.0) == []
    both = [f"waiting for rank {rank} (machine {rank}) to come, {{}} s" for rank in (1, 2)]
    assert check_at(51.0) == [line.format(10) for line in both]
    ask(server, "join", 1, place="elsewhere", pid=0)
    joined.append(1)
    assert check_at(60.0) == check_at(70.9) == []  # rank 1 has come, though not to the collective yet
    assert check_at(71.0) == [both[1].format(30)]
    ask(server, "join", 2, place="elsewhere", pid=0)
    joined.append(2)
    assert check_at(100.0) == []


@pytest.mark.parametrize(
    ("holding", "servers", "policy", "why"),
    [
        ([0, 1], 0, "continue", "and the data of parameter 1 is lost with it"),
        ([0], -1, "continue", "and the data of partition 1 is lost with it"),
        ([0], 0, "stop", "parameter 1 is lost: it sent no heartbeat for 10 s; resume"),
        ([0], 0, "continue", ""),
        ([], 1, "continue", ""),
    ],
)
def test_a_machine_is_missed_only_where_nothing_is_lost_with_it(
    holding: list[int], servers: int, policy: str, why: str
) -> None:
    now = [0.0]
    server = make_lock(policy, lambda: now[0], servers)
    for rank in range(4):
        ask(server, "join", rank, place="elsewhere", pid=0)
    for name in ("parameter 0", "parameter 1"):
        server.methods()["serve"](Message({"place": "elsewhere", "pid": 0}), Caller(name, 1, 1))
    ask(server, "begin", 0, **{**BEGIN, "holding": holding})
    now[0] = 8.0
    for rank in (0, 1):
        assert ask(server, "beat", rank).fields == {"lost_servers": []}  # type: ignore[attr-defined]
    server.methods()["pulse"](Message({}), Caller("parameter 0", 1, 1))
    now[0] = 11.0  # machine 1, with ranks 2 and 3, was silent
    server.check_members()
    if why:
        with pytest.raises(JobEndedError, match=why):
            ask(server, "beat", 0)
    else:
        assert ask(server, "beat", 0).fields == {"lost_servers": ["parameter 1"]}  # type: ignore[attr-defined]
        assert list(server.members.lost) == [1]


def test_a_loss_may_end_the_job() -> None:
    now = [0.0]
    server = make_lock("stop", lambda: now[0])
    ask(server, "join", 2, place="elsewhere", pid=0)
    reply = ask(server, "meet", 0, number=1, value=None)
    now[0] = 11.0
    server.check_members()
    for call in (lambda: reply.result(), lambda: ask(server, "beat", 0)):  # type: ignore[attr-defined]
        with pytest.raises(PeerLostError, match="machine 1 is lost: rank 2 sent no heartbeat"):
            call()


# ------------------------------------------------------------------------------------------------------ partitions


@pytest.fixture(params=["folder", "served"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PartitionStore]:
    if request.param == "folder":
        yield PartitionFolder(tmp_path / "0")
        return
    servers = [
        Server(PartitionHandlers(PartitionFolder(tmp_path / str(n))).methods(), name=f"p {n}", address="tcp://127.0.0.1:0")
        for n in range(2)
    ]  # fmt: skip
    with servers[0], servers[1]:
        clients = [Client(server.address, peer=server.name) for server in servers]
        yield PartitionClient(clients)
        for client in clients:
            client.close()


def tensors(value: float, rows: int = 5) -> dict[str, torch.Tensor]:
    return {ROWS: torch.full((rows, 3), value), STATE: torch.full((rows, 1), -value)}


@pytest.mark.parametrize("rows", [5, 0])
def test_a_store_has_the_newest_version_and_refuses_older_ones(
    store: PartitionStore, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gtrain_pbg.machines.partition_server.PIECE_BYTES", 24)  # two rows
    for key in ("node-0", "node-1"):
        for version in (3, 7):
            store.save(key, version, tensors(float(version), rows))
        store.save(key, 7, tensors(8.0, rows))  # again, under the same lease
        with pytest.raises(PeerLostError, match="under lease 5, and it was granted again under 7"):
            store.save(key, 5, tensors(5.0, rows))
        found = tensors(0.0, rows)
        store.load(key, found)
        assert all(torch.equal(found[kind], tensors(8.0, rows)[kind]) for kind in found)
        if isinstance(store, PartitionClient):  # the next reads while the last, which was declared lost, still writes
            store.load(key, found, lease=8)
            with pytest.raises(PeerLostError, match="under lease 7, and it was granted again under 8"):
                store.save(key, 7, tensors(7.0, rows))
    if rows:
        some = torch.empty(2, 3)
        store.select("node-1", torch.tensor([4, 1]), some)
        assert torch.equal(some, torch.full((2, 3), 8.0))
    targets = {kind: tmp_path / "kept" / f"1.{kind}.npy" for kind in (ROWS, STATE)}
    (tmp_path / "kept").mkdir()
    store.keep("node-1", targets, tensors(0.0, rows))
    store.save("node-1", 9, tensors(9.0, rows))
    assert torch.equal(tensor_files.mapped(targets[ROWS]), tensors(8.0, rows)[ROWS])
    store.adopt("node-1", 12, targets)
    store.load("node-1", found)
    assert torch.equal(found[STATE], tensors(8.0, rows)[STATE])
    names = sorted(path.name for path in tmp_path.glob("?/node-1*"))
    assert names == ["node-1.v12.rows.npy", "node-1.v12.state.npy"]


def test_a_job_begins_without_what_another_left(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the user's")
    PartitionFolder(tmp_path).save("node-0", 88, tensors(1.0))
    store = PartitionFolder(tmp_path)
    store.clear()
    store.save("node-0", 1, tensors(2.0))
    found = tensors(0.0)
    store.load("node-0", found)
    assert torch.equal(found[ROWS], tensors(2.0)[ROWS]) and (tmp_path / "notes.txt").exists()


def test_what_was_written_in_part_is_not_there(tmp_path: Path) -> None:
    handlers = PartitionHandlers(PartitionFolder(tmp_path))

    def write(kind: str, begin: int, rows: int, version: int) -> None:
        fields = {"key": "node-0", "version": version, "kind": kind, "begin": begin, "rows": 4}
        handlers.write(Message(fields, [torch.full((rows, 2), float(version))]), Caller("rank 0", 1, 1))

    write(STATE, 0, 4, 1)
    write(ROWS, 0, 4, 1)
    write(STATE, 0, 4, 2)
    write(ROWS, 0, 2, 2)  # and its machine dies
    found = PartitionFolder(tmp_path)  # as a server that is restarted
    assert found.version("node-0") == 1
    assert torch.equal(tensor_files.mapped(found.path("node-0", ROWS)), torch.ones(4, 2))
    with pytest.raises(DataError, match="out of order"):
        write(ROWS, 3, 1, 2)


def test_checkpoints_are_kept_for_good(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    for step, epoch in enumerate((1, 0, 1, 2, 3, 4)):  # the first is of an earlier run in the same folder
        folder = tmp_path / "new"
        folder.mkdir()
        (folder / "manifest.json").write_text(str(step))
        if last.exists():
            (last / "manifest.json").unlink()
            last.rmdir()
        folder.rename(last)
        preserve(last, epoch, 2)
    kept = {path.name: (path / "manifest.json").read_text() for path in tmp_path.glob("epoch-*")}
    assert kept == {"epoch-00002.ckpt": "2", "epoch-00004.ckpt": "4"}


# ------------------------------------------------------------------------------------------------------ parameters


def test_parameters_become_the_sum_of_what_machines_changed() -> None:
    servers = [
        Server(ParameterHandlers().methods(), name=f"parameter {n}", address="tcp://127.0.0.1:0") for n in range(2)
    ]
    with servers[0], servers[1]:
        machines = []
        for _ in range(3):
            clients = [Client(server.address, peer=server.name) for server in servers]
            values = {"small": torch.zeros(3, 2), "large": torch.zeros(1 << 19, 1), "none": torch.zeros(2, 0)}
            machines.append((values, SharedParameters(values, clients, 0.001), clients))
        machines[0][0]["small"].fill_(100.0)
        machines[0][1].put()
        for _, shared, _ in machines:
            shared.get()
            shared.start()

        def train(values: dict[str, torch.Tensor]) -> None:
            for _ in range(200):
                values["small"] += 1
                values["large"][7] += 0.5

        threads = [threading.Thread(target=train, args=(values,)) for values, _, _ in machines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _, shared, _ in machines:
            shared.stop()
        for values, shared, clients in machines:
            shared.get()
            assert torch.equal(values["small"], torch.full((3, 2), 100.0 + 600.0))
            assert values["large"].sum() == 300.0 == values["large"][7]
            for client in clients:
                client.close()


# ------------------------------------------------------------------------------------------------------ settings


def test_machines_that_do_not_fit_are_refused_with_the_arithmetic() -> None:
    def check(machines: int, partitions: int, **settings: object) -> None:
        check_machines(machines, PBGConfig(name="pbg", num_partitions=partitions, **settings))  # type: ignore[arg-type]

    check(2, 4)
    check(1, 1, buffer_partitions=3)
    with pytest.raises(ConfigError, match=r"2 \* 3 = 6 > 4") as caught:
        check(3, 4)
    assert "strategy.num_partitions=6" in str(caught.value) and "trainer.num_nodes=2" in str(caught.value)
    with pytest.raises(ConfigError, match="buffer_partitions=4"):
        check(2, 4, buffer_partitions=4)


def test_the_lock_server_says_why_a_write_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, said = LockClient.__new__(LockClient), list[str]()
    monkeypatch.setattr(lock, "request", lambda method, fields: said.append(method))
    with pytest.raises(PeerLostError, match="refused"), lock.explaining():
        raise PeerLostError("the write is refused")
    assert said == ["beat"]

    def ask(method: str, fields: object) -> None:
        raise PeerLostError("machine 1 was declared lost")

    monkeypatch.setattr(lock, "request", ask)
    with pytest.raises(PeerLostError, match="declared lost"), lock.explaining():
        raise PeerLostError("the write is refused")
