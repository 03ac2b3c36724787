"""The training step of pbg against autograd: every operator, comparator and loss."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from helpers import some_slow
from torch import Tensor

from gtrain.model.kg.embedding import KGEmbedding
from gtrain.model.kg.training import DrawNodes, Triples
from gtrain.nn import SGD, Adagrad, RowwiseAdagrad
from gtrain_pbg.kernels.rounding import SPAN, equalize_scales, round_rows, write_row_quantized
from gtrain_pbg.kernels.tiles import has_words, multiply, padded
from gtrain_pbg.step import matmul_format
from gtrain_pbg.step.layout import EdgeBatch, PartitionRows, bits
from gtrain_pbg.step.relations import RelationWeights, UpdateRule, state_width
from gtrain_pbg.step.training import TrainingStep

NODES, RELATIONS, DIM = 40, 3, 8
OPERATORS = ("none", "translation", "diagonal", "linear", "affine", "complex_diagonal", "rotation")
COMPARATORS = ("dot", "cos", "l2", "squared_l2")
LOSSES = ("ranking", "logistic", "softmax")


def make_model(dtype: torch.dtype = torch.float64, **settings: Any) -> KGEmbedding:
    torch.manual_seed(1)
    chosen = {"dimension": DIM, "num_batch_negs": 6, "num_uniform_negs": 4, "init_scale": 0.4, **settings}
    model = KGEmbedding(NODES, RELATIONS, sparse_optimizer=lambda p: RowwiseAdagrad(p, lr=0.1), **chosen).to(dtype)
    with torch.no_grad():  # operators begin as the identity, where mistakes may hide
        for parameter in model.recipe().parameters.values():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def make_edges(count: int, static: bool, seed: int, dtype: torch.dtype, weighted: bool = False) -> Triples:
    generator = torch.Generator().manual_seed(seed)
    head, tail = torch.randint(NODES, (2, count), generator=generator)
    tail[:2] = head[:2]  # loops
    relation = torch.randint(RELATIONS, (count,), generator=generator)
    if static:
        relation[:] = relation[0].clone()
    weight = torch.rand(count, generator=generator, dtype=dtype) + 0.5 if weighted else None
    return Triples(head, relation, tail, weight)


def drawn_by(seed: int) -> DrawNodes:
    """Draws for the model what :class:`Fused` draws: heads, then tails."""
    generator = torch.Generator().manual_seed(seed)
    return lambda group, end, size, chunk, count: torch.randint(size, (len(chunk), count), generator=generator)


class Reference:
    """A plain loop of autograd and the optimizers of gtrain.nn."""

    def __init__(self, model: KGEmbedding, lr: float, plain: bool = False) -> None:
        self.model = model
        rest = [p for p in model.parameters() if p is not model.entities[0].weight]
        table, relations = (SGD, SGD) if plain else (RowwiseAdagrad, Adagrad)
        self.optimizers: list[Any] = [table([model.entities[0].weight], lr=lr)]
        self.optimizers += [relations(rest, lr=0.5 * lr)] if rest else []

    def train(self, edges: Triples, drawn_seed: int) -> float:
        model = self.model
        each = model.losses(edges, drawn_by(drawn_seed))
        weight = model._weights(edges)
        weight = torch.ones_like(each) if weight is None else weight.to(each)
        loss = (each * weight).sum() / weight.sum()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach())


class Fused:
    """The same by :class:`TrainingStep`, on copies."""

    def __init__(
        self,
        model: KGEmbedding,
        lr: float,
        matmul: str = "float32",
        kind: str = "rowwise_adagrad",
        of_relations: str = "adagrad",
    ) -> None:
        self.model, self.recipe = model, model.recipe().groups[0]
        table = model.entities[0].weight.detach().clone()
        self.rows = PartitionRows(
            table,
            table.new_zeros(NODES, state_width(kind, table.size(1))),
            torch.full((NODES,), -1, dtype=torch.int32),
        )
        self.weights = {}
        made = {}  # both ends' shift is one
        for name, parameter in self.recipe.parameters.items():
            value = parameter.detach().clone()
            state = value.new_zeros(len(value), state_width(of_relations, value[0].numel()))
            self.weights[name] = made.setdefault(id(parameter), RelationWeights(value, state))
        self.step = TrainingStep(self.recipe, self.weights, table.dtype, matmul)
        self.rules = UpdateRule(kind, lr), UpdateRule(of_relations, 0.5 * lr)

    def train(self, edges: Triples, drawn_seed: int) -> float:
        generator = torch.Generator().manual_seed(drawn_seed)
        count = self.step.draws(len(edges))
        drawn = torch.randint(NODES, (2, count), generator=generator)
        batch = EdgeBatch(edges.head, edges.relation, edges.tail, edges.weight, (drawn[0], drawn[1]))
        lost, weight = self.step(batch, self.rows, self.rows, *self.rules)
        return lost / weight

    def same_as(self, model: KGEmbedding, tolerance: float) -> None:
        torch.testing.assert_close(self.rows.value, model.entities[0].weight.detach(), rtol=tolerance, atol=tolerance)
        for name, parameter in model.recipe().groups[0].parameters.items():
            torch.testing.assert_close(self.weights[name].value, parameter.detach(), rtol=tolerance, atol=tolerance)
        assert int(self.rows.head.max()) == -1


def compare(
    batches: int, tolerance: float, count: int = 20, dtype: torch.dtype = torch.float64, **settings: Any
) -> None:
    """Train side by side and compare all losses and what came out. Tolerances are relative."""
    weighted = settings.pop("weighted", False)
    lr = settings.pop("lr", 0.05)
    plain = settings.pop("plain", False)
    model = make_model(dtype, **settings)
    fused = Fused(model, lr, kind="sgd", of_relations="sgd") if plain else Fused(model, lr)
    reference = Reference(model, lr, plain)
    for number in range(batches):
        edges = make_edges(count, not model.groups[0].scores.reciprocal, number, dtype, weighted)
        assert fused.train(edges, number) == pytest.approx(reference.train(edges, number), rel=tolerance), number
    fused.same_as(model, 100 * tolerance)


def tolerance_of(operator: str, comparator: str) -> float:
    """Where a node is compared with itself, its distance is the root of what rounding left of a zero."""
    return 1e-6 if (operator, comparator) == ("none", "l2") else 1e-10


@pytest.mark.parametrize("reciprocal", [True, False], ids=["reciprocal", "static"])
@pytest.mark.parametrize(
    ("operator", "comparator", "loss"), some_slow(itertools.product(OPERATORS, COMPARATORS, LOSSES), 5)
)
def test_every_combination_trains_as_autograd_does(operator: str, comparator: str, loss: str, reciprocal: bool) -> None:
    """In float64, rows and parameters after two plain steps, which are the gradients of each.

    Plain steps, for Adagrad makes a step of full length of a gradient that is zero but for rounding.
    """
    settings = {"operator": operator, "comparator": comparator, "loss": loss, "reciprocal": reciprocal}
    compare(2, tolerance_of(operator, comparator), plain=True, **settings)


EVERY = bool(os.environ.get("GTRAIN_ALL"))
PAIRS = list(itertools.product(OPERATORS, COMPARATORS))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PAIRS)), ids=["-".join(pair) for pair in PAIRS])
def test_losses_of_200_batches(number: int) -> None:
    """With the optimizers that are the default. Losses and kinds of relations take turns.

    GTRAIN_ALL=1 has all.
    """
    operator, comparator = PAIRS[number]
    every = list(itertools.product(LOSSES, (True, False)))
    for loss, reciprocal in every if EVERY else [every[number % len(every)]]:
        settings = {"operator": operator, "comparator": comparator, "loss": loss, "reciprocal": reciprocal}
        compare(200, 1e-5, count=12, **settings)


VARIANTS: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "uniform alone": {"num_batch_negs": 0},
    "batch alone": {"num_uniform_negs": 0},
    "all": {"all_negs": True},
    "heads alone": {"tail_negs": False},
    "tails alone": {"head_negs": False},
    "n3": {"n3": 0.05},
    "max norm": {"max_norm": 0.9},
    "global": {"global_emb": True},
    "relation weight": {"relation_weight": [0.5, 2.0, 1.0]},
    "edge weight": {"weighted": True},
    "everything": {
        "bias": True,
        "n3": 0.05,
        "max_norm": 0.9,
        "global_emb": True,
        "relation_weight": [0.5, 2.0, 1.0],
        "weighted": True,
    },
    "everything, uniform alone": {"bias": True, "n3": 0.05, "global_emb": True, "num_batch_negs": 0},
    "everything, all": {"bias": True, "n3": 0.05, "global_emb": True, "all_negs": True},
}


@pytest.mark.parametrize("comparator", COMPARATORS)
@pytest.mark.parametrize("operator", ["none", "affine", "complex_diagonal", "rotation"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str, operator: str, comparator: str) -> None:
    turn = list(VARIANTS).index(variant) + COMPARATORS.index(comparator)
    kinds = list(itertools.product(LOSSES, (True, False)))
    for loss, reciprocal in kinds if EVERY else [kinds[turn % len(kinds)]]:
        settings = {"operator": operator, "comparator": comparator, "loss": loss, "reciprocal": reciprocal}
        compare(2, tolerance_of(operator, comparator), plain=True, **settings, **VARIANTS[variant])


@pytest.mark.parametrize("operator", ["none", "affine", "complex_diagonal", "rotation"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("apart", [False, True])
def test_an_edges_own_ends_are_negatives(loss: str, operator: str, apart: bool) -> None:
    more: dict[str, Any] = {"bias": True, "n3": 0.05, "weighted": True, "num_batch_negs": 0} if apart else {}
    compare(2, 1e-10, plain=True, loss=loss, operator=operator, self_negs=True, **more)


EDGE_LOSSES: dict[str, dict[str, Any]] = {
    "alone": {},
    "with all": {"n3": 0.05, "all_negs": True, "bias": True, "weighted": True, "relation_weight": [0.5, 2.0, 1.0]},
    "with uniform": {"num_batch_negs": 0, "global_emb": True, "max_norm": 0.9, "head_negs": False},
}


@pytest.mark.parametrize("operator", ["diagonal", "linear", "complex_diagonal"])
@pytest.mark.parametrize("reciprocal", [True, False], ids=["reciprocal", "static"])
@pytest.mark.parametrize("variant", EDGE_LOSSES)
def test_dura_trains_as_autograd_does(variant: str, reciprocal: bool, operator: str) -> None:
    compare(2, 1e-10, plain=True, operator=operator, reciprocal=reciprocal, dura=0.3, **EDGE_LOSSES[variant])


@pytest.mark.parametrize("operator", ["translation", "diagonal", "complex_diagonal"])
@pytest.mark.parametrize("reciprocal", [True, False], ids=["reciprocal", "static"])
@pytest.mark.parametrize("variant", EDGE_LOSSES)
def test_relation_prediction_trains_as_autograd_does(variant: str, reciprocal: bool, operator: str) -> None:
    """Also with Adagrad, which changes the relations that no edge of the batch has."""
    settings = {"operator": operator, "reciprocal": reciprocal, "relation_prediction": 0.7}
    compare(2, 1e-10, plain=True, **settings, **EDGE_LOSSES[variant])
    compare(5, 1e-8, count=2, **settings, **EDGE_LOSSES[variant])


@pytest.mark.parametrize("count", [1, 5, 6, 7, 12, 13])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_batches_that_chunks_do_not_divide(count: int, reciprocal: bool) -> None:
    compare(3, 1e-10, count=count, reciprocal=reciprocal)


def test_large_chunks_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gtrain_pbg.step.scores.BLOCK", 64)
    compare(2, 1e-10, count=300, num_batch_negs=100, comparator="l2", bias=True)


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products of small chunks computed as those of large ones are."""
    monkeypatch.setattr("gtrain_pbg.step.chunks.MOST", 0)


@pytest.mark.parametrize("reciprocal", [True, False], ids=["reciprocal", "static"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("operator", ["none", "translation", "diagonal", "complex_diagonal"])
def test_large_chunks_train_as_autograd_does(
    operator: str, loss: str, reciprocal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_torch(monkeypatch)
    compare(2, 1e-10, plain=True, operator=operator, loss=loss, reciprocal=reciprocal)


@pytest.mark.parametrize("matmul", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("places", "uniform", "dimension", "operator"), [
    (6, 4, 8, "complex_diagonal"),
    (7, 0, 9, "diagonal"),
    (50, 51, 100, "none"),
    (1, 130, 65, "translation"),
])  # fmt: skip
def test_small_chunks_in_single_precision(
    places: int, uniform: int, dimension: int, operator: str, matmul: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one plain step changes, of chunks and rows that fill no vectors; the last chunk is not whole."""
    settings = {"num_batch_negs": places, "num_uniform_negs": uniform, "dimension": dimension, "operator": operator}
    model = make_model(torch.float32, **settings)
    small = Fused(model, 1.0, matmul, "sgd", "sgd")
    by_torch(monkeypatch)
    exact = Fused(model, 1.0, "float32", "sgd", "sgd")
    assert (small.step._chunks is None) == (matmul == "bfloat16" and not has_words()) and exact.step._chunks is None
    near = 1e-5 if matmul == "float32" else 0.01
    edges = make_edges(2 * places + 3, False, 0, torch.float32, weighted=True)
    assert small.train(edges, 0) == pytest.approx(exact.train(edges, 0), rel=near)
    begin = model.entities[0].weight.detach()
    assert (small.rows.value - exact.rows.value).norm() < near * (exact.rows.value - begin).norm()
    for name, weights in exact.weights.items():
        change = weights.value - model.recipe().groups[0].parameters[name].detach()
        assert (small.weights[name].value - weights.value).norm() < near * change.norm()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "columns", "steps"), [(50, 100, 100), (2, 8, 3), (5, 190, 7), (4, 401, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_products_in_tiles(dtype: torch.dtype, rows: int, columns: int, steps: int, turned: bool) -> None:
    """Sums of exact products, of numbers of which all sums are exact; of bfloat16, each step has two."""
    words = dtype == torch.bfloat16
    if words and not has_words():
        pytest.skip("this CPU does not multiply bfloat16 (AVX512-BF16)")
    width, pair = padded(columns, 8 if dtype == torch.float64 else 4), 1 + words
    a, b = (torch.randint(-8, 8, (pair * steps, n)).to(dtype) for n in (rows, width))
    found = torch.full((rows, width), torch.nan, dtype=torch.float32 if words else dtype)
    wanted = a.to(found.dtype).T @ b.to(found.dtype)
    if words:  # both of a step side by side
        a, b = (x.view(steps, 2, -1).transpose(1, 2).contiguous().view(torch.int32).squeeze(2) for x in (a, b))
    given = [(a if turned else a.T.contiguous()).numpy(), b.numpy()]
    first, second = (x.view(np.uint32) if words else x for x in given)
    multiply(first, first.strides[::-1] if turned else first.strides, second, found.numpy(), rows, steps)
    assert torch.equal(found, wanted)


def biggraph_step(
    values: dict[str, Tensor], sums: dict[str, Tensor], edges: Tensor, drawn: tuple[Tensor, Tensor]
) -> None:
    """A batch of PyTorch-BigGraph (``model.py``, ``losses.py``, ``row_adagrad.py``), with lr 0.1 and eps 1e-10.

    The loss is the sum over edges of both sides' softmax; a chunk's edges are each other's negatives.

    Args:
        values: the table and the operators of both directions; changed.
        sums: Adagrad's sums of squares, one for each row of the table; changed.
        edges: ``[B, 3]``, heads, relations and tails.
        drawn: uniform negatives, heads and tails, ``[chunks * uniform]`` each.
    """
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    table, chunks = leaves["table"], len(drawn[0]) // 4
    loss = table.new_zeros(())
    for given, answer, direction in ((0, 2, "forwards"), (2, 0, "backwards")):
        real, imaginary = (leaves[f"{direction}.{part}"][edges[:, 1]] for part in ("real", "imaginary"))
        x, y = table[edges[:, given]].chunk(2, dim=1)
        queries = torch.cat([x * real - y * imaginary, x * imaginary + y * real], dim=1)
        every = queries.split(6), edges[:, answer].split(6), drawn[answer == 2].view(chunks, -1)
        for query, true, more in zip(*every, strict=True):
            scores = query @ table[torch.cat([true, more])].T
            loss = loss + torch.nn.functional.cross_entropy(scores, torch.arange(len(query)), reduction="sum")
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    for (name, value), gradient in zip(values.items(), gradients, strict=True):
        square = gradient.square()
        sums[name] += square.mean(dim=1, keepdim=True) if name == "table" else square
        value.detach_().sub_(0.1 * gradient / (sums[name].sqrt() + 1e-10))


def test_full_batches_are_those_of_biggraph_with_eps_by_batch_size() -> None:
    """The mean of a batch's losses where torchbiggraph has their sum: Adagrad sees no constant factor but by eps."""
    model = KGEmbedding(NODES, RELATIONS, dimension=DIM, num_batch_negs=6, num_uniform_negs=4).double()
    torch.manual_seed(0)
    table, count = 1e-3 * torch.randn(NODES, DIM, dtype=torch.float64), 24
    recipe = model.recipe().groups[0]
    values = {"table": table.clone()} | {name: value.detach().clone() for name, value in recipe.parameters.items()}
    sums = {name: torch.zeros_like(value) for name, value in values.items()}
    sums["table"] = sums["table"][:, :1].clone()
    results = {}
    for eps in (1e-10, 1e-10 / count):
        rows = PartitionRows(table.clone(), table.new_zeros(NODES, 1), torch.full((NODES,), -1, dtype=torch.int32))
        weights = {name: RelationWeights(value.clone(), torch.zeros_like(value)) for name, value in values.items()}
        del weights["table"]
        rules = UpdateRule("rowwise_adagrad", 0.1, eps), UpdateRule("adagrad", 0.1, eps)
        results[eps] = TrainingStep(recipe, weights, torch.float64, "float32"), rows, weights, rules
    far = []
    for _ in range(3):
        edges = torch.stack([torch.randint(size, (count,)) for size in (NODES, RELATIONS, NODES)], dim=1)
        drawn = torch.randint(NODES, (count // 6 * 4,)), torch.randint(NODES, (count // 6 * 4,))
        biggraph_step(values, sums, edges, drawn)
        heads, relation, tails = (column.contiguous() for column in edges.T)
        for step, rows, _, rules in results.values():
            step(EdgeBatch(heads, relation, tails, None, drawn), rows, rows, *rules)
        for eps, (_, rows, weights, _) in results.items():
            ours = {"table": rows.value} | {name: weight.value for name, weight in weights.items()}
            worst = max(float((ours[name] - value).norm() / value.norm()) for name, value in values.items())
            if eps == 1e-10:
                far.append(worst)
            else:
                assert worst < 1e-6
    assert min(far) > 1e-6  # operators begin with gradients of 1e-8, which the larger eps holds back


@pytest.mark.parametrize(("features", "fastest"), [
    ({}, "float32"),
    ({"avx512vnni": True}, "float32"),  # without bfloat16, small chunks and rows would be converted
    ({"avx512bf16": True}, "bfloat16"),
    ({"avx512bf16": True, "avx512vnni": True}, "int8"),
    ({"avx512bf16": True, "amx-int8": True}, "int8"),
])  # fmt: skip
def test_the_fastest_format_follows_from_the_instructions_of_the_cpu(
    features: dict[str, bool], fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    assert matmul_format.fastest_format() == fastest


@pytest.mark.parametrize(("settings", "dtype", "cpus", "chosen"), [
    ({}, torch.float32, ["int8", "int8"], "int8"),
    ({}, torch.float32, ["int8", "bfloat16"], "bfloat16"),  # the slowest of all ranks' CPUs decides
    ({}, torch.float32, ["int8", "float32"], "float32"),
    ({}, torch.float64, ["int8"], "float32"),
    ({"num_batch_negs": 0, "n3": 0.1}, torch.float32, ["int8"], "bfloat16"),
    ({"all_negs": True}, torch.float32, ["int8"], "bfloat16"),
    ({"comparator": "l2"}, torch.float32, ["int8"], "float32"),  # distances cancel
    ({"comparator": "cos"}, torch.float32, ["int8"], "float32"),
    ({"loss": "ranking"}, torch.float32, ["int8"], "float32"),
    ({"dimension": 16}, torch.float32, ["int8"], "float32"),
])  # fmt: skip
def test_auto_is_the_fastest_format_whose_accuracy_was_measured(
    settings: dict[str, Any], dtype: torch.dtype, cpus: list[str], chosen: str
) -> None:
    model = make_model(**{"dimension": 100, **settings})
    assert matmul_format.choose_format(model.recipe(), dtype, cpus) == chosen


@pytest.mark.parametrize("operator", OPERATORS)
def test_single_precision(operator: str) -> None:
    compare(50, 1e-4, dtype=torch.float32, operator=operator, loss="softmax")


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["bfloat16", "int8"])
def test_products_of_few_bits_stay_near(matmul: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have 8 bits, so that each loss differs by less than a percent, and so does what is learned."""
    by_torch(monkeypatch)
    monkeypatch.setattr("gtrain_pbg.step.scores.ROUNDED", 0)
    model = make_model(torch.float32)
    low, reference = Fused(model, 0.05, matmul=matmul), Reference(model, 0.05)
    for number in range(30):
        edges = make_edges(20, False, number, torch.float32)
        assert low.train(edges, number) == pytest.approx(reference.train(edges, number), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"comparator": "cos", "loss": "logistic", "reciprocal": False},
        {"num_batch_negs": 0, "self_negs": True, "loss": "ranking"},
        {"all_negs": True, "bias": True},
        {"comparator": "squared_l2", "num_batch_negs": 100},
        {"comparator": "l2", "operator": "translation", "all_negs": True},
    ],
    ids=str,
)
def test_gradients_of_8_bits_stay_near(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one plain step changes, wherever answers are; in pieces of a chunk."""
    by_torch(monkeypatch)
    monkeypatch.setattr("gtrain_pbg.step.scores.ROUNDED", 0)
    monkeypatch.setattr("gtrain_pbg.step.scores.FEW", 7)
    monkeypatch.setattr("gtrain_pbg.step.scores.BLOCK", 64)
    model = make_model(torch.float32, **settings)
    low, exact = (Fused(model, 1.0, matmul, "sgd", "sgd") for matmul in ("int8", "float32"))
    before = low.rows.value.clone()
    edges = make_edges(60, settings.get("reciprocal") is False, 0, torch.float32)
    assert low.train(edges, 0) == pytest.approx(exact.train(edges, 0), rel=0.01)
    changes = [(low.rows.value, exact.rows.value, before)]
    changes += [(low.weights[name].value, w.value, model.recipe().groups[0].parameters[name].detach())
                for name, w in exact.weights.items()]  # fmt: skip
    for found, wanted, begin in changes:
        assert (found - wanted).norm() < 0.05 * (wanted - begin).norm()


def test_what_is_too_small_for_8_bits_counts_on_the_average() -> None:
    gradient = torch.full((3, 5000), 1e-3)
    gradient[:, 7], gradient[1], gradient[2, 3] = 1, 0, torch.nan
    fractions = torch.rand(SPAN + 5000, generator=torch.Generator().manual_seed(0)) - 0.5
    found = torch.empty(3, 5000, dtype=torch.int8)
    scale = [write_row_quantized(gradient[z].numpy(), 5000, fractions.numpy(), z, found[z].numpy()) for z in range(3)]
    assert scale[0] == pytest.approx(1 / 126) and scale[1] == 0 and math.isnan(scale[2])
    assert found[0, 7] == 126 and float(found[0].sum() - 126) * scale[0] == pytest.approx(4.999, rel=0.15)
    assert not found[1:].any()
    rows = torch.tensor([[100, -50], [100, 3]], dtype=torch.int8)
    even = torch.empty_like(rows)
    factor = equalize_scales(rows.numpy(), torch.tensor([1.0, 0.1]).numpy(), fractions.numpy(), even.numpy())
    torch.testing.assert_close(even * float(factor), torch.tensor([[100.0, -50.0], [10, 0.3]]), rtol=0, atol=1.01)


def test_rows_are_rounded_to_the_nearest_of_8_bits() -> None:
    rows = torch.randn(5, 37).bfloat16()
    rows[1], rows[2, 3], rows[3, 0] = 0, torch.inf, torch.nan
    found, scale = torch.empty(5, 37, dtype=torch.int8), torch.empty(5)
    round_rows(bits(rows), found.numpy(), scale.numpy())
    most = rows.float().abs().amax(1)
    assert scale[1] == 0 and scale[2:4].isnan().all()
    for z in (0, 1, 4):
        assert scale[z] == pytest.approx(float(most[z]) / 127)
        assert (found[z] * scale[z] - rows[z].float()).abs().max() <= 0.501 * scale[z]


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_other_rules(kind: str) -> None:
    model = make_model()
    fused, reference = Fused(model, 0.05, kind=kind), Reference(model, 0.05)
    reference.optimizers[0] = {"sgd": SGD, "adagrad": Adagrad}[kind]([model.entities[0].weight], lr=0.05)
    for number in range(5):
        edges = make_edges(20, False, number, torch.float64)
        assert fused.train(edges, number) == pytest.approx(reference.train(edges, number), rel=1e-10)
    fused.same_as(model, 1e-8)


def test_ends_of_two_partitions() -> None:
    """Heads of one and tails of another are those of one table in which the one follows the other."""
    model = make_model(num_uniform_negs=0)
    fused, reference = Fused(model, 0.05), Reference(model, 0.05)
    half = NODES // 2
    first, second = (
        PartitionRows(
            fused.rows.value[part].clone(), fused.rows.state[part].clone(), torch.full((half,), -1, dtype=torch.int32)
        )
        for part in (slice(half), slice(half, NODES))
    )
    for number in range(5):
        edges = make_edges(20, False, number, torch.float64)
        here = EdgeBatch(edges.head % half, edges.relation, edges.tail % half, None, (Tensor().long(), Tensor().long()))
        edges = Triples(edges.head % half, edges.relation, edges.tail % half + half)
        lost, weight = fused.step(here, first, second, *fused.rules)
        assert lost / weight == pytest.approx(reference.train(edges, number), rel=1e-10)
    joined = torch.cat([first.value, second.value])
    torch.testing.assert_close(joined, model.entities[0].weight.detach(), rtol=1e-9, atol=1e-9)


def test_what_is_no_number_shows_in_the_loss() -> None:
    for loss in LOSSES:
        fused = Fused(make_model(loss=loss), 0.05)
        fused.rows.value[3, 2] = torch.nan
        assert not fused.train(make_edges(200, False, 0, torch.float64), 0) < 1e300
