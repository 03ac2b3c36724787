"""A block of a table on a parameter server: its products and updates are those of gtrain.nn."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from helpers import LIMIT
from torch import Tensor

from gtrain.errors import ConfigError, DataError
from gtrain.nn import Csr, TableSpec
from gtrain.nn.csr import product, transposed
from gtrain.nn.rules import RULES, update
from gtrain_ps.kernels import widths
from gtrain_ps.kernels.progress import DONE, STEP
from gtrain_ps.placement import Placement, spreading_multiplier
from gtrain_ps.server.block import Block, SparseRows
from gtrain_ps.server.memory import PersistentServerMemory, ServerMemory
from gtrain_ps.worker.served_table import sort_ids

HEIGHT, WIDTH, ROWS = 60, 13, 40
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "weight_decay": 0.01},
    "adagrad": {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-10, "initial_accumulator": 0.1},
    "rowwise_adagrad": {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-10, "initial_accumulator": 0.0},
    "lazy_adam": {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-8, "betas": [0.9, 0.99]},
}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


def sparse_rows(seed: int, weighted: bool, dtype: torch.dtype) -> Csr:
    """SparseRows of 0 to 15 entries, some ids twice in a row, half of them of ten frequent ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 16, (ROWS,), generator=generator)
    total = int(lengths.sum())
    ids = torch.where(
        torch.rand(total, generator=generator) < 0.5,
        torch.randint(0, 10, (total,), generator=generator),
        torch.randint(0, HEIGHT, (total,), generator=generator),
    )
    values = torch.randn(total, generator=generator, dtype=dtype) if weighted else None
    return Csr(ids, values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))


def made(table: Tensor, memory: ServerMemory | None = None) -> Block:
    block = Block("wide", *table.shape, table.dtype, memory or ServerMemory())
    block.table.copy_(table)
    return block


def taken(block: Block, rows: Csr) -> SparseRows:
    return block.rows(rows.ids.int(), rows.offsets.diff().to(torch.uint16), rows.values)


@pytest.fixture(params=["any width", "this width"])
def compiled_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables use loops for any width; here they also use those that are compiled for their own."""
    if request.param == "this width":
        monkeypatch.setattr(widths, "_LARGE_BYTES", 0)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("compiled_for")
def test_products(dtype: torch.dtype, weighted: bool) -> None:
    table = torch.randn(HEIGHT, WIDTH, dtype=dtype)
    rows = sparse_rows(1, weighted, dtype)
    block = made(table)
    torch.testing.assert_close(block.multiply(taken(block, rows)), product(rows, table), rtol=1e-5, atol=1e-5)
    if dtype == torch.float64:
        torch.testing.assert_close(block.multiply(taken(block, rows)), product(rows, table), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.usefixtures("compiled_for")
def test_updates_are_the_rules(name: str, dtype: torch.dtype, weighted: bool, safe: bool) -> None:
    """Three steps of two workers' rows; one row of the gradient is zero, so that some ids are left alone."""
    table, rule, settings = torch.randn(HEIGHT, WIDTH, dtype=dtype), RULES[name], SETTINGS[name]
    memory = ServerMemory()
    memory.survives = safe
    block = made(table, memory)
    block.set_rule(name, settings)
    state = rule.initial(table, settings)
    for step in range(3):
        halves = [sparse_rows(10 * step + worker, weighted, dtype) for worker in range(2)]
        gradients = [torch.randn(ROWS, WIDTH, dtype=dtype) for _ in halves]
        gradients[0][: ROWS // 2] = 0
        found = [transposed(rows, gradient) for rows, gradient in zip(halves, gradients, strict=True)]
        update(rule, table, state, torch.cat([ids for ids, _ in found]), torch.cat([g for _, g in found]), settings)
        grouped = block.group([taken(block, rows) for rows in halves])
        block.update(grouped, torch.cat(gradients), settings, step + 1)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(block.table, table, **tolerance)
    for key in rule.state:
        torch.testing.assert_close(block.state[key], state[key], **tolerance)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.usefixtures("compiled_for")
def test_a_gradient_whose_square_is_zero_is_a_gradient(name: str, single: bool) -> None:
    """The squares of numbers below 1e-23 are 0 in single precision; LazyAdam counts the step all the same."""
    table, rule, settings = torch.randn(HEIGHT, WIDTH), RULES[name], SETTINGS[name]
    block = made(table, ServerMemory())
    block.set_rule(name, settings)
    state = rule.initial(table, settings)
    rows = Csr(torch.tensor([3] if single else [3, 3], dtype=torch.int32), None, torch.tensor([0, 1 if single else 2]))
    gradient = torch.full((1, WIDTH), 1e-24)
    update(rule, table, state, *transposed(rows, gradient), settings)
    block.update(block.group([taken(block, rows)]), gradient, settings, 1)
    torch.testing.assert_close(block.table, table)
    for key in rule.state:
        torch.testing.assert_close(block.state[key], state[key])


@pytest.mark.parametrize("name", RULES)
def test_a_step_that_was_cut_off_is_applied_once(name: str) -> None:
    """The process is killed after some rows and in the middle of one; the next one repairs it and does the rest."""
    table, settings = torch.randn(HEIGHT, WIDTH, dtype=torch.float64), SETTINGS[name]
    rows, gradient = sparse_rows(3, True, torch.float64), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    expected, memory = made(table), ServerMemory()
    memory.survives = True
    block = made(table, memory)
    for one in (expected, block):
        one.set_rule(name, settings)
        one.update(one.group([taken(one, rows)]), gradient, settings, 1)
    before = {row: block.table[row].clone() for row in range(HEIGHT)}
    states = {key: tensor.clone() for key, tensor in block.state.items()}
    expected.update(expected.group([taken(expected, rows)]), gradient, settings, 2)
    grouped = block.group([taken(block, rows)])
    half = grouped.num_ids // 2
    cut = grouped.unique[half]
    block.update(grouped, gradient, settings, 2)
    for row in grouped.unique[half : grouped.num_ids]:  # these had not been changed yet
        block.table[row] = before[int(row)]
        for key, tensor in states.items():
            block.state[key][row] = tensor[row]
    block.progress.marker[:] = [2, half, cut, half]  # and this one was being changed
    block.progress.backup[0] = before[int(cut)].numpy()
    for place, (key, tensor) in enumerate(states.items(), start=1):
        block.progress.backup[place][: tensor[cut].numel()] = tensor[cut].numpy()
        block.state[key][cut] = -7
    block.table[cut] = -7

    again = Block("wide", *table.shape, table.dtype, memory)  # finds what was there
    again.set_rule(name, settings)
    again.progress.repair(2, again.table.numpy(), [tensor.numpy() for tensor in again.state.values()])
    again.update(again.group([taken(again, rows)]), gradient, settings, 2)
    torch.testing.assert_close(again.table, expected.table, rtol=1e-14, atol=1e-14)
    for key in states:
        torch.testing.assert_close(again.state[key], expected.state[key], rtol=1e-14, atol=1e-14)


def test_a_process_that_is_killed_within_an_update_is_followed_by_one_that_does_the_rest() -> None:
    """Real kills, aimed at more and more of a step's rows; the result has the very bits of an undisturbed one."""
    height, width, settings = 90_000, 100, SETTINGS["rowwise_adagrad"]
    lasting = os.memfd_create("test")
    rows = Csr(torch.randperm(height), torch.randn(height), torch.arange(0, height + 1, 100))
    assert widths.is_large(torch.empty(height, width))
    table, gradient, inside = torch.randn(height, width), torch.randn(len(rows.offsets) - 1, width), 0
    expected, block = made(table), made(table, PersistentServerMemory(lasting))
    for one in (expected, block):
        one.set_rule("rowwise_adagrad", settings)
    step = 0
    while step < 10 or not inside:  # a busy machine may be late each time
        step += 1
        assert step < 200
        expected.update(expected.group([taken(expected, rows)]), gradient, settings, step)
        grouped = block.group([taken(block, rows)])
        child = os.fork()
        if child == 0:
            try:
                block.update(grouped, gradient, settings, step)
            finally:
                os._exit(0)
        late = time.monotonic() + LIMIT
        marker = block.progress.marker
        while marker[STEP] != step or marker[DONE] < min(step, 10) * height // 20:
            assert time.monotonic() < late
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        inside += bool(marker[DONE] < height)
        memory = PersistentServerMemory(lasting)
        memory.set_version(step - 1)
        block = Block("wide", height, width, torch.float32, memory)
        block.update(block.group([taken(block, rows)]), gradient, settings, step)
        assert torch.equal(block.table, expected.table) and torch.equal(block.state["sum"], expected.state["sum"])
    os.close(lasting)


def test_rows_that_are_wrong_are_refused_in_a_sentence() -> None:
    block = made(torch.zeros(4, 2))
    with pytest.raises(DataError, match="names row 4 of a block of 4 rows of the table wide"):
        block.rows(torch.tensor([0, 4], dtype=torch.int32), torch.tensor([2]), None)
    with pytest.raises(DataError, match="rows with 1 entries came with 2 ids"):
        block.rows(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1]), None)
    block.set_rule("sgd", {})
    with pytest.raises(ConfigError, match="was trained with sgd; model.sparse_optimizer is now adagrad"):
        block.set_rule("adagrad", {})


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64, 1000, 8191])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 2), (4, 2)])
def test_every_row_is_in_one_place(rows: int, shape: tuple[int, int]) -> None:
    for multiplier in (1, spreading_multiplier(rows)):
        placement = Placement(rows, 6, *shape, multiplier)
        owner, place = placement.locate(torch.arange(rows))
        found = [placement.ids(block, 0, placement.block_rows(block)) for block in range(shape[0])]
        assert torch.cat(found).sort().values.tolist() == list(range(rows))
        for block, ids in enumerate(found):
            assert bool((owner[ids] == block).all()) and place[ids].tolist() == list(range(len(ids)))


def test_no_more_row_blocks_than_8_bits_number() -> None:
    entries = sort_ids(torch.arange(1024), Placement(1024, 6, 256, 1), "wide")
    assert (entries.begin, entries.ids.tolist()) == (list(range(0, 1025, 4)), [0, 1, 2, 3] * 256)
    with pytest.raises(ConfigError, match="257 row blocks; strategy=ps supports at most 256"):
        Placement(1024, 6, 257, 1)


def test_blocks_start_as_the_whole_table_does() -> None:
    table = TableSpec("features", 5000, 6, "feature", "uniform", 0.5, seed=3)
    placement = Placement(5000, 6, 2, 2, spreading_multiplier(5000))
    whole = torch.empty(5000, 6)
    for server in range(4):
        block, (first, last) = server // 2, placement.columns(server % 2)
        part = torch.empty(placement.block_rows(block), last - first)
        placement.fill_initial(table, server, part)
        whole[placement.ids(block, 0, len(part)), first:last] = part
    assert torch.equal(whole, table.initial(0, 5000))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_hashed_blocks_have_equal_shares_of_zipf_ids(first: int, stride: int) -> None:
    """Frequent ids are the first ones, or every second or fourth one, as hashed or one-hot features may have it."""
    n = 1 << 16
    placement = Placement(n, 1, 4, 1, spreading_multiplier(n))
    ids = torch.arange(first, n, stride)
    frequency = torch.arange(1, len(ids) + 1, dtype=torch.float64) ** -0.8
    owner, _ = placement.locate(ids)
    shares = torch.zeros(4, dtype=torch.float64).index_add_(0, owner, frequency) / frequency.sum()
    assert float(shares.max()) < 0.3  # of ranges of ids the first would have 0.7
