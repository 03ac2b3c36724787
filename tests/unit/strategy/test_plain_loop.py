"""What ``gtrain.shard`` gives one process, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import gtrain
from gtrain.errors import ConfigError


def line(dtype: torch.dtype) -> Data:
    index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    return Data(x=torch.arange(10, dtype=dtype).view(5, 2), edge_index=index, mark=torch.arange(5))


def test_one_process_has_the_whole_graph_in_its_precision(tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.float32):
        graph = gtrain.shard(line(dtype), store=str(tmp_path))
        assert (graph.rank, graph.num_ranks) == (0, 1)
        assert graph.data.x.dtype == dtype
        assert graph.data.mark.equal(graph.data.orig_id)
        conv = SAGEConv(2, 3).to(dtype)
        with graph.exchange(conv):
            inside = conv(graph.data.x, graph.data.edge_index)
        whole = line(dtype)
        assert torch.allclose(inside[graph.data.orig_id.argsort()], conv(whole.x, whole.edge_index))


def test_a_second_module_and_one_without_convolutions_are_refused(tmp_path: Path) -> None:
    graph = gtrain.shard(line(torch.float32), store=str(tmp_path))
    with pytest.raises(ConfigError, match="has no message-passing layer"), graph.exchange(nn.Linear(2, 2)):
        pass
    conv = SAGEConv(2, 3)
    with graph.exchange(conv), pytest.raises(ConfigError, match="ModuleList"), graph.exchange(SAGEConv(2, 3)):
        pass
    with graph.exchange(conv):  # again, after the context has ended
        pass


@pytest.mark.parametrize("strategy", ["single", "pyg", "ps"])
def test_strategies_without_one_part_per_rank_in_full_batch_are_refused(strategy: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy={strategy}, which does not train") as refused:
        gtrain.shard(line(torch.float32), strategy)
    assert refused.value.hint == "give sar."
