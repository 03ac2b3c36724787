"""Relational databases in RelBench's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from relational import DAY, amounts, purchases, recommendations, write
from torch_geometric.data import HeteroData

from gtrain.callbacks.predictions import NodeIds
from gtrain.data.module import training_of
from gtrain.data.sources.relbench import ALWAYS, RelBenchData
from gtrain.errors import GtrainError


def data(folder: Path, **settings: Any) -> RelBenchData:
    return RelBenchData(path=str(folder), store=str(folder / "stores"), **{"name": "large", **settings})


def test_rows_are_nodes_and_foreign_keys_are_edges(tmp_path: Path) -> None:
    graph = data(purchases(tmp_path, "past", users=4)).read()
    assert isinstance(graph, HeteroData)
    assert {name: graph[name].num_nodes for name in graph.node_types} == {"purchases": 40, "users": 4, "task": 12}
    assert graph["purchases", "user", "users"].edge_index[:, :11].tolist() == [[*range(11)], [0] * 10 + [1]]
    assert graph["users", "rev_user", "purchases"].num_edges == 40
    assert graph["users", "rev_user", "task"].edge_index.tolist() == [[0, 1, 2, 3] * 3, [*range(12)]]
    assert not [kind for kind in graph.edge_types if kind[0] == "task"]  # no label is seen through another row
    assert graph["users"].time.tolist() == [ALWAYS] * 4
    assert graph["purchases"].time[:3].tolist() == [0, 2 * DAY, 4 * DAY]
    assert graph["task"].time.tolist() == [7 * DAY] * 4 + [13 * DAY] * 4 + [17 * DAY] * 4
    masks = [graph["task"][f"{split}_mask"].nonzero().flatten().tolist() for split in ("train", "val", "test")]
    assert masks == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert graph["users"].x.shape == (4, 2) and graph["task"].x.tolist() == [[1.0]] * 12
    torch.testing.assert_close(graph["purchases"].x.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)


def test_a_foreign_key_may_be_null(tmp_path: Path) -> None:
    purchases(tmp_path, "past", users=4)
    write(tmp_path / "db/notes.parquet", {"note": [1, 2], "user": [None, 3.0]}, "note", None, {"user": "users"})
    graph = data(tmp_path).read()
    assert graph["notes", "user", "users"].edge_index.tolist() == [[1], [3]]


def test_rows_of_the_task_are_named_by_entity_and_time(tmp_path: Path) -> None:
    source = data(purchases(tmp_path, "past", users=4))
    source.prepare_data()
    store = source.open_store()
    ids = NodeIds.of(store, "task")
    assert store.facts["keys"]["task"]["columns"] == ["user", "asked"] and len(store.names("task") or ()) == 12
    users, times = ids.arrays(np.array([0, 5]))
    task = pq.read_table(tmp_path / "tasks/large/train.parquet")
    assert users.to_pylist() == [0, 1] and times.type == task.schema.field("asked").type
    assert [str(time) for time in times.to_pylist()] == ["1970-01-08 00:00:00", "1970-01-14 00:00:00"]


def test_a_table_may_have_the_name_of_the_task(tmp_path: Path) -> None:
    purchases(tmp_path, "past", users=4)
    write(tmp_path / "db/task.parquet", {"task": [1, 2], "user": [None, 3.0]}, "task", None, {"user": "users"})
    graph = data(tmp_path).read()
    assert graph["task", "user", "users"].edge_index.tolist() == [[1], [3]] and graph["task"].num_nodes == 2
    assert graph["users", "rev_user", "task_rows"].edge_index.tolist() == [[0, 1, 2, 3] * 3, [*range(12)]]
    assert not [kind for kind in graph.edge_types if kind[0] == "task_rows"]


@pytest.mark.parametrize("splits", [("test",), ("train", "val", "test")])
def test_rows_of_a_trained_task_may_lack_labels(splits: tuple[str, ...], tmp_path: Path) -> None:
    source = data(purchases(tmp_path, "past", users=4))
    source.prepare_data()
    training = training_of(source.open_store())
    for split in splits:
        file = tmp_path / f"tasks/large/{split}.parquet"
        pq.write_table(pq.read_table(file).drop_columns(["large"]), file)
    new = data(tmp_path)
    new.follow(training)
    new.check_inputs()
    graph = new.read()
    assert "y" not in graph["task"] and graph["users", "rev_user", "task"].num_edges == 12
    with pytest.raises(GtrainError, match=r"which|has not|no column that is neither a key nor the time"):
        data(tmp_path).prepare_data()


def test_rows_of_the_task_that_are_not_distinct_are_numbered(tmp_path: Path) -> None:
    purchases(tmp_path, "past", users=4)
    file = tmp_path / "tasks/large/val.parquet"
    table = pq.read_table(file)
    pq.write_table(pa.concat_tables([table, table]), file)
    graph = data(tmp_path).read()
    assert graph["task"].num_nodes == 16
    assert graph["users", "rev_user", "task"].edge_index.tolist() == [[0, 1, 2, 3] * 4, [*range(16)]]


def test_labels_with_fractions_are_numbers_to_predict(tmp_path: Path) -> None:
    source = data(amounts(tmp_path, users=50), name="amount")
    assert source.outline is not None and source.outline["num_classes"] is None and source.outline["label_scale"]
    source.prepare_data()
    store = source.open_store()
    y = torch.cat([store.node("y", part, node_type="task") for part in range(store.num_parts)])
    trained = y[store.node("train_mask", 0, node_type="task")].double()
    assert y.dtype == torch.float32 and len(trained) == 50 and store.facts["num_classes"] is None
    scale = {"mean": float(trained.mean()), "deviation": float(trained.std(correction=0))}
    assert store.facts["label_scale"] == pytest.approx(scale) and abs(scale["mean"] - 100) < 1.5
    assert store.facts["split"]["sizes"] == {"train": 50, "val": 50, "test": 50}


def test_whole_numbers_are_classes_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    folder = purchases(tmp_path, "past", users=4)
    assert data(folder).number_labels == frozenset()
    counted = data(folder, label_kind="number")
    assert counted.number_labels == {"task"} and counted.read()["task"].y.is_floating_point()
    with pytest.raises(GtrainError, match=r"(?s)train.parquet, row 0 .*: the label is (9|10)\d\.\d+.*label_kind"):
        data(amounts(tmp_path, users=4), name="amount", label_kind="class").read()


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    purchases(tmp_path, "past", users=4)
    for settings, said in (
        ({"name": "small"}, "no such task.*the tasks are large"),
        ({"columns": {"user": {}}}, "the tables are purchases, users"),
        ({"label": "huge"}, "has no column 'huge'"),
    ):
        with pytest.raises(GtrainError, match=f"(?s){said}"):
            data(tmp_path, **settings).check_inputs()
    write(tmp_path / "db/notes.parquet", {"user": [0]}, None, None, {"user": "people"})
    with pytest.raises(GtrainError, match="refers to the table 'people'"):
        data(tmp_path).check_inputs()
    write(tmp_path / "db/notes.parquet", {"user": [9]}, None, None, {"user": "users"})
    with pytest.raises(GtrainError, match="notes.parquet, row 0 .*: the 'user' 9 is not in the node table users"):
        data(tmp_path).read()


def shop(folder: Path, **test: Any) -> RelBenchData:
    """Two users, items with times, and the questions of two days; ``test`` replaces columns of test.parquet."""
    write(folder / "db/users.parquet", {"user": ["ann", "bob"]}, "user", None, {})
    write(folder / "db/items.parquet", {"item": [7, 8, 9], "since": [0, 10, 20]}, "item", "since", {})
    write(folder / "db/sales.parquet", {"user": ["ann"], "item": [8], "at": [12]}, None, "at", KEYS)
    for split, day, items in (("train", 11, [[7, 8], []]), ("val", 15, [[9], [8, 7]]), ("test", 25, [None, [9]])):
        rows = {"day": [day, day], "user": ["ann", "bob"], "item": items, **(test if split == "test" else {})}
        write(folder / f"tasks/next/{split}.parquet", rows, None, "day", KEYS)
    return data(folder, name="next", task="link")


KEYS = {"user": "users", "item": "items"}
ANSWERS = ("users", "task", "items")


def test_answers_are_edges_without_messages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    graph = shop(tmp_path).read()
    assert isinstance(graph, HeteroData)
    assert graph.node_types == ["items", "sales", "users"]
    edges = graph[ANSWERS]
    assert edges.edge_index.shape == (2, 0) and edges.edge_time.shape == (0,)
    assert [kind for kind in graph.edge_types if "task" in kind[1]] == [ANSWERS]
    assert edges.train_edge_index.tolist() == [[0, 0], [0, 1]] and edges.train_edge_time.tolist() == [11, 11]
    # On day 15 nobody knows of the item of day 20.
    assert edges.val_edge_index.tolist() == [[1, 1], [1, 0]] and edges.val_edge_time.tolist() == [15, 15]
    assert "1 of 3 answers of val are left out" in caplog.text
    assert edges.test_edge_index.tolist() == [[1], [2]] and edges.test_edge_time.tolist() == [25]


def test_an_answer_may_be_a_single_key(tmp_path: Path) -> None:
    module = shop(tmp_path)
    for split in ("train", "val", "test"):
        rows = {"day": [30] * 3, "user": ["bob"] * 3, "item": [7, None, 9]}
        write(tmp_path / f"tasks/next/{split}.parquet", rows, None, "day", KEYS)
    edges = module.read()[ANSWERS]
    assert edges.train_edge_index.tolist() == edges.test_edge_index.tolist() == [[1, 1], [0, 2]]


def test_the_store_holds_answers_out(tmp_path: Path) -> None:
    path = recommendations(tmp_path, "past", users=20)
    module = data(path, name="next", task="link", temporal_strategy=None)
    module.prepare_data()
    store = module.open_store()
    assert [module.num_seeds(split) for split in ("train", "val", "test")] == [36, 36, 36]
    assert store.num_edges_of(ANSWERS) == 0 and store.holds_out("train", ANSWERS)
    batch = next(iter(module.train_dataloader()))
    assert batch.target == ANSWERS and batch.edge_label_index.shape == (2, 36)
    assert batch.edge_label_time.tolist() == [2 * DAY] * 36
    assert batch[ANSWERS].edge_index.numel() == 0 and not [name for name in batch[ANSWERS] if name.startswith("train")]


def test_times_of_answers_are_not_those_of_neighbours(tmp_path: Path) -> None:
    path = recommendations(tmp_path, "past", users=20)
    module = data(path, name="next", task="link", time_attr="edge_time", num_neighbors=[2, 2])
    module.prepare_data()
    with pytest.raises(GtrainError, match="its nodes alone have times"):
        module.train_dataloader().sampling_options()


def test_wrong_answers_are_named(tmp_path: Path) -> None:
    with pytest.raises(GtrainError, match="test.parquet, row 1 .*: the 'item' 6 is not in the node table items"):
        shop(tmp_path, item=[[7], [8, 6]]).read()
    with pytest.raises(
        GtrainError, match="(?s)asks which rows follow, and the model has the task node.*model.task=link"
    ):
        data(tmp_path, name="next").check_inputs()
    with pytest.raises(GtrainError, match="(?s)asks for labels, and the model has the task link"):
        data(purchases(tmp_path / "labels", "past", users=4), task="link").check_inputs()
    for split in ("train", "val", "test"):
        rows = {"day": [11, 11], "user": ["ann", "bob"], "item": [[], [9]]}
        write(tmp_path / f"tasks/next/{split}.parquet", rows, None, "day", KEYS)
    with pytest.raises(GtrainError, match="train.parquet has no answer"):
        data(tmp_path, name="next", task="link").read()
