"""A message's tensors as raw frames, without copies where memory allows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gtrain.wire.errors import FrameError
from gtrain.wire.limits import Limits

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
        *("complex32", "complex64", "complex128"),
    )
}
"""Every dtype that may cross, by its name on the wire."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}

_KNOWN_TO_NUMPY = frozenset(
    (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint16, torch.uint8, torch.bool)
)

TensorSpec = tuple[str, tuple[int, ...]]
"""Name of the dtype, and shape."""


@dataclass(slots=True)
class Message:
    """What a request asks with and an answer consists of.

    Args:
        fields: small values by name: None, bool, int (64 bits), float, str, bytes, and lists and dicts (with keys of
            type str) of these. Tuples arrive as lists.
        tensors: any dtype of :data:`DTYPES`, any shape, zero-size and 0-dim included. **Sent** without a copy when
            contiguous and on the host: do not write to them until the answer is there (client) or the next request of
            that client is (server). **Received** tensors own their memory, which no one else reads, and may be written.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)


def to_frames(tensors: Sequence[Tensor], limits: Limits) -> tuple[list[TensorSpec], list[memoryview]]:
    """The specs and the memory of tensors, in order; the memory views keep the tensors alive.

    Raises:
        FrameError: too many, too large, of a dtype or layout that does not cross, or of too many dimensions.
    """
    if len(tensors) > limits.max_tensors:
        raise FrameError(
            f"a message of {len(tensors)} tensors; the limit is {limits.max_tensors}",
            hint="concatenate tensors, or raise max_tensors in the Limits of both sides",
        )
    specs, frames = [], []
    for tensor in tensors:
        name = _NAMES.get(tensor.dtype)
        _check(tensor, name, limits)
        memory = _memory(tensor)
        if memory.nbytes > limits.max_frame_bytes:
            raise FrameError(
                f"a tensor of {memory.nbytes:,} bytes; the limit is {limits.max_frame_bytes:,}",
                hint="send it in pieces, or raise max_frame_bytes in the Limits of both sides",
            )
        specs.append((str(name), tuple(tensor.shape)))
        frames.append(memory)
    return specs, frames


def from_frames(specs: Sequence[TensorSpec], frames: Sequence[memoryview], limits: Limits) -> list[Tensor]:
    """Tensors over received memory, writable if the memory is.

    Args:
        specs: validated by :func:`gtrain.wire.header.decode_header`.
        frames: as many; a tensor keeps its frame alive.

    Raises:
        FrameError: their number or lengths are not those of the specs.
    """
    if len(specs) != len(frames):
        raise FrameError(
            f"a message with {len(frames)} tensor frames announces {len(specs)} tensors",
            hint="both sides have to run the same version of gtrain",
        )
    return [_tensor(spec, frame) for spec, frame in zip(specs, frames, strict=True)]


def spec_bytes(spec: TensorSpec) -> int:
    """Bytes that a tensor of this spec has."""
    return math.prod(spec[1]) * _ITEM_BYTES[spec[0]]


def _check(tensor: Tensor, name: str | None, limits: Limits) -> None:
    """Refuse a tensor that does not cross."""
    if name is None or tensor.layout is not torch.strided:
        raise FrameError(
            f"a tensor of {tensor.dtype} and {tensor.layout} does not go over the wire",
            hint="send strided tensors of a plain dtype; of a sparse tensor its indices and values",
        )
    if tensor.dim() > limits.max_dimensions:
        raise FrameError(
            f"a tensor of {tensor.dim()} dimensions; the limit is {limits.max_dimensions}",
            hint="reshape it, or raise max_dimensions in the Limits of both sides",
        )


def _memory(tensor: Tensor) -> memoryview:
    """The tensor's bytes, which keep it alive; a copy only if it is not contiguous or not on the host."""
    host = tensor.detach() if tensor.requires_grad else tensor
    if not host.is_cpu:
        host = host.cpu()
    if host.is_conj():
        host = host.resolve_conj()
    if host.is_neg():
        host = host.resolve_neg()
    host = host.contiguous()
    if host.dtype not in _KNOWN_TO_NUMPY or not host.dim():
        host = host.view(-1).view(torch.uint8)
    memory: memoryview = host.numpy().data
    return memory


def _tensor(spec: TensorSpec, frame: memoryview) -> Tensor:
    """A tensor over a frame; where the frame's address does not suit the dtype, a copy."""
    dtype, shape, expected = DTYPES[spec[0]], spec[1], spec_bytes(spec)
    if frame.nbytes != expected:
        raise FrameError(
            f"a tensor of {dtype} and shape {list(shape)} has {expected} bytes; its frame has {frame.nbytes}",
            hint="both sides have to run the same version of gtrain",
        )
    if not expected:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(frame, dtype=dtype)
    if flat.data_ptr() % _ITEM_BYTES[spec[0]]:  # a small frame lies somewhere in zmq's receive buffer
        flat = flat.clone()
    if dtype is torch.bool and int(flat.view(torch.uint8).max()) > 1:  # C++ may do anything with other values
        raise FrameError(
            "a bool tensor has bytes other than 0 and 1", hint="both sides have to run the same version of gtrain"
        )
    return flat if len(shape) == 1 else flat.view(shape)
