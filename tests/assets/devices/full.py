"""Callbacks that watch or limit a rank's use of its device."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class RunsOut(Callback):
    """Raises what torch's allocator raises, on one rank, after its first backward pass.

    Args:
        rank: the rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise it."""
        if trainer.global_rank == self._rank:
            self.run_out()

    def run_out(self) -> None:
        """Raise what the allocator of a GPU raises."""
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class RunsOutOnTheHost(RunsOut):
    """Allocates more than this process's limit of addresses, on one rank, after its first backward pass."""

    def run_out(self) -> None:
        """Have torch's allocator fail."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 29), hard))
        torch.empty(1 << 31, dtype=torch.uint8)


class LimitsDevice(Callback):
    """Lets a rank have a share of its GPU's memory.

    Args:
        share: of the memory, 0 to 1.
    """

    def __init__(self, share: float) -> None:
        self._share = share

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the limit."""
        torch.cuda.set_per_process_memory_fraction(self._share)


class RefusesDevices(Callback):
    """Fails if the rank has started to use CUDA by the end of its training."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check it, after checkpoints were written and read."""
        if torch.cuda.is_initialized():
            raise RuntimeError("a rank that trains on the CPU has initialised CUDA")
