"""The header of a message: its type, sender, sequence number and tensors. Every value is checked before it is used.

A message is one msgpack frame (the header) and one raw frame per tensor. The header is a list of fixed length: the
protocol's version, then the fields of :class:`Header` in order. "Wire" in docs/formats.md specifies the protocol.
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
from gtrain.wire.message import DTYPES, SAME_VERSION, TensorSpec, spec_bytes

VERSION = 1
MAX_ACKNOWLEDGED = 4096
"""The most sequence numbers that one header acknowledges one by one."""
MAX_DEPTH = 32
FRONT_BYTES = 64 << 10
"""Bytes of the largest header that are reserved for the entries before the body: names, numbers, acknowledgements."""
EMPTY_BODY = bytes(msgpack.packb({}) + msgpack.packb([]))
_LEVELS_OF_FIELDS = MAX_DEPTH - 2
"""Levels of nested fields, the dictionary of all fields included: the header is a level, and what holds it another."""
_LENGTH = 11
_LIST_OF_11 = bytes([0x90 | _LENGTH])
_INT_END = 1 << 63
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))

# Structure of msgpack by first byte (github.com/msgpack/msgpack/blob/master/spec.md)
_FIXED_BYTES = {
    **{0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8},
    **{0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17},
}
# format of the length that follows, and further bytes (the type of an extension)
_SIZED = {
    **{0xC4: (">B", 0), 0xC5: (">H", 0), 0xC6: (">I", 0), 0xC7: (">B", 1), 0xC8: (">H", 1), 0xC9: (">I", 1)},
    **{0xD9: (">B", 0), 0xDA: (">H", 0), 0xDB: (">I", 0)},
}
# format of the count that follows, and values per item (a dictionary's item has two)
_NESTED = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}
_NOT_NESTED = bytes(code for code in range(256) if not (0x80 <= code <= 0x9F or 0xDC <= code <= 0xDF))
_UNCOUNTED_LISTS = 4
"""This many lists may claim the whole frame's length without being counted up."""


def check_claims(packed: bytes) -> None:
    """Refuse msgpack whose lists claim more items than the frame has bytes, or that is nested too deeply.

    msgpack allocates a list of the claimed length before it reads the items, 8 bytes per item. Nested lists that each
    claim the maximum would take a thousand times the frame's size for 5 bytes each. An item has at least one byte, so
    honest claims sum to less than the frame's length. Frames with few bytes that could start a long list skip the
    count: they can claim 8 x 4 times their length at most.

    Raises:
        FrameError: the frame claims too much, is nested too deeply or is cut short.
    """
    few_lists = len(packed) <= 1 << 16 and packed.count(0xDC) + packed.count(0xDD) <= _UNCOUNTED_LISTS
    if few_lists and len(packed.translate(None, _NOT_NESTED)) <= MAX_DEPTH:
        return
    try:
        _count_claims(packed)
    except (struct.error, IndexError) as err:
        raise _malformed("its header is cut short") from err


def _count_claims(packed: bytes) -> None:
    """Read the structure of one value without building it."""
    position, claimed = 0, 0
    open_items = [1]  # values still to come at each depth
    while open_items:
        if open_items[-1] == 0:
            open_items.pop()
            continue
        open_items[-1] -= 1
        position, items = _skip_value(packed, position)
        if items:
            claimed += items
            if claimed > len(packed):
                raise _malformed("it claims more than it holds")
            open_items.append(items)
            if len(open_items) > MAX_DEPTH:
                raise FrameError(
                    f"a malformed message: nested deeper than {MAX_DEPTH}", hint="nest fields less, or use tensors"
                )


def _skip_value(packed: bytes, position: int) -> tuple[int, int]:
    """Return the position after a value's own bytes, and the number of values nested in it."""
    code = packed[position]
    position += 1
    if code <= 0x7F or code >= 0xE0:  # small integer
        return position, 0
    if code <= 0x8F:  # short dictionary
        return position, 2 * (code & 0x0F)
    if code <= 0x9F:  # short list
        return position, code & 0x0F
    if code <= 0xBF:  # short string
        return position + (code & 0x1F), 0
    if code in _FIXED_BYTES:
        return position + _FIXED_BYTES[code], 0
    if code in _SIZED:
        form, extra = _SIZED[code]
        return position + struct.calcsize(form) + extra + struct.unpack_from(form, packed, position)[0], 0
    if code in _NESTED:
        form, values = _NESTED[code]
        return position + struct.calcsize(form), values * struct.unpack_from(form, packed, position)[0]
    raise _malformed(f"byte {code:#x} starts no value")


class MessageType(IntEnum):
    """The type of a message."""

    HELLO = 1
    """Client: opens or resumes a session (fields: limits; waiting, the numbers of its unanswered requests)."""
    WELCOME = 2
    """Server: accepts the session (fields: limits; missing, the numbers of ``waiting`` that it never received)."""
    REQUEST = 3
    REPLY = 4
    ERROR = 5
    """Server: the request raised (fields: kind, message, hint)."""
    ACK = 6
    """Client: has received the replies that the header acknowledges."""
    STALE = 7
    """Server: the request was not executed; it was meant for another incarnation, or the session is unknown."""
    REFUSED = 8
    """Server: the request was not executed; a newer incarnation of the client is connected."""


_TYPES = {int(member): member for member in MessageType}


@dataclass(slots=True)
class Header:
    """The first frame of every message.

    Args:
        type: type of the message.
        method: a request's method; empty otherwise.
        client: name of the client that sends the message or receives it.
        client_incarnation: incarnation of that client; a larger number is a later one.
        sequence: number of the request within the incarnation, from 1; the handshake's number in HELLO and WELCOME.
        server_incarnation: the server incarnation that a client addresses or that replies; 0 before the first WELCOME.
        low: low-water mark: all requests below it are finished, and the client accepts no replies to them.
        acknowledged: further finished requests, at or above ``low``.
        fields: the message's fields, see :class:`gtrain.wire.Message`.
        specs: dtype and shape of each tensor that follows.
    """

    type: MessageType
    method: str
    client: str
    client_incarnation: int
    sequence: int
    server_incarnation: int
    low: int = 0
    acknowledged: list[int] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    specs: list[TensorSpec] = field(default_factory=list)


def pack_body(method: str, fields: Mapping[str, Any], specs: Sequence[TensorSpec], limits: Limits) -> bytes:
    """Pack the fields and specs of a message, which stay the same when it is sent again.

    Args:
        method: the request's method, for error messages.
        fields: see :class:`gtrain.wire.Message`.
        specs: of the tensors that follow.
        limits: of this side.

    Raises:
        FrameError: a field has a type that cannot be sent, a key is not a string, the fields are nested too deeply, or
            the body is too large.
    """
    try:
        _check_sendable(fields, _LEVELS_OF_FIELDS)
        body: bytes = msgpack.packb(fields) + msgpack.packb(specs)
    except (TypeError, ValueError, OverflowError, RecursionError) as err:
        raise FrameError(
            f"the fields of {method!r} cannot be sent: {err}",
            hint="use None, bool, int (64 bits), float, str, bytes, lists and dicts of these; send arrays as tensors",
        ) from err
    limit = limits.max_header_bytes - FRONT_BYTES
    if len(body) > limit:
        raise FrameError(
            f"the fields of {method!r} have {len(body):,} bytes; the limit is {limit:,}",
            hint="send arrays as tensors, or raise max_header_bytes in the Limits of both sides",
        )
    return body


def _check_sendable(value: Any, levels: int) -> None:
    """Refuse here what the receiver would refuse, whose answer cannot say which call it was: keys and depth."""
    if not isinstance(value, Mapping | list | tuple):
        return
    if not levels:
        raise ValueError(f"they are nested deeper than {_LEVELS_OF_FIELDS} levels")
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise TypeError(f"the key {key!r} is not a string")
        value = value.values()
    for item in value:
        _check_sendable(item, levels - 1)


def pack_header(header: Header, body: bytes = EMPTY_BODY) -> bytes:
    """Pack a header; its fields and specs are those of ``body``, made by :func:`pack_body`."""
    front: bytes = msgpack.packb(
        (
            *(VERSION, int(header.type), header.method, header.client, header.client_incarnation, header.sequence),
            *(header.server_incarnation, header.low, header.acknowledged),
        )
    )
    # msgpack cannot append to a list: the front is packed as a list of 9, whose first byte is then replaced by that of
    # 11.
    return _LIST_OF_11 + front[1:] + body


def decode_header(frame: memoryview | bytes, limits: Limits) -> Header:
    """Unpack and check a header.

    Raises:
        FrameError: the header is malformed or beyond the limits. At most a small multiple of the frame's size was
            allocated; :attr:`FrameError.header` is set if only the fields or specs are malformed.
    """
    size = len(frame)
    if size > limits.max_header_bytes:
        raise _malformed(f"its header has {size} bytes; the limit is {limits.max_header_bytes}")
    packed = bytes(frame)
    check_claims(packed)
    try:
        # unpackb limits the length of each string and list to that of the frame
        values = msgpack.unpackb(packed, ext_hook=_refuse_extension, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as err:
        raise _malformed(f"its header is not msgpack: {err}") from err
    if type(values) is not list or len(values) != _LENGTH:
        raise _malformed(f"its header is not a list of {_LENGTH}")
    return _check_header(values, limits)


def _check_header(values: list[Any], limits: Limits) -> Header:
    """Return the header of unpacked values, each checked for type and range."""
    version, number, method, client, client_incarnation, sequence, server_incarnation, low, done, fields, specs = values
    if version != VERSION or type(version) is not int:
        raise _malformed(f"its version is {str(version)[:40]}; this side speaks {VERSION}")
    # type() and not isinstance(): True is an int, and msgpack may yield it.
    if type(number) is not int or number not in _TYPES:
        raise _malformed(f"its type is {str(number)[:40]}")
    if any(type(name) is not str or len(name) > MAX_NAME for name in (method, client)):
        raise _malformed(f"a name in it is not a string of at most {MAX_NAME} characters")
    if type(done) is not list or len(done) > MAX_ACKNOWLEDGED:
        raise _malformed("its acknowledgements are not a list, or too many")
    _check_integers((client_incarnation, sequence, server_incarnation, low, *done))
    header = Header(_TYPES[number], method, client, client_incarnation, sequence, server_incarnation, low, done)
    try:
        if type(fields) is not dict:
            raise _malformed("its fields are not a dictionary")
        _check_field(fields)
        header.fields, header.specs = fields, _check_specs(specs, limits)
    except FrameError as err:
        err.header = header
        raise
    return header


def _check_integers(numbers: Sequence[Any]) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < _INT_END:
            raise _malformed("a number in it is not an integer from 0 to 2**63 - 1")


def _check_field(value: Any) -> None:
    """Refuse timestamps and keys of type bytes: msgpack allows them, fields do not. The depth is bounded."""
    if type(value) is list:
        for item in value:
            _check_field(item)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise _malformed("a key of its fields is not a string")
            _check_field(item)
    elif type(value) not in _PLAIN:
        raise _malformed(f"its fields hold a {type(value).__name__}")


def _check_specs(specs: Any, limits: Limits) -> list[TensorSpec]:
    """Return the specs of the tensors that follow, checked."""
    if type(specs) is not list or len(specs) > limits.max_tensors:
        raise _malformed(f"its tensors are not a list of at most {limits.max_tensors}")
    checked = [_check_spec(spec, limits) for spec in specs]
    sizes = [spec_bytes(spec) for spec in checked]
    if max(sizes, default=0) > limits.max_frame_bytes or sum(sizes) > limits.max_message_bytes:
        raise _malformed(
            f"its tensors have {sum(sizes):,} bytes; the limits are {limits.max_frame_bytes:,} for one and "
            f"{limits.max_message_bytes:,} for all"
        )
    return checked


def _check_spec(spec: Any, limits: Limits) -> TensorSpec:
    if type(spec) is not list or len(spec) != 2 or type(spec[0]) is not str or spec[0] not in DTYPES:
        raise _malformed("the dtype of a tensor in it is unknown")
    shape = spec[1]
    if type(shape) is not list or len(shape) > limits.max_dimensions:
        raise _malformed(f"the shape of a tensor in it is not a list of at most {limits.max_dimensions} dimensions")
    _check_integers(shape)
    return spec[0], tuple(shape)


def _refuse_extension(code: int, data: bytes) -> Any:
    raise _malformed(f"its header holds a msgpack extension of type {code}")


def _malformed(reason: str) -> FrameError:
    return FrameError(f"a malformed message: {reason}", hint=SAME_VERSION)
