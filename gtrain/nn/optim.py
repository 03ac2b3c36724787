"""Sparse optimizers of tables, and an optimizer that steps tables and ordinary parameters together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad

from gtrain.errors import ConfigError
from gtrain.nn import rules
from gtrain.nn.rules import Rule
from gtrain.nn.table import storage_of

Parameters = Iterable[Any]


class RowOptimizer(Optimizer):
    """An optimizer that changes only rows that have a gradient; see :mod:`gtrain.nn.rules`.

    Dense and sparse gradients give the same result. A parameter with one dimension is a table with one column; in one
    with more than two, the leading index is the row. A table that is stored elsewhere is updated there.

    Args:
        params: parameters, or groups of them.
        settings: of the rule.
    """

    rule: ClassVar[Rule]

    def __init__(self, params: Parameters, **settings: Any) -> None:
        for name, value in settings.items():
            _check(type(self).__name__, name, value)
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Apply the gradients, which ``closure`` computes before, if it is passed; return its loss."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            settings = {name: value for name, value in group.items() if name != "params"}
            for parameter in group["params"]:
                storage = storage_of(parameter)
                if storage is not None:
                    storage.update(self.rule, settings)
                elif parameter.grad is not None:
                    self._update(parameter, settings)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, including those of tables that are stored elsewhere."""
        for group in self.param_groups:
            for parameter in group["params"]:
                storage = storage_of(parameter)
                if storage is not None:
                    storage.zero_grad()
                if set_to_none:
                    parameter.grad = None
        if not set_to_none:  # torch's loop, which is slower
            super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        super().load_state_dict(state_dict)
        _move_state(self)

    def _update(self, parameter: Tensor, settings: Mapping[str, Any]) -> None:
        table = _as_table(parameter)
        state = self.state[parameter]
        if not state:
            state.update(self.rule.initial(table, settings))
        self._apply(table, state, parameter.grad, settings)

    def _apply(self, table: Tensor, state: rules.State, gradient: Tensor | None, settings: Mapping[str, Any]) -> None:
        rules.update(self.rule, table, state, *_row_gradients(gradient), settings)


class SGD(RowOptimizer):
    """Stochastic gradient descent without momentum.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        weight_decay: L2 penalty on rows that have a gradient.
    """

    rule = rules.SGD

    def __init__(self, params: Parameters, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


class Adagrad(RowOptimizer):
    """Adagrad, one accumulator for each number.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        weight_decay: L2 penalty on rows that have a gradient.
        initial_accumulator: initial value of the sum of squares.
        eps: added to its root.
    """

    rule: ClassVar[Rule] = rules.ADAGRAD

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        initial_accumulator: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, initial_accumulator=initial_accumulator, eps=eps)

    def _apply(self, table: Tensor, state: rules.State, gradient: Tensor | None, settings: Mapping[str, Any]) -> None:
        fusable = (
            self.rule is rules.ADAGRAD
            and not settings["weight_decay"]
            and table.device.type == "cpu"
            and table.dtype in (torch.float32, torch.float64)
            and table.is_contiguous()
        )
        if not fusable or gradient is None or gradient.is_sparse or not gradient.is_contiguous():
            super()._apply(table, state, gradient, settings)
            return
        # One kernel of torch updates all rows. Without weight decay it leaves those whose gradient is 0.
        steps = [torch.zeros(())]  # it would only be read by a decay of the learning rate
        rates = {"lr": settings["lr"], "lr_decay": 0.0, "weight_decay": 0.0, "eps": settings["eps"]}
        adagrad([table], [_as_table(gradient)], [state["sum"]], steps, fused=True, maximize=False, **rates)


class RowwiseAdagrad(Adagrad):
    """Adagrad with one accumulator for each row, the mean of its squared gradients (PyTorch-BigGraph's)."""

    rule = rules.ROWWISE_ADAGRAD


class LazyAdam(RowOptimizer):
    """Adam whose moments change only in steps in which the row has a gradient; steps are counted per row.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second.
        weight_decay: L2 penalty on rows that have a gradient.
    """

    rule = rules.LAZY_ADAM

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)


class JointOptimizer(Optimizer):
    """Several optimizers over different parameters as one: one ``step``, one list of groups, one state.

    Schedulers, checkpoints and Lightning's automatic optimisation see a single torch optimizer; each part steps its
    groups by its rule.

    Args:
        parts: the optimizers; no parameter is in two of them.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in self.parts:
            self.state.update(part.state)  # some create their state before the first step
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every part, after ``closure`` has computed the gradients, if it is passed; return its loss."""
        loss = _loss_of(closure)
        for part in self.parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        super().load_state_dict(state_dict)
        _move_state(self)
        self._share()

    def _share(self) -> None:
        """Let the parts use this optimizer's groups and state: torch replaces both when it loads a checkpoint."""
        start = 0
        for part in self.parts:
            end = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:end], self.state
            start = end


def _move_state(optimizer: Optimizer) -> None:
    """Move state of rows to the device of its parameter: torch leaves a state named ``step`` on the CPU."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[name] = value.to(parameter.device)


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check(optimizer: str, name: str, value: Any) -> None:
    message = f"{optimizer}({name}={value}) was set."
    if name == "betas":
        if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
            raise ConfigError(message, hint="give two numbers that are at least 0 and below 1.")
    elif not value >= 0:
        raise ConfigError(message, hint=f"{name} is 0 or more.")


def _as_table(tensor: Tensor) -> Tensor:
    return tensor.view(-1, 1) if tensor.dim() < 2 else tensor.view(tensor.size(0), -1)


def _row_gradients(gradient: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the ids and rows of a sparse gradient, or all rows of a dense gradient."""
    assert gradient is not None
    if gradient.is_sparse:
        return gradient._indices()[0], gradient._values()
    rows = _as_table(gradient.contiguous())
    return torch.arange(len(rows), device=rows.device), rows
