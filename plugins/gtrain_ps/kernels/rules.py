"""The sparse optimizers of :mod:`gtrain.nn.rules`, row by row, for the loop of :mod:`gtrain_ps.kernels.updates`.

A rule is a NamedTuple of its numbers. Its type selects the function that the compiler inlines into the loop. A rule
either changes a row column by column (:data:`CHANGES`), or subtracts a multiple of the row's gradient
(:data:`FACTORS`). A new rule needs a class, a function and an entry in one of these tables.

Below, w is a row of the table, g its gradient plus ``weight_decay * w``, d its length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gtrain.kernels.options import BARE, FAST, by_type

# A function's code depends on the type of the rule, so the loop over rows has no test of the rule.
_compiled: Any = partial(by_type, jit_options={**BARE, "fastmath": FAST})


class Sgd(NamedTuple):
    """Stochastic gradient descent: ``w -= lr * g``; no state."""

    lr: float
    weight_decay: float


class Adagrad(NamedTuple):
    """Adagrad (Duchi et al., 2011): ``s += g^2; w -= lr * g / (sqrt(s) + eps)``; state: s ``[n, d]``."""

    lr: float
    weight_decay: float
    eps: float


class RowwiseAdagrad(NamedTuple):
    """Adagrad with one accumulator per row: ``s += |g|^2 / d; w -= lr * g / (sqrt(s) + eps)``; state: s ``[n]``."""

    lr: float
    weight_decay: float
    eps: float


class LazyAdam(NamedTuple):
    """Adam (Kingma and Ba, 2015, algorithm 1) on the rows of a step, with a count of updates t per row.

    ``t += 1; m += (1 - b1) (g - m); v = b2 v + (1 - b2) g^2; w -= lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)``.
    State: t ``[n]``, m and v ``[n, d]``.
    """

    lr: float
    weight_decay: float
    eps: float
    betas: tuple[float, float]


def rule_of(name: str, settings: Mapping[str, Any]) -> Any:
    """Return the rule of a name in :data:`gtrain.nn.rules.RULES`, with an optimizer's settings."""
    rule, settings = RULES[name], {"weight_decay": 0.0, **settings}
    values = (settings[field] for field in rule._fields)
    return rule(*(tuple(map(float, value)) if isinstance(value, (list, tuple)) else float(value) for value in values))


@_compiled(lambda rule, width, row, total, table, state: CHANGES.get(rule.instance_class, _no_change))
def change(rule: Any, width: int, row: int, total: Any, table: Any, state: Any) -> None:
    """Change a row of the table and its state.

    Args:
        rule: a rule of :data:`CHANGES`.
        width: d.
        row: index of the row.
        total: ``[d]``, the row's gradient, without weight decay.
        table: ``[n, d]``.
        state: the rule's tensors ``[n, d]`` or ``[n]``, in the order of :mod:`gtrain.nn.rules`.
    """


@_compiled(lambda rule, width, row, norm, state, like: FACTORS.get(rule.instance_class, _no_factor))
def factor(rule: Any, width: int, row: int, norm: Any, state: Any, like: Any) -> Any:
    """Change a row's state, and return the factor by which its gradient is multiplied and subtracted from the row.

    Args:
        rule: a rule of :data:`FACTORS`.
        width: d.
        row: index of the row.
        norm: the squared length of the row's gradient, weight decay included.
        state: as for :func:`change`.
        like: an array of the table's dtype.
    """


@_compiled(lambda rule: _yes if rule.instance_class in FACTORS else _no)
def takes_factor(rule: Any) -> Any:
    """Whether a rule is one of :data:`FACTORS`; a constant of the compiled code."""


def _sgd(rule: Any, width: int, row: int, total: Any, table: Any, state: Any) -> None:
    number = table.dtype.type
    lr, wd = number(rule.lr), number(rule.weight_decay)
    for column in range(width):
        table[row, column] -= lr * (total[column] + wd * table[row, column])


def _adagrad(rule: Any, width: int, row: int, total: Any, table: Any, state: Any) -> None:
    number, (squares,) = table.dtype.type, state
    lr, wd, eps = number(rule.lr), number(rule.weight_decay), number(rule.eps)
    for column in range(width):
        g = total[column] + wd * table[row, column]
        s = squares[row, column] + g * g
        squares[row, column] = s
        table[row, column] -= lr * g / (np.sqrt(s) + eps)


def _rowwise_adagrad(rule: Any, width: int, row: int, norm: Any, state: Any, like: Any) -> Any:
    number, (squares,) = like.dtype.type, state
    s = squares[row] + norm / number(width)
    squares[row] = s
    return number(rule.lr) / (np.sqrt(s) + number(rule.eps))


def _lazy_adam(rule: Any, width: int, row: int, total: Any, table: Any, state: Any) -> None:
    number, (times, means, squares) = table.dtype.type, state
    lr, wd, eps = number(rule.lr), number(rule.weight_decay), number(rule.eps)
    beta1, beta2 = rule.betas
    decay1, decay2, rest1, rest2 = number(beta1), number(beta2), number(1.0 - beta1), number(1.0 - beta2)
    times[row] += number(1)
    scale = lr / (number(1) - decay1 ** times[row])
    correction = number(1) - decay2 ** times[row]
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
"""Rules by their names in :data:`gtrain.nn.rules.RULES`."""


def _yes(rule: Any) -> bool:
    return True


def _no(rule: Any) -> bool:
    return False


def _no_change(rule: Any, width: int, row: int, total: Any, table: Any, state: Any) -> None:
    pass


def _no_factor(rule: Any, width: int, row: int, norm: Any, state: Any, like: Any) -> Any:
    return norm
