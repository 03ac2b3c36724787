"""Functions that convolutions look up in their modules: degrees over all ranks, edges changed once, not each time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.conv import MessagePassing

from gtrain_sar.constants import Constants
from gtrain_sar.halo import HaloExchange
from gtrain_sar.normalize import GcnNorm

_REMEMBERED = ("remove_self_loops", "add_self_loops", "add_remaining_self_loops")


class FunctionSwitches:
    """Exchanges functions in the modules of convolutions, for calls made inside a taken-over convolution.

    Args:
        exchange: this rank's halo.
        constants: inputs that never change; what is made of them alone does not either.
    """

    def __init__(self, exchange: HaloExchange, constants: Constants) -> None:
        self._inside = 0
        self._replacements: dict[str, Callable[..., Any]] = {"gcn_norm": GcnNorm(exchange, constants)}
        self._constants = constants

    def install(self, conv: MessagePassing) -> list[Callable[[], Any]]:
        """Exchange the functions that ``conv``'s modules have; returns how to undo it."""
        enter = conv.register_forward_pre_hook(lambda *_: self._count(1))
        leave = conv.register_forward_hook(lambda *_: self._count(-1), always_call=True)
        undo: list[Callable[[], Any]] = [enter.remove, leave.remove]
        for cls in type(conv).__mro__:
            home = sys.modules[cls.__module__].__dict__
            for name in ("gcn_norm", *_REMEMBERED):
                original = home.get(name)
                if callable(original) and not isinstance(original, _Switch):
                    home[name] = _Switch(self, original, self._replacement(name, original))
                    undo.append(partial(home.__setitem__, name, original))
        return undo

    def _replacement(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        if name not in self._replacements:
            self._replacements[name] = _Remembered(original, self._constants)
        return self._replacements[name]

    @property
    def inside(self) -> bool:
        """Whether a taken-over convolution is running."""
        return self._inside > 0

    def _count(self, by: int) -> None:
        self._inside += by


class _Switch:
    """A function as a convolution's module sees it: the replacement inside a taken-over call, PyG's elsewhere."""

    def __init__(
        self, switches: FunctionSwitches, original: Callable[..., Any], replacement: Callable[..., Any]
    ) -> None:
        self._switches, self._original, self._replacement = switches, original, replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._replacement if self._switches.inside else self._original)(*args, **kwargs)


class _Remembered:
    """A function of edges of constant inputs whose results are kept: equal calls give the same tensors."""

    def __init__(self, original: Callable[..., Any], constants: Constants) -> None:
        self._original, self._constants = original, constants
        self._known: Any = WeakIdKeyDictionary()

    def __call__(self, edge_index: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *sorted(kwargs.items()))
        tensors = [value for value in (edge_index, *args, *kwargs.values()) if isinstance(value, Tensor)]
        if not all(tensor in self._constants for tensor in tensors):
            return self._original(edge_index, *args, **kwargs)
        for known, result in self._known.get(edge_index, []):
            if len(known) == len(given) and all(map(_same, known, given)):
                return result
        result = self._original(edge_index, *args, **kwargs)
        if torch.is_inference_mode_enabled():  # autograd could not use it later
            return result
        self._known.setdefault(edge_index, []).append((given, result))
        self._constants.add(value for value in result if isinstance(value, Tensor))
        return result


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b))
