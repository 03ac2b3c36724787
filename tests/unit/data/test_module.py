"""gtrain.data.module: read, check, split, partition, store, open."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_graphs import messy_graph
from torch_geometric.data import Data

from gtrain.data.module import GraphDataModule
from gtrain.errors import ConfigError, DataError, StoreError
from gtrain.graph.partition import metis
from gtrain.graph.shard import load_whole


class Counted(GraphDataModule):
    """A source that counts how often it is read."""

    name = "counted"
    reads = 0

    def __init__(self, graph: Data | None = None, **common: Any) -> None:
        super().__init__(**common)
        self.graph = graph if graph is not None else messy_graph()

    def identity(self) -> dict[str, Any]:
        return {"nodes": self.graph.num_nodes}

    def read(self) -> Data:
        self.reads += 1
        return self.graph.clone()


def test_a_second_run_reuses_the_store(tmp_path: Path) -> None:
    first, second = (Counted(store=str(tmp_path / "s"), num_parts=2) for _ in range(2))
    for module in (first, second):
        module.prepare_data()
        module.setup("fit")
    assert (first.reads, second.reads) == (1, 0)
    assert first.store_path == second.store_path
    assert first.store_path.name.startswith("counted-2parts-") and len(first.store_path.name.split("-")[-1]) == 16
    assert first.facts["num_features"] == 5 and first.facts["num_classes"] == 3
    split = first.facts["split"]
    assert split["kind"] == "public" and split["sizes"]["train"] == int(first.graph.train_mask.sum())


def test_a_changed_option_makes_another_store(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"num_parts": 3},
        {"partitioner": "random"},
        {"seed": 1},
        {"split": "random"},
        {"split": "random", "val_fraction": 0.1},
        {"normalize_features": True},
        {"num_classes": 5},
    ]
    paths = {Counted(store=str(tmp_path), **option).store_path for option in options}
    assert len(paths) == len(options)
    unrelated: list[dict[str, Any]] = [{"batch_size": 4}, {"num_neighbors": [3]}, {"train_fraction": 0.5}]
    assert {Counted(store=str(tmp_path), **option).store_path for option in unrelated} <= paths


def test_the_number_of_parts_follows_the_trainer(tmp_path: Path) -> None:
    module = Counted(store=str(tmp_path))
    assert module.num_parts == 1
    module.trainer = SimpleNamespace(world_size=4)  # type: ignore[assignment]
    assert module.num_parts == 4
    module.prepare_data()
    assert module.open_store().num_parts == 4


def test_failures_leave_nothing(tmp_path: Path) -> None:
    spoilt = messy_graph()
    spoilt.x[3, 1] = float("nan")
    with pytest.raises(DataError, match="row 3, column 1"):
        Counted(spoilt, store=str(tmp_path / "a" / "b")).prepare_data()
    with pytest.raises(DataError, match="more parts than nodes: 41 parts"):
        Counted(store=str(tmp_path / "a" / "b"), num_parts=41).prepare_data()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="is not a store"):
        Counted(store=str(tmp_path / "a")).setup("fit")


def test_own_partition(tmp_path: Path) -> None:
    file = tmp_path / "parts.npy"
    np.save(file, np.arange(40) % 2)
    module = Counted(store=str(tmp_path / "s"), num_parts=2, partitioner="file", partition_path=str(file))
    module.prepare_data()
    assert module.open_store().node("orig_id", 1).tolist() == list(range(1, 40, 2))
    with pytest.raises(ConfigError, match="neither"):
        Counted(partitioner="file")


def test_without_pymetis_the_default_is_ldg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    by_metis = Counted(store=str(tmp_path), num_parts=2, partitioner="metis")
    if metis.available():
        by_metis.prepare_data()
        assert Counted(store=str(tmp_path), num_parts=2).store_path == by_metis.store_path, "auto is metis"
    monkeypatch.setattr(metis, "pymetis", None)
    module = Counted(store=str(tmp_path), num_parts=2)
    module.prepare_data()
    assert module.open_store().manifest.partition.partitioner == "ldg"
    said = [record.getMessage() for record in caplog.records if "pymetis" in record.getMessage()]
    assert said == ["pymetis is not installed: data.partitioner=ldg instead, which may cut more edges"]
    with pytest.raises(ConfigError, match="pip install pymetis"):
        Counted(store=str(tmp_path / "other"), num_parts=2, partitioner="metis").prepare_data()
    if by_metis.store_path.exists():
        by_metis.prepare_data()
        assert by_metis.open_store().manifest.partition.partitioner == "metis", "made where METIS was"


def test_normalised_rows_and_published_splits(tmp_path: Path) -> None:
    graph = messy_graph()
    graph.x = graph.x.abs()
    graph.x[7] = 0
    graph.train_mask = torch.stack([graph.train_mask, ~graph.train_mask], dim=1)
    module = Counted(graph, store=str(tmp_path), num_parts=2, normalize_features=True, split_index=1)
    module.prepare_data()
    whole = load_whole(module.open_store())
    sums = whole.node_data["x"].sum(1)
    assert torch.allclose(sums, (whole.node_data["orig_id"] != 7).float())
    wanted = graph.train_mask[:, 1][whole.node_data["orig_id"]]
    assert torch.equal(whole.node_data["train_mask"], wanted)


def test_unlabelled_nodes_are_in_no_split(tmp_path: Path) -> None:
    graph = messy_graph()
    graph.y[:10] = -1
    module = Counted(graph, store=str(tmp_path), unlabelled=-1, split="random")
    module.prepare_data()
    assert sum(module.facts["split"]["sizes"].values()) == 30
    batches = [next(iter(loader())) for loader in (module.train_dataloader, module.val_dataloader)]
    assert all((batch.y[batch.seeds] >= 0).all() and batch.batch_size for batch in batches)
    assert next(iter(module.predict_dataloader())).batch_size == 40


def test_several_labels(tmp_path: Path) -> None:
    graph = messy_graph()
    graph.y = torch.randint(0, 2, (40, 4))
    module = Counted(graph, store=str(tmp_path))
    module.prepare_data()
    assert module.facts["multilabel"] is True and module.facts["num_classes"] == 4
    assert module.open_store().node("y", 0).dtype == torch.float32


def test_options_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="auto, metis, random, file"):
        Counted(partitioner="kahip")
    with pytest.raises(ConfigError, match="batch_size=0"):
        Counted(batch_size=0)
    with pytest.raises(ConfigError, match="data.num_parts=0"):
        Counted(num_parts=0)
