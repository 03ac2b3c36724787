"""gtrain.data.prepare.graph: a warning where edges are not sorted by time, whatever their source."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import gtrain.data.sources.edges as data_edges
import gtrain.graph.store.files as graph_files
from gtrain.data.prepare.graph import warn_unsorted
from gtrain.data.sources.edges import EdgesData
from gtrain.graph.store.tables import EdgeArrays, Graph

TOLD = "here: the times of edges{} are not in order; each node's edges are sorted by time"


def hetero(times: list[int]) -> HeteroData:
    graph = HeteroData()
    graph["a", "to", "b"].edge_time = torch.tensor([1, 2])
    graph["b", "to", "a"].edge_time = torch.tensor(times)
    return graph


@pytest.mark.parametrize(
    ("graph", "whose"),
    [
        (Data(edge_time=torch.tensor([1, 3, 2])), ""),
        (Data(edge_time=torch.tensor([1, 2, 2, 3])), None),
        (Data(edge_time=torch.tensor([1, 2, 1, 2])), None),  # both directions
        (Data(edge_time=torch.tensor([2, 1, 2, 1])), ""),
        (Data(edge_time=torch.tensor([1, 3, 1, 2])), ""),
        (Data(edge_index=torch.zeros(2, 0, dtype=torch.int64)), None),
        (hetero([1, 1]), None),
        (hetero([5, 4, 6]), " of b,to,a"),
    ],
)
def test_graphs(graph: Graph, whose: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gtrain")
    warn_unsorted(graph, "here")
    assert caplog.messages == ([] if whose is None else [TOLD.format(whose)])


def test_across_pieces_of_a_list_on_disk(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(graph_files, "CHUNK_ROWS", 2)
    caplog.set_level(logging.INFO, "gtrain")
    ends = np.zeros(4, np.int64)
    warn_unsorted(EdgeArrays(1, ends, ends, {"edge_time": np.array([1, 5, 4, 6])}), "here")
    assert caplog.messages == [TOLD.format("")]


@pytest.mark.parametrize("in_memory", [0, 100])
def test_an_edge_list(
    in_memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A list in order is not told of, although its second directions come after all the first."""
    monkeypatch.setattr(data_edges, "IN_MEMORY_EDGES", in_memory)
    caplog.set_level(logging.INFO, "gtrain")
    for times, expected in (([1, 2, 3], 0), ([1, 3, 2], 1)):
        caplog.clear()
        path = tmp_path / "edges"
        path.write_text("".join(f"{i} {i + 1} {time}\n" for i, time in enumerate(times)))
        options = {"columns": [0, 1], "time": 2, "undirected": True, "num_parts": 1}
        EdgesData(
            path=str(path), root=str(tmp_path), store=str(tmp_path / "stores"), task="link", **options
        ).prepare_data()
        assert sum("not in order" in message for message in caplog.messages) == expected, caplog.messages
