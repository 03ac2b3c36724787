"""gtrain.graph.shard: what one rank holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_graphs import messy_graph, random_parts, stored
from torch_geometric.data import Data, HeteroData
from typed_library import CITES, WRITES, library, library_parts, write

from gtrain.errors import StoreError
from gtrain.graph.shard import GraphShard, load_shard, load_whole
from gtrain.graph.shard.graph import HeteroShard, load_hetero_shard
from gtrain.graph.store import Store


def original_edges(store: Store, shard: GraphShard) -> list[tuple[int, int]]:
    orig = torch.cat([store.node("orig_id", p) for p in range(store.num_parts)])
    return [tuple(edge) for edge in orig[shard.global_id(shard.edge_index)].t().tolist()]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_the_shards_together_are_the_graph(tmp_path: Path, num_parts: int) -> None:
    data = messy_graph()
    store = stored(tmp_path / "s", data, random_parts(40, num_parts))
    shards = [load_shard(store, p) for p in range(num_parts)]
    wanted = sorted(map(tuple, data.edge_index.t().tolist()))
    assert sorted(sum((original_edges(store, shard) for shard in shards), [])) == wanted
    whole = load_whole(store)
    assert sorted(original_edges(store, whole)) == wanted
    assert (whole.part, whole.num_parts, whole.num_local, whole.num_halo) == (0, 1, 40, 0)
    assert torch.equal(whole.node_data["x"], data.x[whole.node_data["orig_id"]])
    assert torch.equal(whole.edge_data["edge_attr"], data.edge_attr[whole.edge_data["edge_id"]])
    for shard in shards:
        assert torch.equal(shard.edge_data["edge_weight"], data.edge_weight[shard.edge_data["edge_id"]])
        orig = torch.cat([store.node("orig_id", p) for p in range(num_parts)])
        assert torch.equal(orig[shard.global_id(shard.edge_index)], data.edge_index[:, shard.edge_data["edge_id"]])


@pytest.mark.parametrize("num_parts", [2, 4])
def test_blocks(tmp_path: Path, num_parts: int) -> None:
    store = stored(tmp_path / "s", messy_graph(), random_parts(40, num_parts))
    for part in range(num_parts):
        shard = load_shard(store, part)
        assert shard.blocks == tuple((part - r) % num_parts for r in range(num_parts))
        assert len(shard.halo) == num_parts and shard.halo[0].numel() == 0
        assert shard.num_halo == store.manifest.partition.halo[part]
        block_of_edge = torch.searchsorted(shard.block_ptr, shard.edge_index[0], right=True) - 1
        assert block_of_edge.tolist() == sorted(block_of_edge.tolist())
        for r, owner in enumerate(shard.blocks):
            low, high = shard.block_ptr[r], shard.block_ptr[r + 1]
            ids = shard.global_id(torch.arange(int(low), int(high)))
            assert ((ids >= shard.offsets[owner]) & (ids < shard.offsets[owner + 1])).all()
            assert ids.tolist() == sorted(set(ids.tolist()))
            edges = shard.edge_index[:, block_of_edge == r]
            if r:
                assert torch.equal(ids, shard.halo[r])
                assert torch.equal(edges[0].unique(), torch.arange(int(low), int(high))), "a halo node nobody reads"
            keys = [(t, s) for s, t in edges.t().tolist()]
            assert keys == sorted(keys)


def test_the_example_of_the_docstring(tmp_path: Path) -> None:
    data = Data(edge_index=torch.tensor([[0, 3, 2], [1, 1, 0]]), num_nodes=4)
    shard = load_shard(stored(tmp_path / "s", data, torch.tensor([0, 0, 1, 1])), 0)
    assert shard.blocks == (0, 1)
    assert [ids.tolist() for ids in shard.halo] == [[], [2, 3]]
    assert shard.block_ptr.tolist() == [0, 2, 4]
    assert shard.edge_index.tolist() == [[0, 2, 3], [1, 0, 1]]


def test_empty_blocks_are_kept(tmp_path: Path) -> None:
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=3)
    store = stored(tmp_path / "s", data, torch.tensor([0, 1, 2]))
    assert load_shard(store, 0).block_ptr.tolist() == [0, 1, 1, 2]
    assert load_shard(store, 2).block_ptr.tolist() == [0, 1, 1, 1]
    assert load_shard(store, 2).edge_index.shape == (2, 0)


def test_damage_is_noticed(tmp_path: Path) -> None:
    store = stored(tmp_path / "s", messy_graph(), random_parts(40, 2))
    file = tmp_path / "s" / "part-0" / "edges" / "node__to__node" / "indices.npy"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(StoreError, match=r"indices\.npy is damaged"):
        load_shard(store, 0)
    with pytest.raises(StoreError, match=r"indices\.npy is damaged"):
        load_whole(store)
    load_shard(store, 1)


# ------------------------------------------------------------------------------------------------------------- types


def original_edges_of(store: Store, shard: HeteroShard, edge_type: tuple[str, str, str]) -> list[tuple[int, int]]:
    ends = [
        torch.cat([store.node("orig_id", p, kind) for p in range(store.num_parts)])[shard.nodes[kind].global_id(ids)]
        for kind, ids in zip((edge_type[0], edge_type[2]), shard.edge_index[edge_type], strict=True)
    ]
    return [tuple(edge) for edge in torch.stack(ends).t().tolist()]


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_typed_shards_together_are_the_graph(tmp_path: Path, num_parts: int) -> None:
    data = library()
    store = write(tmp_path / "s", data, library_parts(num_parts), num_parts)
    shards = [load_hetero_shard(store, p) for p in range(num_parts)]
    for edge_type in data.edge_types:
        wanted = sorted(map(tuple, data[edge_type].edge_index.t().tolist()))
        assert sorted(sum((original_edges_of(store, shard, edge_type) for shard in shards), [])) == wanted
    for shard in shards:
        assert torch.equal(
            shard.edge_data[WRITES]["edge_weight"], data[WRITES].edge_weight[shard.edge_data[WRITES]["edge_id"]]
        )
        author = shard.node_data["author"]
        assert torch.equal(author["x"], data["author"].x[author["orig_id"]])
        assert list(shard.node_data["a/b"]) == ["orig_id"] and "val_edge_index" not in shard.edge_data[WRITES]


def test_a_types_halo_serves_all_edges_that_start_there(tmp_path: Path) -> None:
    data = library()
    data["paper", "names", "author"].edge_index = torch.tensor([[3, 7, 9], [0, 1, 2]])
    store = write(tmp_path / "s", data, library_parts(3), 3)
    for part in range(3):
        shard = load_hetero_shard(store, part)
        for kind, nodes in shard.nodes.items():
            read = [shard.edge_index[t][0] for t in store.edge_types if t[0] == kind]
            remote = torch.cat([ids[ids >= nodes.num_local] for ids in read]) if read else torch.empty(0)
            assert remote.unique().tolist() == list(range(nodes.num_local, nodes.num_local + nodes.num_halo))
            assert nodes.num_local == len(shard.node_data[kind]["orig_id"])
        for edge_type, (source, target) in shard.edge_index.items():
            block = torch.bucketize(source, shard.nodes[edge_type[0]].block_ptr[1:-1], right=True)
            within = torch.stack([block, target]).t().tolist()
            if edge_type != CITES:  # which is ordered by time before the source
                within = torch.stack([block, target, source]).t().tolist()
            assert within == sorted(within)


def test_the_example_of_the_typed_docstring(tmp_path: Path) -> None:
    data = HeteroData()
    data["author"].num_nodes, data["paper"].num_nodes = 2, 4
    data[WRITES].edge_index = torch.tensor([[0, 1], [0, 1]])
    data[CITES].edge_index = torch.tensor([[2, 1], [0, 0]])
    parts = {"author": torch.tensor([0, 1]), "paper": torch.tensor([0, 0, 1, 1])}
    shard = load_hetero_shard(write(tmp_path / "s", data, parts, 2), 0)
    author, paper = shard.nodes["author"], shard.nodes["paper"]
    assert [ids.tolist() for ids in author.halo] == [[], [1]] and author.block_ptr.tolist() == [0, 1, 2]
    assert [ids.tolist() for ids in paper.halo] == [[], [2]] and paper.block_ptr.tolist() == [0, 2, 3]
    assert shard.edge_index[WRITES].tolist() == [[0, 1], [0, 1]]
    assert shard.edge_index[CITES].tolist() == [[1, 2], [0, 0]]
