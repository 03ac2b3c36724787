"""The training step of a device on CPU tensors: equal to autograd and to the compiled kernels, for every model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import some_slow
from torch import Tensor
from unit.pbg.test_step import (
    COMPARATORS,
    EDGE_LOSSES,
    LOSSES,
    NODES,
    OPERATORS,
    VARIANTS,
    Fused,
    Reference,
    make_edges,
    make_model,
    tolerance_of,
)

from gtrain.errors import ConfigError
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.model.kg.training import Triples
from gtrain.nn import Csr
from gtrain.nn.recipe import ModelRecipe
from gtrain_pbg.config import PBGConfig, check_device
from gtrain_pbg.device.batches import BatchPreparation, BatchShape, BatchTensors, Ends, shape_of, sort_by_row
from gtrain_pbg.device.kernels import DeviceRule, DeviceTable
from gtrain_pbg.device.lanes import Device
from gtrain_pbg.device.step import DeviceRules, DeviceStep, FusedStep, PlainStep, fits
from gtrain_pbg.device.tables import CommonTensors, parameters_of
from gtrain_pbg.edges import EdgeList
from gtrain_pbg.step.matmul_format import device_format
from gtrain_pbg.step.relations import state_width

FIRST = 7
"""Row of the table on the device at which the partition begins."""


def on_device(
    recipe: ModelRecipe, number: int, tables: tuple[DeviceTable, DeviceTable], rules: DeviceRules, device: Device,
    kind: str, low: torch.dtype,
) -> tuple[DeviceStep, CommonTensors]:  # fmt: skip
    """Return the step of a group, and the parameters that it trains; ``tables`` are of tails and of heads."""
    host = {}
    for name, parameter in recipe.parameters.items():
        host[name] = parameter.detach().clone()
        width = state_width(kind, parameter[0].numel())
        host[f"{name}.state"] = parameter.detach().new_zeros(len(parameter), width)
    common = CommonTensors(device, recipe, tables[0].value.dtype, host, None)
    group = recipe.groups[number]
    if fits(group):
        return FusedStep(group, tables, rules, low, common.operators[number]), common
    return PlainStep(group, tables, rules, low, parameters_of(common, recipe, number)), common


class OnDevice:
    """What :class:`test_step.Fused` is, by the device's step."""

    def __init__(
        self, model: KGEmbedding, lr: float, kind: str = "rowwise_adagrad", of_relations: str = "adagrad",
        low: torch.dtype | None = None, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.model, self.recipe, self.device = model, model.recipe(), Device(torch.device(device))
        value = model.entities[0].weight.detach()
        # The partition is not the first on the device, and rows around it are not to change.
        whole = torch.full((FIRST + NODES + 3, value.size(1)), 0.5, dtype=value.dtype, device=device)
        whole[FIRST : FIRST + NODES] = value
        self.table = DeviceTable(whole, whole.new_zeros(len(whole), state_width(kind, value.size(1))))
        rules = DeviceRules(
            *(
                DeviceRule(name, torch.tensor([rate, 1e-10, 0.0], dtype=value.dtype, device=device))
                for name, rate in ((kind, lr), (of_relations, 0.5 * lr))
            )
        )
        tables = self.table, self.table
        self.step, self.common = on_device(self.recipe, 0, tables, rules, self.device, of_relations, low or value.dtype)
        self.prepare = BatchPreparation(self.recipe.groups[0], value.dtype, self.device)

    def train(self, edges: Triples, drawn_seed: int) -> float:
        torch.manual_seed(drawn_seed)
        ends = Ends(FIRST, NODES, len(self.table.value))
        shape = shape_of(self.recipe.groups[0], len(edges))
        edges_of = EdgeList(edges.head, edges.relation, edges.tail, edges.weight)
        drawn = self.prepare.draw(1, shape, ends, ends, torch.default_generator)
        piece = self.prepare([edges_of], shape, ends, ends, drawn)
        lane = self.device.compute
        lane.follow()
        lane.wait(piece.ready)
        with torch.no_grad(), lane():
            self.step.lost.zero_()
            self.run(piece.tensors.batch(0), shape, ends, piece.relations[0])
        lane.synchronize()
        return float(self.step.lost) / piece.weight

    def run(self, batch: BatchTensors, shape: BatchShape, ends: Ends, relations: Tensor) -> None:
        self.step(batch, shape, (ends, ends), relations)

    @property
    def rows(self) -> Tensor:
        return self.table.value[FIRST : FIRST + NODES]

    def same_as(self, model: KGEmbedding, tolerance: float) -> None:
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(self.rows.cpu(), model.entities[0].weight.detach(), **close)
        for name, parameter in model.recipe().parameters.items():
            torch.testing.assert_close(self.common.tensors[name].cpu(), parameter.detach(), **close)
        around = torch.cat([self.table.value[:FIRST], self.table.value[FIRST + NODES :]])
        assert bool((around == 0.5).all())


def compare(
    batches: int, tolerance: float, count: int = 20, dtype: torch.dtype = torch.float64, **settings: Any
) -> None:
    """Train side by side with autograd and compare losses, rows and parameters."""
    weighted, plain = settings.pop("weighted", False), settings.pop("plain", False)
    model = make_model(dtype, **settings)
    kinds = {"kind": "sgd", "of_relations": "sgd"} if plain else {}
    ours, reference = OnDevice(model, 0.05, **kinds), Reference(model, 0.05, plain)
    for number in range(batches):
        edges = make_edges(count, not model.groups[0].scores.reciprocal, number, dtype, weighted)
        assert ours.train(edges, number) == pytest.approx(reference.train(edges, number), rel=tolerance), number
    ours.same_as(model, 100 * tolerance)


@pytest.mark.parametrize("reciprocal", [True, False], ids=["reciprocal", "static"])
@pytest.mark.parametrize(
    ("operator", "comparator", "loss"), some_slow(itertools.product(OPERATORS, COMPARATORS, LOSSES), 5)
)
def test_every_combination_trains_as_autograd_does(operator: str, comparator: str, loss: str, reciprocal: bool) -> None:
    settings = {"operator": operator, "comparator": comparator, "loss": loss, "reciprocal": reciprocal}
    compare(2, tolerance_of(operator, comparator), plain=True, **settings)


@pytest.mark.parametrize("comparator", COMPARATORS)
@pytest.mark.parametrize("operator", ["none", "affine", "complex_diagonal", "rotation"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str, operator: str, comparator: str) -> None:
    turn = list(VARIANTS).index(variant) + COMPARATORS.index(comparator)
    kinds = list(itertools.product(LOSSES, (True, False)))
    loss, reciprocal = kinds[turn % len(kinds)]
    settings = {"operator": operator, "comparator": comparator, "loss": loss, "reciprocal": reciprocal}
    compare(2, tolerance_of(operator, comparator), plain=True, **settings, **VARIANTS[variant])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("apart", [False, True])
def test_an_edges_own_ends_are_negatives(loss: str, apart: bool) -> None:
    more: dict[str, Any] = {"bias": True, "n3": 0.05, "weighted": True, "num_batch_negs": 0} if apart else {}
    compare(2, 1e-10, plain=True, loss=loss, operator="complex_diagonal", self_negs=True, **more)


@pytest.mark.parametrize("operator", ["diagonal", "linear", "complex_diagonal"])
@pytest.mark.parametrize("reciprocal", [True, False], ids=["reciprocal", "static"])
def test_dura_trains_as_autograd_does(reciprocal: bool, operator: str) -> None:
    for more in EDGE_LOSSES.values():
        compare(2, 1e-10, plain=True, operator=operator, reciprocal=reciprocal, dura=0.3, **more)


@pytest.mark.parametrize("operator", ["translation", "diagonal", "complex_diagonal"])
@pytest.mark.parametrize("reciprocal", [True, False], ids=["reciprocal", "static"])
def test_relation_prediction_trains_as_autograd_does(reciprocal: bool, operator: str) -> None:
    for more in EDGE_LOSSES.values():
        settings = {"operator": operator, "reciprocal": reciprocal, "relation_prediction": 0.7, **more}
        compare(2, 1e-10, plain=True, **settings)


@pytest.mark.parametrize("count", [1, 5, 6, 7, 12, 13])
@pytest.mark.parametrize("operator", ["complex_diagonal", "affine"])
def test_batches_that_chunks_do_not_divide(count: int, operator: str) -> None:
    compare(3, 1e-10, count=count, operator=operator, num_batch_negs=6)


@pytest.mark.slow  # compiles the kernels for double precision
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("settings", [{}, {"n3": 0.1}], ids=["fused", "plain"])
def test_the_compiled_kernels_train_alike(kind: str, settings: dict[str, Any]) -> None:
    """Losses and tables of ten batches with the same draws: that of the CPU's step, with its optimizers."""
    model = make_model(**settings)
    relations = "rowwise_adagrad" if kind == "sgd" else kind
    ours, compiled = OnDevice(model, 0.05, kind, relations), Fused(model, 0.05, kind=kind, of_relations=relations)
    assert isinstance(ours.step, PlainStep if settings else FusedStep)
    for number in range(10):
        edges = make_edges(20, False, number, torch.float64, weighted=True)
        assert ours.train(edges, number) == pytest.approx(compiled.train(edges, number), rel=1e-10)
    torch.testing.assert_close(ours.rows, compiled.rows.value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.table.state[FIRST : FIRST + NODES], compiled.rows.state, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"comparator": "cos"}], ids=["fused", "plain"])
def test_single_precision_and_products_in_bfloat16(settings: dict[str, Any]) -> None:
    model = make_model(torch.float32, **settings)
    exact, low = OnDevice(model, 0.05), OnDevice(model, 0.05, low=torch.bfloat16)
    reference = Reference(model, 0.05)
    for number in range(20):
        edges = make_edges(20, False, number, torch.float32)
        wanted = reference.train(edges, number)
        assert exact.train(edges, number) == pytest.approx(wanted, rel=1e-4)
        assert low.train(edges, number) == pytest.approx(wanted, rel=0.02)
    assert low.train(edges, 0) != exact.train(edges, 0)


def test_positions_are_sorted_by_row_in_each_list() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (5, 50, 2**30):  # the last needs keys of 64 bits
        rows = torch.randint(min(count, 40), (3, 2, 20), generator=generator, dtype=torch.int32)
        order, starts, distinct = sort_by_row(rows, count)
        for i, j in itertools.product(range(3), range(2)):
            some, sizes = rows[i, j].unique(return_counts=True)
            assert int(distinct[i, j]) == len(some)
            spans = starts[i, j, : len(some) + 1].long()
            assert torch.equal(spans.diff(), sizes) and int(spans[-1]) == 20
            ordered = rows[i, j][order[i, j].long()]
            assert torch.equal(ordered[spans[:-1]], some) and torch.equal(ordered, rows[i, j].sort().values)


def test_what_a_gpu_does_not_serve_is_refused_by_its_setting() -> None:
    recipe = make_model().recipe()
    check_device(1, PBGConfig(matmul="bfloat16"), recipe)
    with pytest.raises(ConfigError, match="trainer.devices=2 was set.*\n.*trainer.devices=1 trainer.num_nodes=2"):
        check_device(2, PBGConfig(), recipe)
    with pytest.raises(ConfigError, match="strategy.matmul=int8 was set with trainer.accelerator=gpu"):
        check_device(1, PBGConfig(matmul="int8"), recipe)
    bags = Csr(torch.zeros(0, dtype=torch.int64), None, torch.zeros(NODES + 1, dtype=torch.int64))
    featurized = replace(recipe, groups=(replace(recipe.groups[0], bags=(bags, None)),))
    with pytest.raises(ConfigError, match="data.entities.<type>.featurized"):
        check_device(1, PBGConfig(), featurized)
    with pytest.raises(ConfigError, match="strategy.device_partitions=1 was set"):
        PBGConfig(num_partitions=4, device_partitions=1)


def test_auto_is_bfloat16_on_a_gpu_where_its_accuracy_was_measured() -> None:
    formats = [device_format(make_model(dimension=d, **more).recipe(), torch.float32)
               for d, more in ((100, {}), (16, {}), (100, {"comparator": "l2"}), (100, {"n3": 0.1}))]  # fmt: skip
    assert formats == ["bfloat16", "float32", "float32", "bfloat16"]
    assert device_format(make_model(dimension=100).recipe(), torch.float64) == "float32"
