"""Which sockets carry a connection: plain ones within a machine, zmq's where messages leave it or keys are used."""

from __future__ import annotations

from gtrain.wire.counters import Counters
from gtrain.wire.limits import Limits
from gtrain.wire.unix.link import LocalLink
from gtrain.wire.unix.listener import LocalListener
from gtrain.wire.zeromq.link import Link
from gtrain.wire.zeromq.listener import Listener
from gtrain.wire.zeromq.security import Security

AnyLink = Link | LocalLink
AnyListener = Listener | LocalListener


def link(address: str, security: Security | None, limits: Limits) -> AnyLink:
    """A client's connection; see :class:`gtrain.wire.zeromq.link.Link`."""
    return LocalLink(address, limits) if _plain(address, security) else Link(address, security, limits)


def listener(
    address: str, descriptor: int | None, security: Security | None, limits: Limits, name: str, counters: Counters
) -> AnyListener:
    """A server's socket; see :class:`gtrain.wire.zeromq.listener.Listener`."""
    if _plain(address, security):
        return LocalListener(address, descriptor, limits, name, counters)
    return Listener(address, descriptor, security, limits, name, counters)


def _plain(address: str, security: Security | None) -> bool:
    return security is None and address.startswith("ipc://")
