"""PyG's own loaders over a partitioned graph: batches are those of the source data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pyg_ranks import NAMES, NODES, PARTS, Ranks, edge_ids, hetero_graph, orig_ids
from small_graphs import messy_graph, random_parts, stored
from torch import Tensor
from torch_geometric.data import Data, HeteroData, TensorAttr
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, NodeSamplerInput, SamplerOutput
from torch_geometric.sampler.neighbor_sampler import edge_sample

from gtrain.errors import DataError
from gtrain.graph.sampling import Columns, HeteroNeighborSampler, NeighborSampler
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE
from gtrain.graph.store.writer import write_store
from gtrain_pyg.pyg_loaders import ShardFeatureStore, ShardGraphStore


def columns(store: Store, kind: Any) -> Columns:
    row, pointers = ShardGraphStore(store, range(store.num_parts))._get_edge_index(EdgeAttr(kind, EdgeLayout.CSC))
    return Columns(pointers.numpy(), row.numpy(), num_sources=store.num_nodes_of(kind[0]))


class PlainSampler(BaseSampler):
    """Samples the whole of a graph without types."""

    def __init__(self, store: Store) -> None:
        self.sampler, self.num_nodes = NeighborSampler(columns(store, EDGE_TYPE), [4, 3]), store.num_nodes

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        out = self._sample(index.node)
        out.metadata = (index.input_id, index.time)
        return out

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> Any:
        return edge_sample(index, self._sample, self.num_nodes, False, None, neg_sampling)

    def _sample(self, seeds: Tensor, times: Any = None) -> SamplerOutput:
        found = self.sampler.sample(seeds.numpy())
        tensors = [torch.from_numpy(array) for array in (found.node, found.row, found.col, found.edge)]
        return SamplerOutput(*tensors, None, found.num_sampled_nodes, found.num_sampled_edges)


class TypedSampler(BaseSampler):
    """Samples the whole of a graph with types."""

    def __init__(self, store: Store) -> None:
        counts = {kind: store.num_nodes_of(kind) for kind in store.node_types}
        self.sampler = HeteroNeighborSampler({kind: columns(store, kind) for kind in store.edge_types}, counts, [4, 3])

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> HeteroSamplerOutput:
        found = self.sampler.sample({index.input_type: index.node.numpy()})
        fields = ({k: torch.from_numpy(v) for k, v in part.items()} for part in (found.node, found.row, found.col))
        edge = {kind: torch.from_numpy(positions) for kind, positions in found.edge.items()}
        out = HeteroSamplerOutput(*fields, edge, None, found.num_sampled_nodes, found.num_sampled_edges)
        out.metadata = (index.input_id, index.time)
        return out

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> Any:
        raise NotImplementedError


@pytest.fixture
def data() -> Data:
    return messy_graph(NODES)


@pytest.fixture
def ranks(tmp_path: Path, data: Data) -> Iterator[Ranks]:
    found = Ranks(stored(tmp_path / "store", data, random_parts(NODES, PARTS)))
    found.serve(NAMES)
    yield found
    found.close()


def check(store: Store, data: Data, batch: Data) -> None:
    """All tensors of a batch are those of its nodes and edges in the source data."""
    orig, edge = orig_ids(store), edge_ids(store)
    for name in ("x", "y", "time", "train_mask"):
        assert torch.equal(batch[name], data[name][orig[batch.n_id]]), name
    source_edges = data.edge_index[:, edge[batch.e_id]]
    assert torch.equal(torch.from_numpy(orig)[batch.n_id[batch.edge_index]], source_edges)
    assert torch.equal(batch.edge_attr, data.edge_attr[edge[batch.e_id]])
    assert torch.equal(batch.edge_weight, data.edge_weight[edge[batch.e_id]])


@pytest.mark.parametrize("hosted", [[0], [0, 1, 2]])
def test_node_loader(ranks: Ranks, data: Data, hosted: list[int]) -> None:
    rows, peers = ranks.rows(hosted, NAMES)
    features = ShardFeatureStore(rows, ranks.store)
    loader = NodeLoader(
        (features, ShardGraphStore(ranks.store, hosted)),
        PlainSampler(ranks.store),
        input_nodes=torch.arange(NODES),
        batch_size=16,
        shuffle=True,
        transform=features.with_edge_tensors,
    )
    seen = []
    for batch in loader:
        check(ranks.store, data, batch)
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id if batch.input_id is not None else batch.n_id)
        seen += batch.n_id[: batch.batch_size].tolist()
    assert sorted(seen) == list(range(NODES))
    assert (len(peers.asked) == 0) == (len(hosted) == PARTS)


def test_link_loader(ranks: Ranks, data: Data) -> None:
    rows, _ = ranks.rows([1], NAMES)
    features = ShardFeatureStore(rows, ranks.store)
    pairs = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    loader = LinkLoader(
        (features, ShardGraphStore(ranks.store, [1])),
        PlainSampler(ranks.store),
        edge_label_index=(None, pairs),
        neg_sampling="binary",
        batch_size=2,
        transform=features.with_edge_tensors,
    )
    found = []
    for batch in loader:
        check(ranks.store, data, batch)
        found.append(batch.n_id[batch.edge_label_index[:, batch.edge_label == 1]])
    assert torch.equal(torch.cat(found, 1), pairs)


def test_types(tmp_path: Path) -> None:
    data = hetero_graph()
    parts = {kind: random_parts(int(data[kind].num_nodes), 2) for kind in data.node_types}
    store = write_store(tmp_path / "s", data, parts, 2, source={}, facts={}, partitioner="file", seed=0)
    names: dict[Any, Any] = {"paper": ("x",), "author": ("x", "y")} | {kind: ("edge_attr",) for kind in data.edge_types}
    ranks = Ranks(store)
    ranks.serve(names)
    rows, _ = ranks.rows([0], names)
    features, graph = ShardFeatureStore(rows, store), ShardGraphStore(store, [0, 1])
    loader = NodeLoader(
        (features, graph),
        TypedSampler(store),
        ("paper", torch.arange(50)),
        batch_size=20,
        transform=features.with_edge_tensors,
    )
    batches = list(loader)
    for batch in batches:
        assert isinstance(batch, HeteroData) and batch["paper"].batch_size in (20, 10)
        for kind, tensors in (("paper", ("x",)), ("author", ("x", "y"))):
            for name in tensors:
                assert torch.equal(batch[kind][name], data[kind][name][orig_ids(store, kind)[batch[kind].n_id]])
        for kind in data.edge_types:
            edge = edge_ids(store, kind)[batch[kind].e_id]
            assert torch.equal(batch[kind].edge_attr, data[kind].edge_attr[edge])
    assert sum(batch["paper"].batch_size for batch in batches) == 50
    row, col, _ = graph.coo([("author", "writes", "paper")])
    kind = ("author", "writes", "paper")
    ends = torch.stack(
        [torch.from_numpy(orig_ids(store, end))[index[kind]] for end, index in (("author", row), ("paper", col))]
    )
    assert torch.equal(ends, data[kind].edge_index[:, edge_ids(store, kind)])
    ranks.close()


def test_features_by_any_index(ranks: Ranks, data: Data) -> None:
    rows, peers = ranks.rows([0], NAMES)
    features = ShardFeatureStore(rows, ranks.store)
    x = data.x[orig_ids(ranks.store)]
    assert features.get_tensor_size(group_name=None, attr_name="x") == (NODES, 5)
    assert features.get_tensor_size(group_name=None, attr_name="z") is None
    for index in (None, slice(3, 50, 7), torch.tensor([5, 5, 40])):
        expected = x if index is None else x[index]
        assert torch.equal(features.get_tensor(None, "x", index), expected)
    assert torch.equal(features[None, "x", 17], x[17:18])
    assert features[None, "z", None] is None
    assert all(len(want["names"]) == 1 for _, _, fields, _ in peers.asked for want in fields["wants"])


def test_tensors_of_equal_ids_are_asked_for_together(ranks: Ranks) -> None:
    rows, peers = ranks.rows([0], NAMES)
    ids = torch.arange(NODES)
    found = ShardFeatureStore(rows, ranks.store).multi_get_tensor(
        [TensorAttr(None, "x", ids), TensorAttr(None, "time", ids), TensorAttr(None, "nothing", ids)]
    )
    assert found[0].shape == (NODES, 5) and found[1].shape == (NODES,) and found[2] is None
    assert [part for part, *_ in peers.asked] == [1, 2]


def test_the_edges_of_other_ranks_are_not_here(ranks: Ranks) -> None:
    graph = ShardGraphStore(ranks.store, [0, 2])
    with pytest.raises(DataError, match=r"this rank hosts parts \[0, 2\] of 3: another rank hosts part 1") as caught:
        graph.get_edge_index(None, EdgeLayout.CSC)
    assert caught.value.hint is not None and caught.value.hint.startswith("give the loader the seed edges")
    with pytest.raises(KeyError):
        graph.get_edge_index(None, EdgeLayout.COO)


def test_nothing_can_be_changed(ranks: Ranks) -> None:
    rows, _ = ranks.rows([0], NAMES)
    features, graph = ShardFeatureStore(rows, ranks.store), ShardGraphStore(ranks.store, [0])
    for change in (
        lambda: features.put_tensor(torch.ones(3), None, "x", None),
        lambda: features.remove_tensor(None, "x", None),
        lambda: graph.put_edge_index((torch.ones(1), torch.ones(1)), None, EdgeLayout.COO),
        lambda: graph.remove_edge_index(None, EdgeLayout.COO),
    ):
        with pytest.raises(DataError, match="cannot be changed"):
            change()
