"""gtrain.data.sources.pyg: PyTorch Geometric's data sets, read without a trace beside the raw files."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.csgraph
import torch
import torch_geometric.datasets
from torch_geometric.data import Data, Dataset, HeteroData, InMemoryDataset

from gtrain.data.readers.pyg import tidy_graph
from gtrain.data.sources.pyg import (
    AmazonData,
    CoauthorData,
    HeterophilousData,
    PlanetoidData,
    PyGData,
    components,
    largest_component,
)
from gtrain.errors import ConfigError, DataError
from gtrain.nn.compressed import as_dense, is_compressed

Real = Callable[[str], Path]


def listing(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_cora(real_data: Real, tmp_path: Path) -> None:
    shutil.copytree(real_data("planetoid/Cora"), tmp_path / "raw" / "planetoid" / "Cora")
    before = listing(tmp_path / "raw")
    module = PlanetoidData(root=str(tmp_path / "raw"), store=str(tmp_path / "s"), num_parts=2)
    module.prepare_data()
    store = module.open_store()
    assert (store.num_nodes, store.num_edges) == (2708, 10556)
    assert (module.facts["num_features"], module.facts["num_classes"]) == (1433, 7)
    assert module.facts["split"]["sizes"] == {"train": 140, "val": 500, "test": 1000}
    assert store.node("x", 0).sum(1).max() == pytest.approx(1.0, abs=1e-5)
    assert store.manifest.partition.edge_cut < 900  # a random cut severs about 5278
    assert listing(tmp_path / "raw") == before
    direct = PlanetoidData(root=str(tmp_path / "raw" / "planetoid"), store=str(tmp_path / "s"), num_parts=2)
    assert direct.store_path == module.store_path


def test_the_other_presets(real_data: Real, tmp_path: Path) -> None:
    for cls, name, nodes, edges, split in (
        (AmazonData, "photo", 7650, 238162, {"train": 160, "val": 240, "test": 7250}),
        (HeterophilousData, "minesweeper", 10000, 78804, {"train": 5000, "val": 2500, "test": 2500}),
    ):
        folder = real_data("amazon" if cls is AmazonData else "heterophilous")
        module = cls(name=name, root=str(folder), store=str(tmp_path))
        module.prepare_data()
        assert (module.open_store().num_nodes, module.open_store().num_edges) == (nodes, edges)
        assert module.facts["split"]["sizes"] == split
    assert "processed" not in [file.name for file in real_data("amazon").rglob("*")]


def test_the_largest_component_alone(real_data: Real, tmp_path: Path) -> None:
    where = {"root": str(real_data("amazon")), "store": str(tmp_path)}
    module, whole = AmazonData(**where, largest_component=True), AmazonData(**where)  # type: ignore[arg-type]
    assert module.read().num_nodes == 7487 and whole.read().num_nodes == 7650  # as Shchur et al. 2018 count
    assert module.identity() != whole.identity()
    component, graph = module.read(), whole.read()
    ids = torch.tensor([int(name) for name in module.names()["node"]])
    assert torch.equal(component.x, graph.x[ids]) and torch.equal(component.y, graph.y[ids])
    assert (module.extra_facts(), whole.extra_facts(), whole.names()) == ({"source_nodes": 7650}, {}, {})


@pytest.mark.parametrize("nodes", [1, 5, 200, 3000])
def test_components_beside_scipy(nodes: int) -> None:
    edges = torch.randint(nodes, (2, nodes // 2), generator=torch.Generator().manual_seed(nodes))
    edges[:, : nodes // 5] = torch.stack([torch.arange(nodes // 5) + 1, torch.arange(nodes // 5)])  # a long path
    found = components(edges, nodes)
    matrix = scipy.sparse.coo_matrix((np.ones(edges.size(1)), edges.numpy()), shape=(nodes, nodes))
    count, expected = scipy.sparse.csgraph.connected_components(matrix, directed=False)
    pairs = {(int(a), int(b)) for a, b in zip(found, expected, strict=True)}
    assert len(pairs) == count == len(set(found.tolist()))
    data, ids = largest_component(Data(x=torch.arange(nodes).view(-1, 1), edge_index=edges, num_nodes=nodes))
    assert torch.equal(ids, data.x.flatten())
    assert data.num_nodes == int(torch.from_numpy(expected).long().bincount().max())
    assert (data.x.diff(dim=0) > 0).all() and (data.edge_index < data.num_nodes).all()


@pytest.mark.slow
def test_coauthor(real_data: Real) -> None:
    data = CoauthorData(root=str(real_data("coauthor"))).read()
    assert (data.num_nodes, data.num_edges, data.num_features) == (18333, 163788, 6805)
    assert is_compressed(data.x) and data.x.rows.values is None and len(data.x.rows.ids) == 1092079


@pytest.mark.parametrize("counts", [[1.0, 3.0, 2.0, 1.0, 5.0], [1.0, -2.0, 0.0, 4.0, -4.0]])
def test_bags_of_words_are_those_that_pyg_reads(tmp_path: Path, counts: list[float]) -> None:
    """With counts, negative numbers, a stored zero, columns in any order, and entries at one position."""
    indices, indptr = [4, 0, 2, 1, 1], [0, 3, 3, 5]
    folder = tmp_path / "coauthor/CS/raw"
    folder.mkdir(parents=True)
    arrays = {"data": counts, "indices": indices, "indptr": indptr, "shape": [3, 6]}
    path = scipy.sparse.csr_matrix((np.ones(2), ([0, 1], [1, 2])), (3, 3))
    edges = {"data": path.data, "indices": path.indices, "indptr": path.indptr, "shape": path.shape}
    parts = {f"{kind}_{name}": np.array(a) for kind, p in (("attr", arrays), ("adj", edges)) for name, a in p.items()}
    np.savez(folder / "ms_academic_cs.npz", labels=np.array([0, 1, 0]), **parts)
    expected = torch_geometric.io.read_npz(str(folder / "ms_academic_cs.npz"))
    module = CoauthorData(root=str(tmp_path), store=str(tmp_path / "s"), largest_component=False)
    data = module.read()
    assert is_compressed(data.x) and data.x.dtype == torch.float32
    assert (data.x.rows.values is None) == (counts[1] == 3)
    assert torch.equal(as_dense(data.x), expected.x) and torch.equal(data.edge_index, expected.edge_index)
    assert torch.equal(data.y, expected.y)
    assert type(torch_geometric.io.read_npz(str(folder / "ms_academic_cs.npz")).x) is torch.Tensor


def test_a_class_without_files(tmp_path: Path) -> None:
    module = PyGData(name="KarateClub", root=str(tmp_path / "none"), store=str(tmp_path / "s"), split="random")
    module.prepare_data()
    assert (module.open_store().num_nodes, module.open_store().num_edges) == (34, 156)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="without masks"):
        PyGData(name="FakeDataset", options={"num_graphs": 1}, store=str(tmp_path / "s")).prepare_data()


class Fetched(InMemoryDataset):
    """A data set that downloads one file, or fails to."""

    online = True

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.load(self.processed_paths[0])

    raw_file_names = ("edges.npy", "labels.npy")
    processed_file_names = "data.pt"

    def download(self) -> None:
        np.save(Path(self.raw_dir) / "edges.npy", np.array([[0, 1, 2], [1, 2, 0]]))
        if not self.online:
            raise OSError("no route to host")
        np.save(Path(self.raw_dir) / "labels.npy", np.array([0, 1, 0]))

    def process(self) -> None:
        edges, labels = (torch.from_numpy(np.load(path)) for path in self.raw_paths)
        self.save([Data(edge_index=edges, y=labels)], self.processed_paths[0])


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> type[Fetched]:
    monkeypatch.setattr(torch_geometric.datasets, "Fetched", Fetched, raising=False)
    monkeypatch.setattr(torch_geometric.datasets, "__all__", [*torch_geometric.datasets.__all__, "Fetched"])
    return Fetched


def test_a_download_is_kept(fetched: type[Fetched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"root": str(tmp_path / "raw"), "store": str(tmp_path / "s"), "split": "random"}
    PyGData(name="Fetched", **options).prepare_data()
    wanted = ["Fetched", "Fetched/raw", "Fetched/raw/edges.npy", "Fetched/raw/labels.npy"]
    assert listing(tmp_path / "raw") == wanted
    monkeypatch.setattr(fetched, "online", False)
    again = PyGData(name="Fetched", **options)
    again.prepare_data()
    assert again.open_store().num_edges == 3
    assert len(list((tmp_path / "s").iterdir())) == 1


def test_a_failed_download_says_what_is_missing(
    fetched: type[Fetched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched, "online", False)
    (tmp_path / "raw").mkdir()
    np.save(tmp_path / "raw" / "edges.npy", np.array([[0], [1]]))  # one of two files, where PyG looks
    before = listing(tmp_path)
    with pytest.raises(DataError, match=r"lacks raw/labels\.npy, and Fetched could not download: OSError: no route"):
        PyGData(name="Fetched", root=str(tmp_path), store=str(tmp_path / "s")).prepare_data()
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PyGData(name="karateclub"), "did you mean KarateClub"),
        (lambda: PyGData(name="zzzzzz"), "choose one of .*Planetoid"),
        (lambda: PlanetoidData(name="core"), "choose one of Cora, CiteSeer, PubMed; did you mean Cora"),
        (lambda: PyGData(options=cast(Any, "Cora")), "data.options='Cora' is not a mapping"),
        (
            lambda: PyGData(options={"nme": "Cora"}).fetch(),
            r"options\.nme is not an option of Planetoid\n.*name, split",
        ),
    ],
)
def test_typos(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_presets_know_their_names_in_any_case() -> None:
    assert PlanetoidData(name="citeseer").options == {"name": "CiteSeer"}
    assert HeterophilousData(name="roman_empire").options == {"name": "Roman-empire"}


def test_what_is_not_one_graph() -> None:
    with pytest.raises(DataError, match="FakeDataset holds 3 graphs"):
        PyGData(name="FakeDataset", options={"num_graphs": 3}).read()
    with pytest.raises(DataError, match="things is a dict, but gtrain reads only Data, HeteroData and TemporalData"):
        tidy_graph({}, "things")
    with pytest.raises(DataError, match="points has no edge_index"):
        tidy_graph(Data(x=torch.zeros(2, 1)), "points")
    with pytest.raises(DataError, match="types has no edge_index"):
        tidy_graph(HeteroData({"a": {"x": torch.zeros(2, 1)}}), "types")


def test_a_heterogeneous_graph() -> None:
    graph = PyGData(name="FakeHeteroDataset", options={"num_graphs": 1}).read()
    assert isinstance(graph, HeteroData) and len(graph.edge_types) > 1


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_movielens_100k(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="PyG reads this data set with pandas")
    genres = "|".join("01" * 9 + "1")
    files = {
        "u.item": "".join(f"{number}|film|1-1-1995||url|{genres}\n" for number in (1, 2, 3)),
        "u.user": "1|24|M|writer|85711\n2|53|F|other|94043\n",
        "u1.base": "1\t1\t5\t874965758\n2\t3\t3\t876893171\n",
        "u1.test": "1\t2\t4\t875072484\n",
    }
    write(tmp_path / "raw", files)
    graph = PyGData(name="MovieLens100K", root=str(tmp_path), task="link").read()
    rates = graph["user", "rates", "movie"]
    assert rates.edge_index.tolist() == [[0, 1], [0, 2]]
    assert (rates.edge_rating.tolist(), rates.edge_time.tolist()) == ([5, 3], [874965758, 876893171])
    assert (rates.test_edge_index.tolist(), rates.test_edge_rating.tolist()) == ([[0], [1]], [4])
    assert "edge_label" not in rates and "time" not in rates and graph["movie"].num_nodes == 3
    assert graph["movie", "rated_by", "user"].edge_time.tolist() == [874965758, 876893171]
    module = PyGData(name="MovieLens100K", root=str(tmp_path), store=str(tmp_path / "s"), task="link")
    module.prepare_data()
    store, kind = module.open_store(), ("user", "rates", "movie")
    assert store.facts["split"]["sizes"] == {"train": 2, "test": 1}
    assert store.held_out("edge_rating", 0, "test", kind).tolist() == [4]
    assert store.edge("edge_time", 0, kind).tolist() == [874965758, 876893171]


def test_movielens_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="PyG reads this data set with pandas")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    movies, ratings = "movieId,title,genres\n1,A,Comedy\n", "userId,movieId,rating,timestamp\n1,1,4.0,964982703\n"
    write(tmp_path / "raw" / "ml-latest-small", {"movies.csv": movies, "ratings.csv": ratings})
    with pytest.raises(DataError, match=r"MovieLens needs the package 'sentence_transformers'(.|\n)*MovieLens100K"):
        PyGData(name="MovieLens", root=str(tmp_path)).read()


def test_reddit(tmp_path: Path) -> None:
    (tmp_path / "Reddit" / "raw").mkdir(parents=True)
    feature, kinds = np.arange(6, dtype=np.float64).reshape(3, 2), np.array([1, 2, 3])
    np.savez(tmp_path / "Reddit/raw/reddit_data.npz", feature=feature, label=np.array([0, 4, 0]), node_types=kinds)
    pairs = (np.array([0, 1, 1, 2]), np.array([1, 0, 2, 1]))
    scipy.sparse.save_npz(
        tmp_path / "Reddit/raw/reddit_graph.npz", scipy.sparse.coo_matrix((np.ones(4), pairs), (3, 3))
    )
    data = PyGData(name="Reddit", root=str(tmp_path)).read()
    assert data.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]] and data.x.tolist() == feature.tolist()
    assert [data[f"{split}_mask"].tolist().index(True) for split in ("train", "val", "test")] == [0, 1, 2]


def test_jodie(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="PyG reads this data set with pandas")
    lines = "user_id,item_id,timestamp,state_label,features\n0,0,0.0,0,0.5,1\n1,0,36.0,1,-2,3\n"
    write(tmp_path / "wikipedia" / "raw", {"wikipedia.csv": lines})
    data = PyGData(name="JODIEDataset", options={"name": "Wikipedia"}, root=str(tmp_path)).read()
    assert (data.edge_index.tolist(), data.edge_time.tolist()) == ([[0, 1], [2, 2]], [0, 36])
    assert data.edge_attr.tolist() == [[0.5, 1], [-2, 3]] and data.num_nodes == 3


def test_wordnet_is_cut_by_its_masks(real_data: Real, tmp_path: Path) -> None:
    shutil.copytree(real_data("kg/wn18rr/raw"), tmp_path / "raw")
    data = PyGData(name="WordNet18RR", root=str(tmp_path), task="link").read()
    sizes = [(data[f"{p}edge_index"].size(1), data[f"{p}edge_type"].numel()) for p in ("", "val_", "test_")]
    assert sizes == [(86835, 86835), (3034, 3034), (3134, 3134)]
    assert data.num_nodes == 40943 and "train_mask" not in data


def test_relation_splits_by_other_names() -> None:
    edges = torch.tensor([[0, 1], [1, 2]])
    data = Data(num_nodes=3, edge_index=torch.cat([edges, edges.flip(0)], 1), edge_type=torch.tensor([0, 1, 2, 3]))
    for number, split in enumerate(("train", "valid", "test")):
        data[f"{split}_edge_index"], data[f"{split}_edge_type"] = edges[:, : 2 - number // 2], torch.full((2,), number)
    data["neg_edge_index"] = edges
    tidied = tidy_graph(data, "any")
    assert tidied.edge_index.tolist() == edges.tolist() and tidied.edge_type.tolist() == [0, 0]
    assert tidied.val_edge_index.size(1) == 2 and tidied.test_edge_index.size(1) == 1
    assert sorted(tidied.keys()) == sorted(
        ["num_nodes", *(f"{prefix}edge_{name}" for prefix in ("", "val_", "test_") for name in ("index", "type"))]
    )


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def needy() -> None:
        raise ModuleNotFoundError("No module named 'rdflib'", name="rdflib")

    module = PyGData(name="KarateClub")
    monkeypatch.setattr(module, "_class", type("Needy", (Dataset,), {"__init__": lambda self: needy()}))
    with pytest.raises(DataError, match="Needy needs the package 'rdflib'(.|\n)*pip install rdflib"):
        module.read()


def test_a_damaged_raw_file_is_no_crash(fetched: type[Fetched], tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for name in ("edges.npy", "labels.npy"):
        (tmp_path / "raw" / name).write_text("<html>not found</html>")
    with pytest.raises(DataError, match="Fetched could not read the files under .*: ValueError"):
        PyGData(name="Fetched", root=str(tmp_path), store=str(tmp_path / "s")).prepare_data()
    assert not (tmp_path / "s").exists()


def test_a_download_hides_nothing(fetched: type[Fetched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files directly below the root are still found when another data set of the class was downloaded beside them."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "Fetched").mkdir()
    np.save(tmp_path / "raw" / "edges.npy", np.array([[0, 1], [1, 0]]))
    np.save(tmp_path / "raw" / "labels.npy", np.array([0, 1]))
    monkeypatch.setattr(fetched, "online", False)
    assert PyGData(name="Fetched", root=str(tmp_path), store=str(tmp_path / "s")).read().num_edges == 2
