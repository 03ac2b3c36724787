"""Tables in checkpoints: only the rows that training has changed are stored, and the others are computed.

A table of hashed features may have millions of rows, of which the data touch few. Its other rows have the initial
values that :meth:`.TableSpec.initial` computes, and their optimizer state is one number. In a checkpoint, a large
tensor of which fewer than half of the rows differ from that is a dictionary with the one key :data:`KEY`, whose value
has

* ``shape`` ``[n, d]`` or ``[n]``, and ``dtype``;
* ``ids`` int64 ``[k]``, ascending, and ``values`` ``[k, d]`` or ``[k]``: the rows that are stored;
* ``fill``, the number in the other rows of an optimizer's state; None for a table;
* ``initial``, the fields of the table's :class:`.TableSpec`, and ``first``, its initial row 0, float32 ``[d]``; None
  for an optimizer's state.

Comparisons are of bits, so a tensor is restored as it was. ``first`` tells whether this machine computes the same
initial rows: torch's normal distribution may differ in the last digit between processors and releases.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from gtrain.nn.table import BLOCK_ROWS, INIT_ROWS, TableSpec, tables

KEY = "@changed_rows"
LEAST_BYTES = 1 << 20
"""Smaller tensors are stored as they are."""
MOST_CHANGED = 0.5
"""Tensors of which this share of the rows has changed, or more, are stored as they are."""
_SAMPLED_BLOCKS = 16
_SAMPLED_NUMBERS = 1001
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact(checkpoint: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return a copy of Lightning's checkpoint whose tables, and the optimizer states of tables, have changed rows only.

    Args:
        checkpoint: has ``state_dict`` and perhaps ``optimizer_states``; it is not changed.
        module: the model, whose tables are known.
    """
    specs = {f"{name}.weight": layer.table for name, layer in tables(module)}
    weights = {
        name: _compact_weight(value, specs[name]) if name in specs else value
        for name, value in checkpoint["state_dict"].items()
    }
    rows = {spec.rows for spec in specs.values()}
    states = _mapped(checkpoint.get("optimizer_states", []), lambda tensor: _compact_state(tensor, rows))
    return {**checkpoint, "state_dict": weights, **({"optimizer_states": states} if states else {})}


def has_compact(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether :func:`compact` replaced a tensor of a checkpoint."""
    return any(map(is_compact, checkpoint["state_dict"].values())) or KEY in _keys(checkpoint.get("optimizer_states"))


def restored(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with all tensors, for one that :func:`compact` may have changed."""
    entries = {name: checkpoint[name] for name in ("state_dict", "optimizer_states") if name in checkpoint}
    return {**checkpoint, **{name: _mapped(value, lambda tensor: tensor) for name, value in entries.items()}}


def is_compact(value: Any) -> bool:
    """Return whether an entry of a checkpoint stands for a tensor."""
    return isinstance(value, dict) and KEY in value


def num_rows(value: Any) -> int:
    """Return the number of rows of a tensor or of the entry that stands for it."""
    return int(value[KEY]["shape"][0] if is_compact(value) else value.size(0))


def pieces(value: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids int64 ``[m]`` and rows ``[m, d]`` of a tensor or of the entry that stands for it."""
    for begin in range(0, num_rows(value), BLOCK_ROWS):
        end = min(begin + BLOCK_ROWS, num_rows(value))
        yield torch.arange(begin, end), _rows(value[KEY], begin, end) if is_compact(value) else value[begin:end]


def check_initial(table: TableSpec, first: Tensor) -> None:
    """Warn if this machine computes other initial rows than the one that wrote a checkpoint.

    Args:
        table: the table.
        first: its initial row 0 on that machine, float32 ``[d]``.
    """
    if bool(_differ(table.initial(0, 1), first.unsqueeze(0))):
        warnings.warn(
            f"this machine or release of torch computes initial rows of the table {table.name} that differ in the "
            "last digits from those of the checkpoint's machine: rows that training has not changed have them.",
            stacklevel=2,
        )


def _compact_weight(weight: Tensor, table: TableSpec) -> Any:
    if weight.nbytes < LEAST_BYTES or tuple(weight.shape) != (table.rows, table.dim):
        return weight  # rows that are stored elsewhere are not here

    def changed(begin: int, end: int) -> Tensor:
        return _differ(weight[begin:end].cpu(), table.initial(begin, end).to(weight.dtype))

    starts = range(0, table.rows, INIT_ROWS)
    sample = starts[:: max(1, len(starts) // _SAMPLED_BLOCKS)]
    if _share(changed(begin, min(begin + INIT_ROWS, table.rows)) for begin in sample) >= MOST_CHANGED:
        return weight
    flags = torch.cat([changed(begin, min(begin + INIT_ROWS, table.rows)) for begin in starts])
    return _entry(weight, flags, fill=None, initial=asdict(table), first=table.initial(0, 1)[0].clone())


def _compact_state(tensor: Tensor, rows: set[int]) -> Any:
    """Return the entry of a tensor with a row for each row of a table, most of whose rows have one number."""
    if tensor.nbytes < LEAST_BYTES or tensor.layout != torch.strided or tensor.size(0) not in rows:
        return tensor
    flat = tensor.flatten()
    fill = flat[:: max(1, flat.numel() // _SAMPLED_NUMBERS)].mode().values.cpu()
    flags = torch.cat([_differ(block.cpu(), fill.expand_as(block)) for block in tensor.split(BLOCK_ROWS)])
    return _entry(tensor, flags, fill=fill.item(), initial=None, first=None)


def _entry(tensor: Tensor, changed: Tensor, **values: Any) -> Any:
    """Return the entry of a tensor, given which of its rows to store; the tensor if these are most of them."""
    if _share([changed]) >= MOST_CHANGED:
        return tensor
    ids = changed.nonzero().flatten()
    rows = tensor.detach()[ids.to(tensor.device)].cpu()
    return {KEY: {"shape": list(tensor.shape), "dtype": tensor.dtype, "ids": ids, "values": rows, **values}}


def _rows(entry: Mapping[str, Any], begin: int, end: int) -> Tensor:
    """Return rows ``begin`` to ``end`` of the tensor that an entry stands for."""
    shape, dtype = entry["shape"], entry["dtype"]
    if entry["initial"] is None:
        rows = torch.full([end - begin, *shape[1:]], entry["fill"], dtype=dtype)
    else:
        rows = TableSpec(**entry["initial"]).initial(begin, end).to(dtype, copy=True)
    first, last = torch.searchsorted(entry["ids"], torch.tensor([begin, end])).tolist()
    rows[entry["ids"][first:last] - begin] = entry["values"][first:last]
    return rows


def _whole(entry: Mapping[str, Any]) -> Tensor:
    """Return the tensor that an entry stands for."""
    if entry["initial"] is not None:
        check_initial(TableSpec(**entry["initial"]), entry["first"])
    out = torch.empty(entry["shape"], dtype=entry["dtype"])
    for begin in range(0, len(out), BLOCK_ROWS):
        out[begin : begin + BLOCK_ROWS] = _rows(entry, begin, min(begin + BLOCK_ROWS, len(out)))
    return out


def _differ(rows: Tensor, others: Tensor) -> Tensor:
    """Return for each row whether its bits differ from those of another, bool ``[n]``."""
    bits = _BITS[rows.element_size()]
    unequal = rows.contiguous().view(bits) != others.contiguous().view(bits)
    return unequal.view(len(rows), -1).any(1)


def _share(flags: Iterable[Tensor]) -> float:
    """Return the share of rows whose flag is set."""
    return float(torch.cat(list(flags)).float().mean())


def _mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return nested dictionaries and lists with a function applied to tensors, and entries replaced by tensors."""
    if is_compact(value):
        return _whole(value[KEY])
    if isinstance(value, dict):
        return {key: _mapped(each, function) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, function) for each in value)
    return function(value) if isinstance(value, Tensor) and value.dim() else value


def _keys(value: Any) -> set[Any]:
    """Return all keys of nested dictionaries."""
    if isinstance(value, dict):
        return {*value, *(key for each in value.values() for key in _keys(each))}
    return {key for each in value for key in _keys(each)} if isinstance(value, (list, tuple)) else set()
