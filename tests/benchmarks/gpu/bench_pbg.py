"""``strategy=pbg`` on a GPU beside two cores of the same machine: seconds per epoch, and its matrix products alone.

    python tests/benchmarks/gpu/bench_pbg.py [--data FOLDER] [--seconds 60] [--device cpu --small]

FB15k-237 (272,115 triples for training) from ``FOLDER/kg/FB15k-237.tar.gz``, or a planted graph of its size: dimension
400, batches of 1,000 edges in chunks of 50 with 1,000 uniform negatives per side (PyTorch-BigGraph's defaults and its
number for FB15k), complex_diagonal, reciprocal relations, softmax, dot, row-wise Adagrad, learning rate 0.1, seed 0.

The peer is the CPU's step (``strategy.matmul=float32``) in two processes of one thread, each on a core of its own, with
tables of their own, so that they do not wait for each other: their edges per second, of some batches after the first,
give the seconds of an epoch. They run while the GPU is measured, whose process leaves these two cores. With ``--seconds
120`` or more, ``gtrain strategy=pbg trainer.devices=2`` under ``taskset`` follows: its second epoch, and its test MRR
after two epochs. An epoch of the GPU is what a callback of Lightning measures between the hooks of its start and its
end, the median of all but the first. ``products`` are the three batched products of a batch in a CUDA graph, of the
shapes that a step has, ``step`` is the whole step in a graph. Prints one JSON object per reading.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from gtrain.data.planted.kg import PlantedKGData
from gtrain.data.sources.kg import KGData
from gtrain.launch import cuda
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.nn import Adagrad, RowwiseAdagrad
from gtrain_pbg.device import kernels
from gtrain_pbg.device.batches import BatchPreparation, Ends, shape_of
from gtrain_pbg.device.kernels import DeviceRule, DeviceTable
from gtrain_pbg.device.lanes import Device
from gtrain_pbg.device.step import DeviceRules, FusedStep
from gtrain_pbg.device.tables import CommonTensors
from gtrain_pbg.edges import EdgeList
from gtrain_pbg.strategy import PBGStrategy

RATE = 0.1
CORE_BATCHES = 14
"""Batches that a core trains; the first two are not counted."""


@dataclass(frozen=True)
class Workload:
    """Numbers of the graph, of the model and of a batch."""

    entities: int = 14_541
    relations: int = 237
    triples: int = 310_116
    positions: int = 500
    dimension: int = 400
    batch: int = 1000
    near: int = 50
    far: int = 1000

    @property
    def model(self) -> dict[str, int]:
        """Settings of the model."""
        return {"dimension": self.dimension, "num_batch_negs": self.near, "num_uniform_negs": self.far}


SMALL = Workload(500, 7, 6000, 100, 32, 200, 10, 40)


class EpochTimes(pl.Callback):
    """Measures epochs of training; the device has finished at the end of one, because its losses were read."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop it."""
        self.seconds.append(time.perf_counter() - self._start)


def say(**reading: Any) -> None:
    """Print a reading."""
    print(json.dumps(reading), flush=True)


def main() -> None:
    """Take the readings, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of real data sets")
    parser.add_argument("--seconds", type=float, default=70)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a small graph, and few epochs")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true", help="without the CPU's readings")
    parser.add_argument("--step-on-core", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step_on_core is not None:
        step_on_core(arguments.step_on_core, SMALL if arguments.small else Workload())
        return
    began = time.monotonic()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch then looks for GPUs without using the driver

    def left() -> float:
        return arguments.seconds - (time.monotonic() - began)

    load, archive = SMALL if arguments.small else Workload(), find_archive(arguments.data)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = Bench(load, None if arguments.small else archive, folder, torch.device(arguments.device))
        if arguments.device == "cpu":
            # The code for GPUs on CPU tensors.
            PBGStrategy.make_device = lambda self: Device(torch.device("cpu"))  # type: ignore[method-assign]
        cores = [] if arguments.no_peer else bench.start_cores(arguments.small)
        epochs = 2 if arguments.small else arguments.epochs
        first = attempt("gpu float32", lambda: bench.train("float32", 1, epochs, scores=False))
        if "error" in first:
            first = attempt("gpu float32, without graphs", lambda: bench.train("float32", 1, epochs, graphs=False))
        bench.share(first, attempt("step float32", lambda: bench.step("float32")))
        rest: list[tuple[str, Callable[[], Any]]] = [
            ("gpu bfloat16", lambda: bench.train("bfloat16", 1, epochs, scores=False)),
            ("gpu float32, 2 epochs, test", lambda: bench.train("float32", 1, 2, scores=True)),
            ("gpu float32, 4 partitions, 3 on the device", lambda: bench.train("float32", 4, epochs - 1, device=3)),
            ("gpu float32, 4 partitions on the device", lambda: bench.train("float32", 4, epochs - 1)),
            ("step bfloat16", lambda: bench.step("bfloat16")),
            ("gpu bfloat16, 2 epochs, test", lambda: bench.train("bfloat16", 1, 2, scores=True)),
        ]
        for reading, measure in rest:
            if cores and all(core.poll() is not None for core in cores):
                bench.compare_cores(cores, first, left())
                cores = []
            if left() > 9 or arguments.small:
                attempt(reading, measure)
        if cores:
            bench.compare_cores(cores, first, left())
        if not arguments.no_peer and (arguments.seconds >= 120 or arguments.small):
            bench.compare(bench.start_peer(arguments.small), left(), first)


def step_on_core(core: int, load: Workload) -> None:
    """Train batches by the CPU's step on one core, and print edges per second."""
    from gtrain_pbg.step.layout import EdgeBatch, PartitionRows
    from gtrain_pbg.step.relations import RelationWeights, UpdateRule
    from gtrain_pbg.step.training import TrainingStep

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(core)
    model = KGEmbedding(load.entities, load.relations, **load.model)
    value = model.entities[0].weight.detach().clone()
    rows = PartitionRows(value, torch.zeros(len(value), 1), torch.full((len(value),), -1, dtype=torch.int32))
    recipe = model.recipe().groups[0]
    weights = {
        name: RelationWeights(parameter.detach().clone(), torch.zeros(len(parameter), parameter[0].numel()))
        for name, parameter in recipe.parameters.items()
    }
    step = TrainingStep(recipe, weights, torch.float32, "float32")
    rules = UpdateRule("rowwise_adagrad", RATE), UpdateRule("adagrad", RATE)
    seconds = []
    for _ in range(CORE_BATCHES):
        heads, tails = torch.randint(load.entities, (2, load.batch))
        start = time.perf_counter()  # the CPU's step draws negatives as it trains
        drawn = torch.randint(load.entities, (2, step.draws(load.batch)))
        batch = EdgeBatch(heads, torch.randint(load.relations, (load.batch,)), tails, None, (drawn[0], drawn[1]))
        step(batch, rows, rows, *rules)
        seconds.append(time.perf_counter() - start)
    timed = seconds[2:]
    say(edges_per_second=load.batch * len(timed) / sum(timed), first=seconds[0])


def attempt(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Take a reading in a forked process, and print it: an error of the device lasts as long as its process."""
    start = time.monotonic()
    if cuda.in_use():  # by an import: a fork could not use it
        reading = _taken(measure)
        say(name=name, **reading, took=round(time.monotonic() - start, 2))
        return reading
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, json.dumps(_taken(measure)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    reading = json.loads(text) if text else {"error": f"the process ended with status {status}"}
    say(name=name, **reading, took=round(time.monotonic() - start, 2))
    return reading


def _taken(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return measure()
    except BaseException as error:  # noqa: BLE001 - the other readings count too
        return {"error": f"{type(error).__name__}: {error}"[:800]}


def find_archive(folder: Path | None) -> Path | None:
    """Return the archive of FB15k-237 in a folder of data sets, or the folder with its files."""
    given = folder or os.environ.get("GTRAIN_TEST_DATA")
    if not given:
        return None
    places = [Path(given) / name for name in ("kg/FB15k-237.tar.gz", "FB15k-237.tar.gz", "kg/FB15k-237", "FB15k-237")]
    return next((path for path in places if path.exists()), None)


class Bench:
    """Trains on one graph.

    Args:
        load: numbers.
        archive: of FB15k-237; None: a planted graph.
        folder: for stores and runs.
        device: that trains.
    """

    def __init__(self, load: Workload, archive: Path | None, folder: Path, device: torch.device) -> None:
        self.load, self._archive, self._folder = load, archive, folder
        self.device_name = device
        # This process has no threads and uses no device, so that it can be forked.
        graph = attempt("workload", self._workload)
        self.entities, self.relations, self.edges = graph["entities"], graph["relations"], graph["edges"]

    @cached_property
    def device(self) -> Device:
        """The device, in the process that uses it."""
        return Device(self.device_name)

    def _workload(self) -> dict[str, Any]:
        """Make the store, and describe what is measured."""
        store = self._data(1).open_store()
        return {
            "graph": "FB15k-237" if self._archive else "planted",
            "device": torch.cuda.get_device_name() if self.device.is_cuda else "cpu tensors",
            "entities": store.num_nodes,
            "relations": int(store.facts["num_relations"]),
            "edges": store.num_edges,
            "torch": torch.__version__,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            **self.load.model,
            "batch": self.load.batch,
        }

    def _data(self, partitions: int) -> Any:
        common: dict[str, Any] = {
            "num_parts": partitions,
            "partitioner": "random",
            "batch_size": self.load.batch,
            "store": str(self._folder / f"store-{partitions}"),
        }
        if self._archive is not None:
            data: Any = KGData(path=str(self._archive), unknown="keep", **common)
        else:
            sizes = {"num_entities": self.load.entities, "num_relations": self.load.relations}
            data = PlantedKGData(
                **sizes, num_positions=self.load.positions, num_triples=self.load.triples, held_out=0.06, **common
            )
        data.edge_buckets = True
        data.prepare_data()
        return data

    def train(
        self,
        matmul: str,
        partitions: int,
        epochs: int,
        *,
        scores: bool = False,
        device: int | None = None,
        graphs: bool = True,
    ) -> dict[str, Any]:
        """Train through the strategy; return seconds per epoch, and the test MRR after the last."""
        pl.seed_everything(0, verbose=False)
        if not graphs:
            PBGStrategy.make_device = lambda run: Device(run.root_device, graphs=False)  # type: ignore[method-assign]
        data, times = self._data(partitions), EpochTimes()
        optimizers = {"optimizer": partial(Adagrad, lr=RATE), "sparse_optimizer": partial(RowwiseAdagrad, lr=RATE)}
        model = KGEmbedding(self.entities, self.relations, **self.load.model, **optimizers)  # type: ignore[arg-type]
        settings = {"num_partitions": partitions, "matmul": matmul, "device_partitions": device}
        trainer = pl.Trainer(
            strategy=PBGStrategy(**settings),
            accelerator="gpu" if self.device.is_cuda else "cpu",
            devices=1,
            max_epochs=epochs,
            default_root_dir=self._folder / f"run-{os.getpid()}",
            callbacks=[times],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        if self.device.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        trainer.fit(model, datamodule=data)
        reading: dict[str, Any] = {
            "seconds_per_epoch": statistics.median(times.seconds[1:] or times.seconds),
            "epochs": [round(value, 4) for value in times.seconds],
            "loss": float(trainer.callback_metrics["train/loss"]),
        }
        if self.device.is_cuda:
            reading["peak_mb"] = torch.cuda.max_memory_allocated() >> 20
        if scores:
            start = time.perf_counter()
            (metrics,) = trainer.test(model, datamodule=data, verbose=False)
            reading |= {"test_mrr": metrics["test/mrr"], "test_seconds": time.perf_counter() - start}
        return reading

    # ---------------------------------------------------------------------------------------- the step and its parts

    def step(self, matmul: str) -> dict[str, Any]:
        """Measure a step in a graph, its products alone, and each of its kernels, in microseconds per batch."""
        torch.manual_seed(0)
        load, device = self.load, self.device
        model = KGEmbedding(self.entities, self.relations, **load.model)
        recipe, name = model.recipe(), device.name
        value = model.entities[0].weight.detach().to(name)
        table = DeviceTable(value.clone(), value.new_zeros(len(value), 1))
        numbers = torch.tensor([RATE, 1e-10, 0.0], device=name)
        rules = DeviceRules(DeviceRule("rowwise_adagrad", numbers), DeviceRule("adagrad", numbers))
        host: dict[str, torch.Tensor] = {}
        for key, parameter in recipe.parameters.items():
            host |= {key: parameter.detach(), f"{key}.state": torch.zeros(len(parameter), parameter[0].numel())}
        common = CommonTensors(device, recipe, torch.float32, host, None)
        low = torch.bfloat16 if matmul == "bfloat16" else torch.float32
        step = FusedStep(recipe.groups[0], (table, table), rules, low, common.operators[0])
        heads, tails = torch.randint(self.entities, (2, load.batch))
        edges = EdgeList(heads, torch.randint(self.relations, (load.batch,)), tails, None)
        ends, shape = Ends(0, self.entities, self.entities), shape_of(recipe.groups[0], load.batch)
        preparation = BatchPreparation(recipe.groups[0], torch.float32, device)
        drawn = preparation.draw(1, shape, ends, ends, torch.default_generator)
        piece = preparation([edges], shape, ends, ends, drawn)
        device.prepare.synchronize()
        device.compute.follow()
        batch, values, operators = piece.tensors.batch(0), (table.value, table.value), common.operators[0]
        with device.compute():
            step(batch, shape, (ends, ends), piece.relations[0])
        device.compute.synchronize()
        buffers = step.buffers(shape)
        rows, queries, scores = (t.flatten(0, 1) for t in (buffers.rows, buffers.queries, buffers.scores))
        scores = scores[..., : shape.columns]
        by_queries, by_rows = buffers.by_queries.flatten(0, 1), buffers.by_rows.flatten(0, 1)
        products: list[tuple[str, Callable[[], Any]]] = [
            ("scores", lambda: torch.bmm(queries, rows.transpose(1, 2), out=scores)),
            ("by queries", lambda: torch.bmm(scores, rows, out=by_queries)),
            ("by rows", lambda: torch.bmm(scores.transpose(1, 2), queries, out=by_rows)),
        ]
        others: list[tuple[str, Callable[[], Any]]] = [
            ("gather", lambda: kernels.gather(values, batch.ids, shape, buffers.rows)),
            ("transform", lambda: kernels.transform(values, batch, shape, operators, buffers.queries)),
            ("loss", lambda: kernels.loss(buffers.scores, batch, shape, "softmax", 0.1, buffers.lost)),
            ("transform backward", lambda: kernels.transform_backward(
                values, batch, shape, operators, buffers.by_queries, buffers.by_ends)),
            ("relations", lambda: kernels.update_relations(batch, operators, rules.relations)),
            ("update", lambda: kernels.update_rows(
                (table, table), batch, shape, buffers.by_rows.flatten(0, 2), buffers.by_ends, rules.table)),
            ("sum", lambda: step.lost.addcmul_(buffers.lost.sum(dtype=torch.float64), batch.total)),
        ]  # fmt: skip

        def all_products() -> None:
            for _, product in products:
                product()

        whole = self._microseconds(lambda: step(batch, shape, (ends, ends), piece.relations[0]))
        alone = self._microseconds(all_products)
        # Inner products of m x K x D in each of 2 C chunks, three times.
        flops = 3 * 2 * 2 * shape.edges * shape.columns * load.dimension
        return {
            "step_us": whole,
            "products_us": alone,
            "products_share": round(alone / whole, 3),
            "products_tflops": round(flops / alone / 1e6, 1),
            "each_us": {key: self._microseconds(run) for key, run in products + others},
        }

    def _microseconds(self, work: Callable[[], Any], repeats: int = 60) -> float:
        """Return the median time of work in a CUDA graph, over nine groups of replays."""
        if not self.device.is_cuda:
            start = time.perf_counter()
            work()
            return round((time.perf_counter() - start) * 1e6, 1)
        readings = []
        with self.device.compute():
            work()
            replay = self.device.captured(work)
            for _ in range(10):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(repeats):
                    replay()
                end.record()
                end.synchronize()
                readings.append(begin.elapsed_time(end) * 1000 / repeats)
        return round(statistics.median(readings[1:]), 1)

    # ---------------------------------------------------------------------------------------- two cores

    def start_cores(self, small: bool) -> list[subprocess.Popen[str]]:
        """Start the CPU's step on two cores, and leave these to it."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 3:
            os.sched_setaffinity(0, cores[2:])
        command = [sys.executable, __file__, *(["--small"] if small else []), "--step-on-core"]
        return [
            subprocess.Popen(
                [*command, str(core)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for core in cores[:2]
        ]

    def compare_cores(self, cores: list[subprocess.Popen[str]], first: dict[str, Any], seconds: float) -> None:
        """Print the readings of two cores, and how the GPU's compares."""
        deadline, rates, first_batch = time.monotonic() + max(5.0, seconds - 3), [], 0.0
        for core in cores:
            try:
                output, _ = core.communicate(timeout=max(1.0, deadline - time.monotonic()))
                reading = json.loads(output.strip().splitlines()[-1])
                rates.append(reading["edges_per_second"])
                first_batch = reading["first"]
            except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
                core.kill()
                say(name="two cores float32, steps", error=f"{type(error).__name__}: {error}"[-600:])
                return
        epoch = self.edges / sum(rates)
        reading = {
            "name": "two cores float32, steps",
            "edges_per_second": round(sum(rates)),
            "seconds_per_epoch": epoch,
        }
        reading |= {"first_batch_seconds": first_batch}
        if "seconds_per_epoch" in first:
            reading["gpu_times_faster"] = round(epoch / first["seconds_per_epoch"], 1)
        say(**reading)

    def start_peer(self, small: bool) -> subprocess.Popen[str]:
        """Start the same training on two cores, and leave these to it."""
        prefix = [] if small else ["taskset", "-c", "0,1"]
        source = (
            ["data=kg", f"data.path={self._archive}", "data.unknown=keep"]
            if self._archive
            else ["data=planted_kg", f"data.num_entities={self.load.entities}",
                  f"data.num_positions={self.load.positions}", f"data.num_relations={self.load.relations}",
                  f"data.num_triples={self.load.triples}", "data.held_out=0.06"]
        )  # fmt: skip
        model = [f"model.{key}={value}" for key, value in self.load.model.items()]
        command = [*prefix, sys.executable, "-m", "gtrain", "strategy=pbg", "model=kg", *source, *model,
                   f"data.batch_size={self.load.batch}", "strategy.matmul=float32", "trainer.devices=2",
                   "trainer.max_epochs=2", "trainer.limit_val_batches=0", "logger=none", "seed=0",
                   "trainer.enable_progress_bar=false", f"hydra.run.dir={self._folder / 'peer'}",
                   f"paths.stores={self._folder / 'peer-stores'}"]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # for each of two workers
        return subprocess.Popen(
            command, env=environment, cwd=self._folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def compare(self, peer: subprocess.Popen[str], seconds: float, first: dict[str, Any]) -> None:
        """Print the peer's reading, and how the GPU's compares."""
        try:
            output, _ = peer.communicate(timeout=max(5.0, seconds - 5))
        except subprocess.TimeoutExpired:
            peer.kill()
            output, _ = peer.communicate()
        path = self._folder / "peer" / "summary.json"
        reading: dict[str, Any] = {"name": "two cores float32"}
        if path.exists():
            summary = json.loads(path.read_text())
            times = summary["epoch_seconds"]
            reading |= {"seconds_per_epoch": times[-1], "epochs": times, "loss": summary["metrics"]["train/loss"],
                        "test_mrr": summary["metrics"]["test/mrr"]}  # fmt: skip
            if "seconds_per_epoch" in first:
                reading["gpu_times_faster"] = round(times[-1] / first["seconds_per_epoch"], 1)
        else:
            reading["error"] = output[-600:]
        say(**reading)

    def share(self, first: dict[str, Any], products: dict[str, Any]) -> None:
        """Print the share of the products in an epoch."""
        if "products_us" in products and "seconds_per_epoch" in first:
            batches = -(-self.edges // self.load.batch)
            alone = products["products_us"] * batches / 1e6
            say(
                name="products alone in an epoch",
                seconds=alone,
                share_of_epoch=round(alone / first["seconds_per_epoch"], 3),
                share_of_step=products["products_share"],
            )


if __name__ == "__main__":
    main()
