"""Latency and bandwidth between rank 0 and each other rank, over the connections that ranks use when they train."""

from __future__ import annotations

import socket
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from gtrain.errors import GtrainError
from gtrain.launch import launchers
from gtrain.launch.environment import find_environment
from gtrain.launch.launchers.external import ExternalLauncher
from gtrain.launch.slot import ServerRoster, set_roster
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group, form_group

TIMEOUT_SECONDS = 300.0
"""Rank 0 does its other checks first, while the others wait."""
_BYTES = 8 << 20
_MESSAGES, _TRANSFERS = 50, 4


def facts(key_file: str | None, rendezvous: str | None) -> dict[str, Any]:
    """Return what :func:`measure` does as ``connections``, and as ``error`` why it could not."""
    try:
        return {"connections": measure(key_file, rendezvous), "encrypted": key_file is not None, "error": None}
    except (GtrainError, OSError) as error:
        return {"connections": [], "encrypted": key_file is not None, "error": str(error).partition("\n")[0]}


def measure(key_file: str | None, rendezvous: str | None) -> list[dict[str, Any]]:
    """Measure the connections between rank 0 and the others; all ranks that a launcher started call this.

    Args:
        key_file: the job's keys, with which connections between machines are encrypted; None: they are not.
        rendezvous: where ranks of several machines that mpirun started meet.

    Returns:
        On rank 0, for each other rank: ``rank``, ``host``, ``latency`` (seconds of a message without content), and
        ``to`` and ``from`` (bytes per second). Empty on the others.

    Raises:
        PeerLostError: a rank did not join, or is gone.
    """
    launcher = launchers.detect()
    assert isinstance(launcher, ExternalLauncher)
    info = launcher.rank_info()
    set_roster(ServerRoster({}, {}, None if key_file is None else str(Path(key_file).absolute())), launcher.attempt())
    cluster = {"rendezvous": rendezvous, "timeout_seconds": TIMEOUT_SECONDS}
    with launcher.meeting(OmegaConf.create({"cluster": cluster}), info):
        group = form_group(find_environment(), info.rank, info.size, TIMEOUT_SECONDS, Counters())
        try:
            hosts, rows = group.all_gather_object(socket.gethostname()), []
            for rank in range(1, info.size):
                figures = _measure_pair(group, rank) if group.rank in (0, rank) else {}
                if group.rank == 0:
                    rows.append({"rank": rank, "host": hosts[rank], **figures})
                group.barrier()  # the others leave the cores and the network to the pair
            return rows
        finally:
            group.close()


def _measure_pair(group: Group, rank: int) -> dict[str, float]:
    """Measure the connection between rank 0 and another one; both call this."""
    small, large = torch.zeros(1, dtype=torch.uint8), torch.zeros(_BYTES, dtype=torch.uint8)
    first, other = group.rank == 0, rank if group.rank == 0 else 0
    tags = count(1)  # not the group's, which the other ranks do not count

    def fastest(there: torch.Tensor, back: torch.Tensor, repeats: int) -> float:
        return min(_there_and_back(group, other, there, back, next(tags), first) for _ in range(repeats))

    latency = fastest(small, small, _MESSAGES) / 2
    sending, receiving = fastest(large, small, _TRANSFERS), fastest(small, large, _TRANSFERS)
    return {"latency": latency, "to": _BYTES / (sending - latency), "from": _BYTES / (receiving - latency)}


def _there_and_back(group: Group, other: int, there: torch.Tensor, back: torch.Tensor, tag: int, first: bool) -> float:
    """Send a tensor from rank 0, which is ``first``, and then one to it; return the seconds."""
    start = time.perf_counter()
    if first:
        group.send(there, other, tag).wait()
        group.receive(back, other, tag).wait()
    else:
        group.receive(there, other, tag).wait()
        group.send(back, other, tag).wait()
    return time.perf_counter() - start
