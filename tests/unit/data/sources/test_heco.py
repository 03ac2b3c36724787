"""gtrain.data.sources.heco: HeCo's heterogeneous graphs, in one file and as its repository has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gtrain.data.sources.heco import HeCoData
from gtrain.errors import ConfigError, DataError

Real = Callable[[str], Path]


def dblp(folder: Path) -> dict[str, Any]:
    """Write a small DBLP as HeCo's repository has it; return its arrays as those of one file."""
    folder.mkdir(parents=True)
    pairs = {"pa": [[0, 1, 1, 2], [0, 0, 1, 2]], "pc": [[0, 1, 2], [0, 1, 1]], "pt": [[0, 2], [3, 4]]}
    arrays: dict[str, Any] = {f"edge_{name}": np.array(pair, dtype=np.int32) for name, pair in pairs.items()}
    for name, pair in pairs.items():
        (folder / f"{name}.txt").write_text("".join(f"{a}\t{b}\n" for a, b in zip(*pair, strict=True)))
    sparse = {"data": np.ones(3, np.float32), "indices": np.array([1, 0, 2]), "indptr": np.array([0, 1, 1, 3])}
    np.savez(folder / "a_feat.npz", **sparse, shape=np.array([3, 4]), format=np.array(b"csr"))
    arrays |= {f"a_feat_{part}": value for part, value in {**sparse, "shape": np.array([3, 4])}.items()}
    coo = {"row": np.array([2, 0]), "col": np.array([1, 0]), "data": np.array([5.0, 6.0])}
    np.savez(folder / "p_feat.npz", **coo, shape=np.array([3, 2]), format=np.array(b"coo"))
    arrays |= {"p_feat_data": np.array([6.0, 5.0]), "p_feat_indices": np.array([0, 1])}
    arrays |= {"p_feat_indptr": np.array([0, 1, 1, 2]), "p_feat_shape": np.array([3, 2])}
    for name, index in {"train_40": [0], "val_40": [2], "test_40": [1]}.items():
        arrays[name] = np.array(index)
    arrays["labels"] = np.array([1, 0, 1], dtype=np.int32)
    for name in ("labels", "train_40", "val_40", "test_40"):
        np.save(folder / f"{name}.npy", arrays[name])
    return arrays


def test_both_layouts_of_dblp(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", **dblp(tmp_path / "heco" / "dblp"))
    for path in (None, "one.npz", str(tmp_path / "heco" / "dblp")):
        graph = HeCoData(name="DBLP", path=path, root=str(tmp_path), per_class=40).read()
        assert graph.node_types == ["author", "paper", "conference", "term"]
        assert [graph[node_type].num_nodes for node_type in graph.node_types] == [3, 3, 2, 5]
        assert graph["author"].x.layout == torch.sparse_csr
        assert graph["author"].x.to_dense().tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0]]
        assert graph["paper"].x.to_dense().tolist() == [[6, 0], [0, 0], [0, 5]]
        assert "x" not in graph["term"] and "y" not in graph["paper"]
        assert graph["author"].y.tolist() == [1, 0, 1]
        masks = [graph["author"][f"{split}_mask"].tolist() for split in ("train", "val", "test")]
        assert masks == [[True, False, False], [False, False, True], [False, True, False]]
        assert graph["paper", "to", "term"].edge_index.tolist() == [[0, 2], [3, 4]]
        assert graph["term", "to", "paper"].edge_index.tolist() == [[3, 4], [0, 2]]
        assert len(graph.edge_types) == 6


def test_acm(real_data: Real) -> None:
    module = HeCoData(root=str(real_data("hetero").parent))
    graph = module.read()
    assert {node_type: graph[node_type].num_nodes for node_type in graph.node_types} == {
        "paper": 4019,
        "author": 7167,
        "subject": 60,
    }
    assert graph["author", "to", "paper"].edge_index.size(1) == 13407
    assert graph["paper", "to", "subject"].edge_index.size(1) == 4019
    paper = graph["paper"]
    assert torch.bincount(paper.y[paper.train_mask]).tolist() == [20, 20, 20]
    assert [int(paper[f"{split}_mask"].sum()) for split in ("val", "test")] == [1000, 1000]
    assert (paper.x.values().numel(), graph["author"].x.values().numel()) == (340377, 888869)
    assert HeCoData(root=str(real_data("hetero")), per_class=60).read()["paper"].train_mask.sum() == 180


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    arrays = dblp(tmp_path / "heco" / "dblp")
    np.savez(tmp_path / "one.npz", **{name: array for name, array in arrays.items() if name != "edge_pt"})

    def read(path: str | None = None, name: str = "dblp", per_class: int = 40) -> Any:
        return HeCoData(name=name, path=path, root=str(tmp_path), per_class=per_class).read()

    with pytest.raises(DataError, match=r"data\.name=acm: found neither acm\.npz nor a folder(.|\n)*liun-online/HeCo"):
        read(name="acm")
    with pytest.raises(DataError, match=r"data\.path=two\.npz: found neither"):
        read("two.npz")
    with pytest.raises(DataError, match=r"one\.npz has no array 'edge_pt'; it has edge_pa"):
        read("one.npz")
    with pytest.raises(DataError, match=r"train_20\.npy is missing"):
        read(per_class=20)
    folder = tmp_path / "heco" / "dblp"
    np.save(folder / "train_40.npy", np.array([7]))
    with pytest.raises(DataError, match=r"train_40\.npy: it names node 7; there are 3 labels"):
        read()
    (folder / "pc.txt").write_text("0 0\n1 -1\n")
    with pytest.raises(DataError, match=r"pc\.txt, line 2: a negative id"):
        read()
    (folder / "pc.txt").unlink()
    with pytest.raises(DataError, match=r"pc\.txt is missing"):
        read()
    (folder / "p_feat.npz").write_text("no archive")
    (folder / "pc.txt").write_text("0 0 1\n")
    with pytest.raises(DataError, match=r"pc\.txt, line 1: 3 columns, and 2 were expected"):
        read()
    (folder / "pc.txt").write_text("0 0\n")
    with pytest.raises(DataError, match=r"p_feat\.npz cannot be read"):
        read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array(["x", "y", "z"])}, r"bad\.npz, labels: it holds <U1 of shape \[3\]; 1 dimension of"),
        ({"labels": np.array([0.0, np.nan, 1.0])}, r"labels: it holds float64"),
        ({"labels": np.eye(3, dtype=int)}, r"labels: it holds int64 of shape \[3, 3\]"),
        ({"train_40": np.array([True, False, True])}, r"train_40: it holds bool"),
        ({"edge_pa": np.array([[0, 1], [0.5, np.nan]])}, r"edge_pa: it holds float64"),
        ({"edge_pa": np.zeros((3, 2), dtype=int)}, r"edge_pa: it has the shape \[3, 2\]; \[2, E\]"),
        ({"edge_pa": np.array([[0, 1], [0, -4]])}, r"edge_pa: edge 1 has the negative id -4"),
        ({"a_feat_indptr": np.array([0, 1])}, r"a_feat is not a sparse matrix: its indptr does not divide 3 entries"),
        ({"a_feat_indptr": np.array([0, 2, 1, 3])}, r"a_feat is not a sparse matrix: its indptr"),
        ({"a_feat_data": np.ones(2)}, r"a_feat is not a sparse matrix: data has 2 entries, .*indices has 3 entries"),
        ({"a_feat_shape": np.array([3])}, r"a_feat is not a sparse matrix: its shape is \[3\]"),
        ({"a_feat_shape": np.array(["a", "b"])}, r"a_feat is not a sparse matrix: its shape is <U1"),
    ],
)
def test_wrong_arrays_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", **{**dblp(tmp_path / "dblp"), **changes})
    with pytest.raises(DataError, match=message):
        HeCoData(name="dblp", path=str(tmp_path / "bad.npz"), per_class=40).read()


def test_options() -> None:
    with pytest.raises(ConfigError, match=r"data\.name='acmm'(.|\n)*did you mean acm"):
        HeCoData(name="acmm")
    with pytest.raises(ConfigError, match=r"data\.per_class=30(.|\n)*20, 40 or 60"):
        HeCoData(per_class=30)
