"""sar beside the single process, DGL and SAR's own readings, in one run.

    python tests/benchmarks/bench_sar.py                          # everything at full size: hours on two cores
    python tests/benchmarks/bench_sar.py --what cpu --models sage --scale 0.1
    python tests/benchmarks/bench_sar.py --what accuracy --data FOLDER

cpu: CPU seconds of an epoch summed over ranks, extra peak memory of the largest rank, MiB sent in an epoch over all
ranks and beside the lower bound that the strategy reckons. memory: how extra peak memory falls with the ranks over
random parts. overlap: see sar_overlap.py. accuracy: means over seeds of real data, as conf/experiment sets them.

One thread a rank. A figure is the median of some epochs after one that warms up; evaluation is switched off. Stores
are made beforehand, by other processes. sar_probe.py says what extra peak memory is, sar_readings.py what SAR took.
Graphs of another size than the readings' are compared with none, and miss no target.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import sar_overlap
from sar_readings import (
    ACCURACY,
    DGL,
    EACH,
    EXTRA_AT_4,
    FASTER,
    LEANER,
    LINEAR,
    MODELS,
    OVERLAP,
    SAR,
    SENT_OVER_BOUND,
    SENT_OVER_SAR,
    WORKLOADS,
    Reading,
)
from sar_runs import Bench, Row, dgl_reason, sar

PARTS = ("cpu", "memory", "overlap", "accuracy")
Check = tuple[str, float, float, bool]
"""What is checked, what was found, the limit, and whether the limit is a least value."""


def measure_cpu(bench: Bench, options: argparse.Namespace) -> Iterator[Check]:
    """Every mode and number of ranks beside one process of single and of DGL.

    DGL was read on A alone: how fast this machine is for a model is known from there.
    """
    machine: dict[str, float] = {}
    for letter in options.workloads:
        for model in options.models if letter == "A" else options.models[:1]:
            print(f"\n{letter}, {model}, METIS, {bench.epochs} epochs")
            heading()
            settings = bench.store(WORKLOADS[letter], 1, "metis")
            dgl = one_dgl(bench, letter, model, settings)
            one_single(bench, model, settings)
            rows = []
            for ranks in options.ranks:
                bench.store(WORKLOADS[letter], ranks, "metis")
                for mode in options.modes:
                    rows.append(sar(bench, model, mode, ranks, [*settings, *options.set]))
                    show(rows[-1], reading(letter, model, rows[-1]), WORKLOADS[letter].halo)
            if dgl and (letter, model) in DGL:
                machine[model] = dgl.cpu / DGL[letter, model].cpu
            yield from cpu_checks(letter, model, rows, machine.get(model, 1.0), bench.scale)


def one_dgl(bench: Bench, letter: str, model: str, settings: list[str]) -> Row | None:
    """One process of DGL, where it is installed."""
    if reason := dgl_reason():
        print(f"one DGL process: skipped, {reason}")
        return None
    row = bench.dgl(model, settings)
    show(row, DGL.get((letter, model)), WORKLOADS[letter].halo)
    return row


def one_single(bench: Bench, model: str, settings: list[str]) -> None:
    """One process with strategy=single."""
    show(bench.gtrain("single", ["strategy=single", *MODELS[model], *settings]), None, 0)


def cpu_checks(letter: str, model: str, rows: list[Row], machine: float, scale: float) -> Iterator[Check]:
    """What was found beside the targets; SAR's CPU seconds are taken times ``machine``."""
    by = {(row.ranks, row.mode): row for row in rows}
    best = min((SAR[key].extra for key in SAR if key[:3] == (letter, model, 2)), default=0.0)
    for row in rows:
        name = f"{letter} {model} {row.name}"
        if row.ranks > 1:
            yield f"{name}: sent / bound", ratio(row.sent, row.bound), SENT_OVER_BOUND, False
        if (known := reading(letter, model, row)) is None or scale != 1.0:
            continue
        yield f"{name}: CPU of SAR / ours (machine x {machine:.2f})", known.cpu * machine / row.cpu, FASTER[model], True
        if row.mode == 1:
            yield f"{name}: extra memory / SAR's best mode", row.extra / best, LEANER[model], False
        if (model, row.mode) in SENT_OVER_SAR:
            at_halo = known.sent * row.halo / WORKLOADS[letter].halo
            yield f"{name}: sent / SAR's", row.sent / at_halo, SENT_OVER_SAR[model, row.mode], False
    if (4, 1) in by and (4, 3) in by:
        yield f"{letter} {model} x 4: extra memory mode 1 / mode 3", ratio(by[4, 1].extra, by[4, 3].extra), 1.0, False
    if (4, 1) in by and (1, 1) in by:
        yield f"{letter} {model} mode 1: extra memory x 4 / x 1", by[4, 1].extra / by[1, 1].extra, EXTRA_AT_4, False


def reading(letter: str, model: str, row: Row) -> Reading | None:
    """SAR's reading of a configuration; mode 2 has none, and is held against the cheaper of the other two."""
    if row.mode == 2:
        found = [SAR[key] for mode in (1, 3) if (key := (letter, model, row.ranks, mode)) in SAR]
        return min(found, key=lambda one: one.cpu, default=None)
    return SAR.get((letter, model, row.ranks, row.mode))


def measure_memory(bench: Bench, options: argparse.Namespace) -> Iterator[Check]:
    """Mode 1 over random parts, nothing kept between epochs: the worst case for the halo."""
    for model in options.models:
        print(f"\nA, {model}, random parts, mode 1, strategy.cache_inputs=false")
        heading()
        first = None
        for ranks in (1, *LINEAR):
            settings = bench.store(WORKLOADS["A"], ranks, "random")
            row = sar(bench, model, 1, ranks, [*settings, "strategy.cache_inputs=false"], f"random parts x {ranks}")
            show(row, None, 0)
            first = first or row
            if ranks in LINEAR:
                yield (
                    f"A {model} random parts: extra memory x {ranks} / x 1",
                    row.extra / first.extra,
                    LINEAR[ranks],
                    False,
                )


def measure_overlap(bench: Bench, options: argparse.Namespace) -> Iterator[Check]:
    """How much of the shorter of computing and sending is hidden."""
    if reason := sar_overlap.impossible():
        print(f"\noverlap: skipped, {reason}")
        return
    print(f"\nA, overlap at {options.mbit} Mbit/s between 2 ranks; seconds of an epoch")
    print(f"{'':<28}{'compute':>9}{'transfer':>10}{'epoch':>8}{'hidden':>8}")
    settings = bench.store(WORKLOADS["A"], 2, "metis")
    for model in options.models:
        for mode in options.modes:
            found = sar_overlap.measure(bench, model, mode, 2, options.mbit, [*settings, *options.set])
            times = f"{found.compute:>9.2f}{found.transfer:>10.2f}{found.epoch:>8.2f}{found.share:>8.2f}"
            print(f"{found.name:<28}{times}", flush=True)
            yield f"{found.name}: hidden share", found.share, OVERLAP, True


def measure_accuracy(bench: Bench, options: argparse.Namespace) -> Iterator[Check]:
    """Means over the seeds 0 to 4; each has a split of its own, but for AIFB, which has one."""
    if options.data is None:
        print("\naccuracy: skipped, --data names no folder of the real data")
        return
    print(f"\naccuracy on real data, {' '.join(options.accuracy_settings)}")
    for name, (metric, least) in ACCURACY.items():
        found = []
        for seed in range(5):
            run = bench.folder / "runs" / f"{name}-{seed}"
            settings = [f"experiment={name}", f"data.root={options.data}", f"seed={seed}", f"hydra.run.dir={run}"]
            settings += EACH[name].format(seed=seed).split()
            bench.command([*settings, *options.accuracy_settings, "trainer.enable_progress_bar=false"])
            found.append(bench.metric(run, metric))
        each = " ".join(f"{value:.4f}" for value in found)
        print(f"{name:<14}{metric:<10}{statistics.mean(found):.4f}  ({each})", flush=True)
        yield f"{name}: {metric}, mean of {len(found)}", statistics.mean(found), least, True


def heading() -> None:
    """The columns of :func:`show`."""
    names = f"{'wall s':>8}{'CPU s':>9}{'+-':>6}{'extra MB':>10}{'sent MiB':>10}{'/ bound':>9}"
    print(f"{'':<24}{names}   SAR or DGL, as read: CPU s, extra MB, sent MiB (at this halo)")


def show(row: Row, known: Reading | None, halo: int) -> None:
    """Print one line."""
    bound = f"{ratio(row.sent, row.bound):.3f}" if row.bound else "-"
    line = f"{row.wall:>8.2f}{row.cpu:>9.2f}{row.spread:>6.2f}{row.extra:>10.0f}{row.sent:>10.1f}{bound:>9}"
    beside = ""
    if known is not None:
        beside = f"   {known.cpu:.2f}, {known.extra:.0f}"
        beside += f", {known.sent:.0f} ({known.sent * row.halo / halo:.0f})" if known.sent else ""
    print(f"{row.name:<24}{line}{beside}", flush=True)


def ratio(value: float, base: float) -> float:
    """Their quotient; infinite where there is no base."""
    return value / base if base else float("inf")


def main() -> None:
    """Parse the arguments, measure, print, and end with 1 if a target is missed at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--modes", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the workloads' nodes and edges")
    parser.add_argument("--epochs", type=int, default=3, help="measured ones; one more warms up")
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument(
        "--set", nargs="*", default=[], help="more settings of strategy=sar, such as strategy.prefetch=2"
    )
    parser.add_argument("--data", type=Path, help="folder of the real data")
    parser.add_argument("--accuracy-settings", nargs="*", default=["strategy=sar"])
    parser.add_argument("--folder", type=Path, help="keep stores and runs here, and find stores again")
    options = parser.parse_args()
    print(f"{platform.node()}: {os.cpu_count()} cores, Python {platform.python_version()}, one thread a rank")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, options.scale, options.epochs)
        measures = dict(zip(PARTS, (measure_cpu, measure_memory, measure_overlap, measure_accuracy), strict=True))
        checks = [check for what in PARTS if what in options.what for check in measures[what](bench, options)]
    missed = report(checks)
    sys.exit(1 if missed and options.scale == 1.0 else 0)


def report(checks: list[Check]) -> int:
    """Print every target with what was found; return how many are missed."""
    print("\ntargets")
    missed = 0
    for name, found, limit, least in checks:
        good = found >= limit if least else found <= limit
        missed += not good
        print(f"{'ok' if good else 'MISSED':<8}{found:>8.3f}  {'>=' if least else '<='} {limit:<6g} {name}")
    return missed


if __name__ == "__main__":
    main()
