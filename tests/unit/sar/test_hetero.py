"""gtrain_sar: graphs with types, on one rank; what several ranks do is in tests/process/sar/test_hetero.py."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_geometric
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import (
    GATConv,
    GRUAggregation,
    HANConv,
    HeteroConv,
    HGTConv,
    LSTMAggregation,
    MessagePassing,
    RGCNConv,
    SAGEConv,
    TAGConv,
)
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
    (linear, edge_index, resume), (_, _, resume_another) = suspended[:2]
    assert linear.mean and linear.x is setting.batch["paper"].x and edge_index is setting.batch[CITES].edge_index
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


# ------------------------------------------------------------------------------------------- as one of several ranks


@pytest.fixture
def sharing(setting: Setting) -> Setting:
    """The setting of a rank that runs the convolutions of a layer together, as one process does not."""
    setting.relations.group = SimpleNamespace(size=2)  # type: ignore[assignment]
    return setting


def two(**options: Any) -> HeteroConv:
    return HeteroConv({WRITES: SAGEConv((4, 7), 3, **options), CITES: SAGEConv((7, 7), 3, **options)}).double()


def test_sums_over_edges_of_one_step_are_not_kept(sharing: Setting) -> None:
    """The next step's edges may be where those of the former step were in memory."""
    batch, net = sharing.batch, two()
    reference = copy.deepcopy(net)
    sharing.patcher.constants.add(v for stored in batch.stores for v in stored.values() if isinstance(v, Tensor))
    kept = [sharing.patcher.constants._results[batch[kind].x] for kind in ("author", "paper")]
    sharing.patcher.install(net)
    for step in range(5):
        edges = {kind: index[:, step::5] for kind, index in batch.edge_index_dict.items() if kind in (WRITES, CITES)}
        out = net(batch.x_dict, edges)["paper"]
        torch.testing.assert_close(out, reference(batch.x_dict, edges)["paper"], rtol=1e-10, atol=1e-10)
        out.sum().backward()
        assert not any(kept)
    for _ in range(2):
        net(batch.x_dict, {kind: batch[kind].edge_index for kind in (WRITES, CITES)})
        assert [len(results) for results in kept] == [1, 1]
    sharing.patcher.uninstall()


@pytest.mark.parametrize("aggregation", [LSTMAggregation, GRUAggregation])
def test_aggregations_that_read_edges_in_order_run_one_by_one(sharing: Setting, aggregation: Any) -> None:
    batch = sharing.batch
    edges = {kind: batch[kind].edge_index for kind in (WRITES, CITES)}
    convs = {WRITES: SAGEConv((4, 7), 3, aggr=aggregation(4, 4)), CITES: SAGEConv((7, 7), 3, aggr=aggregation(7, 7))}
    net = HeteroConv(convs).double()
    ascending = {kind: index[:, index[0].argsort()] for kind, index in edges.items()}
    sorted_edges = {kind: index[:, index[1].argsort(stable=True)] for kind, index in ascending.items()}
    expected = net(batch.x_dict, sorted_edges)["paper"]
    sharing.patcher.install(net)
    out = net(batch.x_dict, edges)["paper"]
    sharing.patcher.uninstall()
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


class OwnAggregate(MessagePassing):
    """Has no aggregation of PyG's."""

    def __init__(self) -> None:
        super().__init__(aggr=None)

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
        return inputs.new_zeros(dim_size, inputs.size(1)).index_add(0, index, inputs)


def test_a_convolution_may_aggregate_itself(sharing: Setting) -> None:
    batch = sharing.batch
    edges = {kind: batch[kind].edge_index for kind in (WRITES, CITES)}
    net = HeteroConv({WRITES: SAGEConv((4, 7), 7), CITES: OwnAggregate()}).double()
    expected = net(batch.x_dict, edges)["paper"]
    sharing.patcher.install(net)
    torch.testing.assert_close(net(batch.x_dict, edges)["paper"], expected, rtol=1e-10, atol=1e-10)
    alone = net.convs[CITES]
    torch.testing.assert_close(alone(batch["paper"].x, edges[CITES]), type(alone)()(batch["paper"].x, edges[CITES]))
    sharing.patcher.uninstall()


def test_a_layer_runs_again_in_the_autocast_of_its_first_time(setting: Setting) -> None:
    batch = setting.batch
    x_dict = {kind: batch[kind].x.float() for kind in ("author", "paper")}
    edges = {kind: batch[kind].edge_index for kind in (WRITES, CITES)}
    torch.manual_seed(0)
    net = HGTConv({"author": 4, "paper": 7}, 8, METADATA, heads=2)
    gradients = []
    for mode in (1, 2):
        patcher = TypedPatcher(setting.relations, Schedule(mode))
        patcher.install(net)
        leaves = {kind: x.clone().requires_grad_() for kind, x in x_dict.items()}
        with torch.autocast("cpu", torch.bfloat16):
            out = net(leaves, edges)["paper"]
        net.zero_grad()
        out.float().square().sum().backward()
        gradients.append([p.grad for p in (*leaves.values(), *net.parameters()) if p.grad is not None])
        patcher.uninstall()
    assert len(gradients[0]) > 8
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_network_can_be_copied_during_a_run(setting: Setting) -> None:
    batch, net = setting.batch, two()
    edges = {kind: batch[kind].edge_index for kind in (WRITES, CITES)}
    expected = net(batch.x_dict, edges)["paper"]
    setting.relations.group.lock = threading.Lock()  # type: ignore[attr-defined]  # as a group of several ranks has
    setting.patcher.install(net)
    net(batch.x_dict, edges)
    copied = copy.deepcopy(net)
    setting.patcher.uninstall()
    torch.testing.assert_close(copied(batch.x_dict, edges)["paper"], expected, rtol=1e-10, atol=1e-10)


def test_edge_types_that_a_model_makes_itself_are_refused_by_name(setting: Setting) -> None:
    batch, reverse = setting.batch, ("paper", "written by", "author")
    edges = {WRITES: batch[WRITES].edge_index, reverse: batch[WRITES].edge_index.flip(0)}
    typed = ["author", "paper"], [WRITES, reverse]
    convs = {WRITES: SAGEConv((4, 7), 3), reverse: SAGEConv((7, 4), 3)}
    for net in (HeteroConv(convs), HGTConv({"author": 4, "paper": 7}, 8, typed)):
        setting.patcher.install(net.double())
        with pytest.raises(ConfigError, match=r"does not know the edge type \('paper', 'written by', 'author'\)"):
            net(batch.x_dict, edges)
        setting.patcher.uninstall()


@pytest.mark.parametrize("kind", ["author", "paper"])
@pytest.mark.parametrize("network", ["hetero", "all types", "by name"])
def test_other_rows_than_the_parts_nodes_are_refused(setting: Setting, network: str, kind: str) -> None:
    batch = setting.batch
    edges, rows = {WRITES: batch[WRITES].edge_index, CITES: batch[CITES].edge_index}, dict(batch.x_dict)
    rows[kind] = rows[kind][:-1].clone()
    net: nn.Module = {
        "hetero": lambda: HeteroConv({WRITES: SAGEConv((4, 7), 3), CITES: SAGEConv(7, 3)}),
        "all types": lambda: HGTConv({"author": 4, "paper": 7}, 8, METADATA, heads=2),
        "by name": lambda: SAGEConv((4, 7), 3),
    }[network]().double()
    setting.patcher.install(net)
    with pytest.raises(ConfigError, match="needs a row for each node of the part"):
        net((rows["author"], rows["paper"]), edges[WRITES]) if network == "by name" else net(rows, edges)
    setting.patcher.uninstall()


def test_a_call_with_other_rows_than_the_parts_nodes_is_refused(setting: Setting) -> None:
    relation, papers = setting.relations.by_type[WRITES], setting.batch["paper"].x
    with pytest.raises(ConfigError, match="called with 49 rows"):
        argument = NodeArgument(relation.source, setting.batch["author"].x, papers[:-1])
        LayerCall(SAGEConv((4, 7), 3), relation, 50, (argument, setting.batch[WRITES].edge_index))


@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 1}])
def test_edges_without_a_relation_are_refused(setting: Setting, layers: bool, options: dict[str, int]) -> None:
    """Otherwise only the rank that has them would run the layer as PyG wrote it."""
    conv = RGCNConv(7, 3, 2, **options).double()
    patcher = TypedPatcher(setting.relations, Schedule(compiled=layers))
    patcher.install(conv)
    papers, edge_index = setting.batch["paper"].x, setting.batch[CITES].edge_index
    types = torch.zeros(edge_index.size(1), dtype=torch.int64)
    assert conv(papers, edge_index, types).shape == (50, 3)
    types[7] = 2
    with pytest.raises(DataError, match="RGCNConv has 2 relations, and its edges have the types 0 to 2"):
        conv(papers, edge_index, edge_type=types)
    patcher.uninstall()


def test_no_rank_chooses_for_itself_how_often_a_relational_convolution_passes_messages(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", True)
    setting.patcher.install(nn.ModuleList([RGCNConv(7, 3, 2), RGCNConv(7, 3, 2)]))
    assert torch_geometric.backend.use_segment_matmul is False
    setting.patcher.uninstall()
    assert torch_geometric.backend.use_segment_matmul is True
