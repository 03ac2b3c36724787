"""``strategy=pyg`` on a GPU, beside the same steps on batches that are on the device already, and beside two CPU cores.

    python tests/benchmarks/gpu/bench_pyg.py [--seconds 70] [--device cpu --small]

GraphSAGE, three layers of 256, on a planted graph of 500,000 nodes, 17.6 M directed edges, 100 features and 47 classes;
fan-out 15-10-5, 1,024 seeds per step: the graph and the model of ``tests/benchmarks/bench_pyg.py``. All steps are those
of a Lightning Trainer. ``batches on the device`` trains on 16 batches that the same loader made before; each step gets
a new object for the edges, so that nothing of an earlier step is known about them.

Prints one JSON object per reading: seconds per step (median of blocks of 10 steps, each ended by a synchronisation),
seconds of them that the training thread waited for a batch, CPU seconds of all threads per step, peak device memory.
``loader`` readings only make batches and copy them. ``waits`` counts, by line, where the host waited for the device.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from gtrain import PlantedData
from gtrain.model.classification import NodeClassifier
from gtrain.model.networks import sage
from gtrain_pyg.device import DeviceCopies
from gtrain_pyg.strategy import PygStrategy

FAN_OUT, BATCH, HELD, BLOCK, WARM_UP = [15, 10, 5], 1024, 16, 10, 20
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Probe(pl.Callback):
    """Times blocks of steps.

    Args:
        warm_up: steps before the first block.
        blocks: number of blocks.
        waits: record where the host waits for the device, in 5 further steps.
    """

    def __init__(self, warm_up: int, blocks: int, block: int = BLOCK, waits: bool = False) -> None:
        self.warm_up, self.blocks, self.block, self._waits = warm_up, blocks, block, waits
        self.seconds: list[float] = []
        self.cpu = self.waited = self._waiting = 0.0
        self.waits: collections.Counter[str] = collections.Counter()
        self._recording: Any = None

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.warm_up + self.blocks * self.block + (6 if self._waits else 0)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a span of the strategy's counters."""
        start = time.perf_counter()
        yield
        self._waiting += time.perf_counter() - start if name == "wait: batch" else 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.counters.span = self.span
        synchronise()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = batch_idx + 1 - self.warm_up
        if done == 0:
            synchronise()
            self._start, self._cpu, self._waiting = time.perf_counter(), time.process_time(), 0.0
        elif 0 < done <= self.blocks * self.block and done % self.block == 0:
            synchronise()
            now = time.perf_counter()
            self.seconds.append((now - self._start) / self.block)
            self._start = now
        if done == self.blocks * self.block:
            self.cpu = (time.process_time() - self._cpu) / done
            self.waited = self._waiting / done
            if self._waits and torch.cuda.is_available():
                self._recording = warnings.catch_warnings(record=True)
                self._warnings = self._recording.__enter__()
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
        elif done == self.blocks * self.block + 5 and self._recording is not None:
            torch.cuda.set_sync_debug_mode("default")
            for warning in self._warnings:
                if "synchronizing" in str(warning.message):
                    self.waits[f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"] += 1
            self._recording.__exit__(None, None, None)

    def reading(self) -> dict[str, Any]:
        """What was measured."""
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
        return {
            "seconds_per_step": statistics.median(self.seconds),
            "waited_per_step": self.waited,
            "cpu_seconds_per_step": self.cpu,
            "peak_device_bytes": peak,
        }


class Held:
    """An epoch of batches that are on the device before its first step.

    Args:
        batches: the loader.
        strategy: its strategy.
        count: number of batches to hold.
        draws: batches that are drawn before, to measure the loader alone.
    """

    def __init__(self, batches: Any, strategy: HoldingStrategy, count: int, draws: int) -> None:
        self._batches, self._strategy, self._count, self._draws = batches, strategy, count, draws

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        held = []
        with contextlib.closing(iter(self._batches)) as batches:
            for _ in range(min(30, self._draws)):
                next(batches)
            synchronise()
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(self._draws):
                next(batches)
            synchronise()
            wall = time.perf_counter() - start
            if self._draws:
                per_batch = (time.process_time() - cpu) / self._draws
                self._strategy.loader = {"batches_per_second": self._draws / wall, "cpu_seconds_per_batch": per_batch}
            held = [next(batches) for _ in range(self._count)]
        synchronise()
        for batch in itertools.cycle(held):
            fresh = copy.copy(batch)
            fresh.edge_index = batch.edge_index.view(2, -1)
            self._strategy._on_device[fresh] = True
            yield fresh


class HoldingStrategy(PygStrategy):
    """``strategy=pyg`` that trains on batches which are on the device before the first step."""

    held, draws = HELD, 0
    loader: dict[str, float]

    def batches(self, shard: Any, loader: Any) -> Any:
        batches = super().batches(shard, loader)
        return Held(batches, self, self.held, self.draws) if loader.split == "train" else batches


def synchronise() -> None:
    """Wait for the device."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Bench:
    """Runs of one size.

    Args:
        device: ``cuda`` or ``cpu``.
        small: a hundredth of the graph.
        seconds: time limit.
    """

    def __init__(self, device: str, small: bool, seconds: float) -> None:
        self.device, self.small, self.deadline = device, small, time.monotonic() + seconds
        scale = 100 if small else 1
        self.batch_size, self.blocks = BATCH // (8 if small else 1), 2 if small else 12
        self.held, self.draws = (4, 5) if small else (HELD, 200)
        self.graph = {
            "num_nodes": 500_000 // scale,
            "num_edges": 17_600_000 // scale,
            "num_features": 100,
            "num_classes": 47,
            "homophily": 0.9,
            "num_parts": 1,
        }

    def data(self) -> PlantedData:
        """Return the data module."""
        return PlantedData(**self.graph, batch_size=self.batch_size, num_neighbors=FAN_OUT)

    def fit(self, strategy: PygStrategy, probe: Probe, precision: str = "32-true") -> dict[str, Any]:
        """Train, and return the reading."""
        pl.seed_everything(0, verbose=False)
        network = sage(in_channels=100, hidden_channels=256, num_layers=3, out_channels=47)
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="gpu" if self.device == "cuda" else "cpu",
            devices=1,
            max_epochs=1,
            limit_train_batches=probe.steps,
            limit_val_batches=0,
            precision=precision,
            callbacks=[probe],
            **QUIET,
        )
        trainer.fit(NodeClassifier(network, 47), datamodule=self.data())
        return probe.reading()

    def probe(self, **options: Any) -> Probe:
        """Return the probe of a run on the device."""
        return Probe(5 if self.small else WARM_UP, self.blocks, 5 if self.small else BLOCK, **options)

    def late(self, reading: str) -> bool:
        """Return whether the time is up, and say so."""
        if time.monotonic() > self.deadline:
            say(reading, skipped="the time is up")
            return True
        return False


def say(reading: str, **values: Any) -> None:
    """Print a reading."""
    rounded = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in values.items()}
    print(json.dumps({"reading": reading, **rounded}), flush=True)


def on_two_cores(bench: Bench) -> float | None:
    """Return seconds per step of the same training on two CPU cores, in a separate process; None if that fails."""
    command = [sys.executable, __file__, "--on-cpu", *(["--small"] if bench.small else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    limit = max(20.0, bench.deadline - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        text = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr or ""
        say("two CPU cores", failed=f"{error} {text[-1500:]}")
        return None
    return float(json.loads(done.stdout.splitlines()[-1])["seconds_per_step"])


def main() -> None:
    """Print the readings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=70)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a hundredth of the graph")
    parser.add_argument("--on-cpu", action="store_true", help="train some steps on the CPU, for the comparison")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if options.on_cpu:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        bench = Bench("cpu", options.small, options.seconds)
        say("cpu", **bench.fit(PygStrategy(), Probe(2, 3, 2)))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        measure(Bench(options.device, options.small, options.seconds))


def measure(bench: Bench) -> None:
    """Measure everything, the most important first."""
    start = time.perf_counter()
    bench.data().prepare_data()
    say("graph", seconds=time.perf_counter() - start, cores=len(os.sched_getaffinity(0)))
    if bench.device == "cpu":
        # The stages of a device, on CPU tensors.
        PygStrategy._device_copies = lambda self: DeviceCopies(torch.device("cpu"))  # type: ignore[method-assign]
        DeviceCopies.free_bytes = lambda self: 2 << 30  # type: ignore[method-assign]
    strategy, probe = PygStrategy(), bench.probe(waits=True)
    cached = bench.fit(strategy, probe)
    used = strategy.resolved_settings()
    threads, cache_bytes = used["strategy.threads"], used["strategy.device_cache"]
    say("32-true, device cache", **cached, threads=threads, device_cache=cache_bytes)
    say("waits", of_5_steps=dict(probe.waits.most_common(12)))
    holding = HoldingStrategy()
    holding.held, holding.draws = bench.held, bench.draws
    held = bench.fit(holding, bench.probe())
    say("32-true, batches on the device", **held)
    ratio = cached["seconds_per_step"] / held["seconds_per_step"]
    say("step of training / step on batches on the device", ratio=ratio, target=1.25)
    say("loader, device cache", **holding.loader, threads=threads)
    if not bench.late("two CPU cores"):
        seconds = on_two_cores(bench)
        if seconds is not None:
            say("two CPU cores", seconds_per_step=seconds)
            say("step on two CPU cores / step of training", ratio=seconds / cached["seconds_per_step"], target=10)
    for precision, cache in (("32-true", 0), ("bf16-mixed", "auto"), ("bf16-true", "auto"), ("bf16-mixed", 0)):
        name = f"{precision}, {'no ' if cache == 0 else ''}device cache"
        if not bench.late(name):
            say(name, **bench.fit(PygStrategy(device_cache=cache), bench.probe(), precision))
    for threads, cache in ((None, 0), (1, "auto"), (4, "auto"), (8, "auto")):
        name = f"loader, {'no ' if cache == 0 else ''}device cache"
        if not bench.late(name):
            holding = HoldingStrategy(device_cache=cache, threads=threads)
            holding.held, holding.draws = 1, bench.draws // (2 if threads == 1 else 1)
            bench.fit(holding, Probe(1, 1, 1))
            say(name, **holding.loader, threads=holding.resolved_settings()["strategy.threads"])


if __name__ == "__main__":
    main()
