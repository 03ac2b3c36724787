"""Counts of messages and bytes, for the job's summary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Counts of one client or server since it was created; any thread may read them at any time.

    Bytes count headers and tensors, including those of repeated messages; the framing and encryption of zmq and the
    prelude of Unix sockets are not counted.

    Args:
        bytes_sent: bytes.
        bytes_received: bytes.
        requests: client: requests sent for the first time; server: requests executed.
        errors: client: requests that raised; server: requests whose handler raised or that could not be executed.
        duplicates: server: repeated requests, which are not executed again.
        resent: client: requests, server: replies, sent again after a reconnect or silence.
        malformed: unreadable messages that were dropped or answered with an error.
        refused: server: handshakes and incarnations refused.
        restarts: client: how often the server's incarnation changed.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    requests: int = 0
    errors: int = 0
    duplicates: int = 0
    resent: int = 0
    malformed: int = 0
    refused: int = 0
    restarts: int = 0
