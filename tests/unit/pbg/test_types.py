"""pbg with entity types: steps of groups against autograd, and how tables are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gtrain.data.planted.kg import PlantedKGData
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.model.kg.training import DrawNodes, Triples
from gtrain.nn import Adagrad, Csr, RowwiseAdagrad, TableSpec
from gtrain_pbg.edges import EdgeList, RelationGroups, batches_of, filled
from gtrain_pbg.step.layout import EdgeBatch, PartitionRows
from gtrain_pbg.step.relations import RelationWeights, UpdateRule
from gtrain_pbg.step.training import TrainingStep
from gtrain_pbg.typed import partition_types

COUNTS = {"a": 20, "b": 13}
ENDS = [["a", "b"], ["a", "a"], ["b", "a"], ["a", "a"], ["a", "b"]]
RELATIONS = [{"name": "y", "operator": "affine", "all_negs": True}, {"name": "z", "weight": 2.5}]
SIZES = tuple(COUNTS.values())


def typed_model(**settings: Any) -> KGEmbedding:
    torch.manual_seed(1)
    options = {"dimension": 6, "num_batch_negs": 4, "num_uniform_negs": 3, "init_scale": 0.4, **settings}
    names: dict[str, Any] = {"entity_types": COUNTS, "relation_ends": ENDS, "relation_names": list("vwxyz")}
    if settings.get("featurized"):  # a feature may come twice, and a bag may be empty
        del options["featurized"]
        pointer = torch.tensor([0, *torch.arange(20).remainder(4).cumsum(0).tolist()])
        ids = torch.randint(9, (int(pointer[-1]),), generator=torch.Generator().manual_seed(3))
        names["entity_bags"] = lambda name: (Csr(ids, None, pointer), 9) if name == "a" else None
    model = KGEmbedding(33, 5, relations=RELATIONS, **names, **options).double()
    with torch.no_grad():
        for parameter in model.recipe().parameters.values():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def drawn_by(seed: int) -> DrawNodes:
    """Draws for the model what the step gets: heads, then tails."""
    generator = torch.Generator().manual_seed(seed)
    return lambda group, end, size, chunk, count: torch.randint(size, (len(chunk), count), generator=generator)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": True, "global_emb": True, "max_norm": 0.9, "n3": 0.05},
    {"comparator": "l2", "loss": "ranking", "global_emb": True},
    {"comparator": "cos", "loss": "logistic", "num_batch_negs": 0, "bias": True},
    {"featurized": True, "bias": True, "global_emb": True, "max_norm": 0.9, "n3": 0.05},
    {"featurized": True, "comparator": "squared_l2"},
]


@pytest.mark.parametrize("reciprocal", [True, False], ids=["reciprocal", "static"])
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_groups_train_as_autograd_does(variant: int, reciprocal: bool) -> None:
    """Batches of one group each, on two tables that groups share, with what embeddings of a type have in common."""
    model = typed_model(reciprocal=reciprocal, **VARIANTS[variant])
    tables = [layer.weight for layer in model.entities.tables]
    rest = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = [RowwiseAdagrad(tables, lr=0.05), Adagrad(rest, lr=0.025)]
    recipe = model.recipe()
    rows = [
        PartitionRows(
            table.detach().clone(),
            table.new_zeros(len(table), 1).detach(),
            torch.full((len(table),), -1, dtype=torch.int32),
            bags,
        )
        for table, bags in zip(tables, model.entities.bags, strict=True)
    ]
    weights = {
        name: RelationWeights(p.detach().clone(), torch.zeros(len(p), p[0].numel(), dtype=torch.float64))
        for name, p in recipe.parameters.items()
    }
    steps = [
        TrainingStep(group, {k: weights[n] for k, n in recipe.names_of(number).items()}, torch.float64, "float32")
        for number, group in enumerate(recipe.groups)
    ]
    assert len(steps) == 4 and recipe.groups[0].relations == (0, 4)
    for seed in range(12):
        group, step = recipe.groups[seed % 4], steps[seed % 4]
        generator = torch.Generator().manual_seed(seed)
        ends = [torch.randint(SIZES[end], (11,), generator=generator) for end in group.types]
        local = torch.randint(group.num_relations, (11,), generator=generator)
        local = local if reciprocal else local[:1].expand(11).contiguous()
        drawn_from = torch.Generator().manual_seed(seed)
        drawn = [torch.randint(SIZES[end], (step.draws(11),), generator=drawn_from) for end in group.types]
        batch = EdgeBatch(ends[0], local, ends[1], None, (drawn[0], drawn[1]))
        rules = UpdateRule("rowwise_adagrad", 0.05), UpdateRule("adagrad", 0.025)
        lost, weight = step(batch, rows[group.types[0]], rows[group.types[1]], *rules)
        firsts = [recipe.firsts[end] for end in group.types]
        edges = Triples(ends[0] + firsts[0], torch.tensor(group.relations)[local], ends[1] + firsts[1])
        each = model.losses(edges, drawn_by(seed))
        counted = model._weights(edges)
        assert counted is not None and weight == pytest.approx(float(counted.sum()))
        loss = (each * counted).sum() / counted.sum()
        assert lost / weight == pytest.approx(float(loss.detach()), rel=1e-9), seed
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    for mine, table in zip(rows, tables, strict=True):
        assert int(mine.head.max()) == -1
        torch.testing.assert_close(mine.value, table.detach(), rtol=1e-7, atol=1e-7)
    for name, parameter in recipe.parameters.items():
        torch.testing.assert_close(weights[name].value, parameter.detach(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("reciprocal", [True, False])
def test_batches_are_of_one_group(reciprocal: bool) -> None:
    recipe = typed_model(reciprocal=reciprocal).recipe()
    relation = torch.arange(5).repeat(40)
    edges = EdgeList(torch.arange(200), relation, torch.arange(200), None)
    groups, seen = RelationGroups(recipe), []
    for batch in batches_of(edges, 16, RelationGroups(recipe).batching_keys, torch.Generator().manual_seed(0)):
        number = groups.of(batch)
        assert set(batch.relation.tolist()) <= set(recipe.groups[number].relations)
        assert reciprocal or batch.relation.unique().numel() == 1
        own = groups.localized(batch, 0, 0)
        assert torch.equal(torch.tensor(recipe.groups[number].relations)[own.relation], batch.relation)
        seen += batch.heads.tolist()
    assert sorted(seen) == list(range(200))
    assert [number for number, _ in groups.split(edges)] == [0, 1, 2, 3]


def test_tables_are_cut_by_type(tmp_path: Path) -> None:
    """Each type's rows of a part are in one piece; a type that is not cut is in part 0 and has one partition."""
    module = PlantedKGData(
        num_entities=60, num_positions=6, num_relations=2, num_triples=100, num_types=3, num_parts=3,
        partitioner="random", entities={"type_1": {"num_partitions": 1}}, store=str(tmp_path),
    )  # fmt: skip
    module.edge_buckets = True
    module.prepare_data()
    store = module.open_store()
    assert filled(store) == {(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)}  # from type 0 to 1, and from 1 to 2
    specs = [TableSpec(f"type_{t}", 20, 4, seed=t) for t in range(3)]
    cuts = partition_types(store, specs)
    assert [cut.is_partitioned for cut in cuts] == [True, False, True]
    for number, cut in enumerate(cuts):
        assert sorted(torch.cat(cut.partitions.orig_id).tolist()) == list(range(20))
        for part, ids in enumerate(cut.partitions.orig_id):
            begin = cut.begins[part]
            held = store.node("orig_id", part)[begin : begin + len(ids)]
            assert torch.equal(held, ids + 20 * number)
