"""Questions to a trained model: answers are those of the exported parameters, multiplied by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import some_slow
from numpy.typing import NDArray
from omegaconf import OmegaConf
from torch import Tensor

from gtrain.callbacks.relations import ScoringModel, write_beside
from gtrain.data.sources.kg import KGData
from gtrain.errors import ConfigError
from gtrain.graph.store import Store
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.model.kg.scores import COMPARATORS, OPERATORS
from gtrain.nn import tables
from gtrain.query import known
from gtrain.query.command import NeighborOptions, _all_texts, take_options
from gtrain.query.index import NeighborIndex, num_groups
from gtrain.query.model import TrainedModel
from gtrain.query.opening import OpenedRun, _settings
from gtrain.query.questions import Question
from gtrain.query.rows import load_rows
from gtrain.strategy.checkpoint import SavedRows

D = 6
Floats = NDArray[np.float64]
PEOPLE = ["rome", "ann, the first", "bob", "cleo", "dora"]
EDGES = {
    "train": [("ann, the first", "lives", "rome"), ("ann, the first", "lives", "oslo"), ("bob", "knows", "rome"),
              ("bob", "knows", "ann, the first"), ("cleo", "lives", "bern"), ("dora", "knows", "bob")],
    "valid": [("rome", "lives", "oslo")],
    "test": [("bob", "knows", "dora")],
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """People and places in two parts; rome is both."""
    folder = tmp_path_factory.mktemp("query")
    for split, edges in EDGES.items():
        (folder / f"{split}.txt").write_text("".join("\t".join(edge) + "\n" for edge in edges))
    relations = [
        {"name": "lives", "lhs": "person", "rhs": "place"},
        {"name": "knows", "lhs": "person", "rhs": "person"},
    ]
    data = KGData(path=str(folder), relations=relations, store=str(folder / "s"), partitioner="random", num_parts=2)
    data.prepare_data()
    return data.open_store()


def trained(store: Store, **settings: Any) -> tuple[TrainedModel, KGEmbedding]:
    """A model in double precision, whose rows float32 can represent, far from their initial values."""
    torch.manual_seed(0)
    facts = store.facts
    made = KGEmbedding(
        facts["num_nodes"], 2, entity_types=facts["entity_types"], relation_ends=facts["relation_ends"],
        relation_names=["lives", "knows"], dimension=D, **settings,
    ).double()  # fmt: skip
    for parameter in made.parameters():
        parameter.data += torch.randn_like(parameter)
        parameter.data = parameter.data.float().double()
    made.eval().requires_grad_(False)
    return TrainedModel(OpenedRun(Path("run"), Path("best.ckpt"), "0", store, made)), made


class Exported:
    """What ``gtrain export`` writes, read from the files and multiplied by the formulas of docs/query.md."""

    def __init__(self, model: KGEmbedding, store: Store, folder: Path) -> None:
        self.model = ScoringModel.of(model.recipe(), store)
        ids = torch.arange(store.num_nodes)
        self.rows: Floats = model.entities.of_nodes(ids).numpy()
        biases = model.entities.biases_of(ids)
        self.biases: Floats = np.zeros(len(ids)) if biases is None else biases.numpy()
        write_beside(folder / "x.npy", "npy", self.model, None if biases is None else self.biases)
        path = folder / "x.npy.relations.npz"
        self.parameters = dict(np.load(path)) if path.exists() else {}

    def score(self, head: int, relation: str, tail: int, *, to_tail: bool) -> float:
        """Score of an edge by ids that count through the types."""
        number = next(n for n, group in enumerate(self.model.groups) if relation in group.relations)
        group = self.model.groups[number]
        row = group.relations.index(relation)

        def operated(direction: str, x: Floats) -> Floats:
            names = ("vector", "matrix", "real", "imaginary", "angle")
            values = {n: self.parameters[f"{number}.{direction}.{n}"][row] for n in names
                      if f"{number}.{direction}.{n}" in self.parameters}  # fmt: skip
            if group.operator == "complex_diagonal":
                z = (x[: D // 2] + 1j * x[D // 2 :]) * (values["real"] + 1j * values["imaginary"])
                return np.concatenate([z.real, z.imag])
            if group.operator == "rotation":
                z = (x[: D // 2] + 1j * x[D // 2 :]) * np.exp(1j * values["angle"])
                return np.concatenate([z.real, z.imag])
            if group.operator == "diagonal":
                return x * values["vector"]
            return (values["matrix"] @ x if "matrix" in values else x) + values.get("vector", 0.0)

        left, right = self.rows[head], self.rows[tail]
        if self.model.reciprocal and to_tail:
            left = operated("forwards", left)
        else:
            right = operated("backwards" if self.model.reciprocal else "forwards", right)
        compared = {
            "dot": left @ right,
            "cos": left @ right / np.linalg.norm(left) / np.linalg.norm(right),
            "l2": -np.linalg.norm(left - right),
            "squared_l2": -np.square(left - right).sum(),
        }
        return float(compared[self.model.comparator] + self.biases[head] + self.biases[tail])


@pytest.mark.parametrize(("operator", "comparator"), some_slow(product(OPERATORS, COMPARATORS), 3))
def test_scores_are_those_of_the_exported_parameters(
    operator: str, comparator: str, store: Store, tmp_path: Path
) -> None:
    """Both directions, all answers in their order, and single edges; with and without reciprocals and biases."""
    for reciprocal, bias in ((True, True), (True, False), (False, True)):
        model, module = trained(store, operator=operator, comparator=comparator, reciprocal=reciprocal, bias=bias)
        by_hand = partial(Exported(module, store, tmp_path).score)
        people, places = {name: n for n, name in enumerate(PEOPLE)}, {"rome": 5, "oslo": 6, "bern": 7}
        names = dict(zip(store.names("person").decode(range(5)), range(5), strict=True))  # type: ignore[union-attr]
        assert set(names) == set(people)
        ann, rome = names["ann, the first"], places["rome"]
        tails = model.ask('"ann, the first",lives,?')
        assert isinstance(tails, list)
        want = {name: by_hand(ann, "lives", place, to_tail=True) for name, place in placed(store).items()}
        check(tails, want)
        heads = model.ask("?,lives,rome", k=3)
        assert isinstance(heads, list) and len(heads) == 3
        want = {name: by_hand(person, "lives", rome, to_tail=False) for name, person in names.items()}
        check(heads, dict(sorted(want.items(), key=lambda item: -item[1])[:3]))
        both = model.score("bob", "knows", "rome")
        expected = [by_hand(names["bob"], "knows", names["rome"], to_tail=way) for way in (True, False)]
        np.testing.assert_allclose(both, expected, rtol=1e-11)
        assert reciprocal == (abs(both[0] - both[1]) > 1e-9) or operator == "none"


def placed(store: Store) -> dict[str, int]:
    names = store.names("place")
    assert names is not None
    return {name: 5 + number for number, name in enumerate(names.decode(range(3)))}


def check(answers: list[Any], want: dict[str, float]) -> None:
    """Names and scores, the best first."""
    assert [answer.name for answer in answers] == sorted(want, key=lambda name: -want[name])
    np.testing.assert_allclose([answer.score for answer in answers], [want[a.name] for a in answers], rtol=1e-11)


def test_known_edges_are_left_out(store: Store) -> None:
    """Those of all splits, in both directions; a name has another meaning in each type."""
    model, _ = trained(store)
    everybody = {answer.name for answer in model.answers("bob", "knows", None)}
    assert everybody == set(PEOPLE)
    unknown = {answer.name for answer in model.answers("bob", "knows", None, filtered=True)}
    assert unknown == {"bob", "cleo"}  # rome, ann and, of the test edges, dora are known
    assert {answer.name for answer in model.answers("ann, the first", "lives", None, filtered=True)} == {"bern"}
    heads = {answer.name for answer in model.answers(None, "lives", "oslo", filtered=True)}
    assert heads == {"bob", "cleo", "dora"}


def test_many_questions_read_the_edges_once_for_each_direction(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained(store)
    edge = 'bob,knows,"ann, the first"'
    questions = ["bob,knows,?", "?,lives,oslo", '"ann, the first",lives,?', edge, "bob,knows,?"]
    each = [model.ask(question, filtered=True) for question in questions]
    passes: list[int] = []
    monkeypatch.setattr(known, "_edges", lambda of, edges=known._edges: (passes.append(1), edges(of))[1])
    assert list(model.ask_many(questions, filtered=True)) == each
    assert len(passes) == 2
    assert {answer.name for answer in each[0]} == {"bob", "cleo"}


def test_rows_that_stay_in_the_checkpoint_give_the_same_answers(store: Store) -> None:
    """Pieces in no order, as the partitions of pbg are."""
    model, module = trained(store, bias=True)

    def everything() -> list[tuple[str, float]]:
        lists = [model.answers(None, "lives", "rome"), model.answers("bob", "knows", None)]
        lists += model.neighbors(["bob", "dora"], k=2)
        return [(each.name, pytest.approx(each.score, rel=1e-12)) for answers in lists for each in answers]

    want, saved = everything(), {}
    for name, layer in tables(module):
        rows, order = layer.weight.data.clone(), torch.randperm(layer.table.rows)

        def pieces(rows: Tensor = rows, order: Tensor = order) -> Iterator[tuple[Tensor, Tensor]]:
            return ((ids, rows[ids]) for ids in order.split(2))

        saved[name] = SavedRows(len(rows), pieces)
    load_rows(module, saved, 0)
    assert all(len(layer.weight) == 0 for _, layer in tables(module))
    assert everything() == want and len(want) == 5 + 5 + 4
    load_rows(module, saved)
    assert all(len(layer.weight) == layer.table.rows for _, layer in tables(module))
    assert everything() == want


def test_neighbors_in_the_metric_of_the_model(store: Store) -> None:
    """Directions where operators are linear and are compared by products, else positions."""
    for operator, comparator in [*product(("linear", "affine"), COMPARATORS), ("translation", "dot"), ("none", "cos")]:
        model, module = trained(store, operator=operator, comparator=comparator, bias=True)
        linear = operator not in ("translation", "affine")
        assert model.metric == ("cos" if linear and comparator in ("dot", "cos") else "l2")
        x = module.entities[0].weight[:, :D].numpy()
        names = store.names("person").decode(range(5))  # type: ignore[union-attr]
        bob, rome = names.index("bob"), names.index("rome")
        scores = {"l2": -np.linalg.norm(x - x[bob], axis=1), "dot": x @ x[bob],
                  "cos": x @ x[bob] / np.linalg.norm(x, axis=1) / np.linalg.norm(x[bob])}  # fmt: skip
        for metric in ("cos", "l2", "dot"):
            found = model.neighbors(["bob", "cleo"], metric=metric)[0]
            check(found, {name: score for name, score in zip(names, scores[metric], strict=True) if name != "bob"})
        found = model.neighbors(["rome"], k=1, entity_type="person")[0]
        assert len(found) == 1 and found[0].name != names[rome]


def test_an_index_finds_what_is_nearest(store: Store, tmp_path: Path) -> None:
    """A saved index answers as the exact search does, and is refused for other vectors."""
    pytest.importorskip("faiss", reason="gtrain[index] is not installed")
    model, _ = trained(store, comparator="l2")
    path = tmp_path / "people.index"
    model.build_index(path, entity_type="person")
    index = model.load_index(path, entity_type="person")
    assert index.metric == "l2"
    people = ["bob", "cleo", "dora"]
    got, want = model.neighbors(people, k=9, index=index), model.neighbors(people, k=9)
    assert got == want and [len(answers) for answers in got] == [4, 4, 4]
    with pytest.raises(ConfigError, match=r"the index is of checkpoint and type 0 person, and the model is 0 place"):
        model.load_index(path, entity_type="place")
    with pytest.raises(ConfigError, match=r"metric=cos was set; the index measures l2"):
        model.neighbors(["bob"], metric="cos", index=index)
    with pytest.raises(ConfigError, match=r"people.index exists already"):
        model.build_index(path, entity_type="person")
    (tmp_path / "damaged").write_bytes(b"no index")
    with pytest.raises(ConfigError, match=r"index=.*damaged was set; it cannot be read"):
        model.load_index(tmp_path / "damaged", entity_type="person")


def test_an_index_scans_as_many_groups_as_the_vectors_need() -> None:
    """Few where vectors are near communities, most of them where they have no structure."""
    pytest.importorskip("faiss", reason="gtrain[index] is not installed")
    generator, probes = torch.Generator().manual_seed(0), []
    for spread in (0.1, 1e9):
        centers = torch.randn(50, 16, generator=generator)
        rows = centers[torch.randint(50, (6000,), generator=generator)]
        rows = rows + spread * torch.randn(6000, 16, generator=generator)
        block = torch.arange(len(rows)), rows
        index = NeighborIndex.build(lambda block=block: iter([block]), (6000, 16), metric="l2", source="rows")
        exact = (-torch.cdist(rows[:300], rows)).topk(10).indices
        hits = (index.search(rows[:300], 10).unsqueeze(2) == exact.unsqueeze(1)).sum() / exact.numel()
        assert hits > 0.95
        probes.append(index.probes)
    assert num_groups(6000) == 128 and probes[0] == 16 < probes[1]


def test_relations_form_the_groups_that_were_trained() -> None:
    """The parameters of a group lie together: with other groups, relations would have each other's."""
    relations = [{"name": "a", "all_negs": False}, {"name": "b", "all_negs": True}]
    settings = {"dimension": D, "operator": "diagonal", "relations": relations, "all_negs": True, "dura": 0.1}
    target = f"{KGEmbedding.__module__}.{KGEmbedding.__name__}"
    composed = OmegaConf.create({"model": {"_target_": target, **settings}})
    kept: dict[str, Any] = _settings(SimpleNamespace(composed=composed, folder=Path("run")))  # type: ignore[arg-type]
    trained, opened = (KGEmbedding(9, 3, relation_names=["c", "a", "b"], **chosen) for chosen in (settings, kept))
    assert [g.relations for g in trained.recipe().groups] == [g.relations for g in opened.recipe().groups]
    assert "dura" not in kept


def test_what_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained(store)
    refused = {
        ("bobb,knows,?",): r"'bobb' was given; the data has no person of this name(.|\n)*HINT: did you mean bob",
        ("bob,likes,?",): r"'likes' was given; the data has no relation of this name(.|\n)*HINT: did you mean lives",
        ("bob,lives,bob",): r"'bob' was given; the data has no place of this name",
        ("bob,?",): r"a question has no relation, and the graph has 2 of them",
        ("?,lives,?",): r"it asks for both ends",
        ("ann, the first,lives,?",): r"a question has 3 fields, and this one has 4(.|\n)*in double quotes",
    }
    for (question,), message in refused.items():
        with pytest.raises(ConfigError, match=message):
            model.ask(question)
    with pytest.raises(ConfigError, match=r"k=0 was set"):
        model.ask("bob,knows,?", k=0)
    with pytest.raises(ConfigError, match=r"rome were given; person, place have entities(.|\n)*set type to one of"):
        model.neighbors(["rome"])
    with pytest.raises(ConfigError, match=r"bob, oslo were given; no type has all of them"):
        model.neighbors(["bob", "oslo"])
    with pytest.raises(ConfigError, match=r"'nobody' was given; the data has no person or place of this name"):
        model.neighbors(["nobody"])
    with pytest.raises(ConfigError, match=r"type=city was set(.|\n)*its types are person, place"):
        model.neighbors(["rome"], entity_type="city")
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"approximate search needs faiss(.|\n)*pip install 'gtrain\[index\]'"):
        model.build_index(entity_type="person")


def test_names_with_equal_signs_are_names() -> None:
    options, texts = take_options(["run=x", "k=3", "a=b", "index=null", "c"], NeighborOptions, "neighbors")
    assert (options.run, options.k, options.index, texts) == ("x", 3, None, ["a=b", "c"])
    with pytest.raises(ConfigError, match=r"k=none was set"):
        take_options(["run=x", "k=none"], NeighborOptions, "neighbors")
    with pytest.raises(ConfigError, match=r"metrics=l2 was given; gtrain neighbors has no key(.|\n)*mean metric"):
        take_options(["run=x", "metrics=l2"], NeighborOptions, "neighbors")
    with pytest.raises(ConfigError, match=r"gtrain neighbors was given without a run"):
        take_options(["a"], NeighborOptions, "neighbors")
    assert Question.parse('"a, b", r ,?') == Question("a, b", "r ", None)
    assert Question.parse("?,b") == Question(None, None, "b")
    assert Question.parse('"Weird Al" Yankovic,sings,?') == Question('"Weird Al" Yankovic', "sings", None)
    assert Question.parse('"1990"^^xsd:date,r,"""x"", y"') == Question('"1990"^^xsd:date', "r", '"x", y')
    assert Question.parse('"?", r,?') == Question("?", "r", None)
    assert Question.parse("a,r,") == Question("a", "r", "")


def test_questions_of_a_file_are_utf_8(tmp_path: Path) -> None:
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfann\nbob\n")
    (tmp_path / "latin").write_bytes("Jos\xe9\n".encode("latin-1"))
    assert _all_texts(NeighborOptions(input=str(tmp_path / "marked")), [], "neighbors NAME") == ["ann", "bob"]
    with pytest.raises(ConfigError, match="it cannot be read: it is not UTF-8"):
        _all_texts(NeighborOptions(input=str(tmp_path / "latin")), [], "neighbors NAME")
