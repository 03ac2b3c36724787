"""``gtrain predict``: what is written is the same whoever computes it, and stands by the source data's ids."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import lightning.pytorch as pl
import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
import torch
from forked import gtrain
from helpers import REPO, ok, summary
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN, MLP

from gtrain.callbacks.predictions import NodeIds, PredictionWriter, check_output, format_of, last_layer, write_parquet
from gtrain.errors import ConfigError
from gtrain.graph.store import Store
from gtrain_single.strategy import SingleStrategy

SMALL = ["model=sage", "data.num_nodes=300", "data.num_edges=2400", "data.num_features=16", "data.num_classes=4"]


@pytest.mark.slow
def test_two_ranks_predict_what_one_does(tmp_path: Path) -> None:
    sharded = ["strategy=sar", "trainer.num_nodes=2", *SMALL]
    run = f"hydra.run.dir={tmp_path / 'run'}"
    ok(gtrain(*sharded, "trainer.max_epochs=2", run, cwd=tmp_path))
    quiet = ok(gtrain("predict", *sharded, "output=out/scores.parquet", cwd=tmp_path))
    assert "callbacks" not in quiet.stdout + quiet.stderr  # Lightning warns of those that the trainer had
    checkpoint = f"ckpt_path={tmp_path / 'run/checkpoints/best.ckpt'}"
    said = ok(gtrain("predict", "strategy=single", *SMALL, checkpoint, "output=out/scores.npy", cwd=tmp_path)).stdout
    assert "written: out/scores.npy" in said
    ok(gtrain("predict", *sharded, "embeddings=true", "output=out/hidden.npy", cwd=tmp_path))
    again = gtrain("predict", "strategy=single", *SMALL, checkpoint, "output=out/scores.npy", cwd=tmp_path)
    assert again.returncode == 1 and "output=out/scores.npy exists already" in again.stderr
    table, scores, hidden = (
        pq.read_table(tmp_path / "out/scores.parquet"),
        np.load(tmp_path / "out/scores.npy"),
        np.load(tmp_path / "out/hidden.npy"),
    )
    assert table.column_names == ["id", "values", "prediction"]
    assert scores.shape == (300, 4) and hidden.shape == (300, 64) and np.isfinite(hidden).all()
    assert table["id"].to_pylist() == list(range(300))
    np.testing.assert_allclose(np.stack(table["values"].to_numpy()), scores, atol=1e-6)
    np.testing.assert_array_equal(table["prediction"].to_numpy(), scores.argmax(1))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["hidden.npy", "scores.npy", "scores.parquet"]


@pytest.mark.slow
def test_ids_of_the_largest_component_are_those_of_the_data_set(tmp_path: Path) -> None:
    """Every third node is isolated; the others are a ring in Shchur et al.'s format."""
    raw, ring = tmp_path / "amazon" / "Photo" / "raw", np.array([node for node in range(30) if node % 3])
    raw.mkdir(parents=True)
    parts = {"adj": sp.csr_matrix((np.ones(20), (ring, np.roll(ring, 1))), (30, 30)), "attr": sp.eye(30, format="csr")}
    arrays = {f"{n}_{k}": getattr(m, k) for n, m in parts.items() for k in ("data", "indices", "indptr", "shape")}
    np.savez(raw / "amazon_electronics_photo.npz", labels=np.arange(30) % 2, **arrays)
    photo = ["strategy=single", "data=amazon", "data.largest_component=true", "data.root=.", "model=mlp"]
    photo += ["data.train_per_class=4", "data.val_per_class=2"]
    ok(gtrain(*photo, "trainer.max_epochs=1", cwd=tmp_path))
    ok(gtrain("predict", *photo, "output=out/scores.npy", cwd=tmp_path))
    ok(gtrain("predict", *photo, "format=parquet", "output=out/scores.parquet", cwd=tmp_path))
    scores, table = np.load(tmp_path / "out/scores.npy"), pq.read_table(tmp_path / "out/scores.parquet")
    assert table["id"].to_pylist() == [str(node) for node in ring]
    assert scores.shape == (30, 2) and np.array_equal(np.flatnonzero(np.isfinite(scores[:, 0])), ring)
    np.testing.assert_array_equal(np.stack(table["values"].to_numpy()), scores[ring])


def test_nodes_without_scores_have_no_prediction(tmp_path: Path) -> None:
    """As trainer.limit_predict_batches leaves them."""
    scores = np.array([[0.1, 0.9], [np.nan, np.nan], [0.8, 0.2]], np.float32)
    write_parquet(tmp_path / "s", scores, NodeIds(None), "node", predicts="class", labels=["x", "y"])
    table = pq.read_table(tmp_path / "s").to_pydict()
    assert table["prediction"] == [1, None, 0] and table["label"] == ["y", None, "x"]
    write_parquet(tmp_path / "n", scores[:, :1], NodeIds(None), "node", predicts="number")
    numbers = pq.read_table(tmp_path / "n").to_pydict()["prediction"]
    assert numbers == [pytest.approx(0.1), None, pytest.approx(0.8)]


def test_rows_of_a_device_and_batches_without_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without seeds in a step predicts no rows."""
    monkeypatch.syspath_prepend(REPO / "tests" / "assets")
    pretended = importlib.import_module("devices.pretended").Pretended
    store, module = SimpleNamespace(facts={}, num_nodes_of=lambda node_type: 3), pl.LightningModule()
    writer = PredictionWriter(tmp_path / "s.npy", "npy", cast(Store, store), SingleStrategy(), False, "node")
    trainer = cast(pl.Trainer, None)
    writer.on_predict_start(trainer, module)
    for seeds in ([2, 0], []):
        batch = Data(orig_id=pretended(torch.tensor([1, 0, 2])), seeds=pretended(torch.tensor(seeds).long()))
        outputs = pretended(torch.tensor([[5.0, 6.0], [7.0, 8.0]])[: len(seeds)])
        writer.on_predict_batch_end(trainer, module, outputs, batch, 0)
    writer.on_predict_end(trainer, module)
    np.testing.assert_array_equal(np.load(tmp_path / "s.npy"), [[np.nan, np.nan], [7, 8], [5, 6]])


def test_what_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="npy, parquet"):
        check_output(tmp_path / "x", "csv")
    with pytest.raises(ConfigError, match=r"output=x.csv was set; .csv is not a format(.|\n)*npy, parquet"):
        format_of("x.csv")
    assert [format_of(output) for output in (None, "x", "out/x.parquet", "x.tsv")] == ["npy", "npy", "parquet", "tsv"]
    check_output(tmp_path / "x", "pbg_hdf5")
    check_output(tmp_path / "x.npy", "npy")
    check_output(tmp_path / "x.csv", "npy")
    with pytest.raises(ConfigError, match=r"output=.*x\.tsv was set; format=npy would write(.|\n)*set format=tsv"):
        check_output(tmp_path / "x.tsv", "npy")
    (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError, match=r"output=.*x exists already"):
        check_output(tmp_path / "x", "pbg_hdf5")


class Model(pl.LightningModule):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def test_the_last_layer_is_the_one_that_makes_the_scores() -> None:
    gcn = GCN(4, 8, 2, 3, norm="BatchNorm")
    assert last_layer(Model(network=gcn)) is gcn.convs[1]
    mlp = MLP([4, 8, 3])
    assert last_layer(Model(network=nn.Sequential(mlp))) is mlp.lins[1]
    with pytest.raises(ConfigError, match="neither embed.. nor a network"):
        last_layer(Model())


KG_TABLE = ("data=planted_kg", "model=kg", "model.dimension=8", "data.num_entities=60", "data.num_positions=10")
KG_TABLE = (*KG_TABLE, "data.num_triples=400", "trainer.max_epochs=1", "logger=none", "cluster=local")


@pytest.mark.slow
def test_balanced_classes_are_those_of_the_training_on_new_nodes(tmp_path: Path) -> None:
    """New rows need no labels to be predicted, and are tested with the weights of the training's classes."""
    rng = np.random.default_rng(0)
    for name, labelled in (("old", True), ("new", True), ("bare", False)):
        sizes, ends = rng.normal(size=60), rng.integers(0, 60, (200, 2))
        rows = [
            f"n{i},{size:.4f}" + (f",{'big' if size > 0.7 else 'small'}" * labelled) for i, size in enumerate(sizes)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["id,size" + ",label" * labelled, *rows]) + "\n")
        (tmp_path / f"{name}_edges.csv").write_text("source,target\n" + "".join(f"n{a},n{b}\n" for a, b in ends))

    def files(name: str, label: str = ",label:label") -> tuple[str, ...]:
        return f"data.nodes={{path:{tmp_path}/{name}.csv{label}}}", f"data.edges={tmp_path}/{name}_edges.csv"

    model = ("model=sage", "model.class_weights=balanced", "trainer.max_epochs=2", "logger=none")
    trained = ok(gtrain("strategy=single", "data=tables", *files("old"), *model, "hydra.run.dir=run", cwd=tmp_path))
    assert "test/loss" in trained.stdout
    ok(gtrain("predict", "run=run", *files("bare", ""), "output=bare.npy", cwd=tmp_path))
    assert np.load(tmp_path / "bare.npy").shape == (60, 2)
    ok(gtrain("test", "run=run", *files("new"), "hydra.run.dir=tested", cwd=tmp_path))
    assert 0 < summary(tmp_path / "tested")["metrics"]["test/loss"] < 10
    refused = gtrain("test", "run=run", *files("bare", ""), "hydra.run.dir=refused", cwd=tmp_path)
    assert (
        refused.returncode and "has no nodes with labels in its test split, so nothing can be tested" in refused.stderr
    )


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        ("ps", ["single"]),
        pytest.param("ps", ["pbg"], marks=pytest.mark.slow),
        pytest.param("pbg", ["single", "ps"], marks=pytest.mark.slow),
        pytest.param("single", ["ps", "pbg"], marks=pytest.mark.slow),
    ],
)
def test_a_table_is_read_from_a_checkpoint_of_another_strategy(writer: str, readers: list[str], tmp_path: Path) -> None:
    """Whether its rows are in the module, on servers or in partitions; bit for bit."""
    cut = {"pbg": ["strategy.num_partitions=2"], "ps": ["strategy.servers=2", "strategy.split=row"]}
    ok(gtrain(f"strategy={writer}", *cut.get(writer, []), *KG_TABLE, "hydra.run.dir=run", cwd=tmp_path))
    checkpoint = "ckpt_path=run/checkpoints/last.ckpt"
    found = {}
    for strategy in (writer, *readers):
        own = [
            *cut.get(strategy, []),
            *KG_TABLE,
            checkpoint,
            f"output={strategy}.npy",
            f"data.store={tmp_path / strategy}",
        ]
        ok(gtrain("predict", f"strategy={strategy}", *own, cwd=tmp_path))
        found[strategy] = np.load(tmp_path / f"{strategy}.npy")
    assert np.abs(found[writer]).max() > 0
    for reader in readers:
        np.testing.assert_array_equal(found[reader], found[writer])
        done = gtrain(f"strategy={reader}", *cut.get(reader, []), *KG_TABLE, checkpoint, cwd=tmp_path)
        assert f"was written by strategy={writer}; strategy={reader} reads its parameters to test" in done.stderr
