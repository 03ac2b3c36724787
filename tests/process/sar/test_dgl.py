"""Unmodified convolutions of DGL over ranks: outputs and gradients are those of DGL on the whole graph."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import gtrain, python
from helpers import REPO, ok, summary

os.environ.setdefault("DGLBACKEND", "pytorch")
dgl = pytest.importorskip(
    "dgl", reason="DGL is not installed: pip install 'gtrain[dgl]' (Python 3.11)", exc_type=Exception
)

PROGRAM = REPO / "tests" / "assets" / "dgl_conv_program.py"
SETTINGS = [
    "callbacks=none",
    "logger=none",
    "trainer.limit_test_batches=0",
    "trainer.max_epochs=5",
    "model.dropout=0.5",
]
SMALL = ["data.num_nodes=300", "data.num_edges=3000", "data.num_features=12", "data.num_classes=4"]


@pytest.mark.parametrize(
    ("size", "cases", "modes"), [(2, "listed", "2"), pytest.param(3, "silent", "1,3", marks=pytest.mark.slow)]
)
def test_every_convolution_in_every_mode(size: int, cases: str, modes: str, tmp_path: Path) -> None:
    """On a graph with parallel edges, loops and isolated nodes; over three ranks, one of them is in no loss."""
    command = [str(PROGRAM), str(tmp_path), "--world", str(size), "--cases", cases, "--mode", modes]
    lines = ok(python(*command, cwd=tmp_path)).stdout.splitlines()
    (line,) = [line for line in lines if line.startswith(f"RESULT {size} ")]
    results: dict[str, Any] = json.loads(line.split(" ", 2)[2])
    assert len(results) > 50 and all(
        set(found) == {f"mode {m}" for m in modes.split(",")} for found in results.values()
    )
    wrong = {
        f"{name}, {mode}": found
        for name, figures in results.items()
        for mode, found in figures.items()
        if isinstance(found, str) or max(found.values()) > 1e-10
    }
    assert wrong == {}


def losses(folder: Path) -> list[float]:
    return [epoch["train/loss"] for epoch in summary(folder)["history"]]


def worst(expected: Path, found: Path) -> float:
    """Largest relative difference of the loss over the epochs."""
    pairs = list(zip(losses(expected), losses(found), strict=True))
    assert len(pairs) == 5
    return max(abs(a - b) / a for a, b in pairs)


@pytest.mark.slow
def test_the_commands_train_what_one_process_trains(tmp_path: Path) -> None:
    models = "model=dgl_gat,dgl_gatv2,dgl_sage"
    arguments = [models, "model.hidden_channels=16", *SMALL, *SETTINGS, "trainer.precision=64-true"]
    for name, strategy in (("single", ["strategy=single"]), ("sar", ["strategy=sar", "trainer.num_nodes=2"])):
        ok(gtrain("--multirun", *strategy, *arguments, f"hydra.sweep.dir={name}", cwd=tmp_path))
    assert [worst(tmp_path / "single" / job, tmp_path / "sar" / job) < 1e-10 for job in "012"] == [True] * 3


@pytest.mark.slow
def test_embeddings_are_the_features_that_the_last_layer_takes(tmp_path: Path) -> None:
    """A layer of DGL takes the graph before them."""
    quiet = ["logger=none", "trainer.limit_test_batches=0", "trainer.max_epochs=1"]
    ok(gtrain("strategy=single", "model=dgl_sage", *SMALL, *quiet, "hydra.run.dir=run", cwd=tmp_path))
    for name, strategy in (("one", ["strategy=single"]), ("two", ["strategy=sar", "trainer.num_nodes=2"])):
        ok(gtrain("predict", "run=run", *strategy, "embeddings=true", f"output={name}.npy", cwd=tmp_path))
    one, two = (np.load(tmp_path / f"{name}.npy") for name in ("one", "two"))
    assert one.shape == (300, 64) and np.isfinite(one).all()
    np.testing.assert_allclose(two, one, atol=1e-5)


@pytest.mark.slow
def test_relations_over_ids(tmp_path: Path) -> None:
    """Edges with types and nodes without features, in a file."""
    lines = [f"{(7 * i) % 60}\t{(11 * i + i // 60) % 60}\tr{i % 4}" for i in range(400)]
    (tmp_path / "edges.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "labels.txt").write_text("\n".join(str(node % 3) for node in range(60)) + "\n")
    data = ["data=edges", "data.path=edges.tsv", "data.labels=labels.txt", "data.relation=2", "data.root=."]
    arguments = ["model=dgl_rgcn", "model.num_bases=2", *data, *SETTINGS, "trainer.precision=64-true"]
    ok(gtrain("strategy=single", *arguments, "hydra.run.dir=single", cwd=tmp_path))
    ok(gtrain("strategy=sar", "mode=2", "trainer.num_nodes=2", *arguments, "hydra.run.dir=sar", cwd=tmp_path))
    assert worst(tmp_path / "single", tmp_path / "sar") < 1e-10


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (REPO / "docs" / "dgl.md").read_text()
    (example,) = re.findall(r"^```python\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    said = ok(python("example.py", cwd=tmp_path, env={"DGLBACKEND": "pytorch"})).stdout
    assert float(said.splitlines()[-1].removeprefix("sum of norms ")) > 0


WRITE = """
import dgl, torch
torch.manual_seed(0)
source, target = torch.randint(0, 120, (2, 1500))
graph = dgl.graph((source, target), num_nodes=120)
graph.ndata["feat"], graph.ndata["label"] = torch.randn(120, 8), torch.arange(120) % 3
for number, name in enumerate(("train_mask", "val_mask", "test_mask")):
    graph.ndata[name] = torch.arange(120) % 3 == number
dgl.distributed.partition_graph(graph, "small", 2, "parts", part_method="random")
"""


@pytest.mark.slow
def test_what_partition_graph_writes_is_trained_on(tmp_path: Path) -> None:
    """With as many ranks as parts, with one, and with another number."""
    (tmp_path / "write.py").write_text(WRITE)
    ok(python("write.py", cwd=tmp_path, env={"DGLBACKEND": "pytorch", "HOME": str(tmp_path)}))
    arguments = ["data=dgl_partition", "data.path=parts/small.json", "data.root=.", "model=dgl_gat", *SETTINGS]
    arguments.append("trainer.precision=64-true")
    ok(gtrain("strategy=single", *arguments, "hydra.run.dir=single", cwd=tmp_path))
    ok(gtrain("strategy=sar", "trainer.num_nodes=2", *arguments, "hydra.run.dir=sar", cwd=tmp_path))
    assert worst(tmp_path / "single", tmp_path / "sar") < 1e-10
    assert summary(tmp_path / "sar")["world_size"] == 2
    refused = gtrain("strategy=sar", "trainer.num_nodes=3", *arguments, cwd=tmp_path)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    said = " ".join(refused.stderr.split())
    assert "has 2 parts, and 3 ranks need one each: 2 != 3 HINT: run on 2 ranks" in said
