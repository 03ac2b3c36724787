"""Nodes that came after training: ``gtrain export`` writes what plain PyG computes for them from the checkpoint."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from forked import gtrain
from helpers import ok
from torch import Tensor
from torch_geometric.nn import SAGEConv

SETTINGS = {
    "single": ("strategy=single",),
    "sar": ("strategy=sar", "trainer.num_nodes=2"),
    "pyg": ("strategy=pyg", "trainer.num_nodes=2", "data.num_neighbors=[-1,-1]", "data.batch_size=20"),
}


def write(folder: Path, name: str, nodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Write two tables; returns the columns of numbers [nodes, 2], and the ends of edges [2, E] by row."""
    random = np.random.default_rng(seed)
    numbers = random.normal(3, 2, (nodes, 2)).astype(np.float32)
    ends = random.integers(nodes, size=(2, 4 * nodes))
    with open(folder / f"{name}-nodes.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [("id", "age", "height", "team"), *((f"{name}{i}", *row, "ab"[i % 2]) for i, row in enumerate(numbers))]
        )
    with open(folder / f"{name}-edges.csv", "w", newline="") as file:
        csv.writer(file).writerows([("source", "target"), *((f"{name}{i}", f"{name}{j}") for i, j in ends.T)])
    return numbers, ends


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SETTINGS)
def test_new_nodes_are_embedded_by_the_checkpoint_s_weights(strategy: str, tmp_path: Path) -> None:
    old, _ = write(tmp_path, "old", 60, 0)
    new, ends = write(tmp_path, "new", 40, 1)
    tables = ("data=tables", "data.nodes={path: old-nodes.csv, label: team}", "data.edges=old-edges.csv")
    more = ("model=sage", "model.hidden_channels=8", "trainer.precision=64-true", "trainer.max_epochs=2")
    ok(gtrain(*tables, *more, *SETTINGS[strategy], "hydra.run.dir=run", cwd=tmp_path))
    there = ("data.nodes.path=new-nodes.csv", "data.edges=new-edges.csv", "output=new.parquet")
    ok(gtrain("export", "run=run", *there, cwd=tmp_path))
    table = pq.read_table(tmp_path / "new.parquet")
    key, values = (table.column(name).to_pylist() for name in (table.column_names[0], "values"))
    rows = [int(name.removeprefix("new")) for name in key]
    assert sorted(rows) == list(range(40))
    (state,) = (tmp_path / "run" / "checkpoints").glob("best.ckpt/trainer.pt")
    weights = torch.load(state, weights_only=False)["state_dict"]
    x = torch.from_numpy((new - old.mean(0, dtype=np.float64)) / old.std(0, dtype=np.float64))
    expected = embed(weights, x, torch.from_numpy(ends))
    # Features are stored as float32.
    np.testing.assert_allclose(np.array(values), expected[rows].numpy(), atol=1e-5)


def embed(weights: dict[str, Tensor], x: Tensor, ends: Tensor) -> Tensor:
    """The first layer of the network as PyG computes it, in fp64, and its activation."""
    prefix = "network.convs.0."
    own = {name.removeprefix(prefix): value.double() for name, value in weights.items() if name.startswith(prefix)}
    conv = SAGEConv(x.size(1), len(own["lin_l.weight"])).double()
    conv.load_state_dict(own)
    with torch.no_grad():
        return conv(x, ends).relu()
