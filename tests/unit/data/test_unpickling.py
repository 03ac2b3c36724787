"""Pickles of strangers: nothing runs that they name, whichever reader meets them."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.io import fs

from gtrain.data.readers.pyg import construct
from gtrain.data.readers.unpickling import PlainUnpickler, plain_pickles
from gtrain.data.sources.pyg import PlanetoidData, dataset_class
from gtrain.errors import ConfigError, DataError

sparse = pytest.importorskip("scipy.sparse", reason="Planetoid's files hold scipy's matrices: pip install scipy")
NODES = 510


class Attack:
    """Unpickled as usual, it makes the file ``mark``."""

    def __init__(self, mark: Path, call: Callable[..., Any] = os.system) -> None:
        self.mark, self.call = mark, call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, (f"touch {self.mark}",)


def run(command: str) -> None:
    """``os.system`` by a name that torch's loader does not know, after which PyG loads without it."""
    os.system(command)


def planetoid(folder: Path) -> dict[str, Any]:
    """The contents of Planetoid's files for a ring of nodes: 4 in training, 500 in validation, 2 in the test set."""
    raw = folder / "planetoid" / "Cora" / "raw"
    raw.mkdir(parents=True)
    features = sparse.csr_matrix(np.eye(NODES, 5, dtype=np.float32))
    labels = np.eye(2, dtype=np.int32)[np.arange(NODES) % 2]
    ring: defaultdict[int, list[int]] = defaultdict(list)
    for node in range(NODES):
        ring[node] = [(node - 1) % NODES, (node + 1) % NODES]
    contents = {"x": features[:4], "allx": features[:-2], "tx": features[-2:], "graph": ring}
    contents |= {"y": labels[:4], "ally": labels[:-2], "ty": labels[-2:]}
    for name, value in contents.items():
        (raw / f"ind.cora.{name}").write_bytes(pickle.dumps(value, 2))
    (raw / "ind.cora.test.index").write_text(f"{NODES - 2}\n{NODES - 1}\n")
    return contents


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_contents_are_read(protocol: int) -> None:
    matrix = sparse.random(20, 7, 0.3, format="coo", random_state=0)
    for value in (
        *(matrix.asformat(layout) for layout in ("csr", "csc", "coo")),
        sparse.csr_array(matrix),
        *(np.arange(6).reshape(2, 3), np.asfortranarray(np.eye(3)[:2]), np.array(["a", "bb"]), np.array([b"x"])),
        *(np.array([{"a": 1}, None], dtype=object), np.arange(3, dtype=">i4"), np.zeros((0, 3)), np.array(5)),
        *({"a": [1, (2.5, None)]}, {1, 2}, b"", b"\xff", 1 + 2j, np.float32(3.5), defaultdict(list, {1: [2]})),
    ):
        read = PlainUnpickler(io.BytesIO(pickle.dumps(value, protocol))).load()
        assert type(read) is type(value)
        if sparse.issparse(value):
            assert (read != value).nnz == 0
        elif isinstance(value, np.ndarray):
            assert (read == value).all() and (read.shape, read.dtype.kind) == (value.shape, value.dtype.kind)
        else:
            assert read == value


def test_planetoid(tmp_path: Path) -> None:
    planetoid(tmp_path)
    graph = PlanetoidData(root=str(tmp_path), store=str(tmp_path / "stores")).read()
    assert (graph.num_nodes, graph.num_edges) == (NODES, 2 * NODES) and graph.x.shape == (NODES, 5)


@pytest.mark.parametrize("name", ["x", "graph", "ty"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_planetoid_with_code_in_it(name: str, protocol: int, tmp_path: Path) -> None:
    contents, path = planetoid(tmp_path), tmp_path / "planetoid" / "Cora" / "raw" / f"ind.cora.{name}"
    attack = Attack(tmp_path / "mark")
    path.write_bytes(pickle.dumps({**contents["graph"], 3: attack} if name == "graph" else attack, protocol))
    with pytest.raises(DataError, match=rf"{path} holds posix\.system; only arrays"):
        PlanetoidData(root=str(tmp_path), store=str(tmp_path / "stores")).read()
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("call", [eval, exec, getattr, __import__, os.popen, torch.load, print])
def test_no_other_global_is_looked_up(call: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a pickle holds [\w.]+; only arrays"):
        PlainUnpickler(io.BytesIO(pickle.dumps(Attack(tmp_path / "mark", call)))).load()
    assert not (tmp_path / "mark").exists()


class Reader(InMemoryDataset):
    """A data set that unpickles its raw file in the way of its option."""

    raw_file_names = ("raw.bin",)
    processed_file_names = "data.pt"

    def __init__(self, root: str, how: str) -> None:
        self.how = how
        super().__init__(root)
        self.load(self.processed_paths[0])

    def download(self) -> None:
        raise AssertionError

    def process(self) -> None:
        path = self.raw_paths[0]
        if self.how.startswith("torch"):
            fs.torch_load(path)
        elif self.how == "numpy":
            np.load(path, allow_pickle=True)
        elif self.how == "Unpickler":
            with open(path, "rb") as file:
                pickle.Unpickler(file).load()
        else:
            with open(path, "rb") as file, contextlib.suppress(Exception):
                pickle.loads(file.read())
        self.save([Data(x=torch.ones(3, 2), edge_index=torch.zeros(2, 1, dtype=torch.long))], self.processed_paths[0])


@pytest.mark.parametrize("how", ["torch", "torch fallback", "numpy", "Unpickler", "swallowing"])
def test_other_ways_to_unpickle(how: str, tmp_path: Path) -> None:
    raw = tmp_path / "raw" / "raw.bin"
    raw.parent.mkdir()
    attack = Attack(tmp_path / "mark", run if how == "torch fallback" else os.system)
    if how.startswith("torch"):
        torch.save({"x": attack}, raw)
    elif how == "numpy":
        np.save(tmp_path / "a.npy", np.array([attack], dtype=object))
        (tmp_path / "a.npy").rename(raw)
    else:
        raw.write_bytes(pickle.dumps(attack))
    with pytest.raises(DataError, match=rf"{raw} holds (posix\.system|[\w.]*test_unpickling\.run)"):
        construct(Reader, tmp_path, {"how": how})
    assert not (tmp_path / "mark").exists()
    pickle.loads(pickle.dumps(Path("a")))  # outside of the reader nothing is restricted
    if not how.startswith("torch"):
        raw.write_bytes(pickle.dumps([1.5]))
        assert construct(Reader, tmp_path, {"how": how})[0].num_nodes == 3


def test_states_that_would_have_c_code_read_elsewhere() -> None:
    outside = sparse.csr_matrix(np.eye(3))
    outside.indices[:] = 1 << 20
    with pytest.raises(ValueError, match="indices"):
        PlainUnpickler(io.BytesIO(pickle.dumps(outside))).load()
    objects = pickle.dumps(np.array([None], dtype=object), 2)
    flags = objects.rindex(b"K\x3ft")  # 63, the last number of the dtype's state: reference counts, a list in pickles
    with pytest.raises(pickle.UnpicklingError, match=r"state .* of a numpy\.dtype"):
        PlainUnpickler(io.BytesIO(objects[:flags] + b"K\x00t" + objects[flags + 3 :])).load()


def test_the_restriction_ends_with_the_context(tmp_path: Path) -> None:
    with pytest.raises(DataError), plain_pickles(tmp_path):
        pickle.loads(pickle.dumps(Path("a")))
    assert pickle.loads(pickle.dumps(Path("a"))) == Path("a")


def test_a_reader_that_evaluates_text() -> None:
    with pytest.raises(ConfigError, match="evaluates text"):
        dataset_class("CornellTemporalHyperGraphDataset")
