"""Limits of the size of a message, and of the messages in flight (backpressure)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from gtrain.errors import ConfigError

MAX_NAME = 256
"""The most characters in the name of a method or a client."""

_MIN_HEADER = 128 << 10
_ANNOUNCED = (
    *("max_header_bytes", "max_frame_bytes", "max_message_bytes", "max_tensors", "max_dimensions"),
    *("max_bytes_in_flight", "max_requests_in_flight"),
)


@dataclass(frozen=True)
class Limits:
    """Limits that both sides check before they allocate memory. The smaller of both sides' limits holds.

    Args:
        max_header_bytes: the packed header with all fields of a message; at least 128 KiB.
        max_frame_bytes: one tensor. A larger frame ends the connection before memory is allocated for it.
        max_message_bytes: header and tensors of one message together.
        max_tensors: tensors of one message.
        max_dimensions: dimensions of one tensor.
        max_bytes_in_flight: bytes of a client's unanswered requests (the client waits), and bytes of the replies that
            a server holds for a client until they are acknowledged (the server executes no more for that client). A
            larger message passes while at most a quarter of this is in flight.
        max_requests_in_flight: unanswered requests of one client.
        silence_seconds: a client that waits for a reply repeats its handshake after this much silence.
    """

    max_header_bytes: int = 1 << 20
    max_frame_bytes: int = 4 << 30
    max_message_bytes: int = 8 << 30
    max_tensors: int = 1024
    max_dimensions: int = 16
    max_bytes_in_flight: int = 1 << 30
    max_requests_in_flight: int = 1024
    silence_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Check that each limit lets messages through."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(
                    f"the wire's limit {field.name} is {value}; it must be positive",
                    hint=f"leave {field.name} at its default, {field.default}",
                )
        if self.max_header_bytes < _MIN_HEADER:
            raise ConfigError(
                f"the wire's limit max_header_bytes is {self.max_header_bytes}; names and numbers need {_MIN_HEADER}",
                hint="leave max_header_bytes at its default, 1 MiB",
            )

    @property
    def max_bytes_ahead(self) -> int:
        """Bytes of the requests that a client sends before those without which the server cannot answer them."""
        return self.max_bytes_in_flight // 4

    def announce(self) -> dict[str, int]:
        """Return the limits that the peer must keep to, as a field of the handshake."""
        return {name: int(getattr(self, name)) for name in _ANNOUNCED}

    def agreed(self, announced: Any) -> Limits:
        """Return the smaller of both sides' limits; missing or malformed limits of the peer are ignored."""
        if not isinstance(announced, dict):
            return self
        smaller = {
            name: min(value, getattr(self, name))
            for name in _ANNOUNCED
            if type(value := announced.get(name)) is int and value > 0
        }
        smaller["max_header_bytes"] = max(_MIN_HEADER, smaller.get("max_header_bytes", self.max_header_bytes))
        return replace(self, **smaller)
