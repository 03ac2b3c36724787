"""Public data sets written as tables come to the same graphs as through their own sources."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from gtrain.data.sources.musae import MusaeData
from gtrain.data.sources.pyg import HeterophilousData
from gtrain.data.sources.tables import TablesData
from gtrain.data.sources.temporal import TemporalData


def edges_of(index: Tensor) -> set[tuple[int, int]]:
    return set(map(tuple, index.t().tolist()))


def test_minesweeper_with_string_keys(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    source = HeterophilousData(name="Minesweeper", root=str(real_data("heterophilous").parent), store=str(tmp_path))
    expected = source.read()
    names = [f"cell-{row}" for row in range(expected.num_nodes)]
    splits = np.full(expected.num_nodes, "", object)
    for split in ("train", "val", "test"):
        splits[expected[f"{split}_mask"][:, 0].numpy()] = split
    columns = {f"feature {column}": expected.x[:, column].numpy() for column in range(expected.x.size(1))}
    labels = np.array(["safe", "mine"])[expected.y.numpy()]
    nodes = pa.table({"cell": names, **columns, "kind": labels, "part": splits})
    pq.write_table(nodes, tmp_path / "cells.parquet")
    ends = [np.array(names)[row.numpy()] for row in expected.edge_index]
    pq.write_table(pa.table({"a": ends[0], "b": ends[1]}), tmp_path / "beside.parquet")
    entry = {"path": str(tmp_path / "cells.parquet"), "key": "cell", "label": "kind", "split": "part"}
    edges = {"path": str(tmp_path / "beside.parquet"), "source": "a", "target": "b"}
    found = TablesData(nodes=entry, edges=edges, store=str(tmp_path)).read()
    assert torch.equal(found.edge_index, expected.edge_index)
    torch.testing.assert_close(found.x, expected.x)  # zeros and ones stay as they are
    assert torch.equal(found.y, 1 - expected.y)  # "mine" comes before "safe"
    assert torch.equal(found.train_mask, expected.train_mask[:, 0])


def test_facebook_with_lists(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    folder = real_data("musae")
    expected = MusaeData(path=str(folder), store=str(tmp_path)).read()
    with (folder / "facebook_target.csv").open() as file:
        kinds = {int(row["id"]): row["page_type"] for row in csv.DictReader(file)}
    words = {int(node): ids for node, ids in json.loads((folder / "facebook_features.json").read_text()).items()}
    order = sorted(kinds)
    nodes = pa.table({"page": order, "words": [words[page] for page in order], "kind": [kinds[page] for page in order]})
    pq.write_table(nodes, tmp_path / "pages.parquet")
    entry = {"path": str(tmp_path / "pages.parquet"), "label": "kind"}
    edges = {"path": str(folder / "facebook_edges.csv"), "source": "id_1", "target": "id_2", "undirected": True}
    found = TablesData(nodes=entry, edges=edges, store=str(tmp_path)).read()
    assert edges_of(found.edge_index) == edges_of(expected.edge_index)
    assert torch.equal(found.y, expected.y)
    assert found.x.layout == torch.sparse_csr and found.x.shape == expected.x.shape
    counts = [x.to_dense().bool().sum(0).sort().values for x in (found.x, expected.x)]
    assert torch.equal(*counts)


def test_events_with_times(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    file = real_data("temporal") / "CollegeMsg.txt"
    expected = TemporalData(path=str(file), store=str(tmp_path)).read()
    entry = {"path": str(file), "separator": "space", "header": ["from", "to", "at"], "time": "at"}
    source = TablesData(edges=entry, store=str(tmp_path), task="link")
    found = source.read()
    names = source.names()["node"].to_pylist()
    assert torch.equal(found.edge_time, expected.edge_time) and found.num_nodes == len(set(names)) == 1899
    assert found.edge_index.size(1) == expected.edge_index.size(1)
