"""Serialisation of the Python values that ranks exchange, with msgpack; nothing is ever unpickled.

Plain data are None, booleans, numbers, strings, bytes, paths, tensors, NumPy arrays (restored as tensors), and lists,
tuples and dictionaries of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from gtrain.errors import ConfigError

_TUPLE, _PATH, _LARGE, _TENSOR, _DICT = 1, 2, 3, 4, 5  # codes of msgpack's extension types


def pack(value: Any) -> bytes:
    """Serialise plain data.

    Raises:
        ConfigError: the value contains an object of another type.
    """
    return msgpack.packb(_plain(value), strict_types=True)


def unpack(content: bytes) -> Any:
    """Restore the plain data that :func:`pack` serialised.

    Raises:
        ValueError: the bytes do not come from :func:`pack`.
    """
    return msgpack.unpackb(content, ext_hook=_restore, strict_map_key=False, use_list=True)


def _plain(value: Any) -> Any:
    """Convert a value to msgpack's types; extension types represent all others."""
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    # msgpack has integers of 64 bits; larger ones travel as text.
    if type(value) is int:
        return value if -(1 << 63) <= value < 1 << 64 else msgpack.ExtType(_LARGE, str(value).encode())
    match value:
        case np.generic():
            return _plain(value.item())
        case list():
            return [_plain(item) for item in value]
        case tuple():
            # A NamedTuple is restored as a plain tuple.
            return msgpack.ExtType(_TUPLE, pack(list(value)))
        case dict() if all(type(key) is str for key in value):
            return {key: _plain(item) for key, item in value.items()}
        case dict():
            return msgpack.ExtType(_DICT, pack([list(pair) for pair in value.items()]))
        case str() | float() | int():  # an instance of a subclass
            return _plain(next(base(value) for base in (str, float, int) if isinstance(value, base)))
        case Path():
            return msgpack.ExtType(_PATH, str(value).encode())
        case np.ndarray() if value.dtype.kind in "biuf":
            return _plain(torch.from_numpy(np.ascontiguousarray(value)))
        case Tensor() if value.layout == torch.strided and not value.is_quantized:
            host = value.detach().cpu().contiguous()
            content = host.view(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
            return msgpack.ExtType(_TENSOR, msgpack.packb([str(host.dtype), list(host.shape), content]))
    raise ConfigError(
        f"{type(value).__module__}.{type(value).__qualname__} cannot be sent to other ranks: only plain data can, "
        "because bytes from a socket are never unpickled.",
        hint="send numbers, strings, tensors, and lists, tuples and dictionaries of them.",
    )


def _restore(code: int, content: bytes) -> Any:
    if code not in _RESTORERS:
        raise ValueError(f"msgpack extension type {code} is unknown")
    return _RESTORERS[code](content)


def _restore_tensor(content: bytes) -> Tensor:
    name, shape, data = msgpack.unpackb(content)
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    # bytearray: a tensor over immutable bytes would warn, and fail when it is written to.
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


_RESTORERS: dict[int, Callable[[bytes], Any]] = {
    _TUPLE: lambda content: tuple(unpack(content)),
    _DICT: lambda content: dict(unpack(content)),
    _PATH: lambda content: Path(content.decode()),
    _LARGE: lambda content: int(content.decode()),
    _TENSOR: _restore_tensor,
}
