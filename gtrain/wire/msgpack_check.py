"""Claimed lengths in msgpack, checked before anything is allocated for them."""

from __future__ import annotations

import struct

from gtrain.wire.errors import FrameError

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
