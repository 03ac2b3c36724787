"""Edges per CPU second of ``strategy=pbg``, end to end through the command, and the filtered MRR.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_pbg.py --data /data/FB15k-237 --epochs 2

The settings are those at which PyTorch-BigGraph 1.0.0 was measured: batch 5000 with 1000 batch and 1000 uniform
negatives, dimension 400 and 100, and batch 10000 with 50 and 50, dimension 100; complex_diagonal, dynamic relations,
softmax, dot, lr 0.1. CPU seconds are all of the worker's in training epochs, as ``summary.json`` has them. Without
``--data`` a graph of the same size is generated. ``--what step`` measures the training step alone.

With ``--torchbiggraph PYTHON``, the interpreter of an environment that has it (``pip install torchbiggraph==1.0.0
"setuptools<81"``), it trains the same triples as many epochs in the same run, as it is and with an allocator that keeps
what is freed; else its readings of another day stand beside.
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
from pathlib import Path

CASES = {"400": (400, 5000, 1000, 1000), "100": (100, 5000, 1000, 1000), "50+50": (100, 10000, 50, 50)}
"""Dimension, batch, batch negatives, uniform negatives."""
STOCK = {"400": (5.3, 7.7), "100": (8.1, 18.5), "50+50": (119.0, 130.0)}
"""Thousand edges per CPU second of torchbiggraph 1.0.0, as it is and with a tuned allocator, read on another day."""
TARGET = {"400": (4.5, 3.2), "100": (7.0, 3.2), "50+50": (2.7, 2.4)}
TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
PEER = Path(__file__).parent / "peers" / "pbg_torchbiggraph.py"
GENERATED = ["data=planted_kg", "data.num_entities=14541", "data.num_relations=237", "data.num_positions=500",
             "data.num_triples=310116", "data.held_out=0.06"]  # fmt: skip


def main() -> None:
    """Run the cases that were asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of a knowledge graph; without it, one is generated")
    parser.add_argument("--what", choices=["run", "step"], default="run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--matmul", nargs="+", default=["int8", "bfloat16", "float32"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=10, help="of --what step")
    parser.add_argument("--torchbiggraph", metavar="PYTHON", help="interpreter that has it; needs --data")
    arguments = parser.parse_args()
    if arguments.torchbiggraph and not arguments.data:
        parser.error("--torchbiggraph needs --data")
    print("case      matmul     k edges/CPU s   x stock   x tuned   test MRR")
    for case in arguments.cases:
        stock, tuned = STOCK[case]
        if arguments.torchbiggraph:
            (stock, mrr), (tuned, _) = (
                measure_peer(arguments.torchbiggraph, case, arguments.data, arguments.epochs, tuning)
                for tuning in ({}, TUNED)
            )
            print(
                f"{case:9} torchbiggraph {stock:9.1f} (tuned {tuned:.1f}), test MRR {mrr:.4f}, wanted x {TARGET[case]}"
            )
        for matmul in arguments.matmul:
            if arguments.what == "step":
                rate, mrr = measure_step(case, matmul, arguments.batches), float("nan")
            else:
                rate, mrr = measure_run(case, matmul, arguments.data, arguments.epochs)
            figures = f"{rate:13.1f} {rate / stock:9.2f} {rate / tuned:9.2f} {mrr:10.4f}"
            print(f"{case:9} {matmul:9} {figures}", flush=True)


def measure_run(case: str, matmul: str, data: str | None, epochs: int) -> tuple[float, float]:
    """Thousand edges per CPU second over all epochs but the first, which loads kernels, and the test MRR."""
    dimension, batch, near, far = CASES[case]
    source = GENERATED if data is None else ["data=kg", f"data.path={data}", "data.unknown=keep"]
    settings = [f"model.dimension={dimension}", f"data.batch_size={batch}", f"model.num_batch_negs={near}",
                f"model.num_uniform_negs={far}", f"strategy.matmul={matmul}", "trainer.limit_val_batches=0",
                "logger=none", "trainer.enable_progress_bar=false"]  # fmt: skip
    readings = []
    with tempfile.TemporaryDirectory() as folder:
        stores = [f"paths.stores={Path(tempfile.gettempdir()) / 'bench_pbg_stores'}"]
        command = [sys.executable, "-m", "gtrain", "strategy=pbg", "model=kg", *settings, *stores]
        first = ["data=planted_kg", "trainer.max_epochs=1", f"hydra.run.dir={folder}/first"]
        subprocess.run([*command, *first], check=True, capture_output=True)  # compiles kernels, which are kept
        for count in (1, 1 + epochs):
            place = Path(folder) / str(count)
            subprocess.run(
                [*command, *source, f"trainer.max_epochs={count}", f"hydra.run.dir={place}"],
                check=True,
                capture_output=True,
            )
            summary = json.loads((place / "summary.json").read_text())
            readings.append(sum(rank["cpu_seconds"] for rank in summary["ranks"]))
        edges = summary["throughput"]["value"] * sum(summary["epoch_seconds"]) / summary["epochs"]
    return edges * epochs / (readings[1] - readings[0]) / 1000, summary["metrics"]["test/mrr"]


def measure_peer(python: str, case: str, data: str, epochs: int, tuning: dict[str, str]) -> tuple[float, float]:
    """Thousand edges per CPU second of torchbiggraph over all epochs but the first, and its test MRR."""
    dimension, batch, near, far = CASES[case]
    command = [python, str(PEER), "--data", data, "--dimension", str(dimension), "--batch", str(batch)]
    command += ["--negatives", str(near), str(far), "--epochs", str(epochs)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **tuning})
    result = json.loads(done.stdout.rpartition("RESULT ")[2])
    return result["edges"] / result["cpu"] / 1000, result["mrr"]


def measure_step(case: str, matmul: str, batches: int) -> float:
    """Thousand edges per CPU second of the step, on random edges; the median over the batches."""
    import torch

    from gtrain.model.kg.embedding import KGEmbedding
    from gtrain_pbg.step.layout import EdgeBatch, PartitionRows
    from gtrain_pbg.step.relations import RelationWeights, UpdateRule
    from gtrain_pbg.step.training import TrainingStep

    dimension, batch, near, far = CASES[case]
    nodes, relations = 14541, 237
    model = KGEmbedding(nodes, relations, dimension=dimension, num_batch_negs=near, num_uniform_negs=far)
    table = model.entities[0].weight.detach().clone()
    rows = PartitionRows(table, table.new_zeros(nodes, 1), torch.full((nodes,), -1, dtype=torch.int32))
    recipe = model.recipe().groups[0]
    weights = {
        name: RelationWeights(parameter.detach().clone(), torch.zeros(len(parameter), parameter[0].numel()))
        for name, parameter in recipe.parameters.items()
    }
    step = TrainingStep(recipe, weights, torch.float32, matmul)
    rules, seconds = (UpdateRule("rowwise_adagrad", 0.1), UpdateRule("adagrad", 0.1)), []
    for _ in range(2 + batches):
        head, tail = torch.randint(nodes, (2, batch))
        drawn = torch.randint(nodes, (2, step.draws(batch)))
        edges = EdgeBatch(head, torch.randint(relations, (batch,)), tail, None, (drawn[0], drawn[1]))
        began = time.process_time()
        step(edges, rows, rows, *rules)
        seconds.append(time.process_time() - began)
    return batch / statistics.median(seconds[2:]) / 1000


if __name__ == "__main__":
    main()
