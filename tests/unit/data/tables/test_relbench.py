"""Relational databases in RelBench's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from relational import DAY, purchases, write
from torch_geometric.data import HeteroData

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
