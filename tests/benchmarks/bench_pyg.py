"""strategy=pyg beside DGL's loader and PyG's, in one run.

    python tests/benchmarks/bench_pyg.py                       # everything at full size: about an hour on two cores
    python tests/benchmarks/bench_pyg.py --what loader --scale 0.1 --folder DIR

loader: complete batches (features, labels, edge ids) in one process, beside DGL's loader. ranks: two ranks that sample
and fetch over TCP, and in shared memory. model: steps of GraphSAGE and GAT in float32 and bfloat16, beside DGL's, and
GraphSAGE beside its products alone and on PyG's own loader over the same samples, untrimmed. memory: PSS of a rank at
its highest, above its resident set before data (``baseline_rss_bytes``) and above its PSS before data. cache: remote
features for each seed, with the cache and the look-ahead. growth: CPU time of a drawn edge and of a distinct row of a
batch, with 100,000 nodes and with a million, beside that of a row read at random from arrays of these sizes. network:
two ranks in namespaces of their own, 1 Gbit/s and 2 ms apart, with encryption. subgraphs: what induced and
bidirectional subgraphs cost.

The graph has 500,000 nodes, 17.6 M directed edges, 100 features, 47 classes; fan-out 15-10-5, 1024 seeds a rank and
step. One thread a rank. Seeds/s are by wall and by CPU seconds; trust the second where other programs compute.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pyg_network import slow_network
from sar_overlap import impossible

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
WHAT = ("loader", "ranks", "model", "memory", "cache", "growth", "network", "subgraphs")
MBIT, MILLISECONDS = 1000, 2.0
FAN_OUT = "15,10,5"
BATCH = 1024
IDLE = "model._target_=pyg_probe.Idle"
SAGE = ["model=sage", "model.num_layers=3", "model.hidden_channels=256", "model.dropout=0"]
GAT = ["model=gat", "model.num_layers=3", "model.hidden_channels=256", "model.heads=4", "model.dropout=0"]
Check = tuple[str, float, float, bool]
"""What is checked, what was found, the limit, and whether the limit is a least value."""


@dataclass
class Bench:
    """Where runs are made, and of what size."""

    folder: Path
    scale: float
    steps: int

    def graph(self, parts: int, nodes: int = 500_000, edges: int = 17_600_000) -> list[str]:
        """Make the store in a process of its own, and return its settings."""
        settings = [
            "data=planted",
            f"data.num_nodes={int(nodes * self.scale)}",
            f"data.num_edges={int(edges * self.scale)}",
            "data.num_features=100",
            "data.num_classes=47",
            "data.homophily=0.9",
        ]
        self.store = self.gtrain(["partition", "strategy=single", f"data.num_parts={parts}", *settings])
        return settings

    def run(self, name: str, ranks: int, settings: list[str]) -> list[dict[str, Any]]:
        """Train for some steps; returns what each rank's probe wrote."""
        run = self.folder / "runs" / name
        self.gtrain([*self.settings(run, ranks, settings), f"hydra.run.dir={run}"])
        return self.read(run, ranks)

    def settings(self, run: Path, ranks: int, more: list[str]) -> list[str]:
        """Settings of a run that is measured, but for its folder."""
        return [
            "strategy=pyg",
            f"trainer.num_nodes={ranks}",
            f"data.batch_size={BATCH * ranks}",
            f"data.num_neighbors=[{FAN_OUT}]",
            *more,
            "callbacks=none",
            "logger=none",
            "trainer.max_epochs=1",
            f"trainer.limit_train_batches={self.steps + 5}",
            "trainer.limit_val_batches=0",
            "trainer.limit_test_batches=0",
            "trainer.enable_progress_bar=false",
            f"+callbacks.probe={{_target_:pyg_probe.Probe,folder:{run}}}",
        ]

    def read(self, run: Path, ranks: int) -> list[dict[str, Any]]:
        """What each rank's probe wrote, the bytes that it received in the epoch, and its memory before data."""
        found = [json.loads((run / f"probe-{rank}.json").read_text()) for rank in range(ranks)]
        figures = json.loads((run / "summary.json").read_text())["ranks"]
        names = ("bytes_received", "baseline_rss_bytes")
        return [probe | {name: rank[name] for name in names} for probe, rank in zip(found, figures, strict=True)]

    def gtrain(self, arguments: list[str]) -> str:
        """Run gtrain and return what it printed."""
        return self.command([sys.executable, "-m", "gtrain", *arguments])

    def command(self, command: list[str]) -> str:
        """Run a command with one thread; end with what it said if it fails."""
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DGLBACKEND": "pytorch"}
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout

    @property
    def store_path(self) -> str:
        """Of the graph made last."""
        return str(self.folder / self.store.rpartition("store: ")[2].strip())


def rate(probes: list[dict[str, Any]], clock: str) -> float:
    """Seeds/s of all ranks together: by the slowest rank's wall seconds, or by the mean rank's CPU seconds."""
    spent = [probe[clock] for probe in probes]
    return sum(probe["seeds"] for probe in probes) / (max(spent) if clock == "wall" else statistics.mean(spent))


def each_seed(figure: str, seeds: str, probes: list[dict[str, Any]]) -> float:
    """A figure of all ranks for each seed. Of the whole epoch's, a batch or two were made ahead and not used."""
    return sum(probe.get(figure, 0) for probe in probes) / sum(probe.get(seeds, 1) for probe in probes)


def show(name: str, probes: list[dict[str, Any]]) -> None:
    """Print one line."""
    received = each_seed("bytes_received", "epoch_seeds", probes)
    wall, cpu = rate(probes, "wall"), rate(probes, "cpu")
    print(f"{name:<44}{wall / 1e3:>9.1f}{cpu / 1e3:>9.1f}{received / 1024:>10.1f}", flush=True)


def measure_loader(bench: Bench) -> Iterator[Check]:
    """One process."""
    settings = bench.graph(1)
    ours = bench.run("loader", 1, [*settings, IDLE])
    show("gtrain, one process", ours)
    if has_dgl():
        theirs = peer(bench, "pyg_dgl.py")
        show("DGL, one process", theirs)
        yield "one process: seeds/CPU s over DGL's", rate(ours, "cpu") / rate(theirs, "cpu"), 2.5, True


def has_dgl() -> bool:
    """Whether DGL is installed."""
    found = importlib.util.find_spec("dgl") is not None
    if not found:
        print("DGL: skipped, it is not installed: pip install 'gtrain[dgl]'")
    return found


def peer(bench: Bench, script: str, *arguments: str) -> list[dict[str, Any]]:
    """What a peer took on the graph made last."""
    out = bench.folder / "peer.json"
    command = [sys.executable, str(PEERS / script), bench.store_path, FAN_OUT, str(BATCH), str(bench.steps), str(out)]
    bench.command([*command, *arguments])
    return [json.loads(out.read_text())]


def measure_ranks(bench: Bench) -> Iterator[Check]:
    """Two ranks."""
    settings = bench.graph(2)
    for transport in ("tcp", "shm"):
        found = bench.run(f"ranks-{transport}", 2, [*settings, IDLE, f"strategy.transport={transport}"])
        show(f"gtrain, two ranks, {transport}", found)
        if transport == "tcp":
            yield "two ranks, tcp: seeds/s of CPU seconds", rate(found, "cpu"), 26_000, True


def measure_model(bench: Bench) -> Iterator[Check]:
    """One process, with a model."""
    settings = bench.graph(1)
    sage = yield from beside_dgl(bench, "sage", [*settings, *SAGE], 1.25, 1.8)
    step, alone = sage[0]["cpu"] / sage[0]["steps"], products_alone(sage[0]["targets"])
    print(f"a step: {step:.3f} CPU s; its dense products alone: {alone:.3f} CPU s")
    yield "CPU of a step / its dense products alone", step / alone, 1.25, False
    yield from beside_dgl(bench, "gat", [*settings, *GAT], 1.4, 1.4)
    if not any(importlib.util.find_spec(name) for name in ("pyg_lib", "torch_sparse")):
        print("PyG's own sampling: skipped, neither pyg-lib nor torch-sparse is installed; its loader gets our kernels")
    theirs = peer(bench, "pyg_nodeloader.py")
    show("PyG's NodeLoader, GraphSAGE, untrimmed", theirs)
    yield "epoch with the model: CPU of PyG's loader / ours", rate(sage, "cpu") / rate(theirs, "cpu"), 2.0, True


def beside_dgl(
    bench: Bench, model: str, settings: list[str], least: float, least_in_bf16: float
) -> Generator[Check, None, list[dict[str, Any]]]:
    """A model in float32 and in bfloat16, and in DGL; returns what the first one's probe wrote."""
    precisions = {"32-true": least, "bf16-mixed": least_in_bf16}
    ours = {name: bench.run(f"{model}-{name}", 1, [*settings, f"trainer.precision={name}"]) for name in precisions}
    for name, found in ours.items():
        show(f"gtrain, {model}, {name}", found)
    if has_dgl():
        theirs = peer(bench, "pyg_dgl.py", model)
        show(f"DGL, {model}", theirs)
        for name, limit in precisions.items():
            yield f"{model}, {name}: seeds/CPU s over DGL's", rate(ours[name], "cpu") / rate(theirs, "cpu"), limit, True
    return ours["32-true"]


def products_alone(targets: list[float]) -> float:
    """CPU seconds of the products of a step of three layers of 256: W_l, W_r, their gradients and the inputs'.

    Args:
        targets: nodes whose rows each layer computes, mean of the batches.
    """
    torch.set_num_threads(1)
    spent = []
    for _ in range(3):
        for rows, inputs, outputs in zip(map(int, targets), (100, 256, 256), (256, 256, 47), strict=True):
            x, weight, gradient = torch.ones(rows, inputs), torch.ones(outputs, inputs), torch.ones(rows, outputs)
            out, dweight, dx = torch.empty(rows, outputs), torch.empty(outputs, inputs), torch.empty(rows, inputs)
            start = time.process_time()
            for _ in range(2):
                torch.mm(x, weight.t(), out=out)
                torch.mm(gradient.t(), x, out=dweight)
                if inputs == 256:  # the features have no gradient
                    torch.mm(gradient, weight, out=dx)
            spent.append(time.process_time() - start)
    return statistics.median(sum(spent[i : i + 3]) for i in range(0, len(spent), 3))


def measure_memory(bench: Bench) -> Iterator[Check]:
    """PSS of a rank, and whether the resident set is flat."""
    settings = bench.graph(2)
    steps, bench.steps = bench.steps, max(bench.steps, 100)
    found = bench.run("memory", 2, [*settings, IDLE, "strategy.transport=tcp"])
    bench.steps = steps
    store = sum(path.stat().st_size for path in Path(bench.store_path).rglob("*.npy"))
    limit = store / 2 * 1.3 + 300e6
    above = max(probe["pss"] - probe["baseline_rss_bytes"] for probe in found)
    grown = max(probe["pss"] - probe["baseline_pss"] for probe in found)
    print(f"PSS of a rank: {grown / 1e6:.0f} MB above the PSS before data; half of the store: {store / 2e6:.0f} MB")
    yield "PSS of a rank above baseline_rss_bytes, MB", above / 1e6, limit / 1e6, False
    half = [statistics.mean(probe["resident"][len(probe["resident"]) // 2 :]) for probe in found]
    rise = max(probe["resident"][-1] / mean for probe, mean in zip(found, half, strict=True))
    yield "resident set at the end / mean of the second half", rise, 1.02, False


def measure_cache(bench: Bench) -> Iterator[Check]:
    """Remote bytes for each seed."""
    settings = [*bench.graph(2), IDLE, "strategy.transport=tcp", "strategy.halo_hops=all"]
    rows = 400 * int(500_000 * bench.scale)
    plain = bench.run("cache-none", 2, [*settings, "strategy.lookahead=1"])
    show("no cache, no look-ahead", plain)
    ahead = bench.run("cache-ahead", 2, settings)
    show("no cache, look-ahead of 32 batches", ahead)
    for share in (0.05, 0.2):
        show(f"cache of {share:.0%}", bench.run("cache", 2, [*settings, f"strategy.cache_bytes={int(share * rows)}"]))
    each = [400 * each_seed("remote_rows", "seeds", found) / 1024 for found in (plain, ahead)]
    yield "KiB of remote features for each seed, without cache and look-ahead", each[0], 26.0, False
    yield "saved by looking ahead", 1 - each[1] / each[0], 0.15, True


def measure_growth(bench: Bench) -> Iterator[Check]:
    """One process on two graphs, one ten times as large; runs alternate."""
    sizes = (100_000, 1_000_000)
    graphs = {nodes: bench.graph(1, nodes, 10 * nodes) for nodes in sizes}
    spent: dict[str, dict[int, list[float]]] = {
        name: {nodes: [] for nodes in sizes} for name in ("edge", "row", "read")
    }
    for number in range(3):
        for nodes, settings in graphs.items():
            (probe,) = bench.run(f"growth-{nodes}-{number}", 1, [*settings, IDLE, "+callbacks.probe.stages=true"])
            stages = {name: statistics.median(seconds) for name, seconds in probe["stages"].items()}
            edges, rows = probe["edges"] / probe["steps"], probe["nodes"] / probe["steps"]
            spent["edge"][nodes].append(1e9 * stages["sample"] / edges)
            spent["row"][nodes].append(1e9 * (stages["prefetch"] + stages["assemble"]) / rows)
            spent["read"][nodes].append(1e9 * random_reads(int(nodes * bench.scale), int(rows)))
            print(f"{nodes:>9} nodes: a batch has {edges:,.0f} edges and {rows:,.0f} rows", flush=True)
    for name, of_size in spent.items():
        small, large = (statistics.median(of_size[nodes]) for nodes in sizes)
        print(f"CPU ns of each {name}: {small:.0f} and {large:.0f}")
        if name != "read":
            yield f"CPU of each {name}, a million nodes / 100,000", large / small, 1.2, False


def random_reads(nodes: int, rows: int) -> float:
    """CPU seconds in which torch copies a row of 400 bytes from a random place of an array of ``nodes`` rows."""
    torch.set_num_threads(1)
    table, chosen = torch.ones(nodes, 100), torch.randperm(nodes)[:rows]
    out, spent = torch.empty(len(chosen), 100), []
    for _ in range(5):
        start = time.process_time()
        torch.index_select(table, 0, chosen, out=out)
        spent.append(time.process_time() - start)
    return statistics.median(spent) / len(chosen)


def measure_network(bench: Bench) -> Iterator[Check]:
    """Two ranks, each as on a machine of its own. ``MILLISECONDS`` is a message's way there and back."""
    if reason := impossible():
        print(f"network: skipped, {reason}")
        return
    settings = [*bench.graph(2), IDLE, "strategy.transport=tcp"]
    for name, more in (("no look-ahead", ["strategy.lookahead=1"]), ("look-ahead", [])):
        run = bench.folder / "runs" / f"network-{len(more)}"
        with slow_network(MBIT, MILLISECONDS / 2) as network:
            network.train(bench.settings(run, 2, [*settings, *more]), run, bench.folder)
        show(f"{MBIT} Mbit/s, {MILLISECONDS:g} ms, {name}", bench.read(run, 2))
    yield from ()


def measure_subgraphs(bench: Bench) -> Iterator[Check]:
    """Kinds of subgraphs in one process."""
    settings = [*bench.graph(1), IDLE]
    for kind in ("directional", "bidirectional", "induced"):
        show(f"subgraph_type={kind}", bench.run(f"subgraph-{kind}", 1, [*settings, f"data.subgraph_type={kind}"]))
    yield from ()


_LOCAL = (measure_loader, measure_ranks, measure_model, measure_memory, measure_cache, measure_growth)
MEASURES = dict(zip(WHAT, (*_LOCAL, measure_network, measure_subgraphs), strict=True))


def main() -> None:
    """Parse the arguments, measure, print, and end with 1 if a target is missed at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the graph's nodes and edges")
    parser.add_argument("--steps", type=int, default=50, help="measured ones; five more warm up")
    parser.add_argument("--folder", type=Path, help="keep stores and runs here, and find stores again")
    options = parser.parse_args()
    print(f"{platform.node()}: {os.cpu_count()} cores, Python {platform.python_version()}, one thread a rank")
    print(f"{'':<44}{'k seeds/s':>9}{'/CPU s':>9}{'KiB/seed':>10}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, options.scale, options.steps)
        checks = [check for what in options.what for check in MEASURES[what](bench)]
    missed = 0
    print("\ntargets")
    for name, found, limit, least in checks:
        good = found >= limit if least else found <= limit
        missed += not good
        print(f"{'ok' if good else 'MISSED':<8}{found:>10.2f}  {'>=' if least else '<='} {limit:<8g} {name}")
    sys.exit(1 if missed and options.scale == 1.0 else 0)


if __name__ == "__main__":
    main()
