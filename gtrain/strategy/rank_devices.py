"""Which GPU a rank uses: one for each rank, as long as there are enough."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def device_of(devices: Sequence[torch.device], rank: int, local_rank: int, available: int | None) -> torch.device:
    """Return the device of a rank.

    Args:
        devices: of each machine, as the Trainer's ``devices`` chose them.
        rank: the rank.
        local_rank: its number on its machine.
        available: GPUs that all ranks share, because one machine simulates all machines; None: each rank's machine has
            its own.
    """
    if devices[0].type == "cpu":
        return devices[0]
    if available is None:
        return devices[local_rank % len(devices)]
    # Simulated machines use all GPUs, unless a program named the devices.
    named = [device.index for device in devices] != list(range(len(devices)))
    return devices[rank % len(devices)] if named else torch.device(devices[0].type, rank % max(available, 1))


def sharing(ranks: int, devices: int) -> str | None:
    """Return the message for ranks that share GPUs of one machine; None if each has one of its own."""
    if ranks <= devices:
        return None
    plural = "" if devices == 1 else "s"
    return (
        f"{ranks} ranks share {devices} GPU{plural}: they divide its memory, and their kernels take turns; "
        f"{devices} rank{plural} would be as fast"
    )
