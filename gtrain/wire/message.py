"""Messages, and their tensors as raw frames: without a copy if a tensor is contiguous and in host memory."""

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
"""Every dtype that can be sent, by its name on the wire."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}

_NUMPY_DTYPES = frozenset(
    (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint16, torch.uint8, torch.bool)
)

SAME_VERSION = "run the same version of gtrain on both sides"

TensorSpec = tuple[str, tuple[int, ...]]
"""Name of a tensor's dtype, and its shape."""


@dataclass(slots=True)
class Message:
    """The content of a request or a reply.

    Args:
        fields: small values by name: None, bool, int (64 bits), float, str, bytes, and lists and dicts (with keys of
            type str) of these. Tuples arrive as lists.
        tensors: any dtype of :data:`DTYPES` and any shape, zero-size and 0-dim included. Tensors that are contiguous
            and in host memory are **sent** without a copy: a client must not write to them until it has the reply, a
            server not until the client's next request. **Received** tensors own their memory and may be written to.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)


def to_frames(tensors: Sequence[Tensor], limits: Limits) -> tuple[list[TensorSpec], list[memoryview]]:
    """Return the specs and the memory of tensors, in order; the memory views keep the tensors alive.

    Raises:
        FrameError: too many tensors, or one is too large, has too many dimensions, or a dtype or layout that cannot be
            sent.
    """
    if len(tensors) > limits.max_tensors:
        raise FrameError(
            f"a message of {len(tensors)} tensors; the limit is {limits.max_tensors}",
            hint="concatenate tensors, or raise max_tensors in the Limits of both sides",
        )
    specs, frames = [], []
    for tensor in tensors:
        name = DTYPE_NAMES.get(tensor.dtype)
        if name is None or tensor.layout is not torch.strided:
            raise FrameError(
                f"a tensor of {tensor.dtype} and {tensor.layout} cannot be sent",
                hint="send strided tensors of a plain dtype; of a sparse tensor its indices and values",
            )
        if tensor.dim() > limits.max_dimensions:
            raise FrameError(
                f"a tensor of {tensor.dim()} dimensions; the limit is {limits.max_dimensions}",
                hint="reshape it, or raise max_dimensions in the Limits of both sides",
            )
        memory = _memory(tensor)
        if memory.nbytes > limits.max_frame_bytes:
            raise FrameError(
                f"a tensor of {memory.nbytes:,} bytes; the limit is {limits.max_frame_bytes:,}",
                hint="send it in pieces, or raise max_frame_bytes in the Limits of both sides",
            )
        specs.append((name, tuple(tensor.shape)))
        frames.append(memory)
    return specs, frames


def from_frames(specs: Sequence[TensorSpec], frames: Sequence[memoryview], limits: Limits) -> list[Tensor]:
    """Return tensors over received memory, writable if the memory is.

    Args:
        specs: validated by :func:`gtrain.wire.header.decode_header`.
        frames: one per spec; a tensor keeps its frame alive.

    Raises:
        FrameError: the number or lengths of the frames differ from the specs.
    """
    if len(specs) != len(frames):
        raise FrameError(
            f"a message with {len(frames)} tensor frames announces {len(specs)} tensors",
            hint=SAME_VERSION,
        )
    return [_tensor(spec, frame) for spec, frame in zip(specs, frames, strict=True)]


def spec_bytes(spec: TensorSpec) -> int:
    """Return the size of a tensor of this spec, in bytes."""
    return math.prod(spec[1]) * _ITEM_BYTES[spec[0]]


def _memory(tensor: Tensor) -> memoryview:
    """Return the tensor's memory, which keeps the tensor alive; a copy if it is not contiguous or not on the host."""
    # torch marks conjugated and negated views lazily; their memory has the values before that.
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # numpy lacks some of torch's dtypes, and memory of no dimensions cannot be sliced: send plain bytes.
    if host.dtype not in _NUMPY_DTYPES or not host.dim():
        host = host.view(-1).view(torch.uint8)
    return host.numpy().data


def _tensor(spec: TensorSpec, frame: memoryview) -> Tensor:
    """Return a tensor over a frame; a copy if the frame's address is not aligned for the dtype."""
    dtype, shape, expected = DTYPES[spec[0]], spec[1], spec_bytes(spec)
    if frame.nbytes != expected:
        raise FrameError(
            f"a tensor of {dtype} and shape {list(shape)} has {expected} bytes; its frame has {frame.nbytes}",
            hint=SAME_VERSION,
        )
    if not expected:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(frame, dtype=dtype)
    if flat.data_ptr() % _ITEM_BYTES[spec[0]]:
        # A small frame may start anywhere in zmq's receive buffer.
        flat = flat.clone()
    if dtype is torch.bool and int(flat.view(torch.uint8).max()) > 1:
        # Other values are undefined behaviour in C++.
        raise FrameError("a bool tensor has bytes other than 0 and 1", hint=SAME_VERSION)
    return flat if len(shape) == 1 else flat.view(shape)
