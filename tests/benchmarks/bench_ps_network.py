"""The sparse parameter server over slow links: shipping rows beside pulling them, and not waiting for all beside it.

    python tests/benchmarks/bench_ps_network.py --shape 2048,200 --mbit 100

Two machines, each a network namespace with an interface that sends at a limited rate (``tc tbf``), each with a worker
and a parameter server of one thread, started by hand as docs/launchers.md says, with a key: what crosses is encrypted.
Needs root, ``ip`` and ``tc``. Prints examples/s of the fastest epoch for each, and the seconds that
a step's bytes need at that rate: half of what a worker moves crosses the link, and each link also carries what its
server answers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_ps import WORKERS, settings
from sar_overlap import PORT, Network, address, impossible, network

EPOCHS = 2
RUNS = {
    "ship": ["strategy.protocol=ship"],
    "async": ["strategy.protocol=ship", "strategy.consistency=async", "strategy.staleness=2"],
    "pull": ["strategy.protocol=pull"],
}


def run(net: Network, rows: int, width: int, name: str, steps: int, folder: Path) -> tuple[float, float]:
    """Examples/s, and bytes of a worker and step."""
    given = [*settings(rows, width, folder, steps, EPOCHS), *RUNS[name], "cluster=manual"]
    given += [f"cluster.rendezvous=tcp://{address(0)}:{PORT}", f"cluster.key_file={folder / 'job.key'}"]
    command = [sys.executable, "-m", "gtrain", *given]
    folders = [folder / f"{name}-{rank}" for rank in range(WORKERS)]
    commands = [[*command, f"cluster.rank={rank}", f"hydra.run.dir={at}"] for rank, at in enumerate(folders)]
    net.run(commands, folder)
    found = json.loads((folders[0] / "summary.json").read_text())
    workers = [rank for rank in found["ranks"] if rank["role"] == "worker"]
    nbytes = sum(rank["bytes_sent"] + rank["bytes_received"] for rank in workers) / WORKERS / steps / EPOCHS
    return rows * WORKERS * steps / min(found["epoch_seconds"]), nbytes


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2048,200", help="rows of a worker in a step, columns")
    parser.add_argument("--mbit", type=int, default=100, help="0: as fast as they are, to see what encryption costs")
    parser.add_argument("--steps", type=int, default=4, help="of an epoch")
    given = parser.parse_args()
    reason = impossible()
    if reason:
        sys.exit(f"skipped: {reason}")
    rows, width = (int(number) for number in given.shape.split(","))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        key = [sys.executable, "-m", "gtrain", "key", f"cluster.key_file={folder / 'job.key'}"]
        subprocess.run(key, check=True, cwd=folder, capture_output=True)
        prepare = [sys.executable, "-m", "gtrain", "partition", *settings(rows, width, folder, given.steps, EPOCHS)]
        subprocess.run(prepare, check=True, cwd=folder, capture_output=True)  # not in both namespaces at once
        with network(WORKERS) as net:
            if given.mbit:
                net.limit(given.mbit)
            found = {name: run(net, rows, width, name, given.steps, folder) for name in RUNS}
    print(f"{rows} rows a worker, {width} columns, {given.mbit} Mbit/s")
    for name, (examples, nbytes) in found.items():
        step = rows * WORKERS / examples
        link = f", {nbytes / 2 / (given.mbit * 1e6 / 8):.2f} s" if given.mbit else ""
        print(f"{name:<6}{examples:>10,.0f} examples/s, {nbytes:>12,.0f} bytes{link} of a step's {step:.2f} s")
    ship = found["ship"][0]
    print(f"ship / pull: {ship / found['pull'][0]:.1f}, async / ship: {found['async'][0] / ship:.2f}")


if __name__ == "__main__":
    main()
