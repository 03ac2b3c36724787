"""The results of a run: ``summary.json`` and the tables that the command prints last."""

from __future__ import annotations

import json
import math
import platform
import socket
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gtrain import __version__
from gtrain.callbacks.recorder import RunRecorder
from gtrain.data.module import ColumnFact, GraphDataModule
from gtrain.files import replace_text
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import HELD_OUT
from gtrain.strategy.counters import Counters, PeakMemory

PACKAGES = ("torch", "lightning", "torch-geometric", "hydra-core", "omegaconf", "numpy")


@dataclass(frozen=True)
class BestScore:
    """The best value of the monitored score.

    Attributes:
        name: of the score.
        value: the best one.
        epoch: its epoch, from 0; None if it is unknown.
        direction: whether the lowest value is the best, ``min``, or the highest, ``max``.
    """

    name: str
    value: float
    epoch: int | None
    direction: str


@dataclass(frozen=True)
class EpochMetrics:
    """Metrics, each with the epoch (from 0) after which it was measured.

    Attributes:
        metrics: the newest values, and the best possible values (``data/best_acc``), which have no epoch.
        epoch_of: the epoch by metric; None if it is unknown.
        best: the best validation score; None if nothing was monitored.
    """

    metrics: dict[str, float]
    epoch_of: dict[str, int | None]
    best: BestScore | None


def rank_figures(rank: int, memory: PeakMemory, recorder: RunRecorder, counters: Counters) -> dict[str, Any]:
    """Return this process's entry of ``ranks`` in ``summary.json``: bytes, seconds and memory."""
    return {
        "rank": rank,
        "role": "worker",
        "host": socket.gethostname(),
        **memory.figures(),
        **counters.as_dict(),
        "comm_bound_bytes": counters.bound_bytes,
        "cpu_seconds": recorder.cpu_seconds,
    }


def summary(
    config: dict[str, Any],
    choices: dict[str, str],
    data: GraphDataModule,
    recorder: RunRecorder,
    epoch_metrics: EpochMetrics,
    ranks: list[dict[str, Any]],
    fit_seconds: float,
    resolved: dict[str, Any] | None = None,
    preparation: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Return the content of ``summary.json``; ``docs/summary.schema.json`` fixes its keys.

    Args:
        config: the configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        data: the DataModule.
        recorder: the callback that recorded the epochs.
        epoch_metrics: the metrics.
        ranks: the entries of workers and servers.
        fit_seconds: seconds of the whole training.
        resolved: settings that the strategy chose.
        preparation: memory of the process that prepared the store; None if the store existed.
    """
    training = sum(recorder.epoch_seconds)
    work, unit = data.work
    rate = work * recorder.epochs_trained / training if training else 0.0
    store = data.open_store()
    partition, best = store.manifest.partition, epoch_metrics.best
    return {
        "verb": config["verb"],
        "config": _as_json(config),
        **choices,
        "num_nodes": config["trainer"]["num_nodes"],
        "devices": config["trainer"]["devices"],
        "world_size": sum(rank["role"] == "worker" for rank in ranks),
        "epochs": len(recorder.epoch_seconds),
        "fit_seconds": fit_seconds,
        "epoch_seconds": recorder.epoch_seconds,
        "throughput": {"value": rate, "unit": unit},
        "resolved": resolved or {},
        "metrics": {name: _number(value) for name, value in epoch_metrics.metrics.items()},
        "metrics_epoch": epoch_metrics.epoch_of,
        "best": None if best is None else {**asdict(best), "value": _number(best.value)},
        "history": [{name: _number(value) for name, value in epoch.items()} for epoch in recorder.history],
        "ranks": ranks,
        "store": {
            "path": str(store.path.absolute()),
            "parts": store.num_parts,
            "edge_cut": partition.edge_cut,
            "halo": list(partition.halo),
            "preparation": preparation,
        },
        "versions": {
            "python": platform.python_version(),
            "gtrain": __version__,
            **{name: version(name) for name in PACKAGES},
        },
    }


def _as_json(node: Any) -> Any:
    """Return a configuration in the types of JSON: NaN and infinity become None, paths and other objects their text."""
    if isinstance(node, dict):
        return {str(name): _as_json(value) for name, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_as_json(value) for value in node]
    if isinstance(node, float):
        return _number(node)
    return node if node is None or isinstance(node, (str, int)) else str(node)


def _number(value: float) -> float | None:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return value if math.isfinite(value) else None


def write(path: Path, content: dict[str, Any]) -> None:
    """Write ``summary.json`` atomically."""
    replace_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def print_summary(content: dict[str, Any], run_dir: Path) -> None:
    """Print the metrics and the time of the run, then the memory and the bytes of each rank."""
    console = Console()
    title = f"strategy={content['strategy']} data={content['data']} model={content['model']}"
    # Names and values are text, not markup: val/f1[macro].
    result = _table("value", "after epoch", names="result", title=Text(title, "table.title"))
    for name, value in content["metrics"].items():
        best_possible = name.startswith("data/")
        epoch = "expected best" if best_possible else _epoch(content["metrics_epoch"].get(name))
        result.add_row(Text(name), _score(value), epoch)
    if (best := content["best"]) is not None:
        result.add_row(Text(f"best {best['name']}"), _score(best["value"]), _epoch(best["epoch"]))
    if sampled := content["config"].get("model", {}).get("num_candidates"):
        result.add_row("ranked against", f"{sampled:,} sampled candidates")
    for name, value in content["resolved"].items():
        result.add_row(Text(name), Text(str(value)))
    if content["epochs"]:
        result.add_row("epochs", str(content["epochs"]))
        result.add_row("seconds", f"{content['fit_seconds']:.1f}")
        mean = sum(content["epoch_seconds"]) / content["epochs"]
        result.add_row("seconds per training epoch", f"{mean:.4f}")
        result.add_row(content["throughput"]["unit"], f"{content['throughput']['value']:,.0f}")
    console.print(result)
    console.print(_rank_table(content["ranks"]))
    console.print(Text(f"run folder: {run_dir}"), soft_wrap=True)


def _table(*numbers: str, names: str | None = None, title: str | Text | None = None) -> Table:
    """Return an empty table with the headings of a column of names, if there is one, and of columns of numbers."""
    table = Table(*([] if names is None else [names]), title=title, title_justify="left")
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _epoch(epoch: int | None) -> str:
    """Return an epoch counted from 1, as in the progress line."""
    return "-" if epoch is None else str(epoch + 1)


def _rank_table(ranks: list[dict[str, Any]]) -> Table:
    """Return the table of memory, bytes and time of each rank, with the lower bound of the bytes if a rank has one."""
    bounded = any(rank["comm_bound_bytes"] is not None for rank in ranks)
    on_device = any(rank["peak_device_bytes"] for rank in ranks)
    bound_heading, device_heading = ("lower bound MiB",) * bounded, ("GPU MiB",) * on_device
    memory = ("peak MiB", "imports MiB", *device_heading)
    table = _table(*("rank", *memory, "sent MiB", *bound_heading, "received MiB", "waiting s", "CPU s"))
    for rank in ranks:
        bound = rank["comm_bound_bytes"]
        table.add_row(
            str(rank["rank"]) if rank["role"] == "worker" else f"{rank['role']} {rank['rank']}",
            _mib(rank["peak_rss_bytes"]),
            _mib(rank["baseline_rss_bytes"]),
            *([_mib(rank["peak_device_bytes"])] * on_device),
            _mib(rank["bytes_sent"]),
            *(["-" if bound is None else _mib(bound)] * bounded),
            _mib(rank["bytes_received"]),
            f"{rank['wait_seconds']:.2f}",
            f"{rank['cpu_seconds']:.2f}",
        )
    return table


def print_partition(store: Store) -> None:
    """Print the result of ``gtrain partition``: edge cut, sizes and balance of the parts, counts of each type."""
    partition, console = store.manifest.partition, Console()
    title = f"{store.num_nodes:,} nodes, {store.num_edges:,} edges in {store.num_parts} parts"
    table = _table("part", "nodes", "edges", "train nodes", "halo nodes", title=title)
    columns = (partition.nodes, partition.edges, partition.train_nodes, partition.halo)
    for part, row in enumerate(zip(*columns, strict=True)):
        table.add_row(str(part), *(f"{value:,}" for value in row))
    console.print(table)
    for types in _type_tables(store) if store.is_hetero else ():
        console.print(types)
    cut = partition.edge_cut
    console.print(
        f"partitioner {partition.partitioner}: edge cut {cut:,} ({cut / max(store.num_edges, 1):.1%} of the edges)"
    )
    balance = "  ".join(f"{name} {value:.3f}" for name, value in partition.imbalance.items())
    console.print(f"imbalance (largest / mean): {balance}")
    for split in HELD_OUT:
        if held_out := sum(store.held_out_size(split, edge_type) for edge_type in store.edge_types):
            console.print(f"{split} edges, held out: {held_out:,}")
    console.print(Text(f"store: {store.path}"), soft_wrap=True)


def print_schema(columns: list[ColumnFact], *, as_json: bool) -> None:
    """Print the result of ``gtrain schema``: the columns of each table and what becomes of them."""
    if as_json:
        print(json.dumps([asdict(column) for column in columns], indent=1))
        return
    table = Table(title_justify="left")
    for name in ("table", "column", "read as", ""):
        table.add_column(name, overflow="fold")
    before = None
    for column in columns:
        if before not in (None, column.table):
            table.add_section()
        table.add_row(*(Text(v) for v in (column.table, column.name, column.role, column.detail)))
        before = column.table
    Console().print(table)


def _type_tables(store: Store) -> tuple[Table, Table]:
    """Return the tables of node types, with the nodes in each part, and of edge types, with the edges that are cut."""
    partition = store.manifest.partition
    parts = (f"part {part}" for part in range(store.num_parts))
    nodes = _table("nodes", *parts, "largest / mean", names="node type")
    for node_type, counts in partition.nodes_by_type.items():
        balance = max(counts) * len(counts) / max(sum(counts), 1)
        nodes.add_row(Text(node_type), f"{sum(counts):,}", *(f"{count:,}" for count in counts), f"{balance:.3f}")
    edges = _table("edges", "edge cut", names="edge type")
    for key, spec in store.manifest.edge_types.items():
        cut = partition.edge_cut_by_type[key]
        share = f"{cut:,} ({cut / max(spec.num_edges, 1):.1%})"
        edges.add_row(Text(" ".join(spec.edge_type)), f"{spec.num_edges:,}", share)
    return nodes, edges


def _mib(value: float) -> str:
    return f"{value / 2**20:.1f}"
