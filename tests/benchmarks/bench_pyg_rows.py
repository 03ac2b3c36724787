"""Rows of a batch: CPU time of gathering hosted ones, bytes and CPU time of remote ones, hits of the cache, memory.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_pyg_rows.py
    OMP_NUM_THREADS=1 python tests/benchmarks/bench_pyg_rows.py --nodes 50000 --edges 1000000 --windows 0

The graph of ``bench_sampling.py`` with 100 floats a node, cut in two by METIS; batches of 1024 seeds of part 0, fan-out
15-10-5, sampled beforehand. Part 1 is served by another process over the loopback. CPU milliseconds are medians and can
be compared between runs on a busy machine; wall times cannot.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_sampling import planted
from torch import Tensor
from torch_geometric.data import Data

from gtrain.graph.partition.metis import metis_partition
from gtrain.graph.sampling import Columns, NeighborSampler
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE
from gtrain.graph.store.writer import write_store
from gtrain.strategy.counters import cpu_seconds, rss_bytes
from gtrain.wire import Client, Message, Server
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features.cache import expected_visits, fill_cache
from gtrain_pyg.features.feature_store import FeatureStore, RowCounts
from gtrain_pyg.peers import PartBook

FAN_OUT, SEEDS, FEATURES = (15, 10, 5), 1024, 100
NAMES: Any = {"node": ("x", "y", "orig_id"), EDGE_TYPE: ("edge_id",)}
Batch = dict[Any, np.ndarray]


class Peer:
    """The other process, asked through one client; or in it, where its handler is kept."""

    def __init__(self, address: str | None = None) -> None:
        self.client = None if address is None else Client(address, peer="rank 1")
        self.handler: Any = None

    def handle(self, name: str, handler: Any) -> None:
        self.handler = handler

    def request(self, part: int, method: str, fields: Any = None, tensors: Any = ()) -> Future[Message]:
        assert self.client is not None
        return self.client.submit(method, fields, tensors)

    def wait(self, answer: Future[Message]) -> Message:
        return answer.result()


def serve(path: Path, pipe: Any) -> None:
    """The other process: serves part 1, and says what it spent when it is asked."""
    store, peer = Store.open(path), Peer()
    FeatureStore(store, PartBook.of(store), [1], peer, BufferPool(), NAMES)
    with Server({"rows": lambda m, caller: peer.handler(m)}, name="rank 1", address="tcp://127.0.0.1:0") as server:
        pipe.send(server.address)
        while pipe.recv():
            pipe.send((cpu_seconds(), server.counters.bytes_sent, rss_bytes()))


def make_store(path: Path, nodes: int, edges: int) -> Store:
    """The graph, cut in two."""
    indptr, indices = planted(nodes, edges)
    target = np.repeat(np.arange(nodes), np.diff(indptr))
    index = torch.from_numpy(np.stack([indices.astype(np.int64), target]))
    rng = np.random.default_rng(3)
    x, y = torch.from_numpy(rng.random((nodes, FEATURES), np.float32)), torch.from_numpy(rng.integers(0, 47, nodes))
    parts = torch.from_numpy(metis_partition(indices, target, nodes, 2))
    data = Data(x=x, y=y, edge_index=index, num_nodes=nodes)
    return write_store(path, data, parts, 2, source={}, facts={}, partitioner="metis", seed=0)


def sampled(store: Store, count: int) -> list[Batch]:
    """Batches of part 0."""
    pointers = [store.edge("indptr", part).numpy() for part in range(2)]
    indptr = np.concatenate([pointers[0], pointers[1][1:] + pointers[0][-1]])
    indices = np.concatenate([store.edge("indices", part).numpy() for part in range(2)])
    sampler, rng = NeighborSampler(Columns(indptr, indices), FAN_OUT), np.random.default_rng(5)
    found = []
    for number in range(count):
        seeds = rng.choice(int(store.offsets[1]), SEEDS, replace=False)
        sample = sampler.sample(seeds, batch=number)
        found.append({"node": sample.node, EDGE_TYPE: sample.edge})
    return found


def show(name: str, run: Callable[[Any], object], arguments: list[Any], rows: int) -> None:
    """Time something."""
    spent = []
    for turn in range(3 * len(arguments)):
        began = time.thread_time()
        made = run(arguments[turn % len(arguments)])
        spent.append(time.thread_time() - began)
        del made
    median = statistics.median(spent)
    print(f"{name:<44} {1000 * median:7.1f} CPU ms  {rows / median / 1e6:6.1f} M rows/s", flush=True)


def hosted(store: Store, batches: list[Batch]) -> None:
    """Gathering where everything is here."""
    x = torch.cat([store.node("x", part) for part in range(2)])
    ids = [torch.from_numpy(batch["node"]) for batch in batches[:4]]
    size, count = max(len(i) for i in ids), int(np.mean([len(i) for i in ids]))
    out = torch.zeros(size, FEATURES)

    def select(index: Tensor) -> Tensor:
        return torch.index_select(x, 0, index, out=out[: len(index)])

    show("x[idx]", lambda index: x[index], ids, count)
    show("torch.index_select(out=reused)", select, ids, count)
    for name, names, dtype in (
        ("rows: x", {"node": ("x",)}, None),
        ("rows: x as float64", {"node": ("x",)}, torch.float64),
        ("rows: x, y, orig_id; edge_id", NAMES, None),
    ):
        rows = FeatureStore(store, PartBook.of(store), [0, 1], None, BufferPool(), names, dtype=dtype)
        show(name, lambda batch, rows=rows: rows.get([batch]), batches[:4], count)


def remote(store: Store, batches: list[Batch], windows: int) -> None:
    """Fetching where half of the nodes are another process's."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(store.path, there))
    process.start()
    address, nodes = here.recv(), store.num_nodes
    visits = expected_visits(store, {"node": np.arange(int(store.offsets[1]))}, SEEDS, {EDGE_TYPE: FAN_OUT})
    row_bytes = FEATURES * 4 + 16

    def spent() -> tuple[float, int, int]:
        here.send(True)
        return here.recv()

    for dtype, window, share in (
        *((None, 1, 0.0), (None, 4, 0.0), (torch.bfloat16, 4, 0.0)),
        *((None, 1, 0.05), (None, 1, 0.2), (None, 4, 0.2)),
    ):
        peer = Peer(address)
        rows = FeatureStore(store, PartBook.of(store), [0], peer, BufferPool(), NAMES, wire_dtype=dtype)
        if share:
            fill_cache(rows, visits, int(share * nodes * row_bytes))

        def epoch(rows: FeatureStore = rows, window: int = window) -> None:
            prefetcher = rows.prefetcher(window)
            for batch in batches:
                prefetcher.prefetch(batch).get()

        epoch()
        rows.counts, before, other, rss = RowCounts(), cpu_seconds(), spent(), rss_bytes()
        epoch()
        own, now, count = cpu_seconds() - before, spent(), len(batches)
        named = np.concatenate([batch["node"] for batch in batches])
        hits = rows.counts.cached / int(rows.is_remote("node", named).sum())
        theirs, sent = now[0] - other[0], (now[1] - other[1]) / count / SEEDS / 1024
        print(
            f"wire {str(dtype or 'as stored'):<14} window {window} cache {share:4.0%}: "
            f"{1000 * own / count:6.1f} CPU ms a batch here, {1000 * theirs / count:5.1f} there, "
            f"{sent:5.1f} KiB a seed, hits {hits:.3f}, "
            f"memory {(rss_bytes() - rss) / 2**20:+.0f} and {(now[2] - other[2]) / 2**20:+.0f} MiB",
            flush=True,
        )
        for _ in range(windows):
            epoch()
        if windows:
            print(f"  after {windows * count} more batches: memory {(rss_bytes() - rss) / 2**20:+.0f} MiB", flush=True)
        assert peer.client is not None
        peer.client.close()
    here.send(False)
    process.join()


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=500_000)
    parser.add_argument("--edges", type=int, default=17_600_000)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--windows", type=int, default=0, help="further rounds over all batches, to watch memory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder) / "store", options.nodes, options.edges)
        batches = sampled(store, options.batches)
        nodes = np.mean([batch["node"].size for batch in batches])
        cut = store.manifest.partition.edge_cut / store.num_edges
        print(f"{store.num_nodes} nodes, {store.num_edges} edges, cut {cut:.1%}; a batch has {nodes:.0f} nodes")
        hosted(store, batches)
        remote(store, batches, options.windows)


if __name__ == "__main__":
    main()
