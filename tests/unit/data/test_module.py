"""gtrain.data.module: read, check, split, partition, store, open."""

from __future__ import annotations

import shutil
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
from gtrain.graph.partition import kaminpar, methods, metis
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


def test_without_pymetis_and_kaminpar_the_default_is_ldg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gtrain")
    by_metis = Counted(store=str(tmp_path), num_parts=2, partitioner="metis")
    if metis.available():
        by_metis.prepare_data()
        assert Counted(store=str(tmp_path), num_parts=2).store_path == by_metis.store_path, "auto is metis"
    monkeypatch.setattr(metis, "pymetis", None)
    monkeypatch.setattr(kaminpar, "available", lambda: False)
    module = Counted(store=str(tmp_path), num_parts=2)
    module.prepare_data()
    assert module.open_store().manifest.partition.partitioner == "ldg"
    (line,) = [record.getMessage() for record in caplog.records if "(ldg" in record.getMessage()]
    assert line.endswith("(ldg: data.partitioner=auto; pymetis and kaminpar, which cut fewer edges, are not installed)")
    with pytest.raises(ConfigError, match="pip install pymetis"):
        Counted(store=str(tmp_path / "other"), num_parts=2, partitioner="metis").prepare_data()
    with pytest.raises(ConfigError, match="pip install kaminpar"):
        Counted(store=str(tmp_path / "other"), num_parts=2, partitioner="kaminpar").prepare_data()
    if by_metis.store_path.exists():
        by_metis.prepare_data()
        assert by_metis.open_store().manifest.partition.partitioner == "metis", "made where METIS was"


@pytest.mark.slow
@pytest.mark.skipif(not (metis.available() and kaminpar.available()), reason="pymetis or kaminpar is not installed")
def test_auto_takes_the_store_of_the_method_for_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gtrain")
    small = Counted(store=str(tmp_path), num_parts=2)
    small.prepare_data()
    assert small.open_store().manifest.partition.partitioner == "metis"
    edges, small_path = small.open_store().num_edges, small.store_path
    monkeypatch.setattr(methods, "LARGE_EDGES", edges)
    large = Counted(store=str(tmp_path), num_parts=2)
    assert not large.store_path.exists(), "the store by METIS states the size, for which KaMinPar is meant"
    large.prepare_data()
    assert large.open_store().manifest.partition.partitioner == "kaminpar"
    assert f"(kaminpar: data.partitioner=auto for at least {edges:,} edges)" in caplog.text
    shutil.rmtree(small_path)
    again = Counted(store=str(tmp_path), num_parts=2)
    again.prepare_data()
    assert (again.reads, again.store_path) == (0, large.store_path)
    shutil.rmtree(large.store_path)
    unknown = Counted(store=str(tmp_path), num_parts=2)
    assert unknown.store_path == small_path, "of an unknown size"
    unknown.prepare_data()
    assert unknown.store_path == large.store_path and [path.name for path in tmp_path.iterdir()] == [
        large.store_path.name
    ]
    one = Counted(store=str(tmp_path), num_parts=1)
    one.prepare_data()
    assert one.open_store().manifest.partition.partitioner == "metis", "as before: one part is the same by any method"


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
    with pytest.raises(ConfigError, match="auto, metis, kaminpar, random, file"):
        Counted(partitioner="kahip")
    with pytest.raises(ConfigError, match="batch_size=0"):
        Counted(batch_size=0)
    with pytest.raises(ConfigError, match="data.num_parts=0"):
        Counted(num_parts=0)
