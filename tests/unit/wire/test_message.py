"""Messages through packing and unpacking, without sockets: every dtype, no copies, and no trust in what arrives."""

from __future__ import annotations

import math
import os
import re
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gtrain.wire import FrameError, Limits
from gtrain.wire.header import Header, MessageType, decode_header, pack_body, pack_header
from gtrain.wire.message import DTYPES, from_frames, to_frames

EXAMPLES = int(os.environ.get("GTRAIN_FUZZ_EXAMPLES", "2000"))
"""Mutated messages that the decoder is given; set it to 100000 for the full measurement."""
LIMITS = Limits()
SMALL = Limits(max_frame_bytes=1 << 16, max_message_bytes=1 << 17, max_header_bytes=1 << 17, max_tensors=8)


def pack(fields: dict[str, Any], tensors: Sequence[Tensor], limits: Limits = LIMITS) -> list[bytes]:
    """All frames of a request, as they would go over a socket."""
    specs, frames = to_frames(tensors, limits)
    header = Header(MessageType.REQUEST, "push", "rank 3", 17, 5, 99, 4, [6, 7])
    return [pack_header(header, pack_body("push", fields, specs, limits)), *(bytes(frame) for frame in frames)]


def unpack(frames: Sequence[bytes], limits: Limits = LIMITS) -> tuple[Header, list[Tensor]]:
    """The header and tensors of frames, over memory of their own."""
    header = decode_header(frames[0], limits)
    return header, from_frames(header.specs, [memoryview(bytearray(frame)) for frame in frames[1:]], limits)


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor whose bytes differ."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.arange(count).remainder(2 if dtype == torch.bool else 251).to(torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (2, 3, 4)])
def test_every_dtype_and_shape_crosses(name: str, shape: tuple[int, ...]) -> None:
    tensor = filled(DTYPES[name], shape)
    _, (received,) = unpack(pack({}, [tensor]))
    assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
    assert received.contiguous().view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist()


def test_fields_cross_as_they_are() -> None:
    fields = {
        "nothing": None,
        "yes": True,
        "integer": -(2**63),
        "large": 2**64 - 1,
        "float": 0.1,
        "text": "ä\0",
        "bytes": b"\xff\0",
        "nested": [1, [2.5, {"deep": [None]}], {}],
    }
    header, _ = unpack(pack(fields, []))
    assert header.fields == fields
    assert header == Header(MessageType.REQUEST, "push", "rank 3", 17, 5, 99, 4, [6, 7], fields, [])


def test_contiguous_tensors_are_sent_without_a_copy() -> None:
    tensor = torch.arange(100, dtype=torch.bfloat16).view(10, 10)
    _, (frame,) = to_frames([tensor], LIMITS)
    tensor[0, 1] = 64.0
    assert torch.frombuffer(frame, dtype=torch.bfloat16)[1] == 64.0
    assert to_frames([torch.zeros(0, 3)], LIMITS)[1][0].nbytes == 0


def test_received_tensors_are_the_received_memory_and_can_be_written() -> None:
    memory = memoryview(bytearray(800))
    (received,) = from_frames([("float64", (10, 10))], [memory], LIMITS)
    received[0, 1] = 1.0
    assert memory.cast("d")[1] == 1.0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.ones(1).expand(5),
        torch.view_as_complex(torch.arange(6.0).view(3, 2)).conj(),
        torch.view_as_complex(torch.arange(6.0).view(3, 2)).conj().imag,
        torch.nn.Parameter(torch.arange(3.0)),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negated", "parameter"],
)
def test_tensors_that_are_no_plain_memory_arrive_whole(tensor: Tensor) -> None:
    _, (received,) = unpack(pack({}, [tensor]))
    assert received.tolist() == tensor.tolist()


def test_memory_that_does_not_suit_the_dtype_is_copied() -> None:
    memory = memoryview(bytearray(b"\0" + torch.arange(4.0, dtype=torch.float64).view(torch.uint8).numpy().tobytes()))
    (received,) = from_frames([("float64", (4,))], [memory[1:]], LIMITS)
    assert received.data_ptr() % 8 == 0
    assert received.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([torch.zeros(SMALL.max_frame_bytes + 1, dtype=torch.uint8)], "65,537 bytes; the limit is 65,536"),
        ([torch.zeros(1)] * 9, "9 tensors; the limit is 8"),
        ([torch.zeros([1] * 17)], "17 dimensions; the limit is 16"),
        ([torch.eye(3).to_sparse_csr()], "torch.sparse_csr cannot be sent"),
        ([torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)], "torch.qint8"),
    ],
)
def test_what_cannot_be_sent_is_refused_where_it_is_sent(tensors: list[Tensor], words: str) -> None:
    with pytest.raises(FrameError, match=words):
        to_frames(tensors, SMALL)


@pytest.mark.parametrize("value", [object(), torch.zeros(2), 2**64, {1, 2}, "\ud800", b"x" * (1 << 20)])
def test_fields_that_cannot_be_sent_are_refused(value: object) -> None:
    with pytest.raises(FrameError, match="push"):
        pack_body("push", {"value": value}, [], LIMITS)


def nested(levels: int) -> Any:
    return {"in": nested(levels - 1)} if levels else 1


def test_keys_and_depth_that_the_receiver_would_refuse_are_refused_where_they_are_sent() -> None:
    assert unpack(pack(nested(30), []))[0].fields == nested(30)
    with pytest.raises(FrameError, match="'push' cannot be sent: they are nested deeper than 30"):
        pack_body("push", nested(31), [], LIMITS)
    with pytest.raises(FrameError, match="'push' cannot be sent: the key 7 is not a string"):
        pack_body("push", {"value": [{7: 1}]}, [], LIMITS)


# -------------------------------------------------------------------------------------------------- malformed


def values(**changes: Any) -> list[Any]:
    """The unpacked header of a good message, with some entries replaced."""
    names = ("version", "kind", "method", "client", "life", "sequence", "server", "low", "done", "fields", "specs")
    good = dict(zip(names, msgpack.unpackb(pack({"a": 1}, [torch.zeros(2, 3)])[0]), strict=True))
    return list({**good, **changes}.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version is 2; this side speaks 1"),
        ({"version": True}, "version"),
        ({"kind": 0}, "type is 0"),
        ({"kind": 9}, "type is 9"),
        ({"kind": "x" * 1000}, r"type is x{40}\n"),
        ({"method": b"push"}, "string of at most 256"),
        ({"client": "x" * 257}, "string of at most 256"),
        ({"sequence": -1}, "not an integer"),
        ({"sequence": 1.0}, "not an integer"),
        ({"low": True}, "not an integer"),
        ({"life": 2**63}, "not an integer"),
        ({"done": None}, "acknowledgements"),
        ({"done": [1, "2"]}, "not an integer"),
        ({"done": [1] * 5000}, "acknowledgements"),
        ({"fields": []}, "not a dictionary"),
        ({"fields": {b"a": 1}}, "key of its fields is not a string"),
        ({"fields": {"a": {b"b": 1}}}, "key of its fields is not a string"),
        ({"fields": {"a": msgpack.Timestamp(1, 2)}}, "(Timestamp|exceeds)"),
        ({"fields": {"a": msgpack.ExtType(5, b"x")}}, "(exceeds|extension)"),
        ({"specs": None}, "tensors"),
        ({"specs": [["float32", [1]]] * 9}, "tensors are not a list of at most 8"),
        ({"specs": [["object", [1]]]}, "the dtype of a tensor in it is unknown"),
        ({"specs": [[["float32"], [1]]]}, "the dtype of a tensor in it is unknown"),
        ({"specs": [["float32", [-1]]]}, "not an integer"),
        ({"specs": [["float32", 5]]}, "the shape of a tensor"),
        ({"specs": [["float32", [1] * 17]]}, "not a list of at most 16"),
        ({"specs": [["float32", [1 << 40]]]}, "the limits are 65,536"),
        ({"specs": [["float32", [1 << 62, 1 << 62]]]}, "the limits are"),
        ({"specs": [["uint8", [1 << 16]]] * 3}, "196,608 bytes; the limits are 65,536 for one and 131,072"),
    ],
)
def test_a_header_is_checked_entry_by_entry(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FrameError, match=words) as caught:
        decode_header(msgpack.packb(values(**changes)), SMALL)
    if set(changes) <= {"fields", "specs"} and not re.search("extension|exceeds|Timestamp", str(caught.value)):
        assert caught.value.header is not None
        assert caught.value.header.sequence == 5  # so that its sender can be told


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x80", msgpack.packb([1] * 11) + b"\0", msgpack.packb([1] * 10)])
def test_a_header_that_is_none(frame: bytes) -> None:
    with pytest.raises(FrameError):
        decode_header(frame, SMALL)


def test_a_header_beyond_the_limit_is_not_read() -> None:
    with pytest.raises(FrameError, match="131073 bytes; the limit is 131072"):
        decode_header(bytes((1 << 17) + 1), SMALL)


@pytest.mark.parametrize(("frames", "words"), [([], "0 tensor frames"), ([bytes(23)], "24 bytes; its frame has 23")])
def test_frames_have_to_be_those_announced(frames: list[bytes], words: str) -> None:
    with pytest.raises(FrameError, match=words):
        unpack([pack({}, [torch.zeros(2, 3)])[0], *frames])


def test_a_bool_is_0_or_1() -> None:
    with pytest.raises(FrameError, match="other than 0 and 1"):
        unpack([pack({}, [torch.zeros(3, dtype=torch.bool)])[0], b"\0\1\2"])


@pytest.mark.parametrize(
    "opening", [b"\xdd\x00\x0f\xff\xff", b"\xdc\xff\xff", b"\x9f", b"\xdf\x00\x07\xff\xff", b"\x81\xa1a"]
)
@pytest.mark.parametrize("depth", [2, 30, 1000, 20_000])
def test_claims_allocate_nothing(opening: bytes, depth: int) -> None:
    """Lists that claim to be long, nested in each other, would have msgpack allocate gigabytes."""
    packed = opening * depth
    tracemalloc.start()
    with pytest.raises(FrameError):
        decode_header(packed, LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000 + 40 * len(packed)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
SAMPLES = [
    pack(fields, [filled(DTYPES[name], shape) for name, shape in tensors])
    for fields in ({}, {"a": 1}, {"n": [None, {"b": b"x" * 40, "t": "y" * 300}], "f": 0.5, "i": [-1, 300, 2**40]})
    for tensors in (
        [],
        [("float32", (2, 5))],
        [("bool", (9,)), ("int64", ()), ("bfloat16", (0, 3))],
    )
]
edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "insert", "delete", "repeat", "cut", "swap", "drop", "add"]),
        *[st.integers(0, 1 << 16)] * 2,
        st.binary(max_size=6),
    ),
    min_size=1,
    max_size=3,
)


def mutate(frames: list[bytes], changes: Sequence[tuple[str, int, int, bytes]]) -> list[bytes]:
    """Frames after some edits of bytes or of whole frames."""
    frames = list(frames)
    for kind, where, place, new in changes:
        index = where % len(frames)
        frame = frames[index]
        at = place % (len(frame) + 1)
        if kind == "flip" and frame:
            at = place % len(frame)
            frames[index] = frame[:at] + bytes([frame[at] ^ (1 + where % 255)]) + frame[at + 1 :]
        elif kind == "insert":
            frames[index] = frame[:at] + new + frame[at:]
        elif kind == "delete":
            frames[index] = frame[:at] + frame[at + 1 + where % 4 :]
        elif kind == "repeat":
            frames[index] = frame[:at] + frame[at:] * 3
        elif kind == "cut":
            frames[index] = frame[:at]
        elif kind == "swap":
            other = place % len(frames)
            frames[index], frames[other] = frames[other], frames[index]
        elif kind == "drop" and len(frames) > 1:
            del frames[index]
        elif kind == "add":
            frames.insert(index, new)
    return frames


@given(frames=st.sampled_from(SAMPLES), changes=edits)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_mutated_messages_are_read_or_refused(frames: list[bytes], changes: list[tuple[str, int, int, bytes]]) -> None:
    """Nothing but FrameError leaves the decoder, whatever arrives, and what it accepts keeps to the limits."""
    try:
        header, tensors = unpack(mutate(frames, changes), SMALL)
    except FrameError:
        return
    assert len(tensors) == len(header.specs) <= SMALL.max_tensors
    assert sum(tensor.nbytes for tensor in tensors) <= SMALL.max_message_bytes
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] == [
        (DTYPES[n], shape) for n, shape in header.specs
    ]
