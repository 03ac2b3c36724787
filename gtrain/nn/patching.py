"""Patches functions, such as PyG's ``gcn_norm``, that layers look up in their Python modules at call time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch_geometric.nn.conv import MessagePassing


def patch_function(layers: Iterable[nn.Module], name: str, replacement: Callable[..., Any]) -> list[Callable[[], None]]:
    """Replace a function in the Python modules of layers and of their base classes.

    Args:
        layers: their modules are patched if they have the function.
        name: of the function.
        replacement: called as ``replacement(original, *args, **kwargs)``.

    Returns:
        The actions that undo the patch, to be called in reverse order.
    """
    undo: list[Callable[[], None]] = []
    for namespace in namespaces(layers, name):
        undo.append(partial(namespace.__setitem__, name, namespace[name]))
        namespace[name] = partial(replacement, namespace[name])
    return undo


def namespaces(layers: Iterable[nn.Module], name: str) -> Iterator[dict[str, Any]]:
    """Yield the distinct namespaces in which classes of the layers look up a function of this name."""
    seen = set()
    for module in (cls.__module__ for layer in layers for cls in type(layer).__mro__):
        namespace = sys.modules[module].__dict__
        if id(namespace) not in seen and callable(namespace.get(name)):
            seen.add(id(namespace))
            yield namespace


def normalises(layer: nn.Module) -> bool:
    """Return whether a convolution, such as ``GCNConv``, divides messages by degrees, which are sums of weights.

    It looks up ``gcn_norm`` in its module, and counts the degrees of the sources too in the edges that it receives.
    """
    calls_norm = hasattr(sys.modules.get(type(layer).__module__), "gcn_norm")
    return isinstance(layer, MessagePassing) and calls_norm and bool(getattr(layer, "normalize", True))
