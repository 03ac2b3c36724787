"""As sar_conv_program.py, with the shards' tensors on a pretended device: an operation that mixes devices fails.

The device is torch's ``meta``, whose tensors here wrap ones of the CPU: no accelerator is needed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sar_conv_bench
import sar_conv_program
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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


class Bench(sar_conv_bench.Bench):
    """Runs what an engine serves on the device."""

    def passes(self, case: Any, net: nn.Module, shard: Any, engine: Any = None) -> dict[str, Tensor]:
        if engine is None:
            return super().passes(case, net, shard)
        with Pretending(), self._moved(net):
            found = super().passes(case, net, shard, engine)
        return {name: tensor.inner if isinstance(tensor, Pretended) else tensor for name, tensor in found.items()}

    def loss(self, shard: Any, result: dict[str, Tensor]) -> Tensor:
        return super().loss(shard, {name: tensor.to("cpu") for name, tensor in result.items()})

    @contextmanager
    def _moved(self, net: nn.Module) -> Iterator[None]:
        """The exchange, what convolutions are given, and copies of parameters and buffers on the device."""
        view, rows = sar_conv_bench.view, self.exchange.send_rows
        homes = [(home, dict(home)) for m in net.modules() for home in (m._parameters, m._buffers)]
        sar_conv_bench.view = lambda shard: _on_device(view(shard))
        self.exchange.to(DEVICE)
        for home, tensors in homes:
            for name, tensor in tensors.items():
                if tensor is not None:
                    copy = Pretended(tensor.detach().clone())
                    home[name] = nn.Parameter(copy) if isinstance(tensor, nn.Parameter) else copy  # type: ignore[index]
        try:
            yield
        finally:
            sar_conv_bench.view, self.exchange.send_rows = view, rows
            for home, tensors in homes:
                home.update(tensors)  # type: ignore[arg-type]


def _on_device(view: Any) -> Any:
    tensors = {f.name: getattr(view, f.name) for f in dataclasses.fields(view)}
    moved = {name: Pretended(t.contiguous()) for name, t in tensors.items() if isinstance(t, Tensor)}
    return dataclasses.replace(view, **moved)


if __name__ == "__main__":
    sar_conv_program.Bench = Bench  # type: ignore[misc]
    sys.exit(sar_conv_program.main())
