"""Batches for a device, on CPU tensors: the cache of rows, the copies, their order, and the memory that they read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from given_data import Given
from helpers import LIMIT
from pyg_ranks import NAMES, NODES, PARTS, Ranks, hetero_graph
from small_graphs import messy_graph, random_parts, stored
from torch import Tensor
from torch_geometric.data import Data

from gtrain import PlantedData
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE
from gtrain.model.classification import NodeClassifier
from gtrain.model.decoders import make_decoder
from gtrain.model.link_predictor import LinkPredictor
from gtrain.model.networks import gcn, sage
from gtrain_pyg.buffers import BufferPool, pinned_memory, private_memory
from gtrain_pyg.device import BatchMover, DeviceCopies, HostBatch
from gtrain_pyg.features import device_cache, kernels
from gtrain_pyg.features.cache import expected_visits
from gtrain_pyg.features.device_cache import DeviceCache
from gtrain_pyg.features.feature_store import FeatureStore, RowCounts
from gtrain_pyg.loader import pipelined_copies
from gtrain_pyg.sampling.sampler import Subgraph
from gtrain_pyg.seeds import SeedFields, batch_name
from gtrain_pyg.strategy import PygStrategy
from gtrain_pyg.threads import OrderedThreads

CPU = torch.device("cpu")


@pytest.fixture
def data() -> Data:
    return messy_graph(NODES)


@pytest.fixture
def ranks(tmp_path: Path, data: Data) -> Iterator[Ranks]:
    job = Ranks(stored(tmp_path / "store", data, random_parts(NODES, PARTS)))
    job.serve(NAMES)
    yield job
    job.close()


def some_batches(count: int) -> list[dict[Any, Any]]:
    rng = np.random.default_rng(0)
    return [{"node": rng.integers(0, NODES, 40), EDGE_TYPE: rng.integers(0, 300, 70)} for _ in range(count)]


def visits_of(store: Store) -> dict[str, np.ndarray]:
    return expected_visits(store, {"node": np.arange(20)}, 5, {EDGE_TYPE: (3, 2)})


def rows_by_cache(features: FeatureStore, cache: DeviceCache, batch: dict[Any, Any]) -> dict[Any, dict[str, Tensor]]:
    """The tensors of a batch, made as :class:`BatchMover` makes them."""
    mover = BatchMover(DeviceCopies(CPU), features.output_dtypes())
    mover.cache = cache
    cached, missing = cache.split(batch, features.pool)
    rows = features.prefetch(missing, as_stored=True).get()
    moved = mover(host_batch(batch["node"], rows, cached)).take()
    return {
        graph_type: {name: moved[batch_name(name)] for name in names if batch_name(name) in moved}
        for graph_type, names in NAMES.items()
    }


def host_batch(ids: np.ndarray, rows: Any, cached: Any = None) -> HostBatch:
    """A batch of nodes without edges, of the first of which it was grown."""
    nothing = {EDGE_TYPE: np.empty((2, 0), np.int64)}
    subgraph = Subgraph({"node": ids}, nothing, {}, None, {"node": ids[:1]}, {"node": [1]}, {EDGE_TYPE: [0]})
    seeds = SeedFields("node", {"seeds": torch.tensor([0])}, torch.tensor([0]))
    return HostBatch(subgraph, rows, seeds, False, True, cached or {})


# ---------------------------------------------------------------------------------------------------- the cache


def test_rows_are_divided_into_cached_and_missing_ones() -> None:
    rng = np.random.default_rng(1)
    cached, ids = np.sort(rng.choice(1000, 300, replace=False)), rng.integers(0, 1000, 500)
    bits, ranks = np.zeros(16, np.uint64), np.zeros(16, np.uint32)
    kernels.rank_bits(cached, bits, ranks)
    ids[7], ids[8] = -1, 1 << 40  # no such rows: they are missing, and refused when they are requested
    slots, missing, positions = np.empty(500, np.int32), np.empty(500, np.int64), np.empty(500, np.int64)
    count = kernels.split_cached(ids, bits, ranks, slots, missing, positions)
    is_cached = np.isin(ids, cached)
    assert count == 500 - is_cached.sum()
    assert (cached[slots[is_cached]] == ids[is_cached]).all() and not slots[~is_cached].any()
    assert (positions[:count] == np.flatnonzero(~is_cached)).all() and (missing[:count] == ids[~is_cached]).all()


@pytest.mark.parametrize("hosted", [[0, 1, 2], [1], [0, 2]], ids=["all parts", "one part", "two parts"])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("nbytes", [0, 300, 1200, 1 << 20])
def test_rows_are_the_same_with_every_size_of_the_cache(
    ranks: Ranks, hosted: list[int], dtype: torch.dtype | None, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_cache, "FILL_BYTES", 500)  # several blocks
    plain, _ = ranks.rows(hosted, NAMES, dtype=dtype)
    features, peers = ranks.rows(hosted, NAMES, dtype=dtype)
    cache = DeviceCache(CPU, threads=2)
    cache.fill(features, nbytes, lambda: visits_of(ranks.store))
    assert cache.nbytes <= nbytes
    features.counts = RowCounts()
    for batch in some_batches(4):
        expected, rows = plain.get([batch])[0], rows_by_cache(features, cache, batch)
        for graph_type, tensors in expected.items():
            for name, tensor in tensors.items():
                assert rows[graph_type][name].dtype == tensor.dtype
                assert torch.equal(rows[graph_type][name], tensor), (graph_type, name)
    requested = len(peers.asked)
    if nbytes == 1 << 20 and len(hosted) == PARTS:  # everything is cached, and ids of nodes are rows of the cache
        assert cache.count("node") == NODES and cache.count(EDGE_TYPE) == 300
        assert features.counts == RowCounts() and not requested
    elif nbytes == 1 << 20:  # every node that can be reached is cached, edges are not
        assert cache.count("node") == int((visits_of(ranks.store)["node"] > 0).sum())
        assert cache.count(EDGE_TYPE) == 0
    elif nbytes == 0:
        assert cache.count("node") == 0


def test_rows_of_other_ranks_are_requested_less_often(ranks: Ranks) -> None:
    fetched = []
    for nbytes in (0, 1000, 1 << 20):
        features, _ = ranks.rows([1], NAMES)
        cache = DeviceCache(CPU)
        cache.fill(features, nbytes, lambda: visits_of(ranks.store))
        features.counts = RowCounts()
        for batch in some_batches(4):
            rows_by_cache(features, cache, {"node": batch["node"], EDGE_TYPE: batch[EDGE_TYPE][:0]})
        fetched.append(features.counts.fetched_nodes)
    assert fetched[0] > fetched[1] > fetched[2]


def test_a_remote_node_that_is_hardly_ever_needed_is_not_fetched(ranks: Ranks) -> None:
    features, _ = ranks.rows([1], NAMES)
    visits = visits_of(ranks.store)["node"]
    least = float(np.median(visits))
    cache = DeviceCache(CPU)
    cache.fill(features, 1 << 20, lambda: {"node": visits}, least_visits=least)
    remote = features.is_remote("node", np.arange(NODES))
    assert cache.count("node") == int(((visits >= least) & remote).sum() + ((visits > 0) & ~remote).sum())


def test_the_nodes_that_are_visited_most_are_cached(ranks: Ranks) -> None:
    features, _ = ranks.rows([0, 1, 2], NAMES)
    visits = np.random.default_rng(2).random(NODES).astype(np.float32)
    cache = DeviceCache(CPU)
    row_bytes = int(features.row_bytes("node"))
    cache.fill(features, 10 * row_bytes + 1, lambda: {"node": visits})
    assert cache.count("node") == 10 and cache.nbytes == 10 * row_bytes
    cached, missing = cache.split({"node": np.arange(NODES)}, BufferPool())
    assert set(np.arange(NODES)) - set(missing["node"]) == set(np.argsort(-visits)[:10])
    assert cached["node"].positions is not None and cached["node"].positions.numel() == NODES - 10


def test_rows_take_no_more_bytes_on_the_device_than_in_the_store(ranks: Ranks) -> None:
    sizes = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        features, _ = ranks.rows([0, 1, 2], {"node": ("x",)}, dtype=dtype)
        cache = DeviceCache(CPU)
        cache.fill(features, 1 << 20, lambda: visits_of(ranks.store))
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1] == 2 * sizes[2] > 0


def test_each_type_of_a_heterogeneous_graph(tmp_path: Path) -> None:
    """Types without tensors have nothing to cache."""
    module = Given(hetero_graph(), tmp_path / "store", target="author")
    module.prepare_data()
    job = Ranks(module.open_store())
    names = {"paper": ("x",), "author": ("x", "y"), "venue": ()}
    features, _ = job.rows([0], names)
    cache = DeviceCache(CPU)
    cache.fill(features, 1 << 20, dict)
    assert [cache.count(name) for name in names] == [50, 30, 0]
    assert "venue" not in cache


# --------------------------------------------------------------------------------------------- the copies' memory


class FakeEvent:
    """An event that occurs when it is waited for."""

    def __init__(self, events: list[str], name: str) -> None:
        self.events, self.name = events, name

    def synchronize(self) -> None:
        self.events.append(f"waited for {self.name}")


class FakeCopies(DeviceCopies):
    """Copies whose sources are in use until their event."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.events: list[str] = []
        self.count = 0

    def _record(self) -> Any:
        self.count += 1
        return FakeEvent(self.events, f"copy {self.count}")


def test_memory_of_a_copy_is_reused_after_its_event_and_not_before() -> None:
    copies, pool = FakeCopies(), BufferPool()
    mover = BatchMover(copies, {"node": {"x": torch.float32}})
    addresses = []
    for number in range(6):
        x = pool.tensor((1000, 100))
        x.fill_(number)
        addresses.append(x.data_ptr())
        host = host_batch(np.arange(1000), {"node": {"x": x}})
        del x
        moved = mover(host)
        del host
        assert moved.batch.x.data_ptr() != addresses[-1] and (moved.batch.x == number).all()
        # The copy of the batch before is complete, this one's may be under way.
        assert copies.events == [f"waited for copy {n}" for n in range(1, number + 1)]
    assert len(set(addresses)) == 2
    assert all(one != other for one, other in zip(addresses[:-1], addresses[1:], strict=True))
    copies.close()
    assert pool.free_bytes >= 2 * 400_000


class FakeStream:
    """A stream that notes what it has to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


class FakeCudaEvent:
    """An event that notes where it was recorded."""

    def __init__(self, blocking: bool) -> None:
        assert blocking
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream = stream


def test_the_training_stream_waits_for_the_copies_and_holds_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    training, entered, held = FakeStream(CPU), [], []
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeCudaEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(entered.append(stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: held.append((self.data_ptr(), stream)))
    copies = DeviceCopies(torch.device("cuda", 0))
    copies.device = CPU
    own = copies._stream
    moved = BatchMover(copies, {"node": {"x": torch.float32}})(
        host_batch(np.arange(9), {"node": {"x": torch.ones(9, 2)}})
    )
    assert entered == [own] and moved.ready is not None
    assert isinstance(moved.ready, FakeCudaEvent) and moved.ready.stream is own and not training.waits
    batch = moved.take()
    assert training.waits == [moved.ready]
    tensors = [value for _, value in batch if isinstance(value, Tensor)]
    assert len(tensors) == 5
    assert sorted(held) == sorted((tensor.data_ptr(), training) for tensor in tensors)


def test_blocks_are_allocated_once() -> None:
    sizes: list[int] = []

    def allocate(nbytes: int) -> Any:
        sizes.append(nbytes)
        return private_memory(nbytes)

    pool = BufferPool(allocate)
    for _ in range(20):
        held = [pool.take(100_000), pool.tensor((300, 100))]
        del held
    assert len(sizes) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: page-locked memory exists")
def test_without_page_locked_memory_other_memory_serves(caplog: pytest.LogCaptureFixture) -> None:
    pool = BufferPool(pinned_memory)
    array = pool.take(100_000)
    array[:] = 7
    assert (array == 7).all()
    assert "no page-locked memory of" in caplog.text


# ------------------------------------------------------------------------------------------------- the pipeline


class Stages:
    """Stages that note what was called."""

    def __init__(self) -> None:
        self.sampled: list[int] = []
        self.prefetched: list[int] = []
        self.moved: list[int] = []
        self.threads: set[str] = set()

    def run(self, jobs: Iterable[int], **options: Any) -> Generator[str]:
        return pipelined_copies(jobs, self.sample, self.prefetch, self.assemble, self.move, **options)

    def sample(self, job: int) -> int:
        self.sampled.append(job)
        return job * 10

    def prefetch(self, sample: int) -> int:
        self.prefetched.append(sample)
        return sample + 1

    def assemble(self, job: int, sample: int, rows: int) -> int:
        assert rows == sample + 1 == job * 10 + 1
        return job

    def move(self, job: int) -> str:
        self.moved.append(job)
        self.threads.add(threading.current_thread().name)
        return f"batch {job}"


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("jobs", [0, 1, 20])
def test_batches_are_moved_in_order_by_one_thread(ahead: int, in_order: bool, jobs: int) -> None:
    stages = Stages()
    batches = list(stages.run(range(jobs), threads=4, ahead=ahead, in_order=in_order))
    assert batches == [f"batch {job}" for job in range(jobs)]
    assert stages.moved == list(range(jobs)) and len(stages.threads) <= 1
    if in_order:
        assert stages.prefetched == [10 * job for job in range(jobs)]
    assert sorted(stages.prefetched) == [10 * job for job in range(jobs)]


@pytest.mark.parametrize("in_order", [False, True])
def test_no_more_is_moved_and_made_ahead_than_asked(in_order: bool) -> None:
    stages = Stages()
    batches = stages.run(range(100), threads=3, ahead=2, in_order=in_order)
    for taken in range(1, 20):
        next(batches)
        assert len(stages.moved) <= taken + 2
        assert len(stages.sampled) <= taken + 2 + 3
    batches.close()


def test_threads_make_batches_at_the_same_time() -> None:
    barrier, stages = threading.Barrier(3), Stages()
    sample = stages.sample

    def meeting(job: int) -> int:
        barrier.wait(LIMIT)  # passes when three samples are in progress
        return sample(job)

    stages.sample = meeting  # type: ignore[method-assign]
    assert len(list(stages.run(range(6), threads=3, ahead=1, in_order=False))) == 6


@pytest.mark.parametrize("most_threads", [None, 3])
def test_a_batch_that_is_late_starts_another_thread(most_threads: int | None) -> None:
    """Job 10 is complete when job 12 has started, which one thread would not do before job 10 is taken."""
    stages, names = Stages(), set[str]()
    started, sample = threading.Event(), stages.sample

    def sampling(job: int) -> int:
        names.add(threading.current_thread().name)
        if job == 12:
            started.set()
        if job == 10 and most_threads:
            assert started.wait(LIMIT)
        return sample(job)

    stages.sample = sampling  # type: ignore[method-assign]
    batches = stages.run(range(40), threads=1, most_threads=most_threads, ahead=1, in_order=False)
    assert list(batches) == [f"batch {number}" for number in range(40)]
    assert len(names) in ((2, 3) if most_threads else (1,))


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("stage", ["sample", "prefetch", "assemble", "move"])
def test_what_a_stage_raises_is_raised_where_batches_are_taken(stage: str, ahead: int, in_order: bool) -> None:
    stages = Stages()
    stage_before = getattr(stages, stage)

    def fail(*args: Any) -> Any:
        if args[0] in (3, 30):
            raise OSError("the device is gone")
        return stage_before(*args)

    setattr(stages, stage, fail)
    batches = stages.run(range(6), ahead=ahead, in_order=in_order)
    assert [next(batches) for _ in range(3)] == ["batch 0", "batch 1", "batch 2"]
    with pytest.raises(OSError, match="the device is gone"):
        next(batches)


def test_a_consumer_that_leaves_waits_for_nobody() -> None:
    release, stages = threading.Event(), Stages()
    sample = stages.sample

    def slow(job: int) -> int:
        if job >= 2:
            release.wait(LIMIT)
        return sample(job)

    stages.sample = slow  # type: ignore[method-assign]
    batches = stages.run(range(50), ahead=1, threads=2)
    assert next(batches) == "batch 0"
    batches.close()
    assert not release.is_set()
    release.set()


def test_memory_of_a_batch_is_not_held_by_threads_that_wait() -> None:
    class Thing:
        """What a job is about, or a result."""

    doubler = OrderedThreads(lambda thing: Thing(), 2, "things")
    job = Thing()
    job_is_alive = weakref.ref(job)
    doubler.put(job)
    doubler.put(None)
    del job
    result_is_alive = weakref.ref(doubler.get())
    doubler.get()
    deadline = time.monotonic() + LIMIT
    while (job_is_alive() or result_is_alive()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert job_is_alive() is None and result_is_alive() is None
    doubler.close()


def test_jobs_of_closed_threads_are_cancelled() -> None:
    started, release = threading.Event(), threading.Event()

    def slow(job: int) -> int:
        started.set()
        release.wait(LIMIT)
        return job

    pool = OrderedThreads(slow, 1, "slow")
    pool.put(1)
    pool.put(2)
    started.wait(LIMIT)
    pool.close()
    release.set()
    assert pool.get() == 1
    with pytest.raises(CancelledError):
        pool.get()


def test_an_interpreter_exits_although_threads_wait_for_jobs() -> None:
    program = (
        "from gtrain_pyg.threads import OrderedThreads\npool = OrderedThreads(print, 3, 'waiting')\npool.put('job')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout == "job\n"


# ------------------------------------------------------------------------------------------------- whole runs


class Losses(pl.Callback):
    """Notes the loss of each step, and how the batches came."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.on_device = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.on_device += batch in trainer.strategy._on_device


def fit(
    monkeypatch: pytest.MonkeyPatch, folder: Path, network: str, copied: bool, task: str = "node", **settings: Any
) -> tuple[Losses, PygStrategy]:
    """Train two epochs, and validate; ``copied``: with the stages of a GPU."""
    copies = DeviceCopies(CPU) if copied else None
    monkeypatch.setattr(PygStrategy, "_device_copies", lambda self: copies)
    pl.seed_everything(0, verbose=False)
    data = PlantedData(
        num_nodes=300, num_edges=3000, num_features=6, num_classes=3, batch_size=40, num_neighbors=[4, 3], task=task
    )
    made = {"sage": sage, "gcn": gcn}[network](in_channels=6, hidden_channels=8, num_layers=2, out_channels=3)
    model = NodeClassifier(made, 3) if task == "node" else LinkPredictor(made, make_decoder("dot", 3, None))
    strategy, losses = PygStrategy(**settings), Losses()
    precision = settings.pop("precision", "64-true")
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        default_root_dir=folder,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    trainer.fit(model, datamodule=data)
    return losses, strategy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("network", [pytest.param("sage", marks=pytest.mark.slow), "gcn"])
def test_a_run_has_the_losses_of_a_cpu(network: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To the last digit: with all rows cached, with some, with none; with threads and on demand."""
    expected, _ = fit(monkeypatch, tmp_path, network, False)
    assert len(expected.losses) == 10 and expected.on_device == 0
    for settings in ({"device_cache": 1 << 20}, {"device_cache": 4000}, {"device_cache": 0, "threads": 3}):
        run, strategy = fit(monkeypatch, tmp_path, network, True, **settings)
        assert run.losses == expected.losses and run.on_device == 10
        cached = strategy.resolved_settings()["strategy.device_cache"]
        assert (cached > 0) == (settings["device_cache"] > 0) and cached <= settings["device_cache"]
    run, _ = fit(monkeypatch, tmp_path, network, True, prefetch=0, device_cache=4000)
    assert run.losses == expected.losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_links_have_the_losses_of_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected, _ = fit(monkeypatch, tmp_path, "sage", False, task="link")
    run, _ = fit(monkeypatch, tmp_path, "sage", True, task="link", device_cache=4000, threads=2)
    assert run.losses == expected.losses and run.on_device == len(run.losses) > 10


@pytest.mark.filterwarnings("ignore")
def test_a_hook_that_moves_batches_gets_them_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hooked(pl.LightningModule):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    strategy = PygStrategy()
    monkeypatch.setattr(PygStrategy, "root_device", torch.device("cuda", 0))
    monkeypatch.setattr(DeviceCopies, "__init__", lambda self, device: None)
    for module, copies in ((pl.LightningModule(), True), (Hooked(), False)):
        strategy._lightning_module = module
        assert (strategy._device_copies() is not None) == copies


@pytest.mark.parametrize(
    ("cores", "fan_out", "threads"), [(16, (15, 10), 14), (1, (15, 10), 1), (64, (15, 10), 16), (16, (15, -1), 2)]
)
def test_sampling_threads_of_a_gpu(
    cores: int, fan_out: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cores but two; few where a batch may be most of the graph."""
    strategy, options = PygStrategy(), SamplingOptions(fan_out)
    strategy._opened = SimpleNamespace(store=SimpleNamespace(edge_types=[EDGE_TYPE]))  # type: ignore[assignment]
    monkeypatch.setattr(PygStrategy, "root_device", torch.device("cuda", 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert strategy._threads(options, remote=False) == threads
    assert strategy._threads(options, remote=True) == max(threads, 2)
    assert PygStrategy(threads=5)._threads(options, remote=False) == 5
