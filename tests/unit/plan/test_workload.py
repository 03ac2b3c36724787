"""The workload that formulas read, and formulas of tables and of models without message passing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_graphs import random_parts, stored
from torch import nn
from torch_geometric.data import Data

from gtrain.nn import Embedding, SparseLinear
from gtrain.nn.relational import IdRGCNConv
from gtrain.plan import batch_layers, layers, wide
from gtrain.plan.batches import MeanBatch
from gtrain.plan.counts import Parts, Uses, count_columns, count_ends
from gtrain.plan.estimate import (
    ARITHMETIC,
    DISK,
    MEMORY,
    NETWORK,
    SENT,
    SERVER_MEMORY,
    Estimate,
    NotEstimated,
    PlannedRun,
)
from gtrain.plan.machine import Machine
from gtrain.plan.workload import ATTENTION, LINEAR, Layer, WideTable, Workload, describe
from gtrain_pbg.plan import PbgPlanner
from gtrain_ps.plan import PsPlanner
from gtrain_sar.plan import SarPlanner
from gtrain_single.plan import SinglePlanner

KG = {
    "num_batch_negs": 50,
    "num_uniform_negs": 50,
    "all_negs": False,
    "by_query": False,
    "head_negs": True,
    "tail_negs": True,
}
TYPES = tuple(WideTable(f"type_{number}", 1000, 8, True) for number in range(3))
PBG = {"num_partitions": 4, "buffer_partitions": 2, "matmul": "auto", "num_edge_chunks": 1}
PS = {"wire_dtype": "float32", "rest": "worker", "protocol": "auto", "split": "auto", "prefetch": 2}
WIDE = WideTable("features", 1000, 64, False)
CONV = Layer("SAGEConv", LINEAR, 16, 8, 1, 256, False, True)


def run_of(
    work: Workload, model: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, *, ranks: int = 1
) -> PlannedRun:
    config = {
        "trainer": {"precision": "32-true", "num_nodes": ranks, "devices": 1, "max_epochs": 1},
        "data": {"batch_size": None, "num_neighbors": None},
        "model": model or {},
        "strategy": settings or {},
    }
    return PlannedRun(config, work, Machine(), ranks, 1)


def described(model: nn.Module | None = None, *, precision: str = "32-true", **settings: Any) -> Workload:
    """The workload of data given by counts: 150,000 nodes, of which a sketch has 16 of each type."""
    types = {"type_0": 100_000, "type_1": 50_000}
    facts = {"num_nodes": 150_000, "num_features": None, "num_edges": 9, "num_seeds": 9, "entity_types": types}
    data: Any = SimpleNamespace(can_open_store=False, outline=facts, task="link")
    return describe({"trainer": {"precision": precision}, "model": settings}, data, model, wide.EMBEDDING, 0.25)  # type: ignore[arg-type]


def terms(estimate: Estimate, quantity: str, name: str) -> list[float]:
    return [term.value for term in estimate.terms if term.quantity == quantity and term.name.startswith(name)]


def test_tables_of_entity_types_have_a_row_for_each_entity() -> None:
    model = nn.ModuleList([Embedding(16, 8, node_type="type_0"), Embedding(16, 4, node_type="type_1")])
    assert [(table.rows, table.dim) for table in described(model).tables] == [(100_000, 8), (50_000, 4)]


@pytest.mark.parametrize(("precision", "item"), [("32-true", 4), ("64-true", 8), ("bf16-true", 2), ("bf16-mixed", 4)])
def test_numbers_have_the_bytes_of_the_precision(precision: str, item: int) -> None:
    assert described(precision=precision).item == item


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ({"_target_": "torch.optim.Adam"}, 2),
        ({"_target_": "torch.optim.Adam", "amsgrad": True}, 3),
        ({"_target_": "torch.optim.SGD"}, 0),
        ({"_target_": "torch.optim.SGD", "momentum": 0.9}, 1),
        ({"_target_": "torch.optim.RMSprop"}, 1),
        ({"_target_": "torch.optim.RMSprop", "momentum": 0.9, "centered": True}, 3),
    ],
)
def test_an_optimizer_keeps_what_its_settings_need(optimizer: dict[str, Any], states: int) -> None:
    assert described(optimizer=optimizer).states == states


def test_a_chunk_of_uniform_negatives_alone_has_as_many_edges() -> None:
    assert wide.negatives({"model": {**KG, "num_batch_negs": 0}}, 1000) == (50, 1.0)
    assert wide.negatives({"model": KG}, 1000) == (100, 1.0)


@pytest.mark.parametrize(("states", "row_states", "numbers"), [(0, 1, 9), (1, 0, 16), (0, 0, 8)])
def test_partitions_of_all_types_have_the_states_of_the_optimizer(states: int, row_states: int, numbers: int) -> None:
    """Row-wise Adagrad keeps a number for each row, Adagrad one for each column."""
    work = Workload(3000, 9000, 9000, task="link", kind=wide.EMBEDDING, tables=TYPES)
    work.table_states, work.row_states = states, row_states
    estimate = PbgPlanner().estimate(run_of(work, KG, PBG))
    # Two of four partitions are in memory; all are on disk, beside those that are being written.
    assert sum(terms(estimate, MEMORY, "table of type_")) == 3000 * numbers * 4 / 2
    assert estimate.total(DISK) == pytest.approx(3000 * numbers * 4 * 1.5)


def test_a_type_without_partitions_stays_in_memory() -> None:
    work = Workload(3000, 9000, 9000, task="link", kind=wide.EMBEDDING, tables=TYPES, table_states=1)
    work.store = SimpleNamespace(facts={"unpartitioned": ["type_1"]}, num_parts=4)  # type: ignore[assignment]
    estimate = PbgPlanner().estimate(run_of(work, KG, PBG))
    assert terms(estimate, MEMORY, "table of type_") == [32_000, 64_000, 32_000]
    assert estimate.total(DISK) == pytest.approx(2 * 64_000 * 1.5)


def test_servers_send_rows_of_all_types() -> None:
    """With all entities as negatives a step reads every row."""
    work = Workload(3000, 9000, 9000, task="link", kind=wide.EMBEDDING, tables=TYPES)
    estimate = PsPlanner().estimate(run_of(work, {**KG, "all_negs": True}, PS))
    assert sum(terms(estimate, SENT, "ids and gradients of rows of type_")) == 3000 * (8 + 4 * 8)


def test_steps_by_query_change_the_tables_of_all_types() -> None:
    work = Workload(3000, 9000, 9000, task="link", kind=wide.EMBEDDING, tables=TYPES, num_queries=100)
    estimate = Estimate()
    wide.add_query_scores(estimate, run_of(work, KG))
    (step,) = terms(estimate, MEMORY, "scores, rows and gradients")
    assert step == (4 * 100 / 2 * 1000 + 5 * 3000 * 8) * 4


def test_tables_are_in_the_memory_of_ranks_with_parts_of_a_graph() -> None:
    parts = Parts([50], [200], [30], [[0]], [[0]], 0, "counted", True)
    table = WideTable("node", 50, 16, True)
    work = Workload(50, 200, 30, layers=(CONV,), tables=(table,), _parts={1: parts})
    run = run_of(work, settings={"mode": 1, "wire_dtype": "float32", "prefetch": 1})
    assert terms(SarPlanner().estimate(run), MEMORY, "table of node") == [2 * 50 * 16 * 3 * 4]


def test_numbers_of_heads_travel_as_float32_beside_rows_of_bfloat16() -> None:
    parts = Parts([50, 50], [200, 200], [30, 30], [[0, 10], [10, 0]], [[0, 10], [10, 0]], 20, "counted", True)
    conv = Layer("GATConv", ATTENTION, 16, 8, 2, 128, False, True)
    work = Workload(100, 400, 60, layers=(conv,), item=2, _parts={2: parts})
    run = run_of(work, settings={"mode": 1, "wire_dtype": "float32", "prefetch": 1}, ranks=2)
    assert terms(SarPlanner().estimate(run), SENT, "rows and logits") == [10 * (8 * 2 + 2 * 4)]


def test_logistic_regression_has_an_estimate() -> None:
    work = Workload(1000, 0, 600, 1000, entries=10, kind=wide.SPARSE, tables=(WideTable("features", 1000, 2, False),))
    assert SinglePlanner().estimate(run_of(work)).seconds > 0
    with pytest.raises(NotEstimated):
        SinglePlanner().estimate(run_of(Workload(1000, 0, 600)))


def test_a_step_over_sparse_rows_sorts_their_entries() -> None:
    work = Workload(1000, 0, 600, 1000, entries=10, kind=wide.SPARSE, tables=(WIDE,), dense=128, dense_widths=(2,))
    work.dropout = False
    (few,) = terms(SinglePlanner().estimate(run_of(work)), MEMORY, "chosen entries")
    # Three numbers of 64 columns take more than 10 entries; less than 100.
    assert few == 600 * (10 * 8 + 3 * 64 * 4)
    work.entries = 100
    (many,) = terms(SinglePlanner().estimate(run_of(work)), MEMORY, "chosen entries")
    assert many == 600 * (100 * (8 + wide.SORTED_BYTES) + 64 * 4)
    estimate = PsPlanner().estimate(run_of(work, settings={**PS, "protocol": "ship"}))
    assert terms(estimate, MEMORY, "entries of steps in flight") == [600 * 100 * 64]
    assert terms(estimate, SERVER_MEMORY, "kernels") == [6e7]
    assert terms(estimate, SERVER_MEMORY, "sorted entries") == [600 * 100 * 40]
    estimate = PsPlanner().estimate(run_of(work, settings={**PS, "protocol": "pull"}))
    assert terms(estimate, MEMORY, "rows of a step") == [pytest.approx(2 * 1000 * 64 * 4)]


@pytest.mark.parametrize(("dropout", "copies"), [(True, 2 * 2.25 + 1), (False, 2 + 2)])
def test_hidden_layers_of_all_nodes_are_kept(dropout: bool, copies: float) -> None:
    """Without convolutions, too, all nodes are computed, not the seeds alone."""
    work = Workload(1000, 0, 600, 16, kind="per-node", dense=10, dense_widths=(128, 128, 4), dropout=dropout)
    estimate = SinglePlanner().estimate(run_of(work))
    assert terms(estimate, MEMORY, "hidden layers") == [1000 * 128 * copies * 4]
    (products,) = terms(estimate, ARITHMETIC, "other matrices")
    assert products == pytest.approx(6 * 1000 * 10 / Machine().flops)


def test_a_model_has_the_widths_of_its_layers() -> None:
    model = nn.Sequential(SparseLinear(50, 64), nn.Linear(64, 32), nn.Linear(32, 2))
    work = described(model)
    assert work.dense_widths == (32, 2) and layers.hidden_columns(work)["width"] == 64 + 32


def test_layers_beside_the_convolutions_of_a_batch_take_time() -> None:
    work = Workload(1000, 9000, 600, layers=(CONV, CONV), dense=100)
    batch = MeanBatch({"node": [10.0, 50.0, 200.0]}, [40.0, 150.0], 0.0, "given")
    for trimmed, rows in ((True, 50), (False, 200)):
        estimate, run = Estimate(), run_of(work)
        batch_layers.add_layers(estimate, run, batch, 3, trimmed=trimmed)
        assert terms(estimate, ARITHMETIC, "other matrices") == [pytest.approx(6 * rows * 100 * 3 / run.flops)]


def test_workers_pull_the_rows_of_all_nodes_of_a_graph() -> None:
    work = Workload(50, 200, 30, layers=(CONV,), tables=(WideTable("node", 50, 16, True),))
    estimate = PsPlanner().estimate(run_of(work, settings=PS))
    assert terms(estimate, MEMORY, "rows of node") == [8 * 50 * 16 * 4]
    assert terms(estimate, SERVER_MEMORY, "ids and rows of steps") == [2 * 50 * (4 + 2 * 16 * 4)]


def test_rows_that_are_used_often_are_read_by_most_batches() -> None:
    uses = Uses.of(torch.tensor([4, 1, 0, 1]), 4)
    assert uses.distinct(2) == pytest.approx((1 - 0.5**4) + 2 * 0.5)
    assert uses.distinct(4) == uses.distinct(9) == pytest.approx(3)
    assert uses.distinct(4, others=8) == pytest.approx(3 + 1 - math.exp(-2))
    assert Uses.of(torch.tensor([2, 0]), 4, scale=2.0).distinct(2) == pytest.approx(1 - 0.5**4)


@pytest.mark.parametrize("parts", [1, 3])
def test_columns_and_ends_are_counted_over_all_parts(parts: int, tmp_path: Path) -> None:
    x = torch.tensor([[1.0, 0, 0], [2, 0, 3], [4, 0, 0], [0, 0, 0]])
    graph = Data(x=x.to_sparse_csr(), edge_index=torch.tensor([[0, 1, 2, 2], [1, 0, 0, 2]]), num_nodes=4)
    store = stored(tmp_path, graph, random_parts(4, parts))
    (columns,), ends = count_columns(store), count_ends(store)
    assert (columns.times.tolist(), columns.rows.tolist(), columns.total) == ([0, 1, 3], [1, 1, 1], 4)
    assert (ends.times.tolist(), ends.rows.tolist(), ends.total) == ([0, 2, 3], [1, 1, 2], 4)


def run_with(work: Workload, trainer: dict[str, Any], batch: int | None = None, **more: Any) -> PlannedRun:
    run = run_of(work, **more)
    data = {**run.config["data"], "batch_size": batch}
    return replace(run, config={**run.config, "trainer": {**run.config["trainer"], **trainer}, "data": data})


@pytest.mark.parametrize(("limit", "seeds"), [(1.0, 95), (0.5, 50), (3, 30), (20, 95)])
def test_an_epoch_has_the_batches_that_its_limit_leaves(limit: float, seeds: int) -> None:
    run = run_with(Workload(50, 100, 95), {"limit_train_batches": limit}, 10)
    assert wide.limited(run).workload.num_seeds == seeds


@pytest.mark.parametrize(
    ("trainer", "epochs"),
    [
        ({"max_epochs": 7}, 7),
        ({"max_epochs": -1, "max_steps": 30}, 3),
        ({"max_epochs": -1, "max_steps": 30, "accumulate_grad_batches": 2}, 6),
        ({"max_epochs": -1, "max_steps": -1}, 1),
    ],
)
def test_steps_limit_the_epochs(trainer: dict[str, Any], epochs: float) -> None:
    assert wide.epochs_of(run_with(Workload(50, 100, 100), trainer, 10)) == epochs


def test_norms_and_joined_layers_keep_their_inputs() -> None:
    """In runs with 40,000 nodes, and 3 layers of 256: 75, 246 and 404 MB more were taken."""
    work = Workload(100, 500, 10, layers=(CONV, CONV, CONV))
    rows = 100 * 8 * 4
    for model, kept in (({}, 0), ({"norm": "batch"}, 2), ({"jk": "cat"}, 6), ({"norm": "layer", "jk": "cat"}, 9)):
        estimate = Estimate()
        layers.add_norms_and_jumps(estimate, run_of(work, model), 100)
        assert estimate.total(MEMORY) == kept * rows
    with pytest.raises(NotEstimated, match="jk=lstm"):
        layers.add_norms_and_jumps(Estimate(), run_of(work, {"jk": "lstm"}), 100)


@pytest.mark.parametrize(
    ("precision", "limit", "bytes_"), [("32-true", 1.0, 0), ("64-true", 0, 80), ("64-true", 1.0, 160)]
)
def test_features_are_converted_to_another_precision(precision: str, limit: float, bytes_: int) -> None:
    work = Workload(10, 50, 10, num_features=1, layers=(CONV,), item=8 if precision == "64-true" else 4)
    run = run_with(work, {"precision": precision, "limit_val_batches": limit, "limit_test_batches": 0})
    estimate = Estimate()
    layers.add_memory(estimate, run, 10, 50)
    assert sum(terms(estimate, MEMORY, "features in the precision")) == bytes_


def test_rows_over_ids_are_those_of_all_nodes() -> None:
    model = IdRGCNConv(16, 8, 5)
    assert described(model).parameters == sum(p.numel() for p in IdRGCNConv(150_000, 8, 5).parameters())


@pytest.mark.parametrize("planner", [SinglePlanner(), SarPlanner(), PsPlanner()])
def test_methods_of_pyg_have_no_formula(planner: Any) -> None:
    with pytest.raises(NotEstimated, match="as PyG wrote them"):
        planner.estimate(run_of(Workload(10, 10, 10, layers=(CONV,)), settings={"layers": "plain"}))


@pytest.mark.parametrize(("ranks", "numbers", "factor"), [(2, 100_000, 1), (4, 100_000, 1.5), (4, 100, 3)])
def test_a_sum_over_the_ranks_transfers_more_than_the_tensor(ranks: int, numbers: int, factor: float) -> None:
    run, estimate = run_of(Workload(10, 10, 10), ranks=ranks), Estimate()
    layers.add_reduce_time(estimate, run, numbers)
    assert estimate.total(NETWORK) * run.link == pytest.approx((factor - 1) * 4 * numbers)


@pytest.mark.parametrize(("inner", "item"), [(False, 4), (True, 2)])
def test_rows_of_the_data_travel_as_they_are_stored(inner: bool, item: int) -> None:
    """Results of layers are of bfloat16 with bf16-mixed."""
    layer = replace(CONV, outputs=32, constant=not inner, trained_input=inner)
    work = Workload(100, 500, 10, layers=(layer,))
    mixed = run_with(
        work, {"precision": "bf16-mixed"}, settings={"mode": 1, "prefetch": 1, "wire_dtype": "float32"}, ranks=2
    )
    full = run_with(work, {}, settings=dict(mixed.settings), ranks=2)
    sent = [sum(terms(SarPlanner().estimate(run), SENT, "")) - 4 * work.parameters for run in (mixed, full)]
    assert sent[0] == sent[1] * item / 4


def test_uncached_inputs_travel_in_every_epoch() -> None:
    layer = replace(CONV, outputs=32, constant=True, trained_input=False)
    settings = {"mode": 1, "prefetch": 1, "wire_dtype": "float32"}
    runs = [
        run_with(Workload(100, 500, 10, layers=(layer,)), {"max_epochs": 5}, settings={**settings, **more}, ranks=2)
        for more in ({"cache_inputs": "auto"}, {"cache_inputs": False})
    ]
    once, always = (sum(terms(SarPlanner().estimate(run), SENT, "")) for run in runs)
    assert always == pytest.approx(5 * once)
