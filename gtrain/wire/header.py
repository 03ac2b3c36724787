"""The header of a message: what it is, from whom, and which tensors follow. Nothing is trusted before it is checked.

A message is one msgpack frame (this header) and one raw frame for each tensor. The header is a list of fixed length, in
the order of the fields of :class:`Header`, with the protocol's version in front.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgpack

from gtrain.wire.errors import FrameError
from gtrain.wire.limits import MAX_NAME, Limits
from gtrain.wire.message import DTYPES, TensorSpec, spec_bytes

MAX_DEPTH = 32
_FREE = 4
"""So many long lists may claim the whole frame's length without being counted up."""
_SKIP = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_SKIP |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_SIZED = {0xC4: (">B", 0), 0xC5: (">H", 0), 0xC6: (">I", 0), 0xC7: (">B", 1), 0xC8: (">H", 1), 0xC9: (">I", 1)}
_SIZED |= {0xD9: (">B", 0), 0xDA: (">H", 0), 0xDB: (">I", 0)}
_NESTED = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}


def check_claims(packed: bytes) -> None:
    """Refuse msgpack whose lists claim more items than the frame has bytes, or that is nested too deeply.

    msgpack allocates a list of the claimed length before it reads the items, 8 bytes an item: lists nested in each
    other, each claiming all that is allowed, would take a thousand times the frame's size for 5 bytes each. An item
    has at least one byte, so honest claims sum to less than the frame's length. Frames with few bytes that could
    begin a long list are not walked through: they can claim 8 x 4 times their length at most.

    Raises:
        FrameError: such a frame, or one cut short.
    """
    if len(packed) <= 1 << 16 and packed.count(0xDC) + packed.count(0xDD) <= _FREE and _flat(packed):
        return
    try:
        _walk(packed)
    except (struct.error, IndexError) as err:
        raise FrameError("a malformed message: its header is cut short", hint="run one version of gtrain") from err


def _flat(packed: bytes) -> bool:
    """Whether it cannot be nested deeply: few bytes that could open a list or a dictionary of any kind."""
    return len(packed.translate(None, _NOT_OPENING)) <= MAX_DEPTH


_NOT_OPENING = bytes(code for code in range(256) if not (0x80 <= code <= 0x9F or 0xDC <= code <= 0xDF))


def _walk(packed: bytes) -> None:
    """Read one value's structure without building it."""
    position, claimed = 0, 0
    open_items = [1]  # values still to come at each depth
    while open_items:
        if open_items[-1] == 0:
            open_items.pop()
            continue
        open_items[-1] -= 1
        position, items = _step(packed, position)
        if items:
            claimed += items
            if claimed > len(packed):
                raise FrameError("a malformed message: it claims more than it holds", hint="run one version of gtrain")
            open_items.append(items)
            if len(open_items) > MAX_DEPTH:
                raise FrameError(
                    f"a malformed message: nested deeper than {MAX_DEPTH}", hint="nest fields less, or use tensors"
                )


def _step(packed: bytes, position: int) -> tuple[int, int]:
    """Where the next value begins, and how many values are nested in this one."""
    code = packed[position]
    position += 1
    if code <= 0x7F or code >= 0xE0:
        return position, 0
    if code <= 0x8F:
        return position, 2 * (code & 0x0F)
    if code <= 0x9F:
        return position, code & 0x0F
    if code <= 0xBF:
        return position + (code & 0x1F), 0
    if code in _SKIP:
        return position + _SKIP[code], 0
    if code in _SIZED:
        form, extra = _SIZED[code]
        return position + struct.calcsize(form) + extra + struct.unpack_from(form, packed, position)[0], 0
    if code in _NESTED:
        form, values = _NESTED[code]
        return position + struct.calcsize(form), values * struct.unpack_from(form, packed, position)[0]
    raise FrameError(f"a malformed message: byte {code:#x} begins no value", hint="run one version of gtrain")


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
