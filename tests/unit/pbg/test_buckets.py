"""Orders of buckets, plans of swaps, batches of a bucket, and partitions on disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LIMIT
from torch import Tensor

from gtrain.data.batches.edge_seeds import KnownEdges
from gtrain.data.planted.kg import PlantedKGData
from gtrain.data.sources.edges import EdgesData
from gtrain.errors import ConfigError, DataError
from gtrain.graph.shard.whole import held_out_edges
from gtrain.nn import TableSpec
from gtrain.strategy import tensor_files
from gtrain.strategy.group import Group
from gtrain.wire.shared import SharedDirectory, SharedTensors
from gtrain_pbg import evaluation
from gtrain_pbg.buckets import Bucket, PartitionBuffer, ScheduledBucket, bucket_order
from gtrain_pbg.config import ORDERS, PBGConfig
from gtrain_pbg.deployment import PlannedBuckets
from gtrain_pbg.edges import BucketEdges, EdgeList, batches_of, passes_of
from gtrain_pbg.tables import PartitionedTable, Partitioning
from gtrain_pbg.typed import TypedTables, TypePartitioning
from gtrain_pbg.worker import BucketBatches, BucketWorker, EpochSteps


def swaps_of(order: list[Bucket], slots: int) -> int:
    """Partitions that are read when an epoch goes through the buckets."""
    return sum(len(visit.before) + len(visit.during) for visit in PartitionBuffer(slots).plan([(b, 0) for b in order]))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("partitions", [1, 2, 5, 8])
def test_every_bucket_comes_once(order: str, partitions: int) -> None:
    for seed in range(3):
        found = bucket_order(order, partitions, 3, seed)
        assert sorted(found) == [(i, j) for i in range(partitions) for j in range(partitions)]
        assert found == bucket_order(order, partitions, 3, seed)


def test_a_file_is_announced_in_pieces_that_the_kernel_reads_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads no more of a piece than read_ahead_kb, 128 unless a disk says otherwise."""
    said: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *rest: said.append(rest))
    (tmp_path / "x").write_bytes(bytes(300_000))
    tensor_files.announce(tmp_path / "x")
    assert [begin for begin, _, _ in said] == [0, 131072, 262144]
    assert {(length, advice) for _, length, advice in said} == {(131072, os.POSIX_FADV_WILLNEED)}
    tensor_files.announce(tmp_path / "gone")


def test_orders_are_what_their_names_say() -> None:
    inside = bucket_order("inside_out", 6, 2, 0)
    met: set[int] = set(inside[0])
    for bucket in inside[1:]:
        assert met & set(bucket)  # one end at least has been trained
        met |= set(bucket)
    assert bucket_order("outside_in", 6, 2, 0) == inside[::-1]
    near = bucket_order("affinity", 6, 2, 0)
    assert sum(bool(set(a) & set(b)) for a, b in zip(near, near[1:], strict=False)) >= 33  # of 35
    assert swaps_of(bucket_order("random", 8, 4, 0), 4) > 2 * swaps_of(bucket_order("beta", 8, 4, 0), 4)
    assert swaps_of(bucket_order("beta", 8, 4, 0), 4) <= 15  # 64 buckets; 8 is what must be read


@pytest.mark.parametrize("slots", [2, 3, 4, 5])
@pytest.mark.parametrize("order", ORDERS)
def test_plans_bring_what_is_needed(order: str, slots: int) -> None:
    """Played back: each bucket finds its partitions in its slots, and nothing that is trained is moved meanwhile."""
    buffer, held = PartitionBuffer(slots), dict[int, int]()
    for epoch in range(2):
        plan = buffer.plan([(b, c) for c in range(2) for b in bucket_order(order, 5, slots, epoch)])
        assert len(plan) == 50
        for visit in plan:
            for swap in visit.before:
                assert held.get(swap.slot) == swap.out
                held[swap.slot] = swap.into
            assert [held[slot] for slot in visit.slots] == list(visit.bucket)
            for swap in visit.during:
                assert held.get(swap.slot) == swap.out and swap.slot not in visit.slots
                held[swap.slot] = swap.into
            assert len(set(held.values())) == len(held) <= slots
        assert {partition: slot for slot, partition in held.items()} == buffer.slot_of
    if slots == 5:
        assert sum(len(v.before) + len(v.during) for v in plan) == 0  # everything is there since the first epoch


def test_with_room_for_three_nothing_is_waited_for_within_a_row() -> None:
    plan = PartitionBuffer(3).plan([(b, 0) for b in bucket_order("inside_out", 8, 3, 0)])
    waits = sum(len(visit.before) for visit in plan[1:])
    assert waits < sum(len(visit.during) for visit in plan) / 4


@pytest.fixture
def graph(tmp_path: Path) -> PlantedKGData:
    data = PlantedKGData(
        num_entities=200, num_positions=40, num_triples=3000, num_relations=4, num_parts=3, partitioner="random",
        store=str(tmp_path),
    )  # fmt: skip
    data.edge_buckets = True
    data.prepare_data()
    return data


def test_an_epoch_trains_every_edge_once(graph: PlantedKGData) -> None:
    store = graph.open_store()
    edges = BucketEdges(store, 2, 0.1, True, 5, torch.float32)
    orig = [store.node("orig_id", part) for part in range(3)]

    def triples(found: EdgeList, i: int, j: int) -> list[tuple[int, int, int]]:
        rows = zip(orig[i][found.heads].tolist(), found.relation.tolist(), orig[j][found.tails].tolist(), strict=True)
        return list(rows)

    raw = graph.read()
    everything = sorted(
        zip(raw.edge_index[0].tolist(), raw.edge_type.tolist(), raw.edge_index[1].tolist(), strict=True)
    )
    held_before: list[tuple[int, int, int]] = []
    for epoch in range(2):
        trained, held = [], []
        for chunk in range(2):
            for i in range(3):
                for j in range(3):
                    shares = [edges.share((i, j), chunk, epoch, worker, 2) for worker in range(2)]
                    assert abs(len(shares[0][0]) - len(shares[1][0])) <= 1
                    for mine, _ in shares:
                        trained += triples(mine, i, j)
                    held += triples(shares[0][1], i, j)
        assert sorted(trained + held) == everything
        assert len(held) == pytest.approx(0.1 * len(everything), rel=0.1)
        assert epoch == 0 or held == held_before
        held_before = held


class Recorder:
    """In place of training: the buckets and batches of each turn, and when a bucket is left."""

    def __init__(self) -> None:
        self.turns: list[tuple[Bucket, int]] = []
        self.left: list[tuple[int, bool]] = []  # after how many turns, and whether the epoch ends with it

    def score_before(self, held: EdgeList, visit: ScheduledBucket) -> None:
        self.begins = visit

    def train(
        self, batches: list[EdgeList], visit: ScheduledBucket, following: list[EdgeList] | None
    ) -> tuple[float, float]:
        assert visit is self.begins
        self.turns.append((visit.bucket, len(batches)))
        return 1.0, 1.0

    is_fast = False

    def drain(self) -> tuple[float, float]:
        return 0.0, 0.0

    def score_after(self, held: EdgeList, visit: ScheduledBucket) -> None:
        self.left.append((len(self.turns), visit.last))


@pytest.mark.parametrize("ahead", [False, True], ids=["fetched when trained", "fetched ahead"])
def test_a_limited_epoch_ends_at_the_same_bucket_on_all_workers(
    graph: PlantedKGData, tmp_path: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``trainer.limit_train_batches``: the first batch has edges, and the last one leaves its bucket."""
    monkeypatch.setattr("gtrain_pbg.worker.STEP_EDGES", 20)
    edges = BucketEdges(graph.open_store(), 1, 0.0, True, 5, torch.float32)
    buckets = [(bucket, 0) for bucket in bucket_order("inside_out", 3, 2, 0)]

    def turns_of(worker: int, limit: int) -> Recorder:
        tables, recorder, group = make_tables(tmp_path / f"{worker}-{limit}", 2), Recorder(), Group(0, 1)
        source = PlannedBuckets(tables, group, lambda epoch, seed: buckets, lambda epoch: 0, limit)
        trainee = BucketWorker(source, recorder, group, group, lambda: 0, False, limit)  # type: ignore[arg-type]
        turns = iter(EpochSteps(trainee, BucketBatches(edges, 10, torch.arange(4), worker, 2)))
        fetched = next(turns, None)
        while fetched is not None:
            following = next(turns, None) if ahead else None  # Lightning knows the last one, or counts to the limit
            trainee.train()
            fetched = following if ahead else next(turns, None)
        assert len(recorder.turns) == limit and all(count for _, count in recorder.turns) and trainee.over
        assert recorder.left[-1] == (limit, True) and sum(last for _, last in recorder.left) == 1
        return recorder

    plans = []
    for worker in range(2):
        cut = BucketBatches(edges, 10, torch.arange(4), worker, 2)
        counts = [cut.count(bucket, chunk) for bucket, chunk in buckets]
        limit = counts[0] + counts[1] - 1  # ends within the second bucket
        assert limit > 2
        found = turns_of(worker, limit)
        plans.append(([bucket for bucket, _ in found.turns], found.left))
        turns_of(worker, 1)
    assert plans[0] == plans[1]


@pytest.mark.parametrize("limit", [None, 30])
def test_an_epoch_that_was_interrupted_continues_with_the_next_step(
    graph: PlantedKGData, tmp_path: Path, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any step, the first or the last one of a bucket included."""
    monkeypatch.setattr("gtrain_pbg.worker.STEP_EDGES", 20)
    edges = BucketEdges(graph.open_store(), 1, 0.0, True, 5, torch.float32)
    buckets = [(bucket, 0) for bucket in bucket_order("inside_out", 3, 2, 0)]

    def turns_after(step: int) -> list[Any]:
        tables, recorder, group = make_tables(tmp_path / f"{step}", 2), Recorder(), Group(0, 1)
        source = PlannedBuckets(tables, group, lambda epoch, seed: buckets, lambda epoch: step, limit)
        worker = BucketWorker(source, recorder, group, group, lambda: 0, False, limit)  # type: ignore[arg-type]
        turns = EpochSteps(worker, BucketBatches(edges, 10, torch.arange(4), 0, 1))
        assert sum(1 for _ in map(lambda _: worker.train(), turns)) == worker.trained_steps and worker.over
        return recorder.turns

    whole = turns_after(0)
    assert len({bucket for bucket, _ in whole}) > 1 and (limit is None or len(whole) == limit)
    for step in range(1, len(whole)):
        assert turns_after(step) == whole[step:]


def test_edge_sets_come_one_after_the_other(tmp_path: Path) -> None:
    """Each set of a bucket has its chunks; together they are the bucket."""
    rng = np.random.default_rng(0)
    for name, count in (("a", 90), ("b", 40)):
        rows = rng.integers(30, size=(count, 2)).tolist()
        (tmp_path / f"{name}.tsv").write_text("".join(f"{h}\t{t}\n" for h, t in rows))
    module = EdgesData(edge_sets=[str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv")], num_nodes=30, task="link",
                       train_fraction=1.0, val_fraction=0.0, num_parts=2, partitioner="random",
                       store=str(tmp_path / "s"))  # fmt: skip
    module.edge_buckets = True
    module.prepare_data()
    store = module.open_store()
    edges = BucketEdges(store, 2, 0.0, True, 5, torch.float32)
    assert passes_of(store, 2) == 4 and store.facts["edge_sets"] == 2
    sizes, everything = np.zeros(4, dtype=int), 0
    for bucket in ((0, 0), (0, 1), (1, 0), (1, 1)):
        columns = store.bucket(*bucket)
        everything += len(columns["source"])
        found = []
        for number in range(4):
            mine, _ = edges.share(bucket, number, 0, 0, 1)
            sizes[number] += len(mine)
            found += zip(mine.heads.tolist(), mine.tails.tolist(), strict=True)
        pairs = zip(columns["source"].tolist(), columns["target"].tolist(), strict=True)
        assert sorted(found) == sorted(pairs)
    assert sizes[:2].sum() == 90 and sizes[2:].sum() == 40 and everything == 130


def test_batches_of_one_relation_follow_what_is_left() -> None:
    relation = torch.tensor([0] * 900 + [1] * 100)
    edges = EdgeList(torch.arange(1000), relation, torch.arange(1000), torch.rand(1000))
    firsts = 0
    for seed in range(200):
        batches = list(batches_of(edges, 50, torch.arange(2), torch.Generator().manual_seed(seed)))
        assert all(batch.relation.unique().numel() == 1 for batch in batches)
        assert sorted(torch.cat([batch.heads for batch in batches]).tolist()) == list(range(1000))
        firsts += int(batches[0].relation[0])
    assert 8 <= firsts <= 35  # of 200, with probability 0.1


@pytest.mark.parametrize(("count", "size", "sizes"), [
    (1000, 300, [250] * 4),
    (1001, 300, [251, 250, 250, 250]),  # the last batch would have 101 edges, and as large a step as the others
    (900, 300, [300] * 3),
    (7, 300, [7]),
    (0, 300, []),
])  # fmt: skip
def test_batches_are_few_and_of_one_size(count: int, size: int, sizes: list[int]) -> None:
    edges = EdgeList(torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.arange(count), torch.rand(count))
    for kinds in (None, torch.zeros(1, dtype=torch.int64)):
        batches = list(batches_of(edges, size, kinds, torch.Generator().manual_seed(0)))
        assert [len(batch) for batch in batches] == sizes
        assert [node for batch in batches for node in batch.heads.tolist()] == list(range(count))


# ------------------------------------------------------------------------------------------------------ partitions


def make_tables(folder: Path, slots: int, rows: int = 5000, parts: int = 3) -> TypedTables:
    owner = torch.from_numpy(np.random.default_rng(0).integers(parts, size=rows))
    orig = tuple((owner == part).nonzero().flatten() for part in range(parts))
    offsets = torch.tensor([0, *np.cumsum([len(some) for some in orig])])
    partitions = Partitioning(offsets, orig)
    cuts = [TypePartitioning("table", TableSpec("node", rows, 4, scale=0.1, seed=7), partitions, (0,) * parts)]
    shared = SharedTensors.create(SharedDirectory().name, "table", TypedTables.tensors(cuts, slots, [1], torch.float32))
    tables = TypedTables(cuts, partitions, slots, [1], torch.float32, folder, shared, leader=True)
    tables.initialize(0.5)
    return tables


def _train(tables: TypedTables, buckets: list[Bucket]) -> Tensor:
    """Add 1 to all rows of each bucket's partitions in turn, and return what all rows are to be then."""
    (table,) = tables.tables
    expected = table.spec.initial(0, table.spec.rows)
    for visit in tables.buffer.plan([(bucket, 0) for bucket in buckets]):
        tables.begin_swaps(visit.before).result()
        for slot, partition in zip(visit.slots, visit.bucket, strict=True):
            rows = table.rows(slot, partition)
            rows.value += 1
            rows.state += 2
            expected[table.partitions.orig_id[partition]] += 1
        tables.trained(visit.bucket)
    tables.settle()
    return expected


@pytest.mark.parametrize("slots", [2, 3])
def test_partitions_begin_as_the_whole_table_does(tmp_path: Path, slots: int) -> None:
    (table,) = make_tables(tmp_path, slots).tables
    ids = torch.randperm(5000)
    assert torch.equal(table.fetch(ids), table.spec.initial(0, 5000)[ids])
    seen = torch.cat([found for found, _ in table.blocks()])
    rows = torch.cat([rows.clone() for _, rows in table.blocks()])
    assert torch.equal(rows, table.spec.initial(0, 5000)[seen]) and seen.numel() == 5000


def test_what_was_trained_survives_swaps_and_checkpoints(tmp_path: Path) -> None:
    tables = make_tables(tmp_path / "a", 2)
    (table,) = tables.tables
    expected = _train(tables, [(0, 1), (1, 2), (2, 0)])
    assert torch.equal(table.fetch(torch.arange(5000)), expected)
    (tmp_path / "checkpoint").mkdir()
    tables.save(tmp_path / "checkpoint")
    for slots in (2, 3):
        others = make_tables(tmp_path / f"b{slots}", slots)
        others.load(tmp_path / "checkpoint")
        (other,) = others.tables
        assert torch.equal(other.fetch(torch.arange(5000)), expected)
        assert torch.equal(other.rows(0, 0).state, torch.full((other.partitions.size(0), 1), 4.5))
    table.rows(*_first(table)).value += 1  # what is trained later does not reach the checkpoint
    others.load(tmp_path / "checkpoint")
    assert torch.equal(other.fetch(torch.arange(5000)), expected)


def test_a_slot_is_filled_behind_what_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gtrain.strategy.tensor_files._BYTES", 1000
    )  # of partitions of some 27,000 bytes, of different sizes
    tables = make_tables(tmp_path, 2)
    write, names = tensor_files.Writing.add, []

    def slowly(self: tensor_files.Writing, rows: Tensor, written: Callable[[int], None] | None = None) -> None:
        def told(nbytes: int) -> None:
            names.append(threading.current_thread().name)
            os.sched_yield()  # so that the thread that reads runs into what is not free yet
            if written is not None:
                written(nbytes)

        write(self, rows, told)

    monkeypatch.setattr(tensor_files.Writing, "add", slowly)
    expected = _train(tables, [(0, 1), (1, 2), (2, 0), (0, 1), (2, 1), (0, 2)])
    assert torch.equal(tables.tables[0].fetch(torch.arange(5000)), expected)
    assert len(names) > 100 and "MainThread" not in names


def test_rows_that_cannot_be_written_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gtrain.strategy.tensor_files._BYTES", 1000)
    tables = make_tables(tmp_path, 2)
    (table,) = tables.tables
    visit = tables.buffer.plan([((0, 1), 0), ((0, 2), 0)])[1]
    tables.trained((0, 1))
    before, write = table.rows(1, 1).value.clone(), tensor_files.Writing.add

    def fill(self: tensor_files.Writing, rows: Tensor, written: Callable[[int], None] | None = None) -> None:
        def told(nbytes: int) -> None:
            if nbytes > 5000:
                raise OSError(28, os.strerror(28))
            if written is not None:
                written(nbytes)

        write(self, rows, told)

    monkeypatch.setattr(tensor_files.Writing, "add", fill)
    future = tables.begin_swaps(visit.before)
    with pytest.raises(DataError, match="No space left on device"):
        future.result(LIMIT)
    rest = slice(5000 // 16 + 1, None)  # of 16 bytes a row
    assert torch.equal(table.rows(1, 1).value[rest], before[rest])


@pytest.mark.parametrize("compared", [7, 1 << 20])
def test_known_edges_are_those_of_the_evaluated_ends(
    graph: PlantedKGData, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only these are kept in memory, and the answers are those of an index of all edges."""
    monkeypatch.setattr(evaluation, "EDGES", compared)
    store, offsets = graph.open_store(), graph.open_store().offsets
    asked = {name: ids[:5] for name, ids in held_out_edges(store, "test").items()}
    buckets = [(i, j, store.bucket(i, j)) for i in range(store.num_parts) for j in range(store.num_parts)]
    ends = [torch.stack([b["source"] + offsets[i], b["target"] + offsets[j]]) for i, j, b in buckets]
    relations = [bucket["edge_type"].long() for _, _, bucket in buckets]
    for split in ("val", "test"):
        held = held_out_edges(store, split)
        ends.append(torch.stack([held["source"], held["target"]]))
        relations.append(held["edge_type"].long())
    every = KnownEdges(torch.cat(ends, 1), torch.cat(relations), int(store.facts["num_relations"]))
    known = evaluation.known_edges(store, asked)
    for lookup in ("tails", "heads"):
        nodes = asked["source" if lookup == "tails" else "target"]
        (pointers, found), (expected_pointers, expected) = (
            getattr(index, lookup)(nodes, asked["edge_type"].long()) for index in (known, every)
        )
        assert torch.equal(pointers, expected_pointers) and expected.numel() >= 5
        for begin, end in pairwise(pointers.tolist()):
            assert torch.equal(found[begin:end].sort().values, expected[begin:end].sort().values)
    assert known._by_source[0].numel() < every._by_source[0].numel() / 2


def _first(table: PartitionedTable) -> tuple[int, int]:
    partition, slot = next(iter(table.buffer.slot_of.items()))
    return slot, partition


def test_a_full_disk_is_said_and_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table-0.rows.npy"
    tensor_files.write(path, torch.ones(3, 2))

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("gtrain.strategy.tensor_files.os.fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        tensor_files.write(path, torch.zeros(3, 2))
    monkeypatch.undo()
    assert torch.equal(tensor_files.mapped(path), torch.ones(3, 2))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_partition_of_another_size_is_refused(tmp_path: Path) -> None:
    tensor_files.write(tmp_path / "x.npy", torch.ones(3, 2))
    with pytest.raises(DataError, match=r"holds float32 \[3, 2\]"):
        tensor_files.read(tmp_path / "x.npy", torch.ones(4, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_partitions": 0}, "num_partitions=0"),
        ({"num_partitions": 4, "buffer_partitions": 1}, "2 must fit"),
        ({"bucket_order": "inward"}, "inside_out"),
        ({"eval_fraction": 1.0}, "below 1"),
        ({"matmul": "float16"}, "auto, float32, bfloat16, int8"),
        ({"num_edge_chunks": 0}, "num_edge_chunks=0"),
    ],
)
def test_settings_that_do_not_suit_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PBGConfig(name="pbg", **settings)  # type: ignore[arg-type]
