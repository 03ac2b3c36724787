"""Several hosts, played by network namespaces of this machine: each has one address on a common bridge."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

REASON = "network namespaces need root and the command ip"


def available() -> bool:
    """Whether this process may create network namespaces."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"gtp{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        name: of the namespace.
        address: on the bridge.
        device: the end of its link in the namespace of the bridge.
    """

    name: str
    address: str
    device: str

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs ``arguments`` on this host."""
        return ["ip", "netns", "exec", self.name, *arguments]


@contextlib.contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """Create hosts within the context.

    Args:
        count: number of hosts.
        rate: limit of what each host sends, in the notation of tc: ``100mbit``.
    """
    prefix = f"gt{os.getpid()}"
    switch = f"{prefix}s"
    made = [Host(f"{prefix}h{i}", f"10.77.0.{i + 1}", f"{prefix}v{i}") for i in range(count)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in made:
            _ip("netns", "add", host.name)
            _ip("-n", switch, "link", "add", host.device, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("-n", switch, "link", "set", host.device, "master", "bridge", "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            if rate is not None:
                limit = ["tc", "-n", host.name, "qdisc", "add", "dev", "eth0", "root", "tbf"]
                subprocess.run([*limit, "rate", rate, "burst", "256kb", "latency", "50ms"], check=True)
        yield made
    finally:
        for name in (switch, *(host.name for host in made)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
