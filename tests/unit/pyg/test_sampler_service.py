"""gtrain_pyg.{service,hop,answering}: what is asked, what goes wrong, and whom it is reported to."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LIMIT
from pyg_jobs import Rank, job_of, samplers, together
from small_graphs import messy_graph, random_parts, stored
from torch_geometric.data import Data

from gtrain.errors import ConfigError, DataError
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.strategy.counters import Counters
from gtrain.wire import DeadlineError, Message, RemoteError
from gtrain_pyg.peers import PartBook, Peers, detect_hosting
from gtrain_pyg.sampling.hop import read_replies

SOON = 0.3  # seconds, of a deadline that is to pass


def split(path: Path, num_parts: int = 2, **more: Any) -> Store:
    data = messy_graph(40, 300)
    for name, tensor in more.items():
        data[name] = tensor
    return stored(path / "s", data, random_parts(40, num_parts))


def remote_seeds(store: Store, part: int) -> dict[str, np.ndarray]:
    """The nodes of one part."""
    return {"node": np.arange(*PartBook.of(store).range("node", part))}


def count_requests(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The parts that a rank sends requests to from now on."""
    asked: list[int] = []
    send = rank.peers.request

    def counted(part: int, *rest: Any) -> Future[Message]:
        asked.append(part)
        return send(part, *rest)

    monkeypatch.setattr(rank.peers, "request", counted)
    return asked


# --------------------------------------------------------------------------------------------------- what is asked


def test_a_hop_asks_each_owner_once_and_only_those_whose_nodes_it_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 4 parts and nobody asking part 1 in some hops, no answer is taken for another part's (PyG #9685)."""
    # part p has the nodes 4p .. 4p+3; the seeds' sources are in part 2, theirs in part 3, theirs in part 1
    edges = [(8, 0), (9, 0), (9, 1), (12, 8), (13, 8), (13, 9), (4, 12), (5, 13), (6, 13), (7, 6)]
    data = Data(edge_index=torch.tensor(edges).t(), num_nodes=16)
    store = stored(tmp_path / "s", data, torch.arange(16) // 4)
    with job_of(store) as job:
        asked = count_requests(job[0], monkeypatch)
        options = SamplingOptions(num_neighbors=(-1, -1, -1))
        found = samplers(job, options)[0].sample({"node": np.array([0, 1])}, epoch=0, batch=0)
        assert asked == [2, 3]
        kind = ("node", "to", "node")
        ends = found.node["node"][found.edge_index[kind]]
        assert found.num_sampled_edges[kind] == [3, 3, 3] and found.num_sampled_nodes["node"] == [2, 2, 2, 3]
        assert sorted(map(tuple, ends.T.tolist())) == sorted(edges[:9])
        own = samplers(job, options)[1].sample({"node": np.array([6])}, epoch=0, batch=0)
        assert own.node["node"].tolist() == [6, 7] and asked == [2, 3]


@pytest.mark.parametrize(("transport", "hops", "requests"), [("shm", 0, 0), ("tcp", None, 0), ("tcp", 2, 0)])
def test_what_is_hosted_or_copied_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, hops: int | None, requests: int
) -> None:
    """Seeds of the own part, three hops, and the in-edges of two hops around it copied."""
    with job_of(split(tmp_path), transport, hops=hops) as job:
        made = samplers(job, SamplingOptions(num_neighbors=(4, 4, 4)))
        for rank, sampler in zip(job, made, strict=True):
            asked = count_requests(rank, monkeypatch)
            sampler.sample(remote_seeds(rank.structure.store, rank.hosting.rank), epoch=0, batch=0)
            assert len(asked) == requests


def test_both_sides_count_the_requests_that_are_made_while_their_rank_records(tmp_path: Path) -> None:
    """The owner counts what is requested of it at any time: it may start to record later, and stop earlier."""
    store, counters = split(tmp_path), [Counters(), Counters()]
    waiting = threading.Event()

    def echo(message: Message) -> Message:
        assert not message.fields and waiting.wait(LIMIT)
        return Message({}, [message.tensors[0].repeat(2)])

    def make(group: Any) -> Peers:
        peers = Peers(group, detect_hosting(group, "tcp"), counters=counters[group.rank])
        peers.handle("echo", echo)
        peers.open()
        return peers

    class Reply(Future[Message]):
        """A reply that the server sends once its rank waits for it."""

        def __init__(self, reply: Future[Message]) -> None:
            self.reply = reply

        def done(self) -> bool:
            return self.reply.done()

        def exception(self, timeout: float | None = None) -> BaseException | None:
            waiting.set()
            return self.reply.exception(LIMIT)

        def result(self, timeout: float | None = None) -> Message:
            return self.reply.result()

        def __eq__(self, other: object) -> bool:
            return other is self.reply

        def __hash__(self) -> int:
            return hash(self.reply)

    def exchange(rank: int) -> None:
        made[rank].wait(1 - rank, Reply(made[rank].request(1 - rank, "echo", {}, [torch.zeros(1000)])))

    made = together(store.num_parts, make)
    exchange(0)  # no rank records
    waiting.clear()
    counters[0].start()
    exchange(0)
    exchange(1)  # rank 1 does not record
    counters[0].stop()
    counters[1].start()
    exchange(0)
    counters[1].stop()
    for peers in made:
        peers.close()
    assert (counters[0].bytes_sent, counters[0].bytes_received) == (4000, 8000)
    assert (counters[1].bytes_sent, counters[1].bytes_received) == (8000, 4000)
    assert counters[0].wait_seconds > 0 and counters[1].wait_seconds == 0


# --------------------------------------------------------------------------------------------------- what goes wrong


def test_a_failure_of_the_owner_raises_at_the_asker_with_its_message(tmp_path: Path) -> None:
    with job_of(split(tmp_path), silent=[1]) as job:

        def fail(message: Message) -> Message:
            raise DataError("The disk of part 1 is gone.", hint="mount it.")

        job[1].peers.handle("sample", fail)
        sampler = samplers(job, SamplingOptions(num_neighbors=(2,)))[0]
        with pytest.raises(RemoteError) as caught:
            sampler.sample(remote_seeds(job[0].structure.store, 1), epoch=0, batch=0)
        assert "rank 1 failed to answer 'sample': DataError: The disk of part 1 is gone." in caught.value.message
        assert caught.value.hint == "mount it."
        sampler.sample(remote_seeds(job[0].structure.store, 0), epoch=0, batch=0)  # and it goes on


def test_an_owner_that_does_not_answer_is_named_at_the_deadline(tmp_path: Path) -> None:
    with job_of(split(tmp_path), silent=[1], timeout=SOON) as job:
        sampler = samplers(job, SamplingOptions(num_neighbors=(2,)))[0]
        with pytest.raises(DeadlineError, match="rank 1"):
            sampler.sample(remote_seeds(job[0].structure.store, 1), epoch=0, batch=0)


def test_an_owner_that_has_gone_is_named_and_connections_close_all_the_same(tmp_path: Path) -> None:
    with job_of(split(tmp_path), timeout=SOON) as job:
        sampler = samplers(job, SamplingOptions(num_neighbors=(2,)))[0]
        job[1].peers.close()
        with pytest.raises(DeadlineError, match="rank 1"):
            sampler.sample(remote_seeds(job[0].structure.store, 1), epoch=0, batch=0)
        job[0].peers.close()
        job[0].peers.close()
        with pytest.raises(ConfigError, match="its connections are closed"):
            job[0].peers.request(1, "sample")


def request(rank: Rank, sizes: list[int] | None = None, node: int = 0) -> tuple[dict[str, Any], list[torch.Tensor]]:
    needs = dict.fromkeys(("temporal", "weight", "node_time", "edge_time")) | {"replace": False}
    fields = {"needs": needs, "key": "ff", "hop": 0, "counts": [2], "sizes": sizes or [1], "weighted": True}
    return fields | {"subgraph": False, "limit": False}, [torch.tensor([node])]


def test_requests_of_another_store_are_refused(tmp_path: Path) -> None:
    with job_of(split(tmp_path)) as job:
        for wrong, message in ((request(job[0], [1, 0]), "2 types"), (request(job[0], node=99), "node 99 of a part")):
            with pytest.raises(RemoteError, match=message):
                job[0].peers.wait(1, job[0].peers.request(1, "sample", *wrong))


def test_an_answer_to_another_question_is_refused() -> None:
    tensors = [torch.tensor(values, dtype=torch.int32) for values in ([1, 2], [5, 6, 7], [0, 1, 2])]
    (answer,) = read_replies(Message({"edges": [3]}, tensors), [2])
    assert answer.counts.tolist() == [1, 2] and answer.source.tolist() == [5, 6, 7]
    for edges, nodes in (([3], [3]), ([2], [2]), ([1, 2], [2]), ([1, 2], [2, 0])):
        with pytest.raises(DataError):
            read_replies(Message({"edges": edges}, tensors), nodes)


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ({"node": [40]}, "seeds hold 40; the graph has 40 such nodes"),
        ({"node": [-1]}, "seeds hold -1"),
        ({"shop": [1]}, "seeds of type 'shop'"),
    ],
)
def test_bad_seeds(tmp_path: Path, seeds: dict[str, Any], message: str) -> None:
    with job_of(split(tmp_path)) as job, pytest.raises(DataError, match=message):
        samplers(job, SamplingOptions(num_neighbors=(2,)))[0].sample(seeds, epoch=0, batch=0)


def test_times_of_seeds_are_read_where_they_are_hosted_and_asked_for_elsewhere(tmp_path: Path) -> None:
    store = split(tmp_path)
    options = SamplingOptions(num_neighbors=(-1,), temporal="uniform", node_time="time")
    with job_of(store) as job:
        sampler, own = samplers(job, options)[0], remote_seeds(store, 0)
        times = {"node": store.node("time", 0).numpy()}
        found, given = (sampler.sample(own, epoch=0, batch=0, seed_time=time) for time in (None, times))
        assert all(np.array_equal(found.edge[kind], given.edge[kind]) for kind in found.edge)
        with pytest.raises(DataError, match="needs the time of each seed"):
            sampler.sample(remote_seeds(store, 1), epoch=0, batch=0)
        with pytest.raises(DataError, match="seed_time has 1 values"):
            sampler.sample(own, epoch=0, batch=0, seed_time={"node": [1]})


def test_weights_and_times_that_are_not_there_are_named(tmp_path: Path) -> None:
    with job_of(split(tmp_path)) as job:
        for options, message in (
            ({"weight": "wait"}, "data.weight_attr=wait was set, .* the edge tensors are: edge_attr, edge_weight"),
            ({"temporal": "last", "edge_time": "when"}, "the times 'when' was set, and no edges have"),
            ({"temporal": "last", "node_time": "when"}, "no source nodes of edges have .* are: .*time"),
        ):
            with pytest.raises(DataError, match=message):
                samplers(job, SamplingOptions(num_neighbors=(2,), **options))


def test_the_owner_of_a_negative_weight_says_so(tmp_path: Path) -> None:
    weight = torch.rand(300)
    weight[17] = -0.5
    store = split(tmp_path, edge_weight=weight)
    owner = next(part for part in range(2) if 17 in store.edge("edge_id", part))
    with job_of(store) as job, pytest.raises(DataError, match="weight of edge .* is -0.5"):
        samplers([job[owner]], SamplingOptions(num_neighbors=(2,), weight="edge_weight"))


def test_times_by_which_columns_are_not_sorted_serve_as_well(tmp_path: Path) -> None:
    """A store sorts by ``edge_time`` alone; another tensor is filtered by, at the same result."""
    times = torch.randint(0, 50, (300,), generator=torch.Generator().manual_seed(1))
    seeds, limit = {"node": np.arange(12)}, {"node": np.full(12, 25)}
    found = []
    for name in ("edge_time", "seen"):
        with job_of(split(tmp_path / name, **{name: times})) as job:
            options = SamplingOptions(num_neighbors=(-1, -1), temporal="uniform", edge_time=name)
            sample = samplers(job, options)[0].sample(seeds, epoch=0, batch=0, seed_time=limit)
            (kind,) = sample.edge
            book, store = job[0].structure.book, job[0].structure.store
            owner = book.owner(kind, sample.edge[kind])
            first = [book.range(kind, part)[0] for part in range(2)]
            ids = [store.edge("edge_id", part)[sample.edge[kind][owner == part] - first[part]] for part in range(2)]
            found.append(sorted(torch.cat(ids).tolist()))
    assert found[0] == found[1] and len(found[0]) > 20


# --------------------------------------------------------------------------------------------------- memory, threads


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_threads_and_order_do_not_matter_and_held_batches_stay(tmp_path: Path, transport: str) -> None:
    store = split(tmp_path, 3)
    seeds = [{"node": np.random.default_rng(batch).integers(0, 40, 16)} for batch in range(24)]
    with job_of(store, transport) as job:
        sampler = samplers(job, SamplingOptions(num_neighbors=(3, 2), disjoint=True))[0]

        def sample(batch: int) -> Any:
            return sampler.sample(seeds[batch], epoch=1, batch=batch)

        one_by_one = [sample(batch) for batch in range(24)]
        with ThreadPoolExecutor(4) as threads:
            at_once = list(threads.map(sample, reversed(range(24))))[::-1]
    (kind,) = store.edge_types
    for one, other in zip(one_by_one, at_once, strict=True):
        assert np.array_equal(one.edge_index[kind], other.edge_index[kind])
        assert np.array_equal(one.edge[kind], other.edge[kind])
        assert np.array_equal(one.batch["node"], other.batch["node"])


def test_a_rank_without_seeds_gets_an_empty_subgraph(tmp_path: Path) -> None:
    with job_of(split(tmp_path)) as job:
        for options in ({}, {"disjoint": True}, {"subgraph_type": "induced"}, {"subgraph_type": "bidirectional"}):
            sampler = samplers(job, SamplingOptions(num_neighbors=(3, 2), **options))[0]
            for seeds in ({}, {"node": np.empty(0, np.int64)}):
                found = sampler.sample(seeds, epoch=0, batch=0)
                assert found.node["node"].size == 0
                assert all(index.shape == (2, 0) for index in found.edge_index.values())


def test_memory_is_used_again(tmp_path: Path) -> None:
    """After the first batches a sampler takes no fresh blocks."""
    data = messy_graph(4000, 60_000)
    store = stored(tmp_path / "s", data, random_parts(4000, 2))
    with job_of(store) as job:
        sampler = samplers(job, SamplingOptions(num_neighbors=(10, 10)))[0]
        free = set()
        for batch in range(12):
            seeds = np.random.default_rng(batch).choice(4000, 512, replace=False)
            sampler.sample({"node": seeds}, epoch=0, batch=batch)
            if batch >= 6:
                free.add(job[0].pool.free_bytes)
        assert len(free) == 1 and free.pop() > 0
