"""Kernels over blocks of edges, compiled and in plain torch: against autograd over all edges at once."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor
from torch_geometric.utils import softmax

from gtrain.engine import kernels
from gtrain.engine.edges import CompressedEdges, EdgeBlock, compress
from gtrain.engine.kernels import (
    AttentionGradients,
    AttentionInputs,
    PairGradients,
    PairInputs,
    TargetGradients,
    plain,
    threads,
)
from gtrain.engine.kernels.rows import data
from gtrain.kernels.exponential import exp_all
from gtrain.kernels.splitmix import key
from gtrain.nn.dropout import NO_DROPOUT, Mask

SOURCES, TARGETS, EDGES, SLOPE = 23, 17, 160, 0.2
SHAPES = [(1, 1), (1, 16), (4, 64), (3, 7), (2, 37), (1, 33), (5, 8)]
TIGHT = {torch.float64: {"rtol": 1e-12, "atol": 1e-12}, torch.float32: {"rtol": 2e-5, "atol": 2e-5}}


@dataclass
class Edges:
    """Edges in blocks by the range of their source."""

    source: Tensor
    target: Tensor
    bounds: list[int]
    order: list[int]

    def blocks(self) -> Iterator[tuple[slice, CompressedEdges, CompressedEdges]]:
        """The sources of each block, and its edges by target and by source."""
        for r in self.order:
            low, high = self.bounds[r], self.bounds[r + 1]
            ids = ((self.source >= low) & (self.source < high)).nonzero().view(-1)
            source, target = self.source[ids] - low, self.target[ids]
            by_target = compress(target, source, ids, TARGETS)
            yield slice(low, high), by_target, compress(source, target, ids, high - low)


def edges(order: tuple[int, ...] = (0, 1, 2, 3), seed: int = 0) -> Edges:
    """Four blocks, one of them without sources; targets 0 and 5 without edges; one edge twice."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(0, SOURCES, (EDGES,), generator=generator)
    target = torch.randint(1, TARGETS, (EDGES,), generator=generator)
    target[target == 5] = 7
    source[1], target[1] = source[0], target[0]
    return Edges(source, target, [0, 9, 9, 15, SOURCES], list(order))


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, **TIGHT[wanted.dtype])


@pytest.fixture(params=["compiled", "plain", "three threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the ways to compute; chunks and spans are made small enough for there to be several."""
    monkeypatch.setattr(plain, "CHUNK_NUMBERS", 600)
    monkeypatch.setattr(threads, "_RANGE_EDGES", 8)
    if request.param == "plain":
        for module in (kernels.sums, kernels.attention, kernels.pairs):
            monkeypatch.setattr(module, "runs_compiled", lambda *_, **__: False)
    monkeypatch.setattr(threads, "num_threads", lambda: 3 if request.param == "three threads" else 1)
    return request.param


# ------------------------------------------------------------------------------------------------- sparse products


@pytest.mark.parametrize("heads,channels", SHAPES)
@pytest.mark.parametrize(
    "dtypes", [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("count", [1, 4], ids=["one thread", "four threads"])
def test_inner_products_of_rows(
    heads: int, channels: int, dtypes: tuple[torch.dtype, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.sums, "num_threads", lambda: count)
    monkeypatch.setattr(kernels.sums, "_DOT_ROWS", 3)
    a, b = (torch.randn(20, heads, channels, dtype=torch.float64).to(dtype) for dtype in dtypes)
    out = torch.full((20, heads), math.nan, dtype=dtypes[1])
    for low, high in ((0, 7), (7, 7), (7, 20)):
        kernels.row_dots(a, b, out, low, high)
    torch.testing.assert_close(out, (a.to(b.dtype) * b).sum(-1), **TIGHT[dtypes[1]])


@pytest.mark.parametrize("dtype", TIGHT)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("heads", "channels"), SHAPES)
def test_products_are_those_of_autograd(
    way: str, heads: int, channels: int, weighted: bool, dtype: torch.dtype
) -> None:
    graph, x = edges(), draw(SOURCES, heads, channels, dtype=dtype).requires_grad_()
    weight = draw(EDGES, heads, dtype=dtype).requires_grad_()
    start, gradient = draw(TARGETS, heads, channels, dtype=dtype), draw(TARGETS, heads, channels, dtype=dtype, seed=2)
    messages = x[graph.source] * weight.unsqueeze(-1) if weighted else x[graph.source]
    wanted = start.index_add(0, graph.target, messages)
    wanted.backward(gradient)
    out, dx, dweight = start.clone(), torch.zeros_like(x), torch.full_like(weight, math.nan)
    used = weight.detach() if weighted else None
    for own, by_target, by_source in graph.blocks():
        kernels.spmm(by_target, x.detach()[own], out, used)
        kernels.spmm(by_source, gradient, dx.detach()[own], used)
        kernels.sddmm(by_target, gradient, x.detach()[own], dweight.detach())
    assert x.grad is not None
    near(out, wanted.detach())
    near(dx.detach(), x.grad)
    if weighted:
        assert weight.grad is not None
        near(dweight.detach(), weight.grad)


def test_inputs_need_not_be_contiguous(way: str) -> None:
    graph, x = edges(), draw(2, SOURCES, 8).transpose(0, 1)
    out, wanted = torch.zeros(TARGETS, 2, 8, dtype=torch.float64), torch.zeros(TARGETS, 2, 8, dtype=torch.float64)
    for own, by_target, _ in graph.blocks():
        kernels.spmm(by_target, x[own], out)
    near(out, wanted.index_add(0, graph.target, x[graph.source]))


def test_other_types_take_plain_torch() -> None:
    graph, x = edges(), draw(SOURCES, 1, 8).half()
    out = torch.zeros(TARGETS, 1, 8, dtype=torch.float32)
    for own, by_target, _ in graph.blocks():
        kernels.spmm(by_target, x[own], out)
    near(out, torch.zeros(TARGETS, 1, 8).index_add(0, graph.target, x.float()[graph.source]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("heads", "channels"), SHAPES)
def test_rows_of_bfloat16_are_summed_in_float32(way: str, heads: int, channels: int, weighted: bool) -> None:
    graph, x = edges(), draw(SOURCES, heads, channels).bfloat16()
    start = draw(TARGETS, heads, channels).bfloat16()
    weight = draw(EDGES, heads, dtype=torch.float32) if weighted else None
    exact, rounded, dweight = start.float(), start.clone(), torch.zeros(EDGES, heads)
    for own, by_target, _ in graph.blocks():
        kernels.spmm(by_target, x[own], exact, weight)
        kernels.spmm(by_target, x[own], rounded, weight)
        kernels.sddmm(by_target, start, x[own], dweight)
    rows = x.float()[graph.source]
    messages = rows if weight is None else rows * weight.unsqueeze(-1)
    near(exact, start.float().index_add(0, graph.target, messages))
    near(dweight, (start.float()[graph.target] * rows).sum(-1))
    # Each of the blocks rounds once, to 8 significant bits.
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=4 * 2**-9 * float(exact.abs().max()))


def test_a_sum_of_bfloat16_is_rounded_once(way: str) -> None:
    """1000 ones: in bfloat16 a sum would stop at 256. Ties go to even, NaN and infinity remain."""
    count = 1000
    block = EdgeBlock(torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.zeros(count).long(), 1, 1)
    x = torch.tensor([[[1.0, math.nan, math.inf, -1.0, *[0.0] * 20]]]).bfloat16()
    out = torch.zeros_like(x)
    kernels.spmm(block.by_target, x, out)
    assert out.flatten()[:4].tolist()[0] == 1000 and out[0, 0, 1].isnan() and out[0, 0, 2] == math.inf
    assert out[0, 0, 3] == -1000 and not out[0, 0, 4:].any()
    for number in (1 + 2**-8, 1 + 3 * 2**-8, -1.01, 3e38, 2.0**-130):
        out = torch.zeros_like(x)
        kernels.spmm(block.select(slice(1)).by_target, torch.full(x.shape, number), out)
        assert torch.equal(out, torch.full(x.shape, number).bfloat16())


# ------------------------------------------------------------------------------------------------- attention


@dataclass
class Attention:
    """One attention's inputs, and what dense autograd makes of them."""

    x: Tensor
    source: Tensor
    target: Tensor
    gradient: Tensor

    def wanted(self, graph: Edges, keep: Mask) -> list[Tensor]:
        """Output, logarithm of the sums, and the gradients of x, source and target."""
        leaves = [t.clone().requires_grad_() for t in (self.x, self.source, self.target)]
        x, source, target = leaves
        heads = x.size(1)
        logit = torch.nn.functional.leaky_relu(source[graph.source] + target[graph.target], SLOPE)
        dense = logit.new_full((TARGETS, EDGES, heads), -math.inf)
        dense[graph.target, torch.arange(EDGES)] = logit
        there = (graph.target.view(1, -1) == torch.arange(TARGETS).view(-1, 1)).unsqueeze(-1)
        share = torch.where(there, torch.softmax(dense, 1), 0).nan_to_num(0)
        kept = keep.not_dropped(torch.arange(EDGES), heads).to(x.dtype) * keep.scale
        out = torch.einsum("teh,ehc->thc", share * kept, x[graph.source])
        gradients = torch.autograd.grad(out, leaves, self.gradient)
        return [out.detach(), torch.logsumexp(dense, 1).detach(), *gradients]

    def found(self, graph: Edges, keep: Mask) -> list[Tensor]:
        """The same by the kernels, block by block."""
        state = kernels.attention_state(TARGETS, self.x)
        for own, by_target, _ in graph.blocks():
            inputs = AttentionInputs(self.x[own], self.source[own], self.target, SLOPE, keep)
            kernels.attention_forward(by_target, inputs, state)
        lse = kernels.attention_finish(state)
        delta = (self.gradient * state.out).sum(-1)
        found = [torch.zeros_like(t, dtype=state.out.dtype) for t in (self.x, self.source, self.target)]
        for own, _, by_source in graph.blocks():
            inputs = AttentionInputs(self.x[own], self.source[own], self.target, SLOPE, keep)
            gradients = AttentionGradients(found[0][own], found[1][own], found[2])
            kernels.attention_backward(by_source, inputs, TargetGradients(lse, delta, self.gradient), gradients)
        return [state.out, lse, *found]


def attention(heads: int, channels: int, dtype: torch.dtype = torch.float64) -> Attention:
    return Attention(
        draw(SOURCES, heads, channels, dtype=dtype),
        draw(SOURCES, heads, dtype=dtype),
        draw(TARGETS, heads, dtype=dtype),
        draw(TARGETS, heads, channels, dtype=dtype, seed=2),
    )


@pytest.mark.parametrize("dtype", TIGHT)
@pytest.mark.parametrize("keep", [NO_DROPOUT, Mask(0.4, 11)], ids=["all", "dropout"])
@pytest.mark.parametrize(("heads", "channels"), SHAPES)
def test_attention_is_that_of_autograd(way: str, heads: int, channels: int, keep: Mask, dtype: torch.dtype) -> None:
    case, graph = attention(heads, channels, dtype), edges()
    for found, wanted in zip(case.found(graph, keep), case.wanted(graph, keep), strict=True):
        near(found, wanted)


@pytest.mark.parametrize("keep", [NO_DROPOUT, Mask(0.4, 11)], ids=["all", "dropout"])
@pytest.mark.parametrize(("heads", "channels"), SHAPES)
def test_attention_over_rows_of_bfloat16(way: str, heads: int, channels: int, keep: Mask) -> None:
    """Its results, of float32, are those of the same rows in float32."""
    case, graph = attention(heads, channels, torch.float32), edges()
    low, gradient = case.x.bfloat16(), case.gradient.bfloat16()
    exact = replace(case, x=low.float(), gradient=gradient.float())
    results = exact.found(graph, keep)
    for actual, wanted in zip(replace(case, x=low, gradient=gradient).found(graph, keep), results, strict=True):
        near(actual, wanted)


@pytest.mark.parametrize("dtype", TIGHT)
@pytest.mark.parametrize("keep", [NO_DROPOUT, Mask(0.4, 11)], ids=["all", "dropout"])
@pytest.mark.parametrize("additive", [True, False], ids=["gatv2", "products"])
@pytest.mark.parametrize(("heads", "channels"), SHAPES)
def test_attention_of_pairs_is_that_of_autograd(
    way: str, heads: int, channels: int, additive: bool, keep: Mask, dtype: torch.dtype
) -> None:
    graph = edges()
    key, value = (draw(SOURCES, heads, channels, dtype=dtype, seed=seed) for seed in (1, 3))
    query, gradient = (draw(TARGETS, heads, channels, dtype=dtype, seed=seed) for seed in (4, 2))
    weight, factor = (draw(heads, channels, dtype=dtype), SLOPE) if additive else (key.new_empty(0, 0), 0.7)
    leaves = [tensor.requires_grad_() for tensor in (key, query, *([weight] if additive else [value]))]

    source, target = graph.source, graph.target
    z = key[source] + query[target] if additive else key[source] * query[target]
    logit = (torch.nn.functional.leaky_relu(z, SLOPE) * weight).sum(-1) if additive else z.sum(-1) * factor
    kept = keep.not_dropped(torch.arange(EDGES), heads).to(dtype) * keep.scale
    share = softmax(logit, target, num_nodes=TARGETS) * kept
    wanted = key.new_zeros(TARGETS, heads, channels)
    wanted = wanted.index_add(0, target, share.unsqueeze(-1) * (key if additive else value)[source])
    expected = torch.autograd.grad(wanted, leaves, gradient)

    key, value, query, weight = (tensor.detach() for tensor in (key, value, query, weight))
    value = key if additive else value
    state = kernels.attention_state(TARGETS, key)
    for own, by_target, _ in graph.blocks():
        kernels.pair_forward(by_target, PairInputs(key[own], value[own], query, weight, factor, keep), state)
    lse = kernels.attention_finish(state)
    near(state.out, wanted.detach())
    saved = TargetGradients(lse, (gradient * state.out).sum(-1), gradient)
    of_key, of_query, of_weight = (torch.zeros_like(tensor) for tensor in (key, query, weight))
    of_value = of_key if additive else torch.zeros_like(value)
    for own, by_target, by_source in graph.blocks():
        inputs = PairInputs(key[own], value[own], query, weight, factor, keep)
        sums = PairGradients(of_key[own], of_value[own], of_query, of_weight)
        kernels.pair_backward(by_target, by_source, inputs, saved, sums)
    for found, of_autograd in zip((of_key, of_query, of_weight if additive else of_value), expected, strict=True):
        near(found, of_autograd)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_blocks_come_in_any_order(order: tuple[int, ...]) -> None:
    case, keep = attention(2, 5), Mask(0.3, 5)
    for found, wanted in zip(case.found(edges(order), keep), case.wanted(edges(), keep), strict=True):
        near(found, wanted)


@pytest.mark.parametrize("dtype", TIGHT)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_large_logits_are_no_trouble(way: str, order: tuple[int, ...], dtype: torch.dtype) -> None:
    case = attention(2, 5, dtype)
    case.source[::3] = 1000
    case.source[1::3] = -1000
    for found, wanted in zip(case.found(edges(order), NO_DROPOUT), case.wanted(edges(), NO_DROPOUT), strict=True):
        assert not found.isnan().any()
        rounding = 1000 * torch.finfo(dtype).eps  # of a logit of 1000
        torch.testing.assert_close(found, wanted, rtol=8 * rounding, atol=8 * rounding)


def test_a_logit_of_minus_infinity_counts_nothing(way: str) -> None:
    case, graph = attention(2, 5), edges()
    case.source[:9] = -math.inf
    left = case.source[graph.source, 0] > -math.inf
    rest = Edges(graph.source[left], graph.target[left], graph.bounds, graph.order)
    ids = left.nonzero().view(-1)
    found, wanted = case.found(graph, NO_DROPOUT), case.found(rest, NO_DROPOUT)
    assert len(ids) < EDGES and not any(t.isnan().any() for t in found)
    for a, b in zip(found, wanted, strict=True):
        near(a, b)


def test_a_target_all_of_whose_logits_are_minus_infinity_gets_nothing(way: str) -> None:
    case, graph = attention(2, 5), edges()
    case.target[7] = -math.inf
    out, lse, *gradients = case.found(graph, NO_DROPOUT)
    assert (out[7] == 0).all() and (lse[7] == -math.inf).all()
    assert not any(t.isnan().any() for t in gradients)


def test_nan_is_not_hidden(way: str) -> None:
    case, graph = attention(1, 3, torch.float32), edges()
    case.source[2] = math.nan
    reached = graph.target[graph.source == 2].unique()
    out = case.found(graph, NO_DROPOUT)[0]
    assert out[reached].isnan().all() and not out[0].isnan().any() and out.isnan().any(-1).sum() == len(reached)


def test_a_target_of_very_many_edges(way: str) -> None:
    """More edges than any buffer on the way has room for."""
    count, generator = 100_000, torch.Generator().manual_seed(3)
    source, ids = torch.randint(0, 50, (count,), generator=generator), torch.arange(count)
    x, part = draw(50, 2, 3), draw(50, 2)
    block = compress(torch.zeros(count, dtype=torch.int64), source, ids, 1)
    state = kernels.attention_state(1, x)
    if way == "plain":
        plain.CHUNK_NUMBERS = 1 << 20
    inputs = AttentionInputs(x, part, torch.zeros(1, 2, dtype=x.dtype), SLOPE, NO_DROPOUT)
    kernels.attention_forward(block, inputs, state)
    lse = kernels.attention_finish(state)
    logit = torch.nn.functional.leaky_relu(part, SLOPE)[source]
    near(lse[0], logit.logsumexp(0))
    near(state.out[0], (logit.softmax(0).unsqueeze(-1) * x[source]).sum(0))


@njit(nogil=True)
def exponentials(x: Any) -> None:
    exp_all(data(x), x.size)


def test_exponentials_of_float32_are_exact_to_rounding() -> None:
    x = np.linspace(-87.2, 5, 1_000_003).astype(np.float32)
    wanted, found = np.exp(x.astype(np.float64)), x.copy()
    exponentials(found)
    assert np.abs(found / wanted - 1).max() < 1.3 * np.finfo(np.float32).eps
    special = np.array([-np.inf, -1e30, -88, np.nan, 0], np.float32)
    exponentials(special)
    np.testing.assert_array_equal(special, np.array([0, 0, 0, np.nan, 1], np.float32))


# ------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize(("p", "seed"), [(0.1, 0), (0.5, 2**63 + 5), (0.9, 3)])
def test_dropout_keeps_its_share(p: float, seed: int) -> None:
    mask = Mask(p, key(seed)).not_dropped(torch.arange(50_000), 4).double()
    assert abs(mask.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / mask.numel())
    per_head = (mask - mask.mean(0)).T @ (mask - mask.mean(0)) / len(mask) / (p * (1 - p))
    assert per_head.fill_diagonal_(0).abs().max() < 5 / math.sqrt(len(mask))


def test_dropout_differs_between_seeds_and_not_between_calls() -> None:
    ids = torch.arange(1000)
    mask = Mask(0.5, 1).not_dropped(ids, 2)
    assert torch.equal(mask[300:], Mask(0.5, 1).not_dropped(ids[300:], 2))
    other = Mask(0.5, 2).not_dropped(ids, 2)
    assert not any(torch.equal(mask[k:500], other[: 500 - k]) for k in range(9))


def test_dropping_all_gives_zeros(way: str) -> None:
    assert all(t.abs().sum() == 0 for t in attention(2, 5).found(edges(), Mask(1.0, 3))[:1])


# ------------------------------------------------------------------------------------------------- extremes


@pytest.mark.parametrize("dtype", TIGHT)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("channels", [1, 16, 37, 256])
def test_extremes_and_their_ties(way: str, channels: int, largest: bool, dtype: torch.dtype) -> None:
    graph = edges((2, 0, 3, 1))
    x = draw(SOURCES, channels, dtype=dtype).round()  # few values, so that there are ties within blocks and between
    state = kernels.extreme_state(TARGETS, x, largest)
    for own, by_target, _ in graph.blocks():
        kernels.extreme_forward(by_target, x[own], largest, state)
    index, nothing = graph.target.view(-1, 1).expand(-1, channels), -math.inf if largest else math.inf
    start = x.new_full((TARGETS, channels), nothing)
    wanted = start.scatter_reduce(0, index, x[graph.source], "amax" if largest else "amin")
    attained = (x[graph.source] == wanted[graph.target]).to(dtype)
    ties = torch.zeros_like(start).index_add(0, graph.target, attained)
    near(state.out, wanted)
    near(state.ties, ties)
    assert (ties[0] == 0).all() and ties.max() > 2
    share, dx = draw(TARGETS, channels, dtype=dtype, seed=3), torch.zeros_like(x)
    for own, _, by_source in graph.blocks():
        kernels.extreme_backward(by_source, x[own], state.out, share, dx[own])
    near(dx, torch.zeros_like(x).index_add(0, graph.source, attained * share[graph.target]))


def test_an_extreme_of_nan_is_nan(way: str) -> None:
    graph, x = edges(), draw(SOURCES, 20)
    x[4, 3] = math.nan
    state = kernels.extreme_state(TARGETS, x, True)
    for own, by_target, _ in graph.blocks():
        kernels.extreme_forward(by_target, x[own], True, state)
    reached = graph.target[graph.source == 4].unique()
    assert state.out[reached, 3].isnan().all() and state.out.isnan().sum() == len(reached)


# ------------------------------------------------------------------------------------------------- threads and blocks


def test_a_block_without_edges_changes_nothing(way: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    block = compress(none, none, none, 0)
    x, out = draw(0, 2, 5), draw(TARGETS, 2, 5)
    before = out.clone()
    kernels.spmm(block, x, out)
    kernels.spmm(block, out, x)
    kernels.sddmm(block, out, x, draw(EDGES, 2))
    state = kernels.attention_state(TARGETS, x)
    row = draw(TARGETS, 2)
    inputs = AttentionInputs(x, draw(0, 2), row, SLOPE, NO_DROPOUT)
    kernels.attention_forward(block, inputs, state)
    gradients = AttentionGradients(x.clone(), draw(0, 2), row.clone())
    kernels.attention_backward(block, inputs, TargetGradients(row, row, out), gradients)
    assert torch.equal(out, before) and (state.total == 0).all() and (state.top == -math.inf).all()


def test_rows_are_divided_by_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.tensor([100_000, *[10] * 10_000])
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    block = compress(rows, rows, torch.arange(len(rows)), len(counts))
    monkeypatch.setattr(threads, "num_threads", lambda: 4)
    found = threads.row_ranges(block, per_thread=1)
    assert [low for low, _ in found[1:]] == [high for _, high in found[:-1]]
    assert found[0] == (0, 1) and found[-1][1] == len(counts)
    assert [int(block.ptr[high] - block.ptr[low]) for low, high in found[1:]] == [50_000, 50_000]


@pytest.mark.parametrize("module", [kernels.sums, kernels.attention, kernels.pairs])
def test_local_arrays_outlive_the_pointers_to_them(module: Any) -> None:
    """numba frees an array after its last use by name, so a loop that uses a pointer must use the array too."""
    loops = ast.For, ast.While
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(function, ast.FunctionDef):
            continue
        local = {
            target.id
            for node in function.body
            if isinstance(node, ast.Assign) and "np.empty" in ast.unparse(node.value)
            for target in ast.walk(node.targets[0])
            if isinstance(target, ast.Name)
        }
        last = next((node for node in reversed(function.body) if isinstance(node, loops)), None)
        used = {node.id for node in ast.walk(last) if isinstance(node, ast.Name)} if last is not None else set()
        assert local <= used, f"{function.name}: {sorted(local - used)}"
