"""A pretended device, on which an operation that mixes devices fails as on a GPU; no accelerator is needed.

The device is torch's ``meta``, whose tensors here wrap ones of the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gtrain.strategy.base import GraphStrategy

DEVICE = torch.device("meta")
COPIES = ("aten::copy_", "aten::_to_copy")
INDEXED = ("aten::index.Tensor", "aten::index_put")  # tensors of a device may be, by numbers on the CPU


class Pretended(Tensor):
    """A tensor that says that it is on :data:`DEVICE`; ``inner`` is where its values are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretended:
        made: Pretended = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:
        raise RuntimeError("numpy of a tensor on a device")

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.inner.__reduce_ex__(proto)

    def tolist(self) -> Any:
        return self.inner.tolist()

    def new_tensor(self, data: Any, **settings: Any) -> Tensor:  # type: ignore[override]
        return Pretended(torch.tensor(data, dtype=settings.get("dtype", self.dtype)))


class Pretending(TorchDispatchMode):
    """Makes what is asked for on :data:`DEVICE`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation of tensors that are all on the device, numbers aside, or all on the CPU."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [tensor for tensor in given if isinstance(tensor, Pretended)]
    here = [tuple(tensor.shape) for tensor in given if not isinstance(tensor, Pretended) and tensor.dim() > 0]
    name = func.name()
    may = name.startswith(COPIES) or (name.startswith(INDEXED) and isinstance(args[0], Pretended))
    if there and here and not may:
        raise RuntimeError(f"{name} mixes devices: {[tuple(t.shape) for t in there]} there, {here} here")
    asked = kwargs.get("device")
    settings = kwargs if asked is None else {**kwargs, "device": torch.device("cpu")}
    out = func(*tree_map(_inner, args), **tree_map(_inner, settings))
    if not (there if asked is None else torch.device(asked) == DEVICE):
        return out
    same = {id(tensor.inner): tensor for tensor in there}  # what was changed in place stays the same object
    return tree_map(lambda leaf: same.get(id(leaf), Pretended(leaf)) if isinstance(leaf, Tensor) else leaf, out)


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, Pretended) else leaf


class OnDevice(Callback):
    """A callback with which the layers of a rank are on the device."""

    def __init__(self) -> None:
        GraphStrategy.root_device = property(lambda strategy: DEVICE)  # type: ignore[assignment]
        CPUAccelerator.setup_device = lambda accelerator, device: None  # type: ignore[method-assign, assignment]
        torch.tensor = made(torch.tensor)
        Pretending().__enter__()


def made(tensor: Any) -> Any:
    """``torch.tensor``, which copies its data without an operation that a dispatch mode sees."""

    def function(data: Any, *, device: Any = None, **settings: Any) -> Tensor:
        there = device is not None and torch.device(device) == DEVICE
        return Pretended(tensor(data, **settings)) if there else tensor(data, device=device, **settings)

    return function
