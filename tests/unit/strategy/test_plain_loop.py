"""What ``gtrain.shard`` gives one process, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import gtrain
from gtrain.errors import ConfigError, DataError


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


def test_a_module_that_cannot_be_installed_leaves_graph_and_module_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = gtrain.SarStrategy()
    graph = gtrain.shard(line(torch.float32), strategy, store=str(tmp_path))
    conv, install = SAGEConv(2, 3), strategy.install

    def install_and_fail(module: nn.Module) -> None:
        install(module)
        raise ValueError("in the middle")

    with monkeypatch.context() as patched:
        patched.setattr(strategy, "install", install_and_fail)
        with pytest.raises(ValueError, match="in the middle"), graph.exchange(conv):
            pass
    assert "propagate" not in vars(conv)
    with graph.exchange(SAGEConv(2, 3)):
        pass


def test_a_strategy_has_one_graph(tmp_path: Path) -> None:
    strategy = gtrain.SarStrategy()
    gtrain.shard(line(torch.float32), strategy, store=str(tmp_path))
    with pytest.raises(ConfigError, match="the same SarStrategy for a second graph"):
        gtrain.shard(line(torch.float32), strategy, store=str(tmp_path))


def test_lazy_layers_run_on_one_rank_and_are_refused_on_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = gtrain.SarStrategy()
    graph = gtrain.shard(line(torch.float32), strategy, store=str(tmp_path))
    conv = SAGEConv(-1, 3)
    with monkeypatch.context() as patched:
        patched.setattr(type(strategy), "world_size", 2)
        with pytest.raises(ConfigError, match="has no shape yet"), graph.exchange(conv):
            pass
    with graph.exchange(conv):
        assert conv(graph.data.x, graph.data.edge_index).shape == (5, 3)


def test_a_tensor_of_edges_with_a_name_of_the_store_is_refused(tmp_path: Path) -> None:
    graph = line(torch.float32)
    graph.edge_id = torch.arange(4)
    with pytest.raises(DataError, match="a tensor edge_id"):
        gtrain.shard(graph, store=str(tmp_path))
