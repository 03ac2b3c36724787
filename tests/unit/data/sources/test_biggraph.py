"""gtrain.data.sources.biggraph: PyTorch-BigGraph's folders, written here as its importer writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gtrain.data.sources.biggraph import BigGraphData
from gtrain.errors import ConfigError, DataError
from gtrain.graph.store.entities import entity_bags
from gtrain.graph.store.tables import EdgeArrays
from gtrain_pbg.config import store_settings

h5py = pytest.importorskip("h5py", reason="HDF5 folders need h5py: pip install 'gtrain[hdf5]'")

Buckets = dict[tuple[int, int], dict[str, list[Any]]]


def write_entities(folder: Path, counts: dict[str, list[int]], names: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for entity, sizes in counts.items():
        for part, size in enumerate(sizes):
            (folder / f"entity_count_{entity}_{part}.txt").write_text(f"{size}\n")
            if names:
                strings = [f"{entity}:{part}:{place}" for place in range(size)]
                (folder / f"entity_names_{entity}_{part}.json").write_text(json.dumps(strings, indent=4))
    return folder


def write_edges(folder: Path, buckets: Buckets, version: int | None = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for (i, j), columns in buckets.items():
        with h5py.File(folder / f"edges_{i}_{j}.h5", "w") as file:
            if version is not None:
                file.attrs["format_version"] = version
            for name, values in columns.items():
                kind = np.float32 if name == "weight" else np.int64
                file.create_dataset(name, data=np.array(values, dtype=kind), maxshape=(None,), chunks=(4,))
    return folder


def columns(lhs: list[int], rel: list[int], rhs: list[int], **more: list[float]) -> dict[str, list[Any]]:
    return {"lhs": lhs, "rel": rel, "rhs": rhs, **more}


TRAIN: Buckets = {
    (0, 0): columns([0, 2], [0, 1], [1, 1]),
    (0, 1): columns([1], [1], [3]),
    (1, 0): columns([], [], []),
    (1, 1): columns([3, 0], [0, 0], [0, 2]),
}


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """One entity type in partitions of 3 and 4, two dynamic relations."""
    folder = write_entities(tmp_path / "users", {"user_id": [3, 4]})
    (folder / "dynamic_rel_count.txt").write_text("2\n")
    (folder / "dynamic_rel_names.json").write_text('["follows", "likes"]')
    write_edges(folder / "train", TRAIN)
    write_edges(folder / "test", {**TRAIN, (0, 0): columns([1], [1], [2])})
    return folder


def module(folder: Path, **options: Any) -> BigGraphData:
    given = {"edges": f"{folder}/train", "test_edges": f"{folder}/test", **options}
    return BigGraphData(path=str(folder), **given)  # type: ignore[arg-type]


def test_one_entity_type(users: Path) -> None:
    data_module = module(users)
    data = data_module.read()
    assert data.num_nodes == 7 and data_module.part_of_node is None
    assert data.edge_index.tolist() == [[0, 2, 1, 6, 3], [1, 1, 6, 3, 5]]
    assert data.edge_type.tolist() == [0, 1, 1, 0, 0]
    assert data.test_edge_index.tolist() == [[1, 1, 6, 3], [2, 6, 3, 5]]
    assert data.test_edge_type.tolist() == [1, 1, 0, 0] and "val_edge_index" not in data
    assert data_module.names()["node"][3:5] == ["user_id:1:0", "user_id:1:1"]
    assert data_module.names()["relation"] == ["follows", "likes"]
    assert data_module.extra_facts() == {"num_relations": 2}


def test_several_entity_types(tmp_path: Path) -> None:
    """Users in two partitions, items in one: buckets (i, 0), and items met in both."""
    folder = write_entities(tmp_path, {"user": [2, 2], "item": [3]}, names=False)
    write_edges(
        folder / "e",
        {
            (0, 0): columns([0, 1, 1], [0, 1, 0], [2, 0, 0], weight=[1.5, 2, 3]),
            (1, 0): columns([1, 0], [1, 0], [1, 1], weight=[4, 5]),
        },
    )
    relations = [{"name": "buys", "lhs": "user", "rhs": "item", "operator": "none"}]
    relations += [{"name": "returns", "lhs": "user", "rhs": "item"}]
    data_module = module(folder, edges=[f"{folder}/e"], test_edges=None, relations=relations)
    data = data_module.read()
    assert data.validate() and (data["user"].num_nodes, data["item"].num_nodes) == (4, 3)
    buys, returns = data["user", "buys", "item"], data["user", "returns", "item"]
    assert buys.edge_index.tolist() == [[0, 1, 2], [2, 0, 1]] and buys.edge_weight.tolist() == [1.5, 3, 5]
    assert returns.edge_index.tolist() == [[1, 3], [0, 1]] and returns.edge_weight.tolist() == [2, 4]
    assert data_module.names() == {} and data_module.extra_facts() == {"num_relations": 2}


def test_dynamic_relations_between_two_types(tmp_path: Path) -> None:
    folder = write_entities(tmp_path, {"user": [2], "item": [3]})
    (folder / "dynamic_rel_count.txt").write_text("9")
    write_edges(folder, {(0, 0): columns([0, 1], [8, 3], [2, 0])})
    relations = [{"name": "any", "lhs": "user", "rhs": "item"}]
    data = BigGraphData(path=str(folder), relations=relations).read()
    assert data["user", "any", "item"].edge_type.tolist() == [8, 3]
    assert data["user", "any", "item"].edge_index.tolist() == [[0, 1], [2, 0]]


def test_without_dynamic_relations_they_are_counted(tmp_path: Path) -> None:
    folder = write_entities(tmp_path, {"n": [3]})
    write_edges(folder, {(0, 0): columns([0, 1], [0, 0], [2, 0])})
    data_module = BigGraphData(path=str(folder))
    data = data_module.read()
    assert "edge_type" not in data and data.edge_index.tolist() == [[0, 1], [2, 0]]
    assert data_module.extra_facts() == {"num_relations": 1}


def test_partitions_become_parts(users: Path, tmp_path: Path) -> None:
    kept = module(users, keep_parts=True, store=str(tmp_path / "s"), split="public")
    assert kept.num_parts == 2
    kept.read()
    assert kept.part_of_node is not None and kept.assignment().tolist() == [0, 0, 0, 1, 1, 1, 1]
    joined = module(users, keep_parts=True, num_parts=1)
    joined.read()
    assert joined.num_parts == 1 and joined.assignment().tolist() == [0] * 7
    with pytest.raises(DataError, match="has 2 parts, and 3 ranks need one each: 2 != 3"):
        module(users, keep_parts=True, num_parts=3).num_parts  # noqa: B018
    assert module(users, num_parts=3).num_parts == 3
    with pytest.raises(ConfigError, match="partitioner=random was set, but biggraph keeps the parts"):
        module(users, keep_parts=True, partitioner="random")


def test_buckets_want_as_many_partitions_as_there_are(users: Path) -> None:
    for number in (1, 3):
        trained = module(users, keep_parts=True, num_parts=number)
        trained.edge_buckets, trained.parts_key = True, "strategy.num_partitions"
        with pytest.raises(DataError, match=rf"has 2 partitions, and strategy\.num_partitions={number} was set"):
            trained.num_parts  # noqa: B018
    trained = module(users, keep_parts=True, num_parts=2)
    trained.edge_buckets = True
    assert trained.num_parts == 2


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"keep_parts": None}, {"partitioner": "auto", "keep_parts": True}),
        ({"keep_parts": True}, {"partitioner": "auto"}),
        ({"keep_parts": False}, {"partitioner": "random"}),
        ({"keep_parts": None, "partitioner": "random"}, {"partitioner": "random"}),
        ({"keep_parts": None, "partitioner": "file"}, {"partitioner": "file"}),
        ({}, {"partitioner": "random"}),  # other sources come in no partitions
    ],
)
def test_pbg_trains_partitions_as_they_are(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = store_settings({"data": {"partitioner": "auto", **given}, "strategy": {"num_partitions": 2}})
    assert found == {"num_parts": 2, "buckets": True, **wanted}


def test_a_type_in_one_partition_is_dealt_out(tmp_path: Path) -> None:
    folder = write_entities(tmp_path, {"user": [1, 3], "item": [4]})
    write_edges(folder, {(0, 0): columns([0], [0], [3]), (1, 0): columns([], [], [])})
    relations = [{"name": "buys", "lhs": "user", "rhs": "item"}]
    data_module = BigGraphData(path=str(folder), relations=relations, keep_parts=True)
    data_module.read()
    parts = data_module.assignment()
    assert isinstance(parts, dict)
    assert parts["user"].tolist() == [0, 1, 1, 1] and parts["item"].tolist() == [0, 0, 1, 1]


def test_the_store(users: Path, tmp_path: Path) -> None:
    data_module = module(users, keep_parts=True, store=str(tmp_path / "s"))
    data_module.prepare_data()
    store = data_module.open_store()
    assert store.offsets.tolist() == [0, 3, 7] and store.held_out_size("test") == 4
    assert store.names("relation").decode(torch.tensor([1, 0])) == ["likes", "follows"]
    orig_id = torch.cat([store.node("orig_id", part) for part in range(2)])
    assert orig_id.tolist() == list(range(7))
    assert data_module.facts["num_relations"] == 2


def broken(folder: Path, what: str) -> None:
    edges = folder / "train" / "edges_0_1.h5"
    if what == "count missing":
        (folder / "entity_count_user_id_0.txt").unlink()
    elif what == "count":
        (folder / "entity_count_user_id_0.txt").write_text("three")
    elif what == "no counts":
        for file in folder.glob("entity_count*"):
            file.unlink()
    elif what == "bucket missing":
        edges.unlink()
    elif what == "bucket too many":
        write_edges(folder / "train", {(2, 0): columns([], [], [])})
    elif what == "no hdf5":
        edges.write_bytes(b"lhs,rel,rhs")
    elif what == "names":
        (folder / "entity_names_user_id_1.json").write_text('["a"]')
    elif what == "names json":
        (folder / "entity_names_user_id_1.json").write_text('["a", ')
    elif what == "names missing":
        (folder / "entity_names_user_id_1.json").unlink()
    elif what == "uneven":
        write_entities(folder, {"item": [1, 1, 1]})
    elif what in ("version", "newer"):
        version = None if what == "version" else 2
        write_edges(folder / "train", {(0, 1): columns([1], [1], [3])}, version=version)
    else:
        table: dict[str, dict[str, list[Any]]] = {
            "negative": columns([-1], [1], [3]),
            "beyond": columns([1], [1], [4]),
            "relation": columns([1], [2], [3]),
            "lengths": columns([1, 2], [1], [3]),
            "featurized": columns([1], [1], [3], lhsd_data=[1], lhsd_offsets=[0, 1]),
            "weights": columns([1], [1], [3], weight=[1.0]),
            "dataset": {"lhs": [1], "rhs": [3]},
        }
        write_edges(folder / "train", {(0, 1): table[what]})


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("count missing", "no entity_count_user_id_0.txt, but has partition 1 of user_id"),
        ("count", "entity_count_user_id_0.txt holds 'three'"),
        ("no counts", "has no entity_count_<type>_<part>.txt"),
        ("bucket missing", r"no edges_0_1.h5, and there are 2 .* 2 x 2 = 4 buckets"),
        ("bucket too many", r"has edges_2_0.h5, and there are 2 partitions"),
        ("no hdf5", "edges_0_1.h5 cannot be read as HDF5"),
        ("names", "has 1 names; a list of 4 strings"),
        ("names json", "is not JSON"),
        ("names missing", "no entity_names_user_id_1.json, but has entity_names_user_id_0.json"),
        ("uneven", "different numbers of partitions: item in 3, user_id in 2"),
        ("version", "format_version is None; gtrain reads 1"),
        ("newer", "format_version is 2; gtrain reads 1"),
        ("negative", "edge 0 has lhs -1; ids are not negative"),
        ("beyond", r"edge 0 has rhs 4; the 4 entities in that partition are 0..3"),
        ("relation", r"edge 0 has rel 2; the 2 relations are 0..1"),
        ("lengths", "different lengths: rel 1, lhs 2, rhs 1"),
        ("featurized", "featurized"),
        ("weights", "edges_0_0.h5 has no weights, but other files do"),
        ("dataset", "no dataset 'rel'; it has lhs, rhs"),
    ],
)
def test_bad_folders(what: str, message: str, users: Path) -> None:
    broken(users, what)
    with pytest.raises(DataError, match=message) as caught:
        module(users).read()
    assert caught.value.hint


def test_the_first_negative_weight_is_known_by_its_file(tmp_path: Path) -> None:
    folder = write_entities(tmp_path, {"node": [3]})
    write_edges(folder, {(0, 0): columns([0, 1], [0, 0], [2, 0], weight=[1.0, -0.5])})
    source = BigGraphData(path=str(folder))
    source.read()
    where = f"{folder / 'edges_0_0.h5'}, edge 1 (from 0)"
    assert source.extra_facts()["negative_weight"] == f"{where}: the weight is -0.5"
    source.weight_demand = "kg takes none"
    with pytest.raises(DataError, match=r"edges_0_0.h5, edge 1 \(from 0\): the weight is -0.5, and kg takes none"):
        source.read()


def test_nan_weight(tmp_path: Path) -> None:
    folder = write_entities(tmp_path, {"n": [3]})
    write_edges(folder, {(0, 0): columns([0, 1], [0, 0], [2, 0], weight=[1.0, float("nan")])})
    with pytest.raises(DataError, match="the weight of edge 1 is nan"):
        BigGraphData(path=str(folder)).read()


def test_settings(users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="data.path=nowhere: no such folder, nor"):
        BigGraphData(path="nowhere", root=str(tmp_path)).read()
    with pytest.raises(ConfigError, match="has no rhs"):
        module(users, relations=[{"name": "a", "lhs": "user_id"}])
    with pytest.raises(ConfigError, match="joins user_id and item, but item is not an entity type"):
        module(users, relations=[{"name": "a", "lhs": "user_id", "rhs": "item"}]).read()
    same = {"name": "a", "lhs": "user_id", "rhs": "user_id"}
    with pytest.raises(ConfigError, match="2 relations, and .* has dynamic ones"):
        module(users, relations=[same, same]).read()
    write_entities(users, {"item": [1]})
    with pytest.raises(ConfigError, match="entity types item, user_id, and data.relations is not set"):
        module(users).read()
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(
        ConfigError, match=r"needs the package 'h5py', which is not installed.*\nHINT: pip install h5py"
    ):
        module(users)


def test_bags_become_entities(tmp_path: Path) -> None:
    """Featurized items: edges with the same bag have the same one, in all splits; ids of users come first or after."""
    folder = write_entities(tmp_path / "f", {"item": [5], "user": [2, 1]})
    for name, more in (("train", [2, 3]), ("test", [0, 4])):
        bags = {"rhsd_offsets": [0, 2, 3], "rhsd_data": [1, 3, more[0]]}
        write_edges(folder / name, {
            (0, 0): columns([0, 1], [0, 0], [-1, -1], **bags),
            (1, 0): columns([0], [0], [-1], rhsd_offsets=[0, 2], rhsd_data=[1, 3]),
        })  # fmt: skip
    relations = [{"name": "buys", "lhs": "user", "rhs": "item"}]
    made = module(folder, relations=relations, entities={"item": {"featurized": True}}, joint_types=True,
                  keep_parts=True, store=str(tmp_path / "s"))  # fmt: skip
    data = made.read()
    assert data.edge_index.tolist() == [[3, 4, 5], [0, 1, 0]] and data.test_edge_index.tolist() == [
        [3, 4, 5],
        [0, 2, 0],
    ]
    facts = made.extra_facts()
    assert facts["entity_types"] == {"item": 3, "user": 3} and facts["features"] == {"item": 5}
    assert set(made.names()) == {"user", "item.feature", "relation"}
    made.prepare_data()
    found = entity_bags(made.open_store(), "item")
    assert found is not None and (found[0].tolist(), found[1].tolist(), found[2]) == ([1, 3, 2, 0], [0, 2, 3, 4], 5)
    assert entity_bags(made.open_store(), "user") is None
    write_edges(folder / "train", {(0, 0): columns([0], [0], [-1], rhsd_offsets=[0, 1], rhsd_data=[5])})
    with pytest.raises(DataError, match=r"rhsd_data has the feature 5; the 5 features are 0..4"):
        made.read()
    with pytest.raises(DataError, match="rhsd_data .bags of features., but item is not featurized"):
        module(folder, relations=relations, joint_types=True).read()
    with pytest.raises(ConfigError, match="data.entities.user.featurized was set"):
        module(folder, relations=relations, joint_types=True, entities={"user": {"featurized": True}}).read()


@pytest.mark.parametrize("typed", [False, True])
def test_what_stays_on_disk_is_the_same(
    users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: bool
) -> None:
    """Blocks of two edges, and no more than three in memory."""
    folder, options = users, {"edges": [f"{users}/train", f"{users}/test"]}
    if typed:
        folder = write_entities(tmp_path / "typed", {"item": [3], "user": [3, 4]})
        relations = [{"name": name, "lhs": "user", "rhs": "item"} for name in "ab"]
        buckets = {(0, 0): columns([0, 2, 1], [0, 1, 0], [2, 0, 1]), (1, 0): columns([3, 0], [1, 1], [2, 0])}
        for name in ("train", "test"):
            write_edges(folder / name, buckets)
        options = {"edges": f"{folder}/train", "relations": relations, "joint_types": True}
    stores = []
    for number, most in enumerate((10_000_000, 3)):
        monkeypatch.setattr("gtrain.data.sources.biggraph.IN_MEMORY_EDGES", most)
        monkeypatch.setattr("gtrain.data.readers.biggraph.BLOCK_EDGES", 2)
        made = module(folder, keep_parts=True, store=str(tmp_path / f"s{number}"), **options)
        made.edge_buckets = True
        assert isinstance(made.read(), EdgeArrays) == (most == 3)
        made.prepare_data()
        stores.append(made.open_store())
    whole, on_disk = stores
    assert whole.facts == on_disk.facts and whole.held_out_size("test") == on_disk.held_out_size("test") > 0
    for i in range(2):
        for j in range(2):
            found = [store.bucket(i, j) for store in stores]
            assert found[0].keys() == found[1].keys()
            assert all(found[0][name].tolist() == found[1][name].tolist() for name in found[0])


def test_several_folders_are_edge_sets(users: Path) -> None:
    """What is held out has none; the first folder's edges come first."""
    module_ = module(users, edges=[f"{users}/train", f"{users}/test"], test_edges=f"{users}/test")
    data = module_.read()
    assert data.edge_set.tolist() == [0] * 5 + [1] * 4 and "test_edge_set" not in data
    assert module_.extra_facts()["edge_sets"] == 2
