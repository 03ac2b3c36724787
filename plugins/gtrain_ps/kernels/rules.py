"""The sparse optimizers of :mod:`gtrain.nn.rules`, row by row, for the loop of :mod:`gtrain_ps.kernels.updates`.

A rule is a NamedTuple of its numbers. Its type selects the functions that the compiler inlines into the loop. A rule
either changes a row column by column (:data:`CHANGES`), or subtracts a multiple of the row's gradient
(:data:`FACTORS`). A new rule needs its class, its function and its entries in these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from gtrain.kernels.options import BARE, FAST

_OPTIONS: Any = {**BARE, "fastmath": FAST}


class Sgd(NamedTuple):
    """``w -= lr * g``; no state."""

    lr: float
    weight_decay: float


class Adagrad(NamedTuple):
    """``s += g^2; w -= lr * g / (sqrt(s) + eps)``; state: s ``[n, d]``."""

    lr: float
    weight_decay: float
    eps: float


class RowwiseAdagrad(NamedTuple):
    """``s += sum(g^2) / d; w -= lr * g / (sqrt(s) + eps)``; state: s ``[n]``."""

    lr: float
    weight_decay: float
    eps: float


class LazyAdam(NamedTuple):
    """Adam with the row's own number t of updates; state: t ``[n]``, m and v ``[n, d]``."""

    lr: float
    weight_decay: float
    eps: float
    betas: tuple[float, float]


def rule_of(name: str, settings: Mapping[str, Any]) -> Any:
    """The rule of a name in :data:`gtrain.nn.rules.RULES`, with an optimizer's settings."""
    rule = RULES[name]
    numbers = {"weight_decay": 0.0, **settings}
    return rule(*(_plain(numbers[field]) for field in rule._fields))


def _plain(value: Any) -> Any:
    return tuple(map(float, value)) if isinstance(value, (list, tuple)) else float(value)


def change(rule: Any, width: int, row: int, total: Any, table: Any, state: Any) -> None:
    """Change a row of the table and its state.

    Args:
        rule: a rule of :data:`CHANGES`.
        width: d.
        row: of the table.
        total: ``[d]``, the row's gradient, without weight decay.
        table: ``[n, d]``.
        state: the rule's tensors ``[n, d]`` or ``[n]``, in the order of :mod:`gtrain.nn.rules`.
    """
    raise NotImplementedError("compiled only")


def factor(rule: Any, width: int, row: int, norm: Any, state: Any, like: Any) -> Any:
    """Change a row's state, and return by what its gradient is multiplied before it is subtracted from the row.

    Args:
        rule: a rule of :data:`FACTORS`.
        width: d.
        row: of the table.
        norm: the squared length of the row's gradient, weight decay included.
        state: as for :func:`change`.
        like: an array of the table's dtype.
    """
    raise NotImplementedError("compiled only")


def takes_factor(rule: Any) -> bool:
    """Whether a rule is one of :data:`FACTORS`; a constant."""
    raise NotImplementedError("compiled only")


def _sgd(rule: Any, width: int, row: int, total: Any, table: Any, state: Any) -> None:
    kind = table.dtype.type
    lr, wd = kind(rule.lr), kind(rule.weight_decay)
    for column in range(width):
        table[row, column] -= lr * (total[column] + wd * table[row, column])


def _adagrad(rule: Any, width: int, row: int, total: Any, table: Any, state: Any) -> None:
    kind, (squares,) = table.dtype.type, state
    lr, wd, eps = kind(rule.lr), kind(rule.weight_decay), kind(rule.eps)
    for column in range(width):
        g = total[column] + wd * table[row, column]
        s = squares[row, column] + g * g
        squares[row, column] = s
        table[row, column] -= lr * g / (np.sqrt(s) + eps)


def _rowwise_adagrad(rule: Any, width: int, row: int, norm: Any, state: Any, like: Any) -> Any:
    kind, (squares,) = like.dtype.type, state
    s = squares[row] + norm / kind(width)
    squares[row] = s
    return kind(rule.lr) / (np.sqrt(s) + kind(rule.eps))


def _lazy_adam(rule: Any, width: int, row: int, total: Any, table: Any, state: Any) -> None:
    kind, (times, means, squares) = table.dtype.type, state
    lr, wd, eps = kind(rule.lr), kind(rule.weight_decay), kind(rule.eps)
    beta1, beta2 = rule.betas
    decay1, decay2, rest1, rest2 = kind(beta1), kind(beta2), kind(1.0 - beta1), kind(1.0 - beta2)
    times[row] += kind(1)
    scale = lr / (kind(1) - decay1 ** times[row])
    correction = kind(1) - decay2 ** times[row]
    for column in range(width):
        g = total[column] + wd * table[row, column]
        mean = means[row, column] + rest1 * (g - means[row, column])
        square = decay2 * squares[row, column] + rest2 * g * g
        means[row, column] = mean
        squares[row, column] = square
        table[row, column] -= scale * mean / (np.sqrt(square / correction) + eps)


CHANGES: Mapping[type, Callable[..., None]] = {Sgd: _sgd, Adagrad: _adagrad, LazyAdam: _lazy_adam}
FACTORS: Mapping[type, Callable[..., Any]] = {RowwiseAdagrad: _rowwise_adagrad}
RULES: Mapping[str, Any] = {"sgd": Sgd, "adagrad": Adagrad, "rowwise_adagrad": RowwiseAdagrad, "lazy_adam": LazyAdam}
"""By the names of :data:`gtrain.nn.rules.RULES`."""


@overload(change, jit_options=_OPTIONS)
def _typed_change(rule: Any, width: int, row: int, total: Any, table: Any, state: Any) -> Any:
    return CHANGES.get(rule.instance_class, _no_change)


@overload(factor, jit_options=_OPTIONS)
def _typed_factor(rule: Any, width: int, row: int, norm: Any, state: Any, like: Any) -> Any:
    return FACTORS.get(rule.instance_class, _no_factor)


@overload(takes_factor, jit_options=_OPTIONS)
def _typed_takes_factor(rule: Any) -> Any:
    return _yes if rule.instance_class in FACTORS else _no


def _yes(rule: Any) -> bool:
    return True


def _no(rule: Any) -> bool:
    return False


def _no_change(rule: Any, width: int, row: int, total: Any, table: Any, state: Any) -> None:
    pass


def _no_factor(rule: Any, width: int, row: int, norm: Any, state: Any, like: Any) -> Any:
    return norm
