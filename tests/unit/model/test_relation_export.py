"""``gtrain export`` of relations: the files have every parameter, and score edges as the model does."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import some_slow
from numpy.typing import NDArray

from gtrain.callbacks import biggraph
from gtrain.callbacks.predictions import check_output
from gtrain.callbacks.relations import ScoringModel, files_beside, write_beside
from gtrain.errors import ConfigError
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.model.kg.scores import COMPARATORS, OPERATORS

N, R, D, B = 9, 3, 6, 40
Floats = NDArray[np.float64]


class Relations:
    """The names of relations in a store."""

    def decode(self, ids: tuple[int, ...]) -> list[str]:
        return [f"relation {number}" for number in ids]


def store(**facts: Any) -> Any:
    """What the export reads of a store."""
    named = {"relation": Relations()}
    return SimpleNamespace(names=named.get, facts=facts, node_types=["node"], num_nodes_of=lambda kind: N)


def model(**settings: Any) -> KGEmbedding:
    """A model in double precision, whose parameters float32 can represent, far from their initial values."""
    torch.manual_seed(0)
    made = KGEmbedding(N, R, dimension=D, **settings).double()
    for parameter in made.parameters():
        parameter.data += torch.randn_like(parameter)
        parameter.data = parameter.data.float().double()
    return made


def edges() -> torch.Tensor:
    """Heads, relations and tails ``[3, B]``."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(most, (B,), generator=generator) for most in (N, R, N)])


def test_parameters_by_name_in_every_format(tmp_path: Path) -> None:
    """Users rate by one operator and follow by another: two groups, with a matrix in one of them."""
    ends = [["user", "item"], ["user", "user"], ["user", "item"]]
    made = KGEmbedding(
        N, R, dimension=4, bias=True, entity_types={"user": 5, "item": 4}, relation_ends=ends,
        relation_names=[f"relation {number}" for number in range(R)],
        relations=[{"name": "relation 1", "operator": "affine"}], operator="translation",
    )  # fmt: skip
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    scoring = ScoringModel.of(made.recipe(), store(entity_types={"user": 5, "item": 4}))
    forwards, backwards = made.groups[1].scores.forwards, made.groups[1].scores.backwards
    for fmt in ("npy", "parquet", "tsv"):
        path = tmp_path / f"vectors.{fmt}"
        written = write_beside(path, fmt, scoring, np.arange(N, dtype=np.float32))
        assert written == list(files_beside(path, fmt).values())
        with pytest.raises(ConfigError, match=r"vectors\.\w+\.model\.json exists already"):
            check_output(path, fmt, beside=True)
    described = json.loads((tmp_path / "vectors.tsv.model.json").read_text())
    assert described["entities"] == {"user": 5, "item": 4} and described["bias"] and described["comparator"] == "dot"
    assert [group["relations"] for group in described["groups"]] == [["relation 0", "relation 2"], ["relation 1"]]
    assert described["groups"][1] | {"heads": "user", "tails": "user", "operator": "affine"} == described["groups"][1]
    arrays = np.load(tmp_path / "vectors.npy.relations.npz")
    assert len(arrays.files) == 2 * 1 + 2 * 2
    assert np.array_equal(arrays["1.backwards.matrix"], backwards.matrix.detach().numpy())
    rows = pq.read_table(tmp_path / "vectors.parquet.relations.parquet").to_pylist()
    lines = [line.split("\t") for line in (tmp_path / "vectors.tsv.relations.tsv").read_text().splitlines()]
    assert len(rows) == len(lines) == 2 * 2 + 4
    for row, line in zip(rows, lines, strict=True):
        assert [row[name] for name in ("relation", "direction", "operator", "parameter")] == line[:4]
        assert "x".join(map(str, row["shape"])) == line[4]
        assert np.array_equal(np.array(row["values"], np.float32), np.array(line[5:], np.float32))
    chosen = [row for row in rows if row["relation"] == "relation 1" and row["direction"] == "forwards"]
    assert chosen[0]["parameter"] == "matrix" and chosen[0]["shape"] == [4, 4]
    assert np.array_equal(chosen[0]["values"], forwards.matrix.detach().numpy().ravel())
    assert np.array_equal(np.load(tmp_path / "vectors.npy.biases.npy"), np.arange(N))


@pytest.mark.parametrize(("operator", "comparator"), some_slow(product(OPERATORS, COMPARATORS), 3))
def test_pytorch_biggraphs_files_score_as_the_model(operator: str, comparator: str, tmp_path: Path) -> None:
    """The formulas of PyTorch-BigGraph 1.0.0 (``model.py``) on the files, with numpy."""
    h5py = pytest.importorskip("h5py", reason="gtrain[hdf5] is not installed")
    head, relation, tail = edges()
    near = 1e-5 if operator == "rotation" else 1e-10  # cosines and sines are rounded to float32
    for number, (reciprocal, bias) in enumerate(((True, True), (False, True), (True, False), (False, False))):
        made = model(operator=operator, comparator=comparator, reciprocal=reciprocal, bias=bias)
        scoring, folder = ScoringModel.of(made.recipe(), store()), tmp_path / str(number)
        folder.mkdir()
        assert biggraph.why_not(scoring) is None
        rows = made.entities[0].weight.detach().numpy()
        columns = biggraph.columns_of(scoring, D)
        entities = [f"node {row}" for row in range(N)]
        biggraph.write_entities(folder, "node", rows[:, :D], entities, columns, rows[:, D] if bias else None)
        biggraph.write_model(folder, folder, scoring)
        config = json.loads((folder / "config.json").read_text())
        with h5py.File(folder / "embeddings_node_0.v1.h5") as file:
            x = file["embeddings"][...].astype(np.float64)
        assert x.shape[1] == config["dimension"] and config["dynamic_relations"] == reciprocal
        with h5py.File(folder / "model.v1.h5") as file:
            names = []
            file["model"].visit(names.append)
            nodes = {name: file["model"][name] for name in names}
            found = {
                name: node[...].astype(np.float64) for name, node in nodes.items() if isinstance(node, h5py.Dataset)
            }
        scores = made.groups[0].scores
        table = made.entities[0].weight
        to_tails = scores.of_edges(table[head], relation, table[tail]).detach().numpy()
        heads, tails = x[head], x[tail]
        if reciprocal:
            mine = compared(comparator, bias, operated(operator, parameters(found, relation, "lhs"), heads), tails)
            queries = scores.head_queries(table[tail].unsqueeze(1), relation)
            to_heads = scores.pairs(queries, table[head].unsqueeze(1)).squeeze(1).detach().numpy()
            other = compared(comparator, bias, heads, operated(operator, parameters(found, relation, "rhs"), tails))
            np.testing.assert_allclose(other, to_heads, rtol=near, atol=near)
        else:
            mine = compared(comparator, bias, heads, operated(operator, parameters(found, relation, None), tails))
        np.testing.assert_allclose(mine, to_tails, rtol=near, atol=near)


def parameters(found: dict[str, Floats], relation: torch.Tensor, side: str | None) -> dict[str, Floats]:
    """The parameters of each edge's relation by PyTorch-BigGraph's names; ``side`` None: static relations."""
    if side is None:
        names = {name.rpartition("/")[2] for name in found}
        return {
            name: np.stack([found[f"relations/{number}/operator/rhs/{name}"] for number in relation.tolist()])
            for name in names
        }
    mine = {name: values for name, values in found.items() if name.startswith(f"relations/0/operator/{side}/")}
    return {name.rpartition("/")[2].removesuffix("s"): values[relation] for name, values in mine.items()}


def operated(operator: str, values: dict[str, Floats], rows: Floats) -> Floats:
    """PyTorch-BigGraph's operators."""
    if operator in ("complex_diagonal", "rotation"):  # a rotation is written as the product that it is
        half = rows.shape[1] // 2
        made = (rows[:, :half] + 1j * rows[:, half:]) * (values["real"] + 1j * values["imag"])
        return np.concatenate([made.real, made.imag], axis=1)
    if "linear_transformation" in values:
        rows = np.einsum("bij,bj->bi", values["linear_transformation"], rows)
    rows = rows * values["diagonal"] if "diagonal" in values else rows
    return rows + values["translation"] if "translation" in values else rows


def compared(comparator: str, bias: bool, left: Floats, right: Floats) -> Floats:
    """PyTorch-BigGraph's comparators; the first column is the bias."""
    if bias:
        return left[:, 0] + right[:, 0] + compared(comparator, False, left[:, 1:], right[:, 1:])
    if comparator == "cos":
        left, right = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (left, right))
    if comparator in ("dot", "cos"):
        return (left * right).sum(1)
    squared = np.square(left - right).sum(1)
    return -squared if comparator == "squared_l2" else -np.sqrt(squared)


def test_parameters_in_bfloat16_are_exported_as_float32() -> None:
    made = model(operator="translation").bfloat16()
    scoring = ScoringModel.of(made.recipe(), store())
    for *_, name, numbers in scoring.rows():
        assert (name, numbers.dtype) == ("vector", np.float32)


def test_what_pytorch_biggraph_cannot_hold() -> None:
    """Relations between other types, if each direction has its parameters; the export then says why."""
    ends, types = [["user", "item"], ["user", "user"], ["user", "item"]], {"user": 5, "item": 4}
    reasons = []
    for reciprocal in (True, False):
        made = KGEmbedding(N, R, dimension=4, entity_types=types, relation_ends=ends, reciprocal=reciprocal)
        reasons.append(biggraph.why_not(ScoringModel.of(made.recipe(), store(entity_types=types))))
    assert "dynamic relations" in str(reasons[0]) and reasons[1] is None
