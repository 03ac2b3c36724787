"""How large a message may be, and how much may be under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gtrain.errors import ConfigError

MAX_NAME = 256
"""Characters of a method's or a client's name."""

_MIN_HEADER = 128 << 10
_ANNOUNCED = (
    *("max_header_bytes", "max_frame_bytes", "max_message_bytes", "max_tensors", "max_dimensions"),
    *("max_bytes_in_flight", "max_requests_in_flight"),
)


@dataclass(frozen=True)
class Limits:
    """Bounds that both sides check before they allocate; a client also keeps to those that its server announces.

    Args:
        max_header_bytes: the packed header with all fields of a message; at least 128 KiB.
        max_frame_bytes: one tensor. zmq refuses a larger frame before it allocates, and ends the connection.
        max_message_bytes: header and tensors of one message together.
        max_tensors: tensors of one message.
        max_dimensions: dimensions of one tensor.
        max_bytes_in_flight: bytes of unanswered requests of one client, and bytes of answers that a server holds for
            one client until they are acknowledged. A single larger message passes when nothing else is under way.
        max_requests_in_flight: unanswered requests of one client.
        silence_seconds: a client that waits and hears nothing asks after its requests this often.
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
        """Refuse what would let nothing through."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(
                    f"the wire's limit {field.name} is {value}; it has to be positive",
                    hint=f"leave {field.name} at its default, {field.default}",
                )
        if self.max_header_bytes < _MIN_HEADER:
            raise ConfigError(
                f"the wire's limit max_header_bytes is {self.max_header_bytes}; names and numbers need {_MIN_HEADER}",
                hint="leave max_header_bytes at its default, 1 MiB",
            )

    def announce(self) -> dict[str, int]:
        """The limits that the other side has to keep, as fields of a greeting."""
        return {name: int(getattr(self, name)) for name in _ANNOUNCED}

    def agreed(self, announced: Mapping[str, Any]) -> Limits:
        """What both sides can take: the smaller of each limit; what the other side did not announce well is ours."""
        theirs = {name: announced.get(name) for name in _ANNOUNCED}
        smaller = {
            name: min(value, getattr(self, name)) for name, value in theirs.items() if type(value) is int and value > 0
        }
        smaller["max_header_bytes"] = max(_MIN_HEADER, smaller.get("max_header_bytes", self.max_header_bytes))
        return replace(self, **smaller)
