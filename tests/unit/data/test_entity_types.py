"""Entity types: the sources that have them, and a model of several tables against models of one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.planted.kg import KGModel, PlantedKGData, best_scores, generate
from gtrain.data.schema import DataSchema
from gtrain.data.sources.edges import EdgesData
from gtrain.data.sources.kg import KGData
from gtrain.errors import ConfigError, DataError
from gtrain.graph.store.entities import entity_types, feature_kind
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.model.kg.training import ChunkDraws, Triples
from gtrain.nn import Csr

RELATIONS = [{"name": "lives", "lhs": "person", "rhs": "place"}, {"name": "knows", "lhs": "person", "rhs": "person"}]
LINES = ["rome\tlives\trome", "anna\tlives\trome", "anna\tknows\trome", "bob\tknows\tanna", "bob\tlives\toslo"]


def write_kg(folder: Path, lines: list[str] = LINES, held: str = "bob\tlives\trome") -> str:
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("\n".join(lines if split == "train" else [held]) + "\n")
    return str(folder)


def test_a_name_is_another_entity_in_each_type(tmp_path: Path) -> None:
    """Rome is a person too; types come in the order in which relations name them."""
    module = KGData(
        path=write_kg(tmp_path / "kg"), relations=RELATIONS, store=str(tmp_path / "s"), partitioner="random"
    )
    data = module.read()
    names = {kind: found.to_pylist() for kind, found in module.names().items()}
    assert names == {"person": ["rome", "anna", "bob"], "place": ["rome", "oslo"], "relation": ["lives", "knows"]}
    assert data.edge_index.tolist() == [[0, 1, 1, 2, 2], [3, 3, 0, 1, 4]] and data.num_nodes == 5
    assert (data.val_edge_index.tolist(), data.val_edge_type.tolist()) == ([[2], [3]], [0])
    module.prepare_data()
    store = module.open_store()
    assert [(each.name, each.first, each.count) for each in entity_types(store)] == [("person", 0, 3), ("place", 3, 2)]
    assert store.facts["relation_ends"] == [["person", "place"], ["person", "person"]]
    place = store.names("place")
    assert place is not None and place.encode(["oslo", "rome", "anna"]).tolist() == [1, 0, -1]


def test_an_unknown_name_is_that_of_its_type(tmp_path: Path) -> None:
    module = KGData(path=write_kg(tmp_path / "kg", held="anna\tlives\tanna"), relations=RELATIONS)
    with pytest.raises(DataError, match=r"valid.txt, line 1: the entity 'anna' does not occur in train"):
        module.read()


@pytest.mark.parametrize(
    ("entities", "relations", "message"),
    [
        (None, [{"name": "lives", "lhs": "person"}], "has no rhs"),
        ({"person": {}}, RELATIONS, "names the type 'place'; the types of data.entities are person"),
        (None, RELATIONS[:1], "the data has the relation 'knows'; the relations of data.relations are lives"),
        (None, [{"name": "*", "lhs": "relation", "rhs": "x"}], "the entity type name 'relation' is reserved"),
    ],
)
def test_what_is_amiss_in_a_schema(tmp_path: Path, entities: Any, relations: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KGData(path=write_kg(tmp_path / "kg"), entities=entities, relations=relations).read()


def test_partitions_are_all_or_one(tmp_path: Path) -> None:
    schema = DataSchema({"user": {"num_partitions": 4}, "tag": {"num_partitions": 1}}, None)
    schema.check_partitions(4)
    with pytest.raises(ConfigError, match=r"user.num_partitions=4 was set, .* 4 is neither 1 nor 3"):
        schema.check_partitions(3)
    options: dict[str, Any] = {"path": write_kg(tmp_path / "kg"), "relations": RELATIONS, "store": str(tmp_path / "s")}
    for number in (2, 3):  # the store is the same
        kg = KGData(entities={"person": {"num_partitions": number}, "place": {}}, num_parts=2, **options)
        kg.partitioner, kg.edge_buckets = "random", True
        if number == 2:
            kg.prepare_data()
        else:
            with pytest.raises(ConfigError, match="person.num_partitions=3 was set, .* 3 is neither 1 nor 2"):
                kg.prepare_data()
    module = PlantedKGData(
        num_entities=60, num_positions=6, num_relations=2, num_triples=100, num_types=3, num_parts=3,
        partitioner="random", entities={"type_1": {"num_partitions": 1}}, store=str(tmp_path),
    )  # fmt: skip
    module.edge_buckets = True
    module.prepare_data()
    store = module.open_store()
    parts = [store.node("orig_id", part) for part in range(3)]
    held = [[int(((ids >= 20 * t) & (ids < 20 * t + 20)).sum()) for ids in parts] for t in range(3)]
    assert held[1] == [20, 0, 0] and all(held[0]) and all(held[2])
    relation = store.bucket(1, 0)["edge_type"]
    assert len(relation) and (relation % 3 != 1).all()  # type 1's tails are in partition 0; its heads too


def test_edges_with_types(tmp_path: Path) -> None:
    (tmp_path / "e.tsv").write_text("7\tbuys\t2\n0\tsees\t1\n7\tsees\t4\n")
    relations = [{"name": "buys", "lhs": "user", "rhs": "item"}, {"name": "*", "lhs": "user", "rhs": "film"}]
    options: dict[str, Any] = {"columns": [0, 2], "relation": 1, "separator": "tab"}
    for ids in ("int", "string"):
        module = EdgesData(path=str(tmp_path / "e.tsv"), ids=ids, relations=relations, **options)
        data = module.read()
        assert isinstance(data, Data)
        counts = module.extra_facts()["entity_types"]
        if ids == "int":
            assert counts == {"user": 8, "item": 3, "film": 5} and set(module.names()) == {"relation"}
            assert data.edge_index.tolist() == [[7, 0, 7], [10, 12, 15]]
        else:
            assert counts == {"user": 2, "item": 1, "film": 2}
            assert data.edge_index.tolist() == [[0, 1, 0], [2, 3, 4]]
            assert {kind: names.to_pylist() for kind, names in module.names().items()} == {
                "user": ["7", "0"], "item": ["2"], "film": ["1", "4"], "relation": ["buys", "sees"],
            }  # fmt: skip
        (tmp_path / "f.tsv").write_text("1\tdark\tlong\n4\tlong\n0\tdark\n2\tdark\n3\tdark\n")
        featured = EdgesData(
            path=str(tmp_path / "e.tsv"), ids=ids, relations=relations, **options,
            entities={"user": {}, "item": {}, "film": {"featurized": str(tmp_path / "f.tsv")}},
        )  # fmt: skip
        bags = featured.read().bag.to_dense()  # type: ignore[union-attr]
        films = [12, 15] if ids == "int" else [3, 4]  # 1 and 4
        place = [featured.names()[feature_kind("film")].index(word) for word in ("dark", "long")]
        assert bags[films][:, place].tolist() == [[1, 1], [0, 1]]
        assert not bags[: featured.extra_facts()["entity_types"]["user"]].any()
        assert featured.extra_facts()["features"] == {"film": 2} and "features" in featured.identity()
    with pytest.raises(ConfigError, match="data.path=None and data.edge_sets=None were set"):
        EdgesData(relations=relations)
    with pytest.raises(ConfigError, match="data.num_nodes=9 was set with entity types"):
        EdgesData(path="e", num_nodes=9, relations=relations)


def test_planted_types(tmp_path: Path) -> None:
    """Every triple joins the types of its relation; the best ranks are those among the right type."""
    model = KGModel(num_entities=62, num_relations=5, num_positions=10, num_triples=200, noise=0.1, num_types=3)
    graph = generate(model, 0)
    assert (graph.types[graph.heads] == graph.relations % 3).all()
    assert (graph.types[graph.tails] == (graph.relations + 1) % 3).all()
    triples = set(zip(graph.heads.tolist(), graph.relations.tolist(), graph.tails.tolist(), strict=True))
    assert len(triples) == 200
    expected = []
    for h, r, t in list(zip(graph.heads, graph.relations, graph.tails, strict=True))[: graph.num_test]:
        for answer, others in ((t, [(h, r, e) for e in range(62)]), (h, [(e, r, t) for e in range(62)])):
            free = [e for e in range(62) if others[e] not in triples and graph.types[e] == graph.types[answer]]
            on_rule = [
                e for e in free
                if (graph.positions[others[e][0]] + graph.shifts[r]) % 10 == graph.positions[others[e][2]]
            ]  # fmt: skip
            inside = (graph.positions[h] + graph.shifts[r]) % 10 == graph.positions[t]
            first, last = (1, len(on_rule) + 1) if inside else (len(on_rule) + 1, len(free) + 1)
            expected.append(np.mean([1 / rank for rank in range(first, last + 1)]))
    assert best_scores(graph)["best_mrr"] == pytest.approx(np.mean(expected))


# ------------------------------------------------------------------------------------------------------ the model

COUNTS = {"a": 9, "b": 7}
ENDS = [["a", "b"], ["a", "a"], ["b", "a"], ["a", "a"]]


def typed_model(**settings: Any) -> KGEmbedding:
    torch.manual_seed(0)
    options = {"dimension": 6, "num_batch_negs": 3, "num_uniform_negs": 0, **settings}
    made = KGEmbedding(16, 4, entity_types=COUNTS, relation_ends=ENDS, relation_names=list("wxyz"), **options).double()
    for parameter in made.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    made.log = made.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return made


def edges_of(count: int = 40) -> Triples:
    generator = torch.Generator().manual_seed(0)
    relation = torch.randint(4, (count,), generator=generator)
    first, size = torch.tensor([0, 9]), torch.tensor([9, 7])
    kinds = torch.tensor([[0, 1], [0, 0], [1, 0], [0, 0]])[relation]
    drawn = torch.randint(1 << 30, (2, count), generator=generator)
    head, tail = (first[kinds[:, end]] + drawn[end] % size[kinds[:, end]] for end in (0, 1))
    return Triples(head, relation, tail)


@pytest.mark.parametrize("reciprocal", [True, False])
def test_a_group_is_a_model_of_its_own(reciprocal: bool) -> None:
    """Losses of all edges are those of groups alone, whose edges are chunked alone; x and z differ by the operator."""
    relations = [{"name": "z", "operator": "translation", "weight": 3.0, "all_negs": True}]
    model = typed_model(relations=relations, reciprocal=reciprocal, global_emb=True, bias=True)
    assert [group.relations for group in model.schema.groups] == [(0,), (1,), (2,), (3,)]
    edges = edges_of()
    each = model.losses(edges)
    for number, group in enumerate(model.schema.groups):
        here = (edges.relation == number).nonzero().flatten()
        torch.testing.assert_close(each[here], model.losses(edges.select(here)))
        assert here.numel() > 3 and group.operator == ("translation" if number == 3 else "complex_diagonal")
    weights = model._weights(edges)
    assert weights is not None and torch.equal(weights, torch.where(edges.relation == 3, 3.0, 1.0).double())
    answers = model.entities.rows[0](edges.tail[edges.relation == 3])
    scores = model.groups[3].scores
    queries = (
        scores.tail_queries(
            model.entities.rows[0](edges.head[edges.relation == 3]).unsqueeze(1), torch.zeros(len(answers)).long()
        )
        if reciprocal
        else None
    )  # noqa: E501
    if queries is not None:  # all negatives: softmax over the nine of type a
        both = scores.all_pairs(queries.squeeze(1), model.entities.rows[0](torch.arange(9)))
        tails = -both.log_softmax(1).gather(1, edges.tail[edges.relation == 3].unsqueeze(1)).squeeze(1)
        heads = each[edges.relation == 3] - tails
        assert (heads > 0).all()


@pytest.mark.parametrize("reciprocal", [True, False])
def test_ranks_share_the_chunks_of_all_groups(reciprocal: bool) -> None:
    """Groups with separate negatives, a type with features; ranks that get edges of some groups and of none."""
    pointer = torch.arange(0, 19, 2)
    bags = Csr(torch.arange(18) % 5, None, pointer)
    model = typed_model(
        relations=[{"name": "z", "operator": "translation", "weight": 3.0, "all_negs": True}],
        entity_bags=lambda name: (bags, 5) if name == "a" else None,
        reciprocal=reciprocal,
        num_uniform_negs=4,
    )
    edges = edges_of()
    whole = model.losses(edges, ChunkDraws(3))
    for ranks in (2, 3, 60):
        each = torch.zeros_like(whole)
        for rank in range(ranks):
            places, chunk = model.deal(edges.relation, rank, ranks)
            each[places] += model.losses(replace(edges.select(places), chunk=chunk), ChunkDraws(3))
        torch.testing.assert_close(each, whole, rtol=1e-12, atol=0)
    assert not torch.allclose(model.losses(edges, ChunkDraws(4)), whole)


def test_relations_of_one_kind_are_one_group() -> None:
    model = typed_model()
    assert [(group.lhs, group.rhs, group.relations) for group in model.schema.groups] == [
        (0, 1, (0,)), (0, 0, (1, 3)), (1, 0, (2,)),
    ]  # fmt: skip
    assert model.groups[1].scores.forwards.real.shape == (2, 3)


def test_ranks_are_among_the_right_type() -> None:
    model, edges = typed_model(), edges_of(20)
    batch = Data(orig_id=torch.arange(16), edge_label_index=torch.stack([edges.head, edges.tail]), num_nodes=16)
    batch.edge_label_type = edges.relation
    known = [sorted({int(tail), 0 if tail < 9 else 9}) for tail in edges.tail]
    batch.known_tail = torch.tensor([t for ids in known for t in ids])
    batch.known_tail_ptr = torch.tensor([0, *(len(ids) for ids in known)]).cumsum(0)
    tails, heads = model._ranks(batch, edges)

    def score(head: int, relation: int, tail: int) -> Tensor:
        one = Triples(*(torch.tensor([value]) for value in (head, relation, tail)))
        return model._scored(one, one.tail)[0]

    spans = {"a": range(9), "b": range(9, 16)}
    for e, (h, r, t) in enumerate(zip(edges.head.tolist(), edges.relation.tolist(), edges.tail.tolist(), strict=True)):
        others = [o for o in spans[ENDS[r][1]] if o not in known[e]]
        assert tails[e] == 1 + sum(bool(score(h, r, o) > score(h, r, t)) for o in others)
    assert ((heads >= 1) & (heads <= 9)).all()


def test_types_that_never_meet_may_differ_in_dimension() -> None:
    apart = {"entity_types": {"a": 4, "b": 5}, "relation_ends": [["a", "a"], ["b", "b"]], "relation_names": ["x", "y"]}
    model = KGEmbedding(9, 2, dimension=6, entities={"b": {"dimension": 2}}, num_batch_negs=2, **apart)  # type: ignore[arg-type]
    edges = Triples(torch.tensor([0, 4, 8]), torch.tensor([0, 1, 1]), torch.tensor([3, 5, 4]))
    assert model.losses(edges).shape == (3,) and model.dimensions == {"a": 6, "b": 2}
    found = model.predict_step(Data(orig_id=torch.arange(9), seeds=torch.tensor([8, 1])), 0)
    assert torch.equal(found[0, :2], model.entities[1].weight[4]) and found[0, 2:].isnan().all()
    assert torch.equal(found[1], model.entities[0].weight[1])
    with pytest.raises(ConfigError, match=r"relation 'w' joins a of dimension 6 and b of dimension 2: 6 != 2"):
        typed_model(entities={"b": {"dimension": 2}})
    with pytest.raises(ConfigError, match=r"dimension=5 with model.operator=complex_diagonal: 5 / 2 = 2\.5"):
        KGEmbedding(9, 2, dimension=6, entities={"b": {"dimension": 5}}, **apart)  # type: ignore[arg-type]
    empty = KGEmbedding(9, 2, dimension=6, entities={"a": None, "b": {}}, **apart)  # type: ignore[arg-type,dict-item]
    assert empty.dimensions == {"a": 6, "b": 6}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entities": {"c": {}}}, "names the type 'c', and the graph has a, b"),
        ({"entities": {"a": {"dim": 3}}}, "data.entities.a has 'dim'"),
        ({"entities": {"a": {"dimension": 0}}}, "data.entities.a.dimension=0 was set"),
        (
            {"relations": [{"name": "w", "weight": 1.0}, {"name": "w", "weight": 2.0}]},
            "data.relations has two entries for 'w'",
        ),
        ({"relations": [{"name": "v", "weight": 2.0}]}, "names 'v', and the graph has no such relation"),
        ({"relations": [{"name": "w", "weight": -1}]}, r"data.relations has the weight -1\.0"),
        ({"relations": [{"name": "w", "operators": "none"}]}, "data.relations has 'operators'"),
        ({"relations": [{"name": "w", "operator": "rotate"}]}, "operator=rotate"),
    ],
)
def test_settings_of_types_and_relations(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        typed_model(**settings)


def test_a_setting_of_all_other_relations() -> None:
    relations = [{"name": "x", "operator": "none"}, {"name": "*", "operator": "diagonal", "weight": 0.5}]
    model = typed_model(relations=relations)
    assert [group.operator for group in model.schema.groups] == ["diagonal", "none", "diagonal", "diagonal"]
    assert model.schema.weights == (0.5, 1.0, 0.5, 0.5)
    assert json.loads(json.dumps(model.schema.weights)) == [0.5, 1.0, 0.5, 0.5]
