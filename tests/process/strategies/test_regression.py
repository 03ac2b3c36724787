"""Numbers of nodes are predicted: every strategy trains what one process trains, and new nodes get numbers too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import ok, rest_exhaustive, summary

NODES = 120
SETTINGS = ["logger=none", "model.dropout=0.3", "model.hidden_channels=16", "trainer.max_epochs=4"]
NAMES = ("train/loss", "val/loss", "val/mae", "val/rmse", "val/r2")
Sweep = Callable[..., list[dict[str, Any]]]


def write(folder: Path, name: str, seed: int, first: int = 0) -> Any:
    """Write houses, whose price is that of their size and of their neighbours', and return the prices."""
    rng = np.random.default_rng(seed)
    sizes, towns = rng.normal(100, 20, NODES), rng.integers(0, 3, NODES)
    edges = rng.integers(0, NODES, (2, 4 * NODES))
    edges = np.concatenate([edges, edges[::-1]], axis=1)
    around = np.bincount(edges[1], sizes[edges[0]], NODES) / np.maximum(np.bincount(edges[1], minlength=NODES), 1)
    prices = 5000 + 30 * sizes + 40 * around + 500 * towns
    lines = ["id,size,town,price"]
    for node in range(NODES):
        price = "" if node % 10 == 9 else f"{prices[node]:.3f}"
        lines.append(f"h{first + node},{sizes[node]:.6f},t{towns[node]},{price}")
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    ends = "".join(f"h{first + a},h{first + b}\n" for a, b in edges.T)
    (folder / f"{name}_edges.csv").write_text(f"source,target\n{ends}")
    return prices


@pytest.fixture
def houses(tmp_path: Path) -> list[str]:
    write(tmp_path, "houses", 0)
    entry = f"{{path: {tmp_path}/houses.csv, label: price, label_kind: number, columns: {{size: number}}}}"
    return ["data=tables", f"data.nodes={entry}", f"data.edges={tmp_path}/houses_edges.csv"]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    def run(*overrides: str, name: str) -> list[dict[str, Any]]:
        return forked.sweep(tmp_path / name, *SETTINGS, *overrides)

    return run


def agree(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert len(expected["history"]) == 4
    for mine, other in zip(expected["history"], found["history"], strict=True):
        assert [other[name] for name in NAMES] == pytest.approx([mine[name] for name in NAMES], rel=1e-10)
    tested = [name for name in expected["metrics"] if name.startswith("test/")]
    assert sorted(tested) == ["test/loss", "test/mae", "test/r2", "test/rmse"]
    assert [found["metrics"][name] for name in tested] == pytest.approx(
        [expected["metrics"][name] for name in tested], rel=1e-10
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "loss"), rest_exhaustive([("sage", "l1"), ("gcn", "huber")], ("gcn", "huber")))
def test_whole_graphs(sweep: Sweep, houses: list[str], model: str, loss: str) -> None:
    arguments = [*houses, f"model={model}", f"model.regression_loss={loss}", "trainer.precision=64-true"]
    (single,) = sweep("strategy=single", "strategy.layers=plain", *arguments, name="single")
    (sharded,) = sweep("strategy=sar", "mode=1", "trainer.num_nodes=2", *arguments, name="sar")
    agree(single, sharded)
    lowest = min(single["history"], key=lambda epoch: epoch["val/mae"])
    best = {"name": "val/mae", "value": lowest["val/mae"], "epoch": lowest["epoch"], "direction": "min"}
    assert single["best"] == best and single["history"][-1]["val/mae"] < 4000


@pytest.mark.slow
def test_sampled_batches(sweep: Sweep, houses: list[str]) -> None:
    arguments = [*houses, "model=sage", "data.batch_size=25", "trainer.precision=64-true"]
    (single,) = sweep("strategy=single", *arguments, name="single")
    sampled = ["strategy=pyg", "data.num_neighbors=[-1,-1]", "strategy.seeds=global", "trainer.num_nodes=2"]
    (run,) = sweep(*sampled, *arguments, name="pyg")
    agree(single, run)


@pytest.mark.slow
def test_parameter_servers(sweep: Sweep, houses: list[str]) -> None:
    optimizer = "model.sparse_optimizer={_target_:gtrain.nn.Adagrad,lr:0.05}"
    arguments = [*houses, "model=sage", "data.feature_layout=sparse", "data.num_parts=1", optimizer]
    arguments.append("trainer.precision=64-true")
    (single,) = sweep("strategy=single", *arguments, name="single")
    (served,) = sweep("strategy=ps", "trainer.num_nodes=2", *arguments, name="ps")
    agree(single, served)


@pytest.mark.slow
def test_new_nodes_get_numbers_in_the_unit_of_the_labels(houses: list[str], tmp_path: Path) -> None:
    """The network fits them; without the scale of the training, predictions would be near 0, not near 12,000."""
    trained = ["strategy=sar", "mode=2", "trainer.num_nodes=2", "model=sage", "model.dropout=0"]
    trained += ["trainer.max_epochs=150", "logger=none", "hydra.run.dir=run"]
    ok(forked.gtrain(*houses, *trained, cwd=tmp_path))
    metrics = summary(tmp_path / "run")["metrics"]
    assert metrics["test/r2"] > 0.9 and metrics["test/mae"] < 300 < metrics["val/rmse"] + 300
    prices = write(tmp_path, "new", 1, first=1000)
    new = [f"data.nodes.path={tmp_path}/new.csv", f"data.edges={tmp_path}/new_edges.csv"]
    ok(forked.gtrain("predict", "run=run", *new, "format=parquet", "output=new.parquet", cwd=tmp_path))
    rows = pq.read_table(tmp_path / "new.parquet").to_pydict()
    assert rows["id"] == [f"h{1000 + node}" for node in range(NODES)]
    assert rows["prediction"] == [values[0] for values in rows["values"]]
    errors = np.abs(np.array(rows["prediction"]) - prices)
    assert errors.mean() < 400 and prices.std() > 700
    ok(forked.gtrain("test", "run=run", *new, "hydra.run.dir=tested", cwd=tmp_path))
    labelled = np.arange(NODES) % 10 != 9
    tested = json.loads((tmp_path / "tested" / "summary.json").read_text())["metrics"]
    assert tested["test/mae"] == pytest.approx(errors[labelled].mean(), rel=1e-4)


@pytest.mark.slow
def test_what_does_not_predict_numbers_is_refused(houses: list[str], tmp_path: Path) -> None:
    for setting, said in (
        ("model=sparse", "predicts classes, and the labels are numbers to predict"),
        ("model.class_weights=balanced", "model.class_weights=balanced was set, and the labels are numbers"),
        ("model.label_smoothing=0.1", "model.label_smoothing=0.1 was set, and the labels are numbers"),
        ("model.regression_loss=mse", "model.regression_loss=mse was set"),
        (
            "callbacks.checkpoint.monitor=val/acc",
            "the model does not log val/acc. It logs train/loss, val/loss, val/mae",
        ),
    ):
        refused = forked.gtrain("strategy=single", *houses, *([] if "model=" in setting else ["model=sage"]), setting,
                                cwd=tmp_path)  # fmt: skip
        assert refused.returncode and said in refused.stderr and "Traceback" not in refused.stderr, refused.stderr
        assert not (tmp_path / "data").exists(), "before the data are read"
