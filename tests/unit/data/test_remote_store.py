"""``data.remote_store``: which jobs may read a store that another machine prepared."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gtrain.data.module import GraphDataModule, same_source
from gtrain.data.planted.graph import PlantedData
from gtrain.data.sources.edges import EdgesData
from gtrain.data.sources.libsvm import LibsvmData
from gtrain.errors import ConfigError
from gtrain.graph.store.replica import RemoteFolder


def stored(module: GraphDataModule, folder: Path) -> str:
    """Prepare a store, and write it to an address."""
    module.prepare_data()
    address = f"file://{folder}/bucket/graph"
    RemoteFolder(address).write(module.open_store())
    return address


def planted(folder: Path, **options: Any) -> PlantedData:
    sizes = {"num_nodes": 60, "num_edges": 400, "num_classes": 3, "num_features": 4}
    return PlantedData(store=folder / "stores", num_parts=2, **{**sizes, **options})


@pytest.mark.parametrize(("name", "value"), [("num_nodes", 61), ("seed", 1), ("homophily", 0.5), ("self_loops", True)])
def test_a_generated_graph_has_the_parameters_of_the_store(name: str, value: Any, tmp_path: Path) -> None:
    address = stored(planted(tmp_path), tmp_path)
    planted(tmp_path / "other", remote_store=address).prepare_data()
    with pytest.raises(
        ConfigError, match=rf"was prepared with data\.{name}=.*, and this job has data\.{name}={str(value).lower()}"
    ):
        planted(tmp_path / "other", remote_store=address, **{name: value}).prepare_data()


def rows(folder: Path, **options: Any) -> LibsvmData:
    settings = {"path": "rows.txt", "split": "random", "num_features": 9, **options}
    return LibsvmData(root=folder, store=folder / "stores", num_parts=1, **settings)


def test_files_have_the_names_and_sizes_of_those_of_the_store(tmp_path: Path) -> None:
    text = "".join(f"{row % 2} {row % 7 + 1}:1\n" for row in range(40))
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "rows.txt").write_text(text)
    address = stored(rows(here), tmp_path)
    os.utime(there / "rows.txt", ns=(1, 1))  # a copy may have another time
    rows(there, remote_store=address).prepare_data()
    with pytest.raises(ConfigError, match=r"data\.num_features=9, and this job has data\.num_features=10"):
        rows(there, remote_store=address, num_features=10).prepare_data()
    (there / "rows.txt").write_text(text + "0 1:1\n")
    with pytest.raises(ConfigError, match=r"data\.path=rows\.txt \(240 bytes\), .* data\.path=rows\.txt \(246 bytes\)"):
        rows(there, remote_store=address).prepare_data()
    shutil.copy(here / "rows.txt", there / "others.txt")
    with pytest.raises(
        ConfigError, match=r"data\.path=rows\.txt \(240 bytes\), and this job has data\.path=others\.txt"
    ):
        rows(there, remote_store=address, path="others.txt").prepare_data()


def test_without_the_files_their_names_and_options_are_compared(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "rows.txt").write_text("".join(f"{row % 2} {row % 7 + 1}:1\n" for row in range(40)))
    address = stored(rows(tmp_path / "here"), tmp_path)
    for path in ("rows.txt", "/elsewhere/rows.txt"):
        rows(tmp_path / "there", remote_store=address, path=path).prepare_data()
    for name, value in {"num_features": 10, "index_base": 0, "path": "others.txt"}.items():
        with pytest.raises(ConfigError, match=rf"this job has data\.{name}={value}\."):
            rows(tmp_path / "there", remote_store=address, **{name: value}).prepare_data()


def test_edges_are_compared_without_their_files(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "edges.tsv").write_text("".join(f"{a % 20}\t{(7 * a + 1) % 20}\n" for a in range(60)))

    def edges(folder: str, **options: Any) -> EdgesData:
        common = {"path": "edges.tsv", "task": "link", "split": "random", "num_parts": 1, **options}
        return EdgesData(root=tmp_path / folder, store=tmp_path / folder / "stores", **common)

    address = stored(edges("here"), tmp_path)
    edges("there", remote_store=address).prepare_data()
    with pytest.raises(ConfigError, match=r"data\.undirected=false, and this job has data\.undirected=true"):
        edges("there", remote_store=address, undirected=True).prepare_data()


def test_files_that_are_missing_are_not_compared() -> None:
    stamp = ["a.csv", 10, 99]
    assert same_source(["a.csv", 10, 1], stamp) and same_source(["a.csv", None, None], stamp)
    assert not same_source(["a.csv", 11, 99], stamp) and not same_source(["b.csv", 10, 99], stamp)
    assert same_source([], [stamp]) and not same_source([stamp, stamp], [stamp])
    assert same_source(["part0", "a.csv", 10, 1], ["part0", *stamp]) and not same_source([], ["a", "b"])
    assert same_source({"files": []}, {"files": [stamp]}) and not same_source({"a": 1}, {"a": 1, "b": 2})
