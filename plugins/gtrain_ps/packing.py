"""Nested plain values with tensors as one buffer of bytes, without pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.errors import ConfigError

_ALIGN = 64
"""Alignment of tensors in the buffer; that of torch's allocator."""
_NUMBERS = {torch.float32: "float32", torch.float64: "float64", torch.int64: "int64"}
"""Dtypes whose values JSON preserves to the last digit."""


@dataclass(frozen=True)
class Packed:
    """A value that is ready to be written.

    Attributes:
        text: JSON of the value, with a number in place of each tensor, and the tensors' dtypes and shapes.
        tensors: the tensors.
        offsets: of each tensor in the buffer.
        nbytes: size of the buffer.
    """

    text: bytes
    tensors: list[Tensor]
    offsets: list[int]
    nbytes: int

    def write(self, buffer: Tensor) -> None:
        """Write the value into uint8 ``[nbytes]``."""
        memory = buffer.numpy().data
        for offset, content in self.pieces():
            memory[offset : offset + len(content)] = content

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the offset and the bytes of each piece, in order."""
        # The length of the text, in a field as wide as the alignment, then the text.
        yield 0, memoryview(len(self.text).to_bytes(_ALIGN, "little") + self.text)
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            if tensor.numel():
                yield offset, as_bytes(tensor).cpu().numpy().data


def prepare(value: Any) -> Packed:
    """Lay out a value made of dictionaries, lists, tuples, tensors, numbers and strings.

    Tensors without dimensions become numbers now; the others are read when the value is written.

    Raises:
        ConfigError: the value contains something else.
    """
    tensors: list[Tensor] = []
    content = _encode(value, tensors, numbers=True)
    text = json.dumps([content, [layout_of(tensor) for tensor in tensors]]).encode()
    offsets, end = [], _align(_ALIGN + len(text))
    for tensor in tensors:
        offsets.append(end)
        end = _align(end + tensor.nbytes)
    return Packed(text, tensors, offsets, end)


def pack(value: Any) -> Tensor:
    """Return the bytes of a value, uint8."""
    packed = prepare(value)
    buffer = torch.empty(packed.nbytes, dtype=torch.uint8)
    packed.write(buffer)
    return buffer


def unpack(buffer: Tensor) -> Any:
    """Return the value in an aligned buffer; its tensors share the buffer's memory."""
    length = int.from_bytes(buffer[:_ALIGN].numpy().tobytes(), "little")
    content, layouts = json.loads(buffer[_ALIGN : _ALIGN + length].numpy().tobytes())
    return join(content, cut_tensors(buffer[_align(_ALIGN + length) :], layouts, _ALIGN))


def layout_of(tensor: Tensor) -> list[Any]:
    """Return a tensor's dtype and shape, as JSON holds them."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's memory, uint8; a copy if it is not contiguous."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def cut_tensors(buffer: Tensor, layouts: list[Any], align: int = 1, copy: bool = False) -> list[Tensor]:
    """Return the tensors that lie one behind another in a buffer, uint8.

    Args:
        buffer: the buffer.
        layouts: of each tensor, by :func:`layout_of`.
        align: alignment of their offsets.
        copy: whether to copy each tensor, if their offsets are not aligned for their dtypes.
    """
    tensors, offset = [], 0
    for name, shape in layouts:
        dtype = getattr(torch, name)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        content = buffer[offset : offset + nbytes].clone() if copy else buffer[offset : offset + nbytes]
        tensors.append(content.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype))
        offset = -(-(offset + nbytes) // align) * align
    return tensors


def split(value: Any) -> tuple[Any, list[Tensor]]:
    """Return a value's JSON with numbers in place of its tensors, and the tensors themselves, not copied."""
    tensors: list[Tensor] = []
    return _encode(value, tensors), tensors


def join(content: Any, tensors: list[Tensor]) -> Any:
    """Return the value that :func:`split` took apart."""
    if not isinstance(content, dict):
        return content
    ((tag, item),) = content.items()
    if tag == "tensor":
        return tensors[item]
    if tag == "number":
        return torch.tensor(item[1], dtype=getattr(torch, item[0]))
    if tag == "dict":
        return {join(key, tensors): join(entry, tensors) for key, entry in item}
    entries = [join(entry, tensors) for entry in item]
    return tuple(entries) if tag == "tuple" else entries


def _encode(value: Any, tensors: list[Tensor], numbers: bool = False) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if numbers and not value.dim() and value.dtype in _NUMBERS:
            return {"number": [_NUMBERS[value.dtype], value.item()]}
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"dict": [[_encode(key, tensors), _encode(item, tensors, numbers)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_encode(item, tensors, numbers) for item in value]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ConfigError(
        f"the state of a module, optimizer, scheduler or callback contains a {type(value).__name__}, which strategy=ps "
        "cannot keep for a worker that is restarted.",
        hint="keep tensors, numbers, strings, lists and dictionaries there, or set strategy.max_restarts=0.",
    )


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
