"""The header of a message: what it is, from whom, and which tensors follow. Nothing is trusted before it is checked.

A message is one msgpack frame (this header) and one raw frame for each tensor. The header is a list of fixed length, in
the order of the fields of :class:`Header`, with the protocol's version in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgpack

from gtrain.wire.errors import FrameError
from gtrain.wire.limits import MAX_NAME, Limits
from gtrain.wire.message import DTYPES, TensorSpec, spec_bytes
from gtrain.wire.msgpack_check import check_claims

VERSION = 1
MAX_DONE = 4096
"""Sequence numbers that one header acknowledges one by one."""
_LENGTH = 11
_LIST_OF_11 = bytes([0x90 | _LENGTH])
FRONT_BYTES = 64 << 10
"""Bytes of the largest header kept for what stands in front of the body: names, numbers, acknowledgements."""
EMPTY_BODY = bytes(msgpack.packb({}) + msgpack.packb([]))
_INT_END = 1 << 63
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_HINT = "both sides have to run the same version of gtrain"


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1
    """Client: I am this incarnation, these requests of mine are unanswered (fields: limits, waiting)."""
    WELCOME = 2
    """Server: I am this incarnation, of those I do not have these (fields: limits, missing)."""
    REQUEST = 3
    REPLY = 4
    ERROR = 5
    """Server: the request raised (fields: kind, message, hint)."""
    ACK = 6
    """Client: forget these answers."""
    STALE = 7
    """Server: not executed, because it was meant for another incarnation of mine or of a client I do not know."""
    REFUSED = 8
    """Server: not executed, because a newer incarnation of that client is here."""


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(slots=True)
class Header:
    """What stands in front of every message.

    Args:
        kind: what it is.
        method: what a request asks for; empty otherwise.
        client: name of the client that asks or is answered.
        client_incarnation: which life of that client; a larger number is a later one.
        sequence: number of the request in that life, from 1; for HELLO and WELCOME the number of the greeting.
        server_incarnation: the server's life that the client means or that answers; 0 in HELLO.
        low: requests below it are finished: the client takes no answer to them any more.
        done: further finished requests, at or above ``low``.
        fields: the message's own, see :class:`gtrain.wire.Message`.
        specs: dtype and shape of each tensor that follows.
    """

    kind: Kind
    method: str
    client: str
    client_incarnation: int
    sequence: int
    server_incarnation: int
    low: int = 0
    done: list[int] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    specs: list[TensorSpec] = field(default_factory=list)


def pack_body(method: str, fields: Mapping[str, Any], specs: Sequence[TensorSpec], limits: Limits) -> bytes:
    """Pack the fields and the specs of the tensors, which stay the same when a message is sent again.

    Args:
        method: for messages.
        fields: see :class:`gtrain.wire.Message`.
        specs: of the tensors that follow.
        limits: of this side.

    Raises:
        FrameError: a field is of a type that does not cross, or all together are too large.
    """
    try:
        body: bytes = msgpack.packb(fields) + msgpack.packb(specs)
    except (TypeError, ValueError, OverflowError, RecursionError) as err:
        raise FrameError(
            f"the fields of {method!r} cannot be sent: {err}",
            hint="use None, bool, int (64 bits), float, str, bytes, lists and dicts of these; arrays belong in tensors",
        ) from err
    most = limits.max_header_bytes - FRONT_BYTES
    if len(body) > most:
        raise FrameError(
            f"the fields of {method!r} have {len(body):,} bytes; the limit is {most:,}",
            hint="send arrays as tensors, or raise max_header_bytes in the Limits of both sides",
        )
    return body


def pack_header(header: Header, body: bytes = EMPTY_BODY) -> bytes:
    """Pack a header; its fields and specs are those of ``body``, made by :func:`pack_body`."""
    front: bytes = msgpack.packb(
        (
            *(VERSION, int(header.kind), header.method, header.client, header.client_incarnation, header.sequence),
            *(header.server_incarnation, header.low, header.done),
        )
    )
    return _LIST_OF_11 + front[1:] + body


def decode_header(frame: memoryview | bytes, limits: Limits) -> Header:
    """Unpack and check a header.

    Raises:
        FrameError: whatever is wrong with it; nothing larger than a small multiple of the frame was allocated.
    """
    size = len(frame)
    if size > limits.max_header_bytes:
        raise _malformed(f"its header has {size} bytes; the limit is {limits.max_header_bytes}")
    packed = bytes(frame)
    check_claims(packed)
    try:
        values = msgpack.unpackb(
            packed,
            raw=False,
            use_list=True,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=size,
            max_map_len=size,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as err:
        raise _malformed(f"its header is not msgpack: {err}") from err
    if type(values) is not list or len(values) != _LENGTH:
        raise _malformed(f"its header is not a list of {_LENGTH}")
    return _checked(values, limits)


def _checked(values: list[Any], limits: Limits) -> Header:
    """The header of unpacked values, each checked for type and range."""
    version, kind, method, client, client_incarnation, sequence, server_incarnation, low, done, fields, specs = values
    if version != VERSION or type(version) is not int:
        raise _malformed(f"its version is {str(version)[:40]}; this side speaks {VERSION}")
    if type(kind) is not int or kind not in _KINDS:
        raise _malformed(f"its kind is {str(kind)[:40]}")
    for name in (method, client):
        if type(name) is not str or len(name) > MAX_NAME:
            raise _malformed(f"a name in it is no text of at most {MAX_NAME} characters")
    _check_numbers((client_incarnation, sequence, server_incarnation, low))
    if type(done) is not list or len(done) > MAX_DONE:
        raise _malformed("its acknowledgements are no list, or too many")
    _check_numbers(done)
    header = Header(_KINDS[kind], method, client, client_incarnation, sequence, server_incarnation, low, done)
    try:
        if type(fields) is not dict:
            raise _malformed("its fields are no dictionary")
        _check_plain(fields)
        header.fields, header.specs = fields, _specs(specs, limits)
    except FrameError as err:
        err.header = header
        raise
    return header


def _check_numbers(numbers: Sequence[Any]) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < _INT_END:
            raise _malformed("a number in it is no integer from 0 to 2**63 - 1")


def _check_plain(value: Any) -> None:
    """Refuse timestamps and keys of type bytes, which msgpack can carry and fields do not; depth is bounded."""
    if type(value) in _PLAIN:
        return
    if type(value) is list:
        for item in value:
            _check_plain(item)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise _malformed("a key of its fields is no text")
            _check_plain(item)
    else:
        raise _malformed(f"its fields hold a {type(value).__name__}")


def _specs(specs: Any, limits: Limits) -> list[TensorSpec]:
    """The checked specs of the tensors that follow."""
    if type(specs) is not list or len(specs) > limits.max_tensors:
        raise _malformed(f"its tensors are no list of at most {limits.max_tensors}")
    checked = [_spec(spec, limits) for spec in specs]
    if not checked:
        return checked
    sizes = [spec_bytes(spec) for spec in checked]
    if max(sizes) > limits.max_frame_bytes or sum(sizes) > limits.max_message_bytes:
        raise _malformed(
            f"its tensors have {sum(sizes):,} bytes; the limits are {limits.max_frame_bytes:,} for one and "
            f"{limits.max_message_bytes:,} for all"
        )
    return checked


def _spec(spec: Any, limits: Limits) -> TensorSpec:
    """One checked spec."""
    if type(spec) is not list or len(spec) != 2 or type(spec[0]) is not str or spec[0] not in DTYPES:
        raise _malformed("a tensor in it has no known dtype")
    shape = spec[1]
    if type(shape) is not list or len(shape) > limits.max_dimensions:
        raise _malformed(f"a tensor in it has no shape of at most {limits.max_dimensions} dimensions")
    _check_numbers(shape)
    return spec[0], tuple(shape)


def _refuse_extension(code: int, data: bytes) -> Any:
    raise _malformed(f"its header holds a msgpack extension of type {code}")


def _malformed(what: str) -> FrameError:
    return FrameError(f"a malformed message: {what}", hint=_HINT)
