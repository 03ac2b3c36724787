"""gtrain.data.sources.musae: social networks with sparse features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gtrain.data.sources.musae import MusaeData
from gtrain.errors import ConfigError, DataError

Real = Callable[[str], Path]
TWITCH = {
    "edges.csv": "from,to\n0,1\n2,1\n1,1\n1,2\n",
    "features.json": '{"1": [4, 0, 4], "0": [2], "2": []}',
    "target.csv": "id,days,mature,partner,new_id\n77,3,True,False,2\n55,1,False,False,0\n66,2,True,True,1\n",
}


def write(folder: Path, **changes: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for ending, text in TWITCH.items():
        (folder / f"musae_DE_{ending}").write_text(changes.get(ending.split(".")[0], text))
    return str(folder)


def test_twitch(tmp_path: Path) -> None:
    write(tmp_path / "musae" / "DE")
    for module in (
        MusaeData(name="de", root=str(tmp_path)),
        MusaeData(name="DE", path="DE", root=str(tmp_path / "musae")),
    ):
        data = module.read()
        assert data.edge_index.tolist() == [[0, 1, 1, 1, 2], [1, 0, 1, 2, 1]]
        assert data.x.to_dense().tolist() == [[0, 0, 1, 0, 0], [1, 0, 0, 0, 1], [0] * 5]
        assert (data.y.tolist(), module.extra_facts()) == ([0, 1, 1], {"label_values": [False, True]})
        assert (module.names(), module.split.kind) == ({}, "random")
    partner = MusaeData(name="DE", root=str(tmp_path), label="partner")
    assert partner.read().y.tolist() == [0, 1, 0] and partner.identity() != module.identity()


def test_ids_are_numbered_anew(tmp_path: Path) -> None:
    target = "id,page_type\n9,b\n5,a\n"
    module = MusaeData(name="DE", path=write(tmp_path, target=target, edges="a,b\n9,5\n", features='{"9": [1]}'))
    data = module.read()
    assert (data.y.tolist(), data.edge_index.tolist()) == ([0, 1], [[0, 1], [1, 0]])
    assert module.names()["node"].to_pylist() == ["5", "9"]
    assert data.x.to_dense().tolist() == [[0, 0], [0, 1]]


def test_facebook(real_data: Real) -> None:
    module = MusaeData(root=str(real_data("musae").parent))
    data = module.read()
    assert (data.num_nodes, data.num_edges) == (22470, 2 * (171002 - 179) + 179)
    assert data.x.layout == torch.sparse_csr and data.x.shape == (22470, 4714)
    assert module.extra_facts()["label_values"] == ["company", "government", "politician", "tvshow"]
    assert torch.bincount(data.y).tolist() == [6495, 6880, 5768, 3327]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": "from,to\n0,1\n0,1,2\n"}, r"musae_DE_edges\.csv, line 3: 3 columns"),
        ({"edges": "from,to\n0,1\n0,9\n"}, r"edges\.csv, line 3: the edge 0 - 9 names node 9, which has no label"),
        ({"edges": "from,to\n0,-1\n"}, r"edges\.csv, line 2: the edge 0 - -1 names node -1"),
        ({"edges": ""}, r"edges\.csv has no lines"),
        ({"features": '{"0": [1],\n"1": '}, r"features\.json, line 2: not JSON"),
        ({"features": '{"7": [1]}'}, r"features\.json has features of node 7, which has no label"),
        ({"features": '{"0": [1, -2]}'}, r"features\.json: the feature id -2 is not a whole number"),
        ({"features": '{"0": [1.5]}'}, r"features\.json: the feature id 1\.5 is not a whole number"),
        ({"features": "[1]"}, r"features\.json must have a list of feature ids for each node"),
        ({"target": "id,mature\n0,True\n1\n"}, r"target\.csv cannot be read: .*columns"),
        ({"target": ""}, r"target\.csv cannot be read: it is empty"),
        ({"target": "id,mature\n0,True\n1,\n2,False\n"}, r"target\.csv, line 3: mature is empty"),
        ({"target": "id,mature\n0,True\n-1,True\n"}, r"target\.csv, line 3: the id -1 is negative"),
        ({"target": "id,mature\n0,True\n0,True\n"}, r"target\.csv, line 3: node 0 already has a label"),
        ({"target": "id,mature\n\n0,True\n\n-1,True\n"}, r"target\.csv, line 5: the id -1 is negative"),
        ({"target": 'id,name,mature\n0,"a\nb",True\n0,c,True\n'}, r"target\.csv, line 4: node 0 already has a label"),
        ({"target": "id,mature\n0,True\n1,True,2\n"}, r"target\.csv cannot be read: line 3 has 3 columns"),
        ({"target": "id,page_type\n0,a\n1,nan\n"}, r"target\.csv, line 3: page_type is empty"),
        ({"target": "id,mature\n"}, r"target\.csv has no line below the column names"),
        ({"target": "id,ml_target\n0,0.5\n1,1\n"}, r"ml_target holds numbers with fractions"),
        ({"edges": "from,to\n"}, r"edges\.csv has no line below the column names"),
        ({"features": '{"0": [true]}'}, r"features\.json: the feature id True is not a whole number"),
        ({"features": '{"0": [99999999999999999999]}'}, r"features\.json: the feature id 9999.* is not a whole number"),
        ({"features": "{}"}, r"features\.json names no feature"),
        ({"target": "id,mature\na,True\n"}, r"target\.csv, line 2: the id 'a' is not a whole number"),
        ({"target": "id,x\n0,1\n"}, r"target\.csv: no column for labels \(.*ml_target\); it has id, x"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        MusaeData(name="DE", path=write(tmp_path, **changes)).read()


def test_missing_files(tmp_path: Path) -> None:
    (Path(write(tmp_path / "musae")) / "musae_DE_target.csv").unlink()
    with pytest.raises(DataError, match=r"data\.name=DE: .*musae has no DE_target\.csv"):
        MusaeData(name="DE", root=str(tmp_path)).identity()
    with pytest.raises(DataError, match=r"no folder gone or .*gone(.|\n)*put DE_edges\.csv"):
        MusaeData(name="DE", path="gone", root=str(tmp_path)).identity()
    with pytest.raises(ConfigError, match="have no masks"):
        MusaeData(split="public")
