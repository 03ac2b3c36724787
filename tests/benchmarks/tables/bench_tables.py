"""Edges between string keys of a node table, read into ids by data=tables and joined by DuckDB.

    python tests/benchmarks/tables/bench_tables.py --nodes 10000000 --edges 100000000

Two Parquet files: one of distinct keys of 20 characters, and one of edges between them, in random order. ``tables``
maps both ends of every edge to ids, checks that no key is twice in the node table or missing from it, and leaves the
ids in memory-mapped files. DuckDB numbers the keys and joins both ends, in memory, with as many threads as cores. The
two take turns, each in a process of its own. Printed are CPU seconds of all threads and wall seconds, both without
imports, the peak resident memory, mapped files included, and the ratio of the median CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

READERS = {
    "tables": """
        graph = TablesData(nodes=nodes, edges=edges, store="stores").read()
        edges_read = graph.num_edges
    """,
    "duckdb": """
        connection = duckdb.connect()
        connection.execute(f"CREATE TABLE n AS SELECT row_number() OVER () - 1 AS i, id FROM '{nodes}'")
        connection.execute(
            f"CREATE TABLE e AS SELECT a.i AS s, b.i AS t FROM '{edges}' x "
            "JOIN n a ON x.source = a.id JOIN n b ON x.target = b.id"
        )
        (edges_read,) = connection.execute("SELECT count(*) FROM e").fetchone()
    """,
}
MEASURED = """
import json, resource, sys, time
{imports}
nodes, edges = sys.argv[1:]
start, before = time.perf_counter(), time.process_time()
{body}
cpu, seconds = time.process_time() - before, time.perf_counter() - start
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps([int(edges_read), cpu, seconds, memory]))
"""
IMPORTS = {"tables": "from gtrain.data.sources.tables import TablesData", "duckdb": "import duckdb"}


def write(folder: Path, num_nodes: int, num_edges: int, seed: int = 0) -> tuple[Path, Path]:
    """Write the two files, a few million edges at a time."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(seed)
    keys = pa.array([f"user-{number * 2654435761 % 2**40:015d}" for number in range(num_nodes)])
    nodes, edges = folder / "nodes.parquet", folder / "edges.parquet"
    pq.write_table(pa.table({"id": keys}), nodes)
    with pq.ParquetWriter(edges, pa.schema([("source", pa.string()), ("target", pa.string())])) as writer:
        for first in range(0, num_edges, 2_000_000):
            count = min(2_000_000, num_edges - first)
            ends = [keys.take(pa.array(rng.integers(0, num_nodes, count))) for _ in range(2)]
            writer.write_table(pa.table({"source": ends[0], "target": ends[1]}))
    return nodes, edges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    cpu: dict[str, list[float]] = {name: [] for name in READERS}
    with tempfile.TemporaryDirectory(prefix="gtrain-bench-") as temporary:
        folder = Path(temporary)
        files = write(folder, given.nodes, given.edges)
        for _ in range(given.repeat):
            for name, body in READERS.items():
                lines = "\n".join(line.removeprefix(" " * 8) for line in body.strip("\n").splitlines())
                program = MEASURED.format(imports=IMPORTS[name], body=lines)
                command = [sys.executable, "-c", program, *map(str, files)]
                done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
                count, seconds, wall, memory = json.loads(done.stdout.splitlines()[-1])  # after a progress bar
                assert count == given.edges
                cpu[name].append(seconds)
                print(f"{name:8} {seconds:7.1f} CPU s {wall:7.1f} s {memory:6.2f} GiB")
    medians = {name: statistics.median(values) for name, values in cpu.items()}
    print(f"CPU seconds of tables / DuckDB: {medians['tables'] / medians['duckdb']:.2f}")


if __name__ == "__main__":
    main()
