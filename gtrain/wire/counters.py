"""What went over the wire, for the job's summary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Counts of one client or server since it was made; plain numbers, to be read at any time from any thread.

    Bytes are those of headers and tensors that were handed to or taken from zmq, resent ones included; zmq's own
    framing and encryption are not counted.

    Args:
        bytes_sent: bytes.
        bytes_received: bytes.
        requests: client: requests sent for the first time; server: requests executed.
        errors: client: requests that raised; server: requests whose handler raised or that could not be executed.
        duplicates: server: requests received again and not executed again.
        resent: client: requests, server: answers, sent again after a reconnect or silence.
        malformed: messages that were dropped or answered with an error because they could not be read.
        refused: server: handshakes and incarnations refused.
        restarts: client: how often another server incarnation was found.
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
