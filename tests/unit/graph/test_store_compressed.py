"""Dense features of which most elements are 0 are stored in CSR form, and read as the dense features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_graphs import messy_graph, random_parts, stored
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.graph.shard import load_shard, load_whole
from gtrain.graph.store import Store
from gtrain.graph.store.tables import EdgeArrays
from gtrain.graph.store.writer import write_store
from gtrain.nn import Csr
from gtrain.nn.compressed import CompressedMatrix, as_dense, is_compressed

NODES, COLUMNS = 40, 50


def bags(entries: int, *, ones: bool = False, dtype: torch.dtype = torch.float32) -> Data:
    """A graph with this number of elements other than 0 in its features, none of them in the first rows."""
    data, generator = messy_graph(NODES), torch.Generator().manual_seed(0)
    data.x = torch.zeros(NODES, COLUMNS, dtype=dtype)
    chosen = 2 * COLUMNS + torch.randperm((NODES - 2) * COLUMNS, generator=generator)[:entries]
    data.x.view(-1)[chosen] = 1 if ones else torch.randn(entries, generator=generator).to(dtype)
    return data


def read(store: Store) -> Tensor:
    """The features of all parts in the order of the source data."""
    parts = range(store.num_parts)
    order = torch.cat([store.node("orig_id", part) for part in parts]).argsort()
    return torch.cat([as_dense(store.node("x", part)) for part in parts])[order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("ones", [False, True])
def test_each_part_has_its_rows(tmp_path: Path, ones: bool, dtype: torch.dtype) -> None:
    data = bags(90, ones=ones, dtype=dtype)
    store = stored(tmp_path / "store", data, random_parts(NODES, 3))
    spec = store.manifest.node_types["node"].tensors["x"]
    assert (spec.layout, spec.nnz, spec.shape) == ("compressed", 90, (NODES, COLUMNS))
    assert spec.dtype == str(dtype).removeprefix("torch.")
    for part in range(3):
        folder = store.path / f"part-{part}/nodes/node"
        assert sorted(file.name for file in folder.glob("x.*")) == [
            "x.indices.npy",
            "x.indptr.npy",
            *([] if ones else ["x.values.npy"]),
        ]
        assert np.load(folder / "x.indptr.npy").dtype == np.int64
        assert np.load(folder / "x.indices.npy").dtype == np.int32
        assert is_compressed(store.node("x", part)) and store.node("x", part).dtype == dtype
    assert torch.equal(read(store), data.x)
    assert torch.equal(as_dense(load_whole(store).node_data["x"]), torch.cat([store.node("x", p) for p in range(3)]))
    assert is_compressed(load_whole(store).node_data["x"]) and is_compressed(load_shard(store, 1).node_data["x"])


def test_up_to_an_eighth_of_the_elements_is_compressed(tmp_path: Path) -> None:
    """2,000 elements, and 40 row offsets, which take the memory of two numbers each."""
    for entries, layout in ((2000 // 8 - 40, "compressed"), (2000 // 8 - 39, "dense")):
        data = bags(entries)
        store = stored(tmp_path / f"{entries}", data, random_parts(NODES, 2))
        assert store.manifest.node_types["node"].tensors["x"].layout == layout
        assert torch.equal(read(store), data.x)


def test_what_is_not_a_dense_matrix_of_floats_is_stored_as_before(tmp_path: Path) -> None:
    for number, x in enumerate(
        (torch.zeros(NODES, 30, dtype=torch.int64), torch.zeros(NODES, 5, 9), torch.zeros(NODES, 1))
    ):
        data = messy_graph(NODES)
        data.x, data.other = x, torch.zeros(NODES, 80)
        tensors = stored(tmp_path / f"{number}", data, random_parts(NODES, 2)).manifest.node_types["node"].tensors
        assert tensors["x"].layout == tensors["other"].layout == "dense"


def test_numbers_that_are_not_finite_are_elements(tmp_path: Path) -> None:
    data = bags(20)
    data.x[0, 0], data.x[1, 1] = float("nan"), float("inf")
    x = read(stored(tmp_path / "store", data, random_parts(NODES, 2)))
    assert torch.equal(x.isnan(), data.x.isnan()) and torch.equal(x.nan_to_num(), data.x.nan_to_num())


def test_a_matrix_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gtrain.graph.store.files.CHUNK_BYTES", 1000)
    data = bags(100)
    memory = np.memmap(tmp_path / "x", np.float32, "w+", shape=(NODES, COLUMNS))
    memory[:] = data.x.numpy()
    source, target = data.edge_index.numpy()
    graph = EdgeArrays(NODES, source, target, node_tensors={"x": memory})
    store = write_store(
        tmp_path / "s", graph, random_parts(NODES, 2), 2, source={}, facts={}, partitioner="file", seed=0
    )
    assert is_compressed(store.node("x", 0)) and torch.equal(read(store), data.x)


@pytest.mark.parametrize("entries", [90, 900])
def test_a_source_may_pass_features_in_csr_form(tmp_path: Path, entries: int) -> None:
    data = bags(entries)
    sparse = data.x.to_sparse_csr()
    x, expected = Csr(sparse.col_indices(), sparse.values(), sparse.crow_indices()), data.x
    data.x = CompressedMatrix(x, COLUMNS, torch.float32)
    store = stored(tmp_path / "store", data, random_parts(NODES, 2))
    assert is_compressed(store.node("x", 0)) == (entries == 90)
    assert torch.equal(read(store), expected)


def test_dense_features_on_request(tmp_path: Path) -> None:
    data, parts = bags(90), random_parts(NODES, 2)
    options = {"source": {}, "facts": {}, "partitioner": "file", "seed": 0}
    store = write_store(tmp_path / "s", data, parts, 2, dense_features=True, **options)  # type: ignore[arg-type]
    assert store.manifest.node_types["node"].tensors["x"].layout == "dense" and torch.equal(read(store), data.x)


def test_types_are_stored_one_by_one(tmp_path: Path) -> None:
    graph = HeteroData()
    graph["a"].x, graph["b"].x = bags(90).x, torch.rand(20, 5)
    graph["a", "to", "b"].edge_index = torch.tensor([[0, 39], [1, 19]])
    parts = {"a": random_parts(NODES, 2), "b": random_parts(20, 2)}
    store = write_store(tmp_path / "s", graph, parts, 2, source={}, facts={}, partitioner="file", seed=0)
    assert is_compressed(store.node("x", 1, "a")) and not is_compressed(store.node("x", 1, "b"))
