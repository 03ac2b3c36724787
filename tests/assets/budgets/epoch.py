"""Counts of one training epoch that do not depend on the machine: calls of functions, and large tensors."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGE = 1 << 20
"""Tensors of this many bytes are counted."""


class Budget(pl.Callback):
    """Counts the last epoch of rank 0, and writes ``{"calls": ..., "allocations": [...]}`` to a file.

    ``calls`` has a list for each name: for each call of a function the bytes of the tensors and arrays among its
    arguments, keyed by the function's name and, if an argument is a string, ``name(string)``. ``allocations`` has
    the bytes of each tensor of :data:`LARGE` bytes or more that an operation of torch made in the training thread.

    Args:
        path: the file.
        functions: what to count, ``package.module:name`` or ``package.module:Class.method``.
    """

    def __init__(self, path: str, functions: Sequence[str] = ()) -> None:
        self._path, self._functions = Path(path), functions
        self._calls: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._originals: list[tuple[Any, str, Any]] = []
        self._allocations = _LargeTensors()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to count in the last epoch."""
        if trainer.current_epoch != (trainer.max_epochs or 0) - 1 or trainer.strategy.global_rank:
            return
        for path in self._functions:
            module, _, name = path.partition(":")
            owner: Any = importlib.import_module(module)
            *parents, name = name.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            original = getattr(owner, name)
            self._originals.append((owner, name, original))
            setattr(owner, name, self._counted(name, original))
        self._allocations.__enter__()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the counts."""
        if not self._originals:
            return
        self._allocations.__exit__(None, None, None)
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        counts = {"calls": self._calls, "allocations": self._allocations.sizes}
        self._path.write_text(json.dumps(counts))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            words = [value for value in args if isinstance(value, str)]
            arrays = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (Tensor, np.ndarray))]
            with self._lock:
                sizes = self._calls.setdefault(f"{name}({words[0]})" if words else name, [])
                sizes.append(sum(array.nbytes for array in arrays))
            return function(*args, **kwargs)

        return call


class _LargeTensors(TorchDispatchMode):
    """The bytes of large tensors that operations make; views, and results in given memory, are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and _memory(leaf) not in given:
                size = leaf.untyped_storage().nbytes()
                if size >= LARGE:
                    self.sizes.append(size)
        return out


def _memory(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None
