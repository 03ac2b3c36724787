"""gtrain.launch.links: frames, the messages of the key-value store and of the server of a store's files."""

from __future__ import annotations

import socket

import pytest

from gtrain.launch import links


def test_frames_arrive_one_by_one_and_may_be_empty() -> None:
    one, other = socket.socketpair()
    with one, other:
        for content in (b"first", b"", b"third"):
            links.send_frame(one, content)
        assert [bytes(links.receive_frame(other, 5)) for _ in range(3)] == [b"first", b"", b"third"]


def test_a_frame_above_the_limit_is_refused_before_its_content_is_read() -> None:
    one, other = socket.socketpair()
    with one, other:
        links.send_frame(one, b"sixsix")
        with pytest.raises(ConnectionAbortedError, match="a frame of 6 bytes; the limit is 5"):
            links.receive_frame(other, 5)
        assert other.recv(6) == b"sixsix"


def test_a_connection_that_closes_within_a_frame_is_an_error() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"\0\0\0\5half")
        one.close()
        with pytest.raises(ConnectionResetError):
            links.receive_frame(other, 5)
