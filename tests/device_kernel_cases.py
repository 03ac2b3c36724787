"""Cases that hold the kernels in Triton equal to the plain ones, on the CPU by Triton's interpreter, or on a GPU.

``pytest`` collects this file only by name: ``tests/unit/engine/test_device_kernels.py`` runs it with the interpreter,
and ``tests/gpu/test_kernels.py`` on a GPU.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from gtrain.engine.edges import CompressedEdges, compress
from gtrain.engine.kernels import attention_state, device, extreme_state, plain
from gtrain.engine.kernels.plain import (
    AttentionGradients,
    AttentionInputs,
    AttentionState,
    PairGradients,
    PairInputs,
    TargetGradients,
)
from gtrain.nn.dropout import NO_DROPOUT, Mask
from gtrain.nn.dropout_device import drop

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOURCES, TARGETS, EDGES = 23, 17, 60
SHAPES = [(1, 1), (3, 5), (2, 70)]
MASKS = [NO_DROPOUT, Mask(0.4, (1 << 62) - 3)]


def tensor(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def blocks() -> tuple[CompressedEdges, CompressedEdges]:
    """The same edges by target and by source; one target has a third of them, and some nodes have none."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(0, SOURCES - 2, (EDGES,), generator=generator)
    target = torch.randint(0, TARGETS - 3, (EDGES,), generator=generator)
    target[::3] = 5
    ids = torch.randperm(EDGES, generator=generator).int()
    return tuple(  # type: ignore[return-value]
        CompressedEdges(*(part.to(DEVICE) for part in compress(*ends, ids, count)))
        for *ends, count in ((target, source, TARGETS), (source, target, SOURCES))
    )


def equal(one: Tensor, other: Tensor) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}[one.dtype]
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "sums"),
    [(d, d) for d in (torch.float64, torch.float32, torch.bfloat16)] + [(torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize(("shape", "weighted"), [*product(SHAPES, [False, True]), ((2, 150), True)])
def test_spmm(shape: tuple[int, int], weighted: bool, rows: torch.dtype, sums: torch.dtype) -> None:
    block, _ = blocks()
    x, out = tensor(SOURCES, *shape, dtype=rows), tensor(TARGETS, *shape, dtype=sums)
    weight = tensor(EDGES, shape[0], dtype=torch.float32 if sums == torch.bfloat16 else sums) if weighted else None
    results = []
    for form in (plain, device):
        results.append(out.clone())
        form.spmm(block, x, results[-1], weight)
    equal(*results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_sddmm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    block, _ = blocks()
    a, b = tensor(TARGETS, *shape, dtype=dtype), tensor(SOURCES, *shape, dtype=dtype)
    results = []
    for form in (plain, device):
        results.append(a.new_zeros(EDGES, shape[0]))
        form.sddmm(block, a, b, results[-1])
    equal(*results)


@pytest.mark.parametrize("undefined", [False, True])
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("channels", [1, 37, 300])
def test_extremes(channels: int, largest: bool, undefined: bool) -> None:
    by_target, by_source = blocks()
    x = tensor(SOURCES, channels).round(decimals=0)  # so that there are ties
    if undefined:
        x[3, 0] = float("nan")
    results = []
    for form in (plain, device):
        state = extreme_state(TARGETS, x, largest)
        form.extreme_forward(by_target, x, largest, state)
        form.extreme_forward(by_target, x, largest, state)  # a second block with the same messages
        share, dx = tensor(TARGETS, channels), tensor(SOURCES, channels, seed=2)
        form.extreme_backward(by_source, x, state.out, share, dx)
        ties = state.ties.masked_fill(state.out.isnan(), 0)  # without a meaning for a NaN
        results.append((state.out, ties, dx))
    for one, other in zip(*results, strict=True):
        equal(one, other)


def passes(dtype: torch.dtype, shape: tuple[int, int], low: bool) -> tuple[Tensor, Tensor]:
    sources = tensor(SOURCES, *shape, dtype=torch.bfloat16 if low else dtype)
    return sources, tensor(TARGETS, *shape, dtype=dtype, seed=5)


@pytest.mark.parametrize("mask", MASKS, ids=["all", "dropout"])
@pytest.mark.parametrize(("dtype", "low"), [(torch.float64, False), (torch.float32, False), (torch.float32, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape: tuple[int, int], dtype: torch.dtype, low: bool, mask: Mask) -> None:
    by_target, by_source = blocks()
    x, gradient = passes(dtype, shape, low)
    source, target = tensor(SOURCES, shape[0], dtype=dtype), tensor(TARGETS, shape[0], dtype=dtype)
    source[2] = -torch.inf
    target[7] = -torch.inf  # all its logits
    inputs = AttentionInputs(x, source, target, 0.2, mask)
    results = []
    for form in (plain, device):
        state = attention_state(TARGETS, x)
        form.attention_forward(by_target, inputs, state)
        form.attention_forward(by_target, inputs._replace(source=source + 1), state)  # of another block
        totals = AttentionState(*(part.clone() for part in state))
        lse = plain.attention_finish(state)
        saved = TargetGradients(lse, (gradient * state.out).sum(-1), gradient.to(x.dtype))
        gradients = AttentionGradients(*(torch.ones_like(part).to(dtype) for part in (x, source, target)))
        form.attention_backward(by_source, inputs, saved, gradients)
        results.append((*totals, *gradients))
    for one, other in zip(*results, strict=True):
        equal(one, other)


@pytest.mark.parametrize("mask", MASKS, ids=["all", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs(shape: tuple[int, int], additive: bool, dtype: torch.dtype, mask: Mask) -> None:
    by_target, by_source = blocks()
    key, gradient = passes(dtype, shape, False)
    value = key if additive else tensor(SOURCES, *shape, dtype=dtype, seed=3)
    weight = tensor(*shape, dtype=dtype) if additive else key.new_empty(0, 0)
    inputs = PairInputs(key, value, tensor(TARGETS, *shape, dtype=dtype), weight, 0.2, mask)
    results = []
    for form in (plain, device):
        state = attention_state(TARGETS, key)
        form.pair_forward(by_target, inputs, state)
        lse = plain.attention_finish(state)
        saved = TargetGradients(lse, (gradient * state.out).sum(-1), gradient)
        of_key = torch.ones_like(key)
        of_value = of_key if additive else torch.ones_like(value)
        gradients = PairGradients(of_key, of_value, torch.ones_like(inputs.query), torch.ones_like(weight))
        form.pair_backward(by_target, by_source, inputs, saved, gradients)
        results.append((state.out, lse, *gradients))
    for one, other in zip(*results, strict=True):
        equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("p", "columns"), [(0.3, 1), (0.5, 8), (0.25, 301), (1.0, 3)])
def test_dropout(p: float, columns: int, dtype: torch.dtype) -> None:
    x, ids = tensor(SOURCES, columns, dtype=dtype), torch.randint(0, 1 << 40, (SOURCES,), device=DEVICE)
    mask = Mask(p, 12345678901234567)
    out = torch.empty_like(x)
    drop(x, out, ids, mask.stream, mask.threshold, mask.scale)
    equal(x * (mask.not_dropped(ids, columns).to(dtype) * mask.scale), out)
