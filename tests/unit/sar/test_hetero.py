"""gtrain_sar: graphs with types, on one rank; what several ranks do is in tests/process/sar/test_hetero.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HANConv, HeteroConv, HGTConv, RGCNConv, SAGEConv, TAGConv
from torch_geometric.nn.norm import HeteroBatchNorm
from torch_geometric.nn.to_hetero_with_bases_transformer import HeteroBasisConv
from typed_library import CITES, WRITES, library, library_parts, write

from gtrain.data.batches.loader import hetero_shard_batch, split_batch
from gtrain.engine.schedule import Schedule
from gtrain.errors import ConfigError, DataError
from gtrain.graph.shard.graph import HeteroShard, load_hetero_shard
from gtrain.graph.store import Store
from gtrain.strategy.group import Group
from gtrain_sar import unsupported
from gtrain_sar.hetero import LayerCall, MultipleHopsError, NodeArgument, Relations, TypedPatcher, suspend_at_propagate
from gtrain_sar.strategy import check_parts_agree

METADATA = (["author", "paper"], [WRITES, CITES])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    data = library()
    data["paper"].x = data["paper"].x.to_dense()
    data["paper"].val_mask = ~data["paper"].train_mask
    return write(tmp_path / "s", data, library_parts(1), 1)


class Setting:
    """A typed shard on one rank, with what runs networks over it."""

    def __init__(self, store: Store) -> None:
        self.shard = load_hetero_shard(store, 0)
        self.batch: HeteroData = hetero_shard_batch(self.shard, store, torch.float64)
        self.batch.target = "paper"
        self.relations = Relations(Group(), self.shard)
        self.relations.register(self.batch.edge_index_dict)
        self.patcher = TypedPatcher(self.relations, Schedule())

    def call(self, conv: nn.Module) -> LayerCall:
        papers = NodeArgument(self.relations.exchanges["paper"], self.batch["paper"].x, pair=False)
        return LayerCall(conv, self.relations.by_type[CITES], 50, (papers, self.batch[CITES].edge_index))


@pytest.fixture
def setting(store: Store) -> Setting:
    return Setting(store)


def test_a_batch_has_own_rows_and_seeds_of_the_target(setting: Setting) -> None:
    batch = split_batch(setting.batch, "val")
    assert batch["paper"].val_mask[batch.seeds].all() and batch.batch_size == int(batch["paper"].val_mask.sum())
    assert batch["author"].x.dtype == batch[CITES].edge_attr.dtype == torch.float64
    assert batch["a/b"].num_nodes == 2 and "x" not in batch["a/b"]
    assert batch["author"].n_id.tolist() == list(range(30))
    assert split_batch(setting.batch, "predict").seeds.tolist() == list(range(50))


def test_a_module_is_left_as_it_was_found(setting: Setting) -> None:
    hetero = HeteroConv({WRITES: SAGEConv((4, 7), 3), CITES: GATConv(7, 3)})
    module = nn.ModuleList([hetero, HGTConv({"author": 4, "paper": 7}, 8, METADATA, heads=2)]).double()
    before = [(set(layer.__dict__), len(layer._forward_hooks)) for layer in module.modules()]
    setting.patcher.install(module)
    assert all("forward" in layer.__dict__ for layer in module)
    setting.patcher.uninstall()
    assert [(set(layer.__dict__), len(layer._forward_hooks)) for layer in module.modules()] == before


def test_own_methods_come_back_for_a_while(setting: Setting) -> None:
    conv = GATConv(7, 3)
    setting.patcher.install(conv)
    shadow = conv.__dict__["propagate"]
    with setting.patcher.patches.suspended(conv, propagate=lambda conv, *_: 5):
        assert conv.propagate() == 5 and "edge_updater" not in conv.__dict__
    assert conv.__dict__["propagate"] is shadow and "edge_updater" in conv.__dict__


def test_the_relation_is_told_by_edges_by_name_or_not_at_all(setting: Setting) -> None:
    batch, relations = setting.batch, setting.relations
    convs = nn.ModuleDict({"paper__cites__paper": SAGEConv(7, 3), "other": SAGEConv(7, 3)}).double()
    setting.patcher.install(convs)
    x, copied = batch["paper"].x, batch[CITES].edge_index.clone()
    assert torch.equal(
        convs["other"](x, batch[CITES].edge_index), convs["other"](x, edge_index=batch[CITES].edge_index)
    )
    assert convs["paper__cites__paper"](x, copied).shape == (50, 3)
    with relations.inside(relations.by_type[CITES]):
        assert convs["other"](x, copied).shape == (50, 3)
    with pytest.raises(ConfigError, match="does not know the edge type of SAGEConv"):
        convs["other"](x, copied)
    with pytest.raises(ConfigError, match="a convolution"):
        Relations(Group(), setting.shard).current()


def test_linear_convolutions_are_broken_off_at_propagate(setting: Setting) -> None:
    convs = nn.ModuleList([SAGEConv(7, 3), TAGConv(7, 3), GATConv(7, 3), SAGEConv(7, 3, aggr="max")]).double()
    setting.patcher.install(convs)
    suspended = [suspend_at_propagate(setting.call(conv), setting.patcher.context) for conv in convs]
    assert suspended[0] is not None and suspended[1] is not None and suspended[2] is None and suspended[3] is None
    (linear, resume), (_, resume_another) = suspended[:2]
    assert linear.mean and linear.x is setting.batch["paper"].x
    assert resume(torch.zeros(50, 7).double()).shape == (50, 3)
    with pytest.raises(MultipleHopsError):
        resume_another(torch.zeros(50, 7).double())


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (HANConv({"author": 4, "paper": 7}, 8, METADATA), "an average over all nodes"),
        (HeteroBasisConv(SAGEConv(7, 3), 2, 2), "into one numbering"),
        (HeteroBatchNorm(4, 2), "statistics over all nodes"),
    ],
)
def test_layers_that_look_at_all_nodes_are_refused(layer: nn.Module, reason: str) -> None:
    assert reason in str(unsupported.reason(layer))
    assert unsupported.reason(HGTConv(8, 8, METADATA)) is None


def test_a_relational_convolution_needs_features_or_ids(setting: Setting) -> None:
    conv = RGCNConv(50, 3, 2)
    setting.patcher.install(conv)
    with pytest.raises(ConfigError, match="RGCNConv was called without features"):
        conv(None, setting.batch[CITES].edge_index, torch.zeros(300, dtype=torch.int64))


class Rank(Group):
    """A rank of two, whose peer says something else."""

    def __init__(self, peer: HeteroShard) -> None:
        super().__init__()
        self._peer = peer

    def all_gather_object(self, value: Any) -> list[Any]:
        from gtrain_sar.strategy import _description

        return [_description(self._peer), value]


def test_parts_that_differ_are_refused_in_a_sentence(store: Store) -> None:
    first, second = load_hetero_shard(store, 0), load_hetero_shard(store, 0)
    check_parts_agree(Rank(first), second)
    second.node_data["author"]["x"] = torch.zeros(30, 5)
    with pytest.raises(DataError, match=r"in the node type author: part 1 has .*x \(float32 x 5\), part 0 has .* x 4"):
        check_parts_agree(Rank(first), second)
    del first.node_data["a/b"]
    second.node_data["author"]["x"] = torch.zeros(30, 4)
    with pytest.raises(DataError, match="in the node type a/b: part 1 has orig_id .*, part 0 has nothing"):
        check_parts_agree(Rank(first), second)
