"""Plain values with tensors among them as one row of bytes, without pickle."""

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
"""Tensors begin where torch would have them begin."""
_NUMBERS = {torch.float32: "float32", torch.float64: "float64", torch.int64: "int64"}
"""Types whose values JSON repeats to the last digit."""


@dataclass(frozen=True)
class Packed:
    """A value that is ready to be written.

    Attributes:
        text: JSON of the value, with a number in place of each tensor, and the tensors' types and shapes.
        tensors: these.
        begins: where each begins.
        nbytes: of all.
    """

    text: bytes
    tensors: list[Tensor]
    begins: list[int]
    nbytes: int

    def write(self, room: Tensor) -> None:
        """Write into uint8 ``[nbytes]``."""
        memory = room.numpy().data
        for begin, content in self.pieces():
            memory[begin : begin + len(content)] = content

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """Where each piece begins, in their order, and its bytes."""
        yield 0, memoryview(len(self.text).to_bytes(_ALIGN, "little") + self.text)
        for tensor, begin in zip(self.tensors, self.begins, strict=True):
            if tensor.numel():
                yield begin, as_bytes(tensor).numpy().data


def prepare(value: Any) -> Packed:
    """Look at a value made of dictionaries, lists, tuples, tensors, numbers and strings.

    Tensors without dimensions become numbers now; the others are read when it is written.

    Raises:
        ConfigError: there is something else in it.
    """
    tensors: list[Tensor] = []
    content = _encode(value, tensors, numbers=True)
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps([content, kinds]).encode()
    begins, end = [], _aligned(_ALIGN + len(text))
    for tensor in tensors:
        begins.append(end)
        end = _aligned(end + tensor.nbytes)
    return Packed(text, tensors, begins, end)


def pack(value: Any) -> Tensor:
    """The bytes of a value, uint8."""
    packed = prepare(value)
    room = torch.empty(packed.nbytes, dtype=torch.uint8)
    packed.write(room)
    return room


def unpack(room: Tensor) -> Any:
    """The value; its tensors are in ``room``'s memory, which begins where torch would let it."""
    length = int.from_bytes(room[:_ALIGN].numpy().tobytes(), "little")
    content, kinds = json.loads(room[_ALIGN : _ALIGN + length].numpy().tobytes())
    tensors, begin = [], _aligned(_ALIGN + length)
    for kind, shape in kinds:
        dtype = getattr(torch, kind)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        tensors.append(from_bytes(room[begin : begin + nbytes], dtype, shape))
        begin = _aligned(begin + nbytes)
    return _decode(content, tensors)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory, uint8; a copy where it is not contiguous."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(room: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """The tensor whose memory is ``room``."""
    return room.view(dtype).view(shape) if room.numel() else torch.empty(shape, dtype=dtype)


def split(value: Any) -> tuple[Any, list[Tensor]]:
    """A value's JSON with numbers in place of its tensors, and the tensors themselves, not copied."""
    tensors: list[Tensor] = []
    return _encode(value, tensors), tensors


def join(content: Any, tensors: list[Tensor]) -> Any:
    """What :func:`split` took apart."""
    return _decode(content, tensors)


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
        f"the state of a module, optimizer, scheduler or callback has a {type(value).__name__}, which strategy=ps "
        "cannot keep for a worker that is restarted.",
        hint="keep tensors, numbers, strings, lists and dictionaries there, or set strategy.max_restarts=0.",
    )


def _decode(content: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(content, dict):
        return content
    ((kind, inside),) = content.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "number":
        return torch.tensor(inside[1], dtype=getattr(torch, inside[0]))
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in inside}
    items = [_decode(item, tensors) for item in inside]
    return tuple(items) if kind == "tuple" else items


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
