"""Writing a store of a large random graph whose edges lie in files: seconds, and memory at its peak.

    python tests/benchmarks/bench_store.py --edges 100000000 --nodes 10000000 --parts 1 4

Each part count is written in a process of its own. The targets for 100 M edges are less than 3 GB at the peak and 3 M
edges/s on one core, reading and writing included. ``--cold`` compiles the kernels anew, as the first run does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CHUNK = 1 << 22


def generate(folder: Path, nodes: int, edges: int, seed: int = 0) -> None:
    """Write random int32 sources and targets, a chunk at a time."""
    random = np.random.default_rng(seed)
    for name in ("source", "target"):
        column = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.int32, (edges,))
        for start in range(0, edges, CHUNK):
            count = min(CHUNK, edges - start)
            column[start : start + count] = random.integers(0, nodes, count, dtype=np.int32)
        column.flush()


def write(folder: Path, nodes: int, parts: int, partitioner: str, buckets: bool) -> None:
    """Write the store in this process, and print what it took."""
    from gtrain.graph.partition import partition_nodes
    from gtrain.graph.store.tables import EdgeArrays
    from gtrain.graph.store.writer import write_store

    columns = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("source", "target")]
    before, cpu = peak(), time.process_time()
    assignment = partition_nodes((columns[0], columns[1]), nodes, parts, partitioner)
    partitioning, after = time.process_time() - cpu, peak()
    began, cpu = time.perf_counter(), time.process_time()
    store = write_store(
        folder / "store",
        EdgeArrays(nodes, *columns),
        assignment,
        parts,
        source={},
        facts={},
        partitioner=partitioner,
        seed=0,
        buckets=buckets,
    )
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    figures = {
        "parts": parts,
        "buckets": buckets,
        "partitioner": partitioner,
        "partitioning_cpu_seconds": round(partitioning, 1),
        "partitioning_peak_gb": round(after / 1e9, 2),
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "million_edges_per_cpu_second": round(store.num_edges / cpu / 1e6, 2),
        "peak_gb": round(peak() / 1e9, 2),
        "peak_before_gb": round(before / 1e9, 2),
        "edge_cut": store.manifest.partition.edge_cut,
    }
    print(json.dumps(figures), flush=True)


def peak() -> int:
    """Largest resident memory of this process so far, in bytes, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, default=100_000_000)
    parser.add_argument("--nodes", type=int, default=10_000_000)
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--partitioner", default="random")
    parser.add_argument("--buckets", action="store_true")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        write(options.inside, options.nodes, options.parts[0], options.partitioner, options.buckets)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder), options.nodes, options.edges)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if options.cold:
            environment["NUMBA_CACHE_DIR"] = f"{folder}/cache"
        for parts in options.parts:
            command = [sys.executable, __file__, "--inside", folder, "--nodes", str(options.nodes)]
            command += ["--parts", str(parts), "--partitioner", options.partitioner]
            command += ["--buckets"] if options.buckets else []
            subprocess.run(command, env=environment, check=True)
            subprocess.run(["rm", "-r", f"{folder}/store"], check=True)


if __name__ == "__main__":
    main()
