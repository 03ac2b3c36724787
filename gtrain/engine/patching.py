"""Patches a module's message passing while a run lasts, and undoes the patches afterwards.

An instance attribute ``propagate`` or ``edge_updater`` shadows the class's method. A convolution looks up functions
such as ``gcn_norm`` in its own module at call time; they are replaced there, for calls inside a patched convolution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.conv import GATConv, GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.nn.norm import BatchNorm

from gtrain.engine.constants import Constants, version_of
from gtrain.engine.edges import EdgeBlock
from gtrain.engine.kernels import load_attention, load_pairs, load_sums
from gtrain.engine.precision import sum_dtype
from gtrain.nn.patching import patch_function

_MEMOIZED = ("remove_self_loops", "add_self_loops", "add_remaining_self_loops")


class ReplacedMethod:
    """A method of a layer that a run replaces; copies and pickles of the layer have the method of its class.

    Args:
        layer: the layer.
        name: of the method.
        function: called instead, without the layer.
    """

    def __init__(self, layer: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self._layer, self._name, self._function = layer, name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Stand for the method of the class."""
        return _method_of_class, (self._layer, self._name)


class RunHook:
    """A hook of a layer that belongs to a run; in copies and pickles of the layer it does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Stand for a hook without effect."""
        return RunHook, (_do_nothing,)


def _do_nothing(*_: Any, **__: Any) -> None:
    return None


def _method_of_class(layer: nn.Module, name: str) -> Callable[..., Any]:
    return partial(getattr(type(layer), name), layer)


class MethodPatches:
    """Methods of layers that instance attributes shadow, and every other change that the end of a run undoes."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._patched: dict[nn.Module, set[str]] = defaultdict(set)

    def add(self, layer: nn.Module, name: str, function: Callable[..., Any]) -> None:
        """Shadow a method of ``layer``."""
        undo = partial(layer.__dict__.__setitem__, name, layer.__dict__[name]) if name in layer.__dict__ else None
        layer.__dict__[name] = ReplacedMethod(layer, name, function)
        self._patched[layer].add(name)
        self._undo.append(undo or partial(layer.__dict__.pop, name))

    def undo_with(self, *actions: Callable[[], Any]) -> None:
        """Call these when the patches are undone."""
        self._undo += actions

    def undo(self) -> None:
        """Undo every change, the last one first."""
        while self._undo:
            self._undo.pop()()
        self._patched.clear()

    @contextmanager
    def suspended(self, module: nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
        """Restore the methods of ``module`` and its layers inside this context; batch norms stay synchronised.

        Args:
            module: a convolution.
            methods: by name, what replaces methods of its convolutions instead; called with the convolution first.
        """
        norms = nn.modules.batchnorm._BatchNorm, BatchNorm
        layers = [layer for layer in module.modules() if layer in self._patched and not isinstance(layer, norms)]
        before = [dict(layer.__dict__) for layer in layers]
        for layer in layers:
            for name in self._patched[layer]:
                layer.__dict__.pop(name, None)
            if isinstance(layer, MessagePassing):
                layer.__dict__.update({name: partial(method, layer) for name, method in methods.items()})
        try:
            yield
        finally:
            for layer, attributes in zip(layers, before, strict=True):
                for name in {*self._patched[layer], *methods}:
                    layer.__dict__.pop(name, None)
                    if name in attributes:
                        layer.__dict__[name] = attributes[name]


def load_kernels(module: nn.Module, dtype: torch.dtype) -> None:
    """Load the kernels that the module's convolutions are likely to need, before memory and time are measured."""
    if dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return
    zero = torch.zeros(1, dtype=torch.int64)
    edge = EdgeBlock(zero, zero, zero, 1, 1).by_target
    load_sums(edge, dtype)
    if any(isinstance(layer, GATConv) for layer in module.modules()):
        load_attention(edge, dtype)
    if any(isinstance(layer, (GATv2Conv, TransformerConv)) for layer in module.modules()):
        load_pairs(edge, sum_dtype(dtype))


class PatchedFunctions:
    """Replaces functions in the modules of convolutions, for calls made inside a patched convolution.

    Results for inputs that never change are computed once: equal calls return the same tensors.

    Args:
        constants: inputs that never change, and hence results of these functions that never change.
        gcn_norm: returns for arguments of PyG's ``gcn_norm`` the arguments and the function to call instead; None
            leaves PyG's.
    """

    def __init__(self, constants: Constants, gcn_norm: Callable[..., Any] | None = None) -> None:
        self._depth = 0
        self._constants, self._gcn_norm = constants, gcn_norm
        self._memoized: dict[str, _Memoized] = {}

    def install(self, convs: Sequence[MessagePassing]) -> list[Callable[[], Any]]:
        """Replace the functions that the modules of ``convs`` have; return the actions that undo it."""
        undo: list[Callable[[], Any]] = []
        for conv in convs:
            undo.append(conv.register_forward_pre_hook(RunHook(lambda *_: self._enter(1))).remove)
            undo.append(conv.register_forward_hook(RunHook(lambda *_: self._enter(-1)), always_call=True).remove)
        for name in ("gcn_norm", *_MEMOIZED):
            undo += patch_function(convs, name, partial(self._call, name))
        return undo

    def _call(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call PyG's function outside of a patched convolution, else its replacement."""
        if not self._depth:
            return original(*args, **kwargs)
        if name == "gcn_norm" and self._gcn_norm is not None:
            # Convolutions pass the same arguments by position or by name.
            args, original = self._gcn_norm(*args, **kwargs)
            kwargs = {}
        if name not in self._memoized:
            self._memoized[name] = _Memoized(original, self._constants)
        return self._memoized[name](*args, **kwargs)

    def _enter(self, levels: int) -> None:
        self._depth += levels


class _Memoized:
    """A function of edges whose results for constant inputs are cached: equal calls return the same tensors."""

    def __init__(self, original: Callable[..., Any], constants: Constants) -> None:
        self._original, self._constants = original, constants
        self._results: Any = WeakIdKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        key = (*args, *sorted(kwargs.items()), tuple(map(version_of, tensors)))
        if not all(tensor in self._constants for tensor in tensors):
            return self._original(*args, **kwargs)
        cached = self._results.get(tensors[0], [])
        for i, (cached_key, result) in enumerate(cached):
            if len(cached_key) == len(key) and all(map(_same, cached_key[:-1], key[:-1])):
                if cached_key[-1] == key[-1]:
                    return result
                # Of values that were changed in place since.
                del cached[i]
                break
        result = self._original(*args, **kwargs)
        if not torch.is_inference_mode_enabled():
            # Autograd cannot use inference tensors later.
            self._results.setdefault(tensors[0], []).append((key, result))
            self._constants.add(value for value in result if isinstance(value, Tensor))
        return result


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b))
