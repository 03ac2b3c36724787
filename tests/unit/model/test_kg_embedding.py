"""Embeddings of entities: scores, losses and negatives against plain loops, ranking, what they learn."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked import gtrain
from helpers import ok, show, some_slow
from torch import Tensor
from torch_geometric.data import Data

from gtrain import backends
from gtrain.errors import ConfigError
from gtrain.model.kg import training as kg_training
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.model.kg.scores import COMPARATORS, OPERATORS, make_comparator, make_operator
from gtrain.model.kg.training import LOSSES, ChunkDraws, by_relation, in_order
from gtrain.model.kinds import EMBEDDING, SPARSE, kind
from gtrain.nn import JointOptimizer, RowwiseAdagrad

N, R, D, B = 12, 3, 6, 10


def batch(weights: bool = False, edges: int = B) -> Data:
    """Edges among twelve nodes, whose rows are not in the order of the source data."""
    generator = torch.Generator().manual_seed(0)
    made = Data(
        num_nodes=N,
        orig_id=torch.randperm(N, generator=generator),
        edge_label_index=torch.randint(N, (2, edges), generator=generator),
        edge_label_type=torch.randint(R, (edges,), generator=generator),
    )
    if weights:
        made.edge_label_weight = torch.rand(edges, generator=generator)
    return made


def module(**settings: object) -> KGEmbedding:
    """A model with parameters far from their initial values, in double precision."""
    torch.manual_seed(0)
    options = {"dimension": D, "num_batch_negs": 4, "num_uniform_negs": 3, **settings}
    made = KGEmbedding(N, R, **options).double()  # type: ignore[arg-type]
    for parameter in made.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    made.log = made.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return made


def operated(name: str, parameters: dict[str, Tensor], row: Tensor) -> Tensor:
    """An operator on one row, by its formula."""
    if name == "complex_diagonal":
        half = row.numel() // 2
        product = torch.complex(row[:half], row[half:]) * torch.complex(parameters["real"], parameters["imaginary"])
        return torch.cat([product.real, product.imag])
    if name == "rotation":
        half = row.numel() // 2
        product = torch.complex(row[:half], row[half:]) * torch.exp(1j * parameters["angle"])
        return torch.cat([product.real, product.imag])
    if name in ("linear", "affine"):
        row = parameters["matrix"].mv(row)
    if name == "diagonal":
        row = row * parameters["vector"]
    return row + parameters["vector"] if name in ("translation", "affine") else row


def compared(name: str, left: Tensor, right: Tensor) -> Tensor:
    """A comparator on two rows, by its formula."""
    if name == "dot":
        return left.dot(right)
    if name == "cos":
        return left.dot(right) / left.norm() / right.norm()
    distance = (left - right).norm()
    return -distance if name == "l2" else -(distance**2)


def lossy(name: str, true: Tensor, false: list[Tensor], margin: float = 0.1) -> Tensor:
    """A loss of one edge, by its formula."""
    negatives = torch.stack(false) if false else true.new_zeros(0)
    if name == "ranking":
        return (margin - true + negatives).clamp(min=0).sum()
    if name == "softmax":
        return -torch.cat([true.view(1), negatives]).log_softmax(0)[0]
    return -F.logsigmoid(true) - F.logsigmoid(-negatives).sum() / max(1, len(false))


class Plain:
    """The model one edge at a time."""

    def __init__(self, model: KGEmbedding, operator: str, comparator: str) -> None:
        self.model, self.operator, self.comparator = model, operator, comparator

    def score(self, head: int, relation: int, tail: int, side: str) -> Tensor:
        """Score of an edge whose tail or head is looked for."""
        scores, d = self.model.groups[0].scores, D
        table = self.model.entities[0].weight
        reverse = scores.reciprocal and side == "head"
        source = scores.backwards if reverse else scores.forwards
        parameters = {name: value[relation] for name, value in source.named_parameters()}  # type: ignore[union-attr]
        if scores.reciprocal and side == "tail":
            pair = operated(self.operator, parameters, table[head, :d]), table[tail, :d]
        else:
            pair = table[head, :d], operated(self.operator, parameters, table[tail, :d])
        bias = table[head, d] + table[tail, d] if scores.bias else 0
        return compared(self.comparator, *pair) + bias

    def loss(self, loss: str, b: Data, chunks: list[list[int]], drawn: list[Tensor], batch_negs: bool) -> Tensor:
        """Loss of each edge."""
        head, tail = b.orig_id[b.edge_label_index].tolist()
        relation = b.edge_label_type.tolist()
        found = {}
        for number, chunk in enumerate(chunks):
            for e in chunk:
                others = [o for o in chunk if o != e] if batch_negs else []
                tails = [tail[o] for o in others] + drawn[1][number].tolist()
                heads = [head[o] for o in others] + drawn[0][number].tolist()
                h, r, t = head[e], relation[e], tail[e]
                found[e] = lossy(
                    loss, self.score(h, r, t, "tail"), [self.score(h, r, other, "tail") for other in tails]
                ) + lossy(loss, self.score(h, r, t, "head"), [self.score(other, r, t, "head") for other in heads])
        return torch.stack([found[e] for e in range(B)])


def losses(model: KGEmbedding, b: Data) -> tuple[Tensor, Tensor]:
    """Loss of each edge, and the nodes that were drawn."""
    drawn: list[Tensor] = []
    draw = ChunkDraws(7)

    def recorded(group: int, end: int, size: int, chunk: Tensor, count: int) -> Tensor:
        drawn.append(draw(group, end, size, chunk, count))
        return drawn[-1]

    each = model.losses(model._edges(b), recorded, training=False)
    return each, torch.stack(drawn[:2])


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize(("operator", "comparator", "loss"), some_slow(product(OPERATORS, COMPARATORS, LOSSES), 5))
def test_losses_and_gradients_are_those_of_a_loop(operator: str, comparator: str, loss: str, reciprocal: bool) -> None:
    b = batch()
    model = module(operator=operator, comparator=comparator, loss=loss, reciprocal=reciprocal)
    each, drawn = losses(model, b)
    if reciprocal:
        chunks = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    else:
        of = [[e for e in range(B) if b.edge_label_type[e] == r] for r in range(R)]
        chunks = [edges[i : i + 4] for edges in of for i in range(0, len(edges), 4)]
    expected = Plain(model, operator, comparator).loss(loss, b, chunks, list(drawn), True)
    torch.testing.assert_close(each, expected)
    parameters = list(model.parameters())
    found = torch.autograd.grad(each.sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad(expected.sum(), parameters, allow_unused=True)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reciprocal", [True, False])
def test_biases_and_uniform_negatives_alone(reciprocal: bool) -> None:
    b, model = batch(), module(bias=True, num_batch_negs=0, num_uniform_negs=20, reciprocal=reciprocal)
    each, drawn = losses(model, b)
    of = [[e for e in range(B) if b.edge_label_type[e] == r] for r in range(R)]
    expected = Plain(model, "complex_diagonal", "dot").loss(
        "softmax", b, [list(range(B))] if reciprocal else of, list(drawn), False
    )
    torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("side", ["head", "tail"])
def test_all_nodes_as_negatives_of_one_side(side: str, reciprocal: bool) -> None:
    b = batch()
    model = module(all_negs=True, reciprocal=reciprocal, head_negs=side == "head", tail_negs=side == "tail")
    plain, (head, tail) = Plain(model, "complex_diagonal", "dot"), b.orig_id[b.edge_label_index]
    expected = []
    for h, r, t in zip(head.tolist(), b.edge_label_type.tolist(), tail.tolist(), strict=True):
        edges = [(h, r, other) if side == "tail" else (other, r, t) for other in range(N)]
        scores = torch.stack([plain.score(*edge, side) for edge in edges])
        expected.append(-scores.log_softmax(0)[t if side == "tail" else h])
    torch.testing.assert_close(model.losses(model._edges(b), training=False), torch.stack(expected))


@pytest.mark.parametrize("settings", [{}, {"reciprocal": False}, {"all_negs": True}])
def test_a_large_batch_in_blocks_is_the_same(settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    b, found = batch(), []
    for limit in (1 << 25, 30):
        monkeypatch.setattr(kg_training, "LIMIT", limit)
        model = module(num_uniform_negs=0, n3=0.1, **settings)
        loss = model.training_step(b, 0)["loss"]
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
        assert (len(model.groups[0].loss._blocks(model._edges(b))) > 1) == (limit == 30)
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole)


def test_edge_weights_and_the_regulariser() -> None:
    b = batch(weights=True)
    with_n3, without = module(n3=0.5, num_uniform_negs=0), module(num_uniform_negs=0)
    head, tail = without.entities[0].weight[b.orig_id[b.edge_label_index]]
    cubes = sum(torch.complex(*rows.chunk(2, -1)).abs().pow(3).sum(-1) for rows in (head, tail))
    for operator in (without.groups[0].scores.forwards, without.groups[0].scores.backwards):
        assert operator is not None
        cubes = cubes + torch.complex(operator.real, operator.imaginary).abs().pow(3).sum(-1)[b.edge_label_type]
    each, weight = losses(without, b)[0] + 0.5 * cubes, b.edge_label_weight.double()
    out = with_n3.training_step(b, 0)
    torch.testing.assert_close(out["loss"], (weight * each).sum() / weight.sum())
    torch.testing.assert_close(out["weight"], weight.sum())


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("operator", ["diagonal", "linear", "complex_diagonal"])
def test_dura_is_the_norms_of_ends_and_of_both_transformed(operator: str, reciprocal: bool) -> None:
    """Each operator as a matrix, of which one end gets the product and the other that of the transposed one."""
    b, settings = batch(), {"operator": operator, "reciprocal": reciprocal, "num_uniform_negs": 0}
    model = module(dura=0.5, **settings)
    scores, ends = model.groups[0].scores, model.entities[0].weight[b.orig_id[b.edge_label_index]]
    directions = {scores.forwards: ends if reciprocal else ends.flip(0)}
    if scores.backwards is not None:
        directions[scores.backwards] = ends.flip(0)
    norms = torch.zeros(B, dtype=ends.dtype)
    for edge, relation in enumerate(b.edge_label_type):
        for transform, (given, other) in directions.items():
            # The images of the unit vectors are the columns of its matrix.
            matrix = transform(torch.eye(given.size(1), dtype=ends.dtype).unsqueeze(0), relation.view(1))[0].T
            x, y = given[edge], other[edge]
            norms[edge] += sum(row @ row for row in (x, y, matrix @ x, matrix.T @ y))
    torch.testing.assert_close(losses(model, b)[0], losses(module(**settings), b)[0] + 0.5 * norms)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("operator", ["translation", "diagonal", "complex_diagonal"])
def test_relation_prediction_classifies_the_relation(operator: str, reciprocal: bool) -> None:
    """The scores of an edge's ends with each relation, one after the other."""
    b, settings = batch(), {"operator": operator, "reciprocal": reciprocal, "bias": True, "num_uniform_negs": 0}
    model = module(relation_prediction=0.5, **settings)
    (head, tail), scores = model.entities[0](b.orig_id[b.edge_label_index]), model.groups[0].scores
    every = [torch.full((B,), relation) for relation in range(R)]
    logits = [torch.stack([scores.of_edges(head, relation, tail) for relation in every], dim=1)]
    if reciprocal:
        queries = [scores.head_queries(tail.unsqueeze(1), relation).squeeze(1) for relation in every]
        logits.append(torch.stack([scores.pairs(query, head) for query in queries], dim=1))
    predicted = sum(-each.log_softmax(1)[range(B), b.edge_label_type] for each in logits)
    torch.testing.assert_close(losses(model, b)[0], losses(module(**settings), b)[0] + 0.5 * predicted)


def test_a_batch_without_edges_has_loss_and_gradients_zero() -> None:
    b, model = batch(), module()
    b.edge_label_index, b.edge_label_type = b.edge_label_index[:, :0], b.edge_label_type[:0]
    out = model.training_step(b, 0)
    out["loss"].backward()
    assert (out["loss"].item(), out["weight"].item()) == (0.0, 0.0)
    assert model.entities[0].weight.grad is not None and not model.entities[0].weight.grad.any()


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        *(
            {"operator": name, "comparator": c}
            for name, c in zip(OPERATORS, [*COMPARATORS, *COMPARATORS], strict=False)
        ),
        *({"operator": "diagonal", "comparator": c, "loss": "ranking"} for c in COMPARATORS),
        *({"operator": "diagonal", "comparator": c, "loss": "logistic"} for c in COMPARATORS),
        {"bias": True, "n3": 0.1, "relation_weight": [0.5, 2.0, 1.0]},
        {"relation_prediction": 0.5, "bias": True},
        {"dura": 0.5, "operator": "linear"},
        {"all_negs": True},
        {"num_batch_negs": 0},
        {"num_uniform_negs": 0, "global_emb": True},
        {"head_negs": False},
        {"tail_negs": False, "num_batch_negs": 100},
    ],
    ids=str,
)
def test_ranks_that_share_a_step_compute_what_one_process_does(settings: dict[str, Any], reciprocal: bool) -> None:
    """Whatever the state of torch's generator; with more ranks than chunks too."""
    b = batch(weights=True, edges=41)
    b.random_key = 5
    model = module(reciprocal=reciprocal, **settings)
    whole = trained(model, b)
    b.random_key = 6
    assert "num_uniform_negs" in settings or "all_negs" in settings or trained(model, b)[0] != whole[0]
    b.random_key = 5
    for ranks in (1, 3, 50):
        shares = [model.deal(b.edge_label_type, rank, ranks) for rank in range(ranks)]
        assert sorted(torch.cat([places for places, _ in shares]).tolist()) == list(range(41))
        sizes = [len(places) for places, _ in shares]
        assert ranks == 1 or "num_batch_negs" in settings or max(sizes) <= 41 // ranks + 4
        found = [trained(model, share_of(b, *share)) for share in shares]
        assert sum(weight for _, weight, _ in found) == pytest.approx(whole[1], rel=1e-12)
        assert sum(total for total, _, _ in found) == pytest.approx(whole[0], rel=1e-12)
        for mine, gradients in zip(whole[2], zip(*(gradients for _, _, gradients in found), strict=True), strict=True):
            torch.testing.assert_close(torch.stack(gradients).sum(0), mine, rtol=1e-12, atol=1e-12)


def trained(model: KGEmbedding, b: Data) -> tuple[float, float, list[Tensor]]:
    """The summed loss of a batch, the sum of its weights, and the gradients of the former."""
    torch.rand(1)
    out = model.training_step(b, 0)
    total, parameters = out["loss"] * out["weight"], list(model.parameters())
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return float(total.detach()), float(out["weight"]), gradients


def share_of(b: Data, places: Tensor, chunk: Tensor) -> Data:
    """A rank's share of a batch."""
    mine = copy.copy(b)
    mine.edge_label_index = b.edge_label_index[:, places]
    mine.edge_label_type, mine.edge_label_weight = b.edge_label_type[places], b.edge_label_weight[places]
    mine.edge_label_chunk = chunk
    return mine


@pytest.mark.parametrize("operator", ["complex_diagonal", "affine"])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_ranks_among_sampled_candidates(reciprocal: bool, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a loop over the candidates; as many in a batch of some edges; equal rows tie."""
    monkeypatch.setattr("gtrain.model.kg.evaluation._PAIRED", 3 * D)
    b, model = batch(), module(reciprocal=reciprocal, operator=operator, num_candidates=20)
    b.seeds, orig = torch.arange(B) + 7, b.orig_id.tolist()
    head, tail = b.orig_id[b.edge_label_index].tolist()
    if operator == "complex_diagonal":  # products by matrices may round equal rows differently
        model.entities[0].weight.data[:3] = model.entities[0].weight[0]
    b.known_tail, b.known_tail_ptr = b.edge_label_index[1].roll(1), torch.arange(B + 1)
    b.known_head, b.known_head_ptr = b.known_tail[:0], torch.zeros(B + 1, dtype=torch.int64)
    ranks, plain = model._ranks(b, model._edges(b)), Plain(model, operator, "dot")
    drawn = model._candidates(0, b.seeds)
    assert drawn[0].shape == (B, 20) and not torch.equal(*drawn)
    for e, relation in enumerate(b.edge_label_type.tolist()):
        known = orig[int(b.known_tail[e])]
        for side, answer, left_out in ((0, tail[e], {tail[e], known}), (1, head[e], {head[e]})):

            def score(node: int, e: int = e, side: int = side, relation: int = relation) -> float:
                h, t = (head[e], node) if side == 0 else (node, tail[e])
                return round(plain.score(h, relation, t, ("tail", "head")[side]).item(), 9)

            others = [score(node) for node in drawn[side][e].tolist() if node not in left_out]
            better, ties = sum(s > score(answer) for s in others), sum(s == score(answer) for s in others)
            assert ranks[side][e] == 1 + better + ties / 2
    some = batch()
    some.edge_label_index, some.edge_label_type = b.edge_label_index[:, 4:], b.edge_label_type[4:]
    some.seeds = b.seeds[4:]
    model.filtered = False
    whole, part = (torch.stack(model._ranks(each, model._edges(each))) for each in (b, some))
    torch.testing.assert_close(whole[:, 4:], part)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("comparator", COMPARATORS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_ranks_are_those_of_a_loop(
    reciprocal: bool, bias: bool, comparator: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gtrain.model.kg.evaluation._TRANSFORMED", 3 * D)  # candidates are transformed three at a time
    b, model = batch(), module(reciprocal=reciprocal, operator=operator, comparator=comparator, bias=bias)
    head, tail = b.edge_label_index.tolist()
    relation, plain = b.edge_label_type.tolist(), Plain(model, operator, comparator)
    known = [sorted({tail[e], (tail[e] + 1) % N, 5}) for e in range(B)]
    b.known_tail = torch.tensor([t for ids in known for t in ids])
    b.known_tail_ptr = torch.tensor([0, *(len(ids) for ids in known)]).cumsum(0)
    tails, heads = model._ranks(b, model._edges(b))
    orig = b.orig_id.tolist()
    for e in range(B):
        h, r, t = orig[head[e]], relation[e], orig[tail[e]]
        own, others = plain.score(h, r, t, "tail"), {orig[i] for i in known[e]}
        better = sum(bool(plain.score(h, r, o, "tail") > own) for o in range(N) if o not in others)
        assert tails[e] == 1 + better
        own = plain.score(h, r, t, "head")
        assert heads[e] == 1 + sum(bool(plain.score(o, r, t, "head") > own) for o in range(N) if o != h)


def test_all_pairs_are_the_pairs() -> None:
    left, right = torch.randn(2, 4, D).double(), torch.randn(2, 5, D).double()
    for name in COMPARATORS:
        every = make_comparator(name).all_pairs(left, right)
        single = make_comparator(name).pairs(left.unsqueeze(2), right.unsqueeze(1))
        torch.testing.assert_close(every, single)


def test_operators_begin_as_the_identity() -> None:
    rows = torch.randn(3, 2, D)
    for name in OPERATORS:
        assert torch.equal(make_operator(name, R, D)(rows, torch.tensor([2, 0, 1])), rows), name


def test_operators_begin_at_random_where_they_are_told_to() -> None:
    model = KGEmbedding(5, 300, dimension=20, relation_init_scale=0.25)
    for name, parameter in model.recipe().parameters.items():
        assert abs(float(parameter.detach().mean())) < 0.02, name
        assert float(parameter.detach().std()) == pytest.approx(0.25, rel=0.05), name


def test_every_edge_has_one_place() -> None:
    relation = torch.tensor([4, 0, 4, 4, 0, 4, 4, 2])
    for chunks in (in_order(relation, 3), by_relation(relation, 3)):
        assert sorted(chunks.edge[chunks.filled].tolist()) == list(range(8))
    assert chunks.edge[chunks.filled].tolist() == [1, 4, 7, 0, 2, 3, 5, 6]
    assert (relation[chunks.edge] == relation[chunks.edge][:, :1])[chunks.filled].all()
    assert chunks.negative_mask(1)[0].tolist() == [
        [False, True, False, True],
        [True, False, False, True],
        [True, True, False, True],
    ]


def test_the_table_has_an_optimizer_and_a_sparse_gradient_of_its_own() -> None:
    model = module(sparse_optimizer=lambda p: RowwiseAdagrad(p, lr=0.2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = model.configure_optimizers()
    assert isinstance(optimizer, JointOptimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
    model.training_step(batch(), 0)["loss"].backward()
    assert model.entities[0].weight.grad is not None and model.entities[0].weight.grad.is_sparse


def test_predictions_are_the_seeds_embeddings() -> None:
    b, model = batch(), module(bias=True)
    b.seeds = torch.tensor([3, 0])
    torch.testing.assert_close(model.predict_step(b, 0), model.entities[0].weight[b.orig_id[[3, 0]], :D])
    assert kind(model) == "embedding"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dimension": 5}, r"dimension=5 with model.operator=complex_diagonal: 5 / 2 = 2\.5"),
        ({"operator": "reflection"}, "model.operator=reflection"),
        ({"operator": "rotation", "dimension": 5}, r"dimension=5 with model.operator=rotation: 5 / 2 = 2\.5"),
        ({"comparator": "cosine"}, "model.comparator=cosine"),
        ({"loss": "hinge"}, "model.loss=hinge"),
        ({"num_batch_negs": 1, "num_uniform_negs": 0}, r"max\(0, 1 - 1\) \+ 0 = 0 negatives"),
        ({"head_negs": False, "tail_negs": False}, "leave no negatives"),
        ({"relation_weight": [0.0] * R}, "the weights of all relations are 0"),
        ({"n3": -1.0}, r"model.n3=-1\.0"),
        ({"max_norm": 0.0}, r"model.max_norm=0\.0 was set, and no vector is that short"),
        ({"self_negs": True, "comparator": "l2"}, "model.self_negs=true was set with model.comparator=l2"),
        ({"relation_prediction": 1.0, "operator": "linear"}, "relation_prediction was set .* the operator linear"),
        ({"relation_prediction": 1.0, "comparator": "cos"}, "relation_prediction was set with model.comparator=cos"),
        ({"num_candidates": 0}, "model.num_candidates=0"),
        ({"relation_prediction": -1.0}, r"model.relation_prediction=-1\.0"),
        ({"dura": 0.1, "operator": "rotation"}, r"operator that multiplies\.\s.*diagonal, linear, complex_diagonal"),
        ({"dura": 0.1, "comparator": "cos"}, "model.dura was set with model.comparator=cos"),
        ({"relation_init_scale": -0.1}, r"model.relation_init_scale=-0\.1"),
        ({"dimension": 0}, "model.dimension=0"),
    ],
)
def test_settings_that_do_not_suit_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        module(**settings)


def test_several_node_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="node types paper, author"):
        KGEmbedding({"paper": 3, "author": 4})  # type: ignore[arg-type]


def metrics(tmp_path: Path, *overrides: str) -> dict[str, float]:
    """Metrics of a run."""
    ok(gtrain("strategy=single", "trainer.enable_progress_bar=false", "hydra.run.dir=run", *overrides, cwd=tmp_path))
    found: dict[str, float] = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    return found


@pytest.mark.slow
def test_planted_rules_are_found(tmp_path: Path) -> None:
    found = metrics(tmp_path, "data=planted_kg", "model=kg", "data.batch_size=2000", "trainer.max_epochs=8")
    assert found["data/best_mrr"] - 0.03 < found["test/mrr"] < found["data/best_mrr"] + 0.03


@pytest.mark.slow
def test_umls(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    found = metrics(tmp_path, "experiment=umls", f"data.path={real_data('kg/umls')}", "trainer.max_epochs=60")
    assert found["test/mrr"] >= 0.90


def test_sar_refuses_what_has_nothing_to_aggregate(tmp_path: Path) -> None:
    models = backends.get("sar").serves.models
    assert models is not None and not {EMBEDDING, SPARSE} & models
    result = gtrain("strategy=sar", "mode=1", "trainer.num_nodes=1", "data=planted_kg", "model=kg", cwd=tmp_path)
    assert result.returncode == 1, show(result)
    assert "strategy=sar does not serve model=kg" in result.stderr
    assert "nothing to aggregate" in result.stderr and "Traceback" not in result.stderr
