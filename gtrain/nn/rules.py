"""The sparse optimizers as pure functions: the reference for every backend.

A rule maps rows of a table, their optimizer state and their gradients to new rows and new state. It depends on
those rows only, so every block of a table is updated alike, however the table is divided. Before a rule is applied,
gradients of the same row are summed (:func:`gtrain.nn.csr.coalesce`), and rows whose gradient is zero in every
column are omitted: neither momentum nor weight decay changes them.

With g the gradient of a row w plus ``weight_decay`` * w, and d its width:

=================  ===================================================================================
sgd                w -= lr * g
adagrad            s += g^2;                 w -= lr * g / (sqrt(s) + eps)            (Duchi et al. 2011)
rowwise_adagrad    s += sum(g^2) / d;        w -= lr * g / (sqrt(s) + eps)            one s per row
lazy_adam          t += 1; m, v as in Adam;  w -= lr * m^ / (sqrt(v^) + eps)          (Kingma and Ba 2015)
=================  ===================================================================================

Row-wise Adagrad is that of PyTorch-BigGraph (``torchbiggraph/row_adagrad.py``; Lerer et al. 2019), eps 1e-10 there and
here, added after the root. Adam's bias correction uses the row's own number t of updates, where torch's ``SparseAdam``
uses the table's: a row's updates then depend on that row alone. If every row has a gradient in every step, both are
Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtrain.nn.csr import coalesce

State = dict[str, Tensor]
Settings = Mapping[str, Any]
"""``lr``, ``weight_decay``, ``eps``, ``initial_accumulator``, ``betas``: those that the rule has."""
_BLOCK = 1 << 17  # numbers in the rows that are updated at once: they stay in the CPU's cache between passes


@dataclass(frozen=True)
class Rule:
    """A sparse optimizer.

    Attributes:
        name: for messages.
        state: names of its state tensors; True: one number for each column, False: one for each row.
        step: (rows [U, d], state of these rows, gradients [U, d], settings) -> new rows, new state; not in place.
    """

    name: str
    state: Mapping[str, bool]
    step: Callable[[Tensor, State, Tensor, Settings], tuple[Tensor, State]]

    def initial(self, rows: Tensor, settings: Settings) -> State:
        """Return the initial state of rows [n, d]: [n, d] or [n] each, of the rows' dtype."""
        start = float(settings.get("initial_accumulator", 0.0))
        state = {}
        for name, wide in self.state.items():
            # 16-bit numbers cannot count steps; torch keeps the dtype of a state named step when it loads a checkpoint
            dtype = torch.promote_types(rows.dtype, torch.float32) if name == "step" else rows.dtype
            shape = rows.shape if wide else rows.shape[:1]
            state[name] = rows.new_full(shape, start if name == "sum" else 0.0, dtype=dtype)
        return state


def update(rule: Rule, table: Tensor, state: State, ids: Tensor, gradients: Tensor, settings: Settings) -> None:
    """Apply a rule to the rows of a table that have a gradient, in place.

    Args:
        rule: one of :data:`RULES`.
        table: [n, d].
        state: as ``rule.initial(table, settings)`` made it.
        ids: int64 [Z], rows of the table, which may repeat.
        gradients: [Z, d].
        settings: the rule's numbers.
    """
    ids, gradients = coalesce(ids, gradients)
    block = max(1, _BLOCK // max(1, table.size(1)))
    for block_ids, block_gradients in zip(ids.split(block), gradients.split(block), strict=True):
        selected, nonzero = touched(block_ids, block_gradients)
        before = {name: tensor.index_select(0, selected) for name, tensor in state.items()}
        rows, after = rule.step(table.index_select(0, selected), before, nonzero, settings)
        table.index_copy_(0, selected, rows)
        for name, tensor in state.items():
            tensor.index_copy_(0, selected, after[name])


def touched(ids: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and gradients without the rows whose gradient is zero in every column."""
    nonzero = (gradients != 0).any(dim=1)
    return (ids, gradients) if bool(nonzero.all()) else (ids[nonzero], gradients[nonzero])


def _decayed(rows: Tensor, gradients: Tensor, settings: Settings) -> Tensor:
    decay = settings.get("weight_decay", 0.0)
    return gradients.add(rows, alpha=decay) if decay else gradients


def _sgd(rows: Tensor, state: State, gradients: Tensor, settings: Settings) -> tuple[Tensor, State]:
    return rows.sub(_decayed(rows, gradients, settings), alpha=settings["lr"]), {}


def _adagrad(rows: Tensor, state: State, gradients: Tensor, settings: Settings) -> tuple[Tensor, State]:
    g = _decayed(rows, gradients, settings)
    total = state["sum"].addcmul(g, g)
    return rows.addcdiv(g, total.sqrt().add_(settings["eps"]), value=-settings["lr"]), {"sum": total}


def _rowwise_adagrad(rows: Tensor, state: State, gradients: Tensor, settings: Settings) -> tuple[Tensor, State]:
    g = _decayed(rows, gradients, settings)
    total = state["sum"] + g.square().mean(dim=1)
    return rows.addcdiv(g, total.sqrt().add_(settings["eps"])[:, None], value=-settings["lr"]), {"sum": total}


def _lazy_adam(rows: Tensor, state: State, gradients: Tensor, settings: Settings) -> tuple[Tensor, State]:
    g = _decayed(rows, gradients, settings)
    beta1, beta2 = settings["betas"]
    step = state["step"] + 1
    mean = state["mean"].lerp(g, 1 - beta1)
    square = (state["square"] * beta2).addcmul_(g, g, value=1 - beta2)
    scale = (settings["lr"] / (1 - torch.pow(beta1, step))).to(rows.dtype)
    correction = (1 - torch.pow(beta2, step)).to(rows.dtype)
    root = (square / correction[:, None]).sqrt_().add_(settings["eps"])
    return rows - scale[:, None] * mean / root, {"step": step, "mean": mean, "square": square}


SGD = Rule("sgd", {}, _sgd)
ADAGRAD = Rule("adagrad", {"sum": True}, _adagrad)
ROWWISE_ADAGRAD = Rule("rowwise_adagrad", {"sum": False}, _rowwise_adagrad)
LAZY_ADAM = Rule("lazy_adam", {"step": False, "mean": True, "square": True}, _lazy_adam)
RULES = {rule.name: rule for rule in (SGD, ADAGRAD, ROWWISE_ADAGRAD, LAZY_ADAM)}
