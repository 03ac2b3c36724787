"""Ingest of a generated edge list with string ids: time and memory of the whole ``gtrain partition``.

    python tests/benchmarks/bench_ingest.py --edges 100000000 --nodes 20000000
    python tests/benchmarks/bench_ingest.py --edges 100000000 --nodes 20000000 --strategy pbg strategy.num_partitions=8

Lines are ``n12345678<TAB>n87654321``, 20 bytes. Beside it, on a piece of the same file: a plain Python importer (two
passes over the lines and a dictionary, as PyTorch-BigGraph's works), and the parsing alone, ours and Arrow's. Memory is
VmHWM of the largest process, and the largest sum of the resident sizes of all of them (memory that processes share
counts in each). The targets for 100 M edges are a peak under 4 GB and 1 M edges/s.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numba import njit

from gtrain.data.ingest.lines import LineReader

DIGITS = 8
PIECE = 1_000_000


@njit(cache=True)
def spell(ids: np.ndarray, out: np.ndarray) -> None:
    """Write pairs of ids as lines of 20 bytes."""
    place = 0
    for i in range(ids.shape[0]):
        for end in range(2):
            out[place] = 110
            rest = ids[i, end]
            for digit in range(DIGITS):
                out[place + DIGITS - digit] = 48 + rest % 10
                rest //= 10
            out[place + DIGITS + 1] = 10 if end else 9
            place += DIGITS + 2


def generate(path: Path, edges: int, nodes: int, skew: float) -> None:
    """Write an edge list; node ranks are drawn as ``N * u ** skew``, 1 is uniform, and scattered over the ids."""
    rng = np.random.default_rng(1)
    with path.open("wb") as file:
        for first in range(0, edges, PIECE):
            ranks = (nodes * rng.random((min(PIECE, edges - first), 2)) ** skew).astype(np.int64)
            out = np.empty(len(ranks) * 2 * (DIGITS + 2), dtype=np.uint8)
            spell(ranks * 7919 % 99_999_989, out)  # both are primes, so distinct ranks have distinct ids
            file.write(out.data)


def processes(session: int) -> dict[int, tuple[int, int]]:
    """VmHWM and VmRSS in bytes of each process of a session."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if os.getsid(int(status.parent.name)) == session:
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                found[int(status.parent.name)] = tuple(1024 * int(lines[key].split()[0]) for key in ("VmHWM", "VmRSS"))
        except (OSError, KeyError):
            continue  # it has ended meanwhile
    return found


def partition(path: Path, folder: Path, strategy: str, more: list[str]) -> tuple[float, float, int, int]:
    """Wall and CPU seconds, and both peaks in bytes, of making the store."""
    command = ["partition", f"strategy={strategy}", "data=edges", f"data.path={path}", "data.ids=string"]
    command += ["model=kg", "data.batch_size=1000"] if strategy == "pbg" else ["data.partitioner=random"]
    command += more
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "gtrain", *command], cwd=folder, start_new_session=True)
    largest = together = 0
    while process.poll() is None:
        sizes = processes(process.pid)
        largest = max([largest, *(peak for peak, _ in sizes.values())])
        together = max(together, sum(now for _, now in sizes.values()))
        time.sleep(0.25)
    if process.returncode:
        raise SystemExit(f"gtrain partition ended with {process.returncode}")
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, largest, together


def plain_python(path: Path, edges: int) -> float:
    """Edges/s of two passes over the lines: count the names, then number them."""
    began = time.perf_counter()
    counts: Counter[str] = Counter()
    with path.open() as file:
        for _, line in zip(range(edges), file, strict=False):
            counts.update(line.split())
    numbers = {name: number for number, (name, _) in enumerate(counts.most_common())}
    sources, targets = [], []
    with path.open() as file:
        for _, line in zip(range(edges), file, strict=False):
            source, target = line.split()
            sources.append(numbers[source])
            targets.append(numbers[target])
    np.array([sources, targets])
    return edges / (time.perf_counter() - began)


def parsing(path: Path) -> tuple[float, float]:
    """CPU seconds of splitting and hashing a file, and of splitting it by Arrow's reader, one thread."""
    began = time.process_time()
    for piece in LineReader(path, "\t", 0, 2, dict.fromkeys((0, 1), pa.string()), "#%").pieces():
        piece.keys(0, 2)
    ours, began = time.process_time() - began, time.process_time()
    options = pyarrow.csv.ReadOptions(column_names=["source", "target"], use_threads=False, block_size=1 << 22)
    types = pyarrow.csv.ConvertOptions(column_types={name: pyarrow.string() for name in ("source", "target")})
    separator = pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False)
    with pyarrow.csv.open_csv(path, options, separator, types) as reader:
        for _ in reader:
            pass
    return ours, time.process_time() - began


def main() -> None:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--nodes", type=int, default=2_000_000, help="at most 99,999,989")
    parser.add_argument("--skew", type=float, default=1.0, help="1: uniform; 4: a heavy head")
    parser.add_argument("--strategy", default="single", choices=["single", "pbg"], help="pbg: its buckets")
    parser.add_argument("--folder", type=Path, help="for the files; a temporary one by default")
    parser.add_argument("overrides", nargs="*", help="such as data.num_parts=4, or strategy.num_partitions=8")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        path = Path(scratch, "edges.tsv")
        generate(path, options.edges, options.nodes, options.skew)
        print(f"{options.edges:,} edges, {path.stat().st_size / 1e9:.2f} GB", flush=True)
        wall, cpu, largest, together = partition(path, Path(scratch), options.strategy, options.overrides)
        print(f"gtrain partition: {wall:.1f} s wall, {cpu:.1f} s CPU, {options.edges / wall / 1e6:.2f} M edges/s")
        print(f"peak: {largest / 1e9:.2f} GB in one process, {together / 1e9:.2f} GB in all", flush=True)
        piece = min(PIECE, options.edges)
        print(f"plain Python: {plain_python(path, piece) / 1e6:.2f} M edges/s on {piece:,} edges")
        few = Path(scratch, "few.tsv")
        generate(few, min(5 * PIECE, options.edges), options.nodes, options.skew)
        parsing(few)  # compiles
        ours, arrow = parsing(few)
        size = few.stat().st_size / 1e6
        print(f"parsing alone, CPU: ours with hashes {size / ours:.0f} MB/s, Arrow's reader {size / arrow:.0f} MB/s")


if __name__ == "__main__":
    main()
