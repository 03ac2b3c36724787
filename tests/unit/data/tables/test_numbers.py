"""Labels of tables that are numbers to predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from gtrain.data.module import training_of
from gtrain.data.sources.tables import TablesData
from gtrain.errors import GtrainError

PRICES = "id,rooms,price,part\na,1,100.5,train\nb,2,,train\nc,3,300,train\nd,4,NaN,val\ne,5,-7,val\nf,6,8,test\n"
ENTRY = {"label": "price", "label_kind": "number"}


def data(folder: Path, text: str = PRICES, name: str = "houses.csv", **entry: Any) -> TablesData:
    (folder / name).write_text(text)
    nodes = {"path": str(folder / name), **ENTRY, **entry}
    return TablesData(store=str(folder / "stores"), nodes=nodes)


def labels(source: TablesData) -> list[float]:
    source.prepare_data()
    store = source.open_store()
    y, ids = (torch.cat([store.node(name, part) for part in range(store.num_parts)]) for name in ("y", "orig_id"))
    assert y.dtype == torch.float32
    return [float(value) for value in y[torch.argsort(ids)]]


def test_a_missing_number_is_no_label(tmp_path: Path) -> None:
    source = data(tmp_path, split="part")
    np.testing.assert_equal(labels(source), [100.5, np.nan, 300, np.nan, -7, 8])
    assert source.facts["split"]["sizes"] == {"train": 2, "val": 1, "test": 1}
    assert source.facts["label_scale"] == {"mean": 200.25, "deviation": 99.75}
    assert source.facts["num_classes"] is None and source.facts["multilabel"] is None
    assert source.facts["num_features"] == 1  # the rooms


def test_numbers_of_a_frame_and_in_a_table_of_their_own(tmp_path: Path) -> None:
    nodes = {
        "frame": pa.table({"id": ["a", "b", "c"], "size": [1, 2, 3]}),
        "labels": {"frame": pa.table({"id": ["c", "a", "c"], "price": [3, 1, 3]}), **ENTRY},
    }
    np.testing.assert_equal(labels(TablesData(store=str(tmp_path), nodes=nodes)), [1, np.nan, 3])


def test_several_types(tmp_path: Path) -> None:
    nodes = {
        "house": {"frame": pa.table({"id": [1, 2, 3], "price": [1.5, None, 2.5]}), **ENTRY},
        "owner": {"frame": pa.table({"id": [7, 8, 9], "job": ["x", "y", "x"]}), "label": "job"},
    }
    owns = {"frame": pa.table({"owner": [7, 8], "house": [1, 2]}), "source_type": "owner", "target_type": "house"}
    for target, classes in (("house", None), ("owner", 2)):
        source = TablesData(store=str(tmp_path), nodes=nodes, edges={"owns": owns}, target=target)
        source.prepare_data()
        assert source.facts["num_classes"] == classes and source.facts["target"] == target
        assert ("label_scale" in source.facts) == (target == "house")
        assert source.number_labels == {"house"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,price\na,1\nb,dear\n", r"houses.csv, line 3: the column 'price' has 'dear', which is not a number"),
        ("id,price\na,1\nb,inf\n", "houses.csv, line 3: the label is inf"),
        ("id,price\na,1\nb,1e39\n", r"houses.csv, line 3: the label is 1e\+39"),
        ("id,price\na,5\nb,5\nc,\n", "all 2 labels are 5, and a model needs two numbers at least"),
        ("id,price\na,\nb,\n", "none of 2 nodes has a label"),
    ],
)
def test_wrong_numbers(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(GtrainError, match=said):
        data(tmp_path, text).prepare_data()


def test_wrong_settings(tmp_path: Path) -> None:
    apart = {"id": ["a", "a"], "price": [1.0, 2.0]}
    nodes: dict[str, Any] = {"frame": pa.table({"id": ["a", "b"]}), "labels": {"frame": pa.table(apart), **ENTRY}}
    with pytest.raises(GtrainError, match="row 1 .*: the label 2.0; the same node has the label 1.0 in .* row 0"):
        TablesData(store=str(tmp_path), nodes=nodes).read()
    with pytest.raises(GtrainError, match="(?s)data.nodes.label_kind=float was set.*choose one of class: .*; number: "):
        data(tmp_path, label_kind="float")
    with pytest.raises(GtrainError, match="(?s)row 0 .*: the label is 100.5.*set label_kind to number"):
        frame = pa.table({"id": ["a", "b"], "price": [100.5, 2]})
        TablesData(store=str(tmp_path), nodes={"frame": frame, "label": "price"}).read()
    with pytest.raises(GtrainError, match="the column 'done' holds bool, and numbers are expected"):
        frame = pa.table({"id": ["a", "b"], "done": [True, False]})
        TablesData(store=str(tmp_path), nodes={"frame": frame, **ENTRY, "label": "done"}).read()
    with pytest.raises(GtrainError, match="data.split=per_class, and the labels are numbers to predict"):
        (tmp_path / "houses.csv").write_text(PRICES)
        nodes = {"path": str(tmp_path / "houses.csv"), **ENTRY}
        TablesData(store=str(tmp_path), nodes=nodes, split="per_class").prepare_data()


def test_texts_of_numbers_are_classes_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = data(tmp_path, label_kind="class")
    assert source.read().y.tolist() == [1, -1, 2, -1, 0, 3]
    assert "the labels 'price' are 4 different texts of numbers, taken as classes" in caplog.text


def test_new_data_have_the_scale_of_the_training(tmp_path: Path) -> None:
    trained = data(tmp_path, split="part")
    trained.prepare_data()
    training = training_of(trained.open_store())
    for text, sizes in (
        ("id,rooms\nx,3\ny,4\n", None),
        ("id,rooms,price\nx,3,5\ny,4,\n", {"train": 0, "val": 0, "test": 1}),
    ):
        new = data(tmp_path, text, name=f"new{len(text)}.csv", label_kind="class")  # the model knows better
        new.follow(training)
        new.prepare_data()
        assert new.facts["label_scale"] == {"mean": 200.25, "deviation": 99.75}
        assert (new.facts["split"] and new.facts["split"]["sizes"]) == sizes


def test_the_schema_names_the_kind(tmp_path: Path) -> None:
    found = {fact.name: fact.role for fact in data(tmp_path, split="part").columns()}
    assert found == {"id": "key", "rooms": "number", "price": "label: number", "part": "split"}
