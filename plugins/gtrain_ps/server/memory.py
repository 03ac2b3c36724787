"""Where a server keeps its blocks: memory of its own, or memory that outlives it."""

from __future__ import annotations

import json
import mmap
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.memory import pages

HEADER_BYTES = 1 << 20
PAGE = mmap.ALLOCATIONGRANULARITY
_SLOTS = 2  # of the directory: one is whole while the other is written


class Region:
    """Named tensors, and notes.

    Attributes:
        survives: whether both are there again after the process was killed and restarted.
        version: steps that the tensors have seen.
    """

    survives = False

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self.notes: dict[str, Any] = {}
        self.version = 0

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros, or what it was before."""
        if name not in self._tensors:
            self._tensors[name] = self._make(name, shape, dtype)
        return self._tensors[name]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return dict(self._tensors)

    def note(self, name: str, value: Any) -> None:
        """Keep a small value."""
        self.notes[name] = value

    def set_version(self, version: int) -> None:
        """Note how many steps the tensors have seen."""
        self.version = version

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return pages.own(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)


class LastingRegion(Region):
    """Tensors in an anonymous file of the kernel, which the agent keeps open.

    A server that is killed at any moment finds them again: what it had written is there, in the order in which it was
    written. The memory ends with the job, and nothing is left in a file system.

    Args:
        descriptor: of the file; an empty one becomes a region without tensors.
    """

    survives = True

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        if os.fstat(descriptor).st_size < HEADER_BYTES:
            os.ftruncate(descriptor, HEADER_BYTES)
        self._header = mmap.mmap(self._descriptor, HEADER_BYTES)
        self._numbers = np.frombuffer(self._header, np.int64, count=8)  # directories written; -; version; -; lengths
        self._layout: dict[str, tuple[int, tuple[int, ...], str]] = {}
        if int(self._numbers[0]):
            self._read_directory()
        self.version = int(self._numbers[2])

    def note(self, name: str, value: Any) -> None:
        super().note(name, value)
        self._write_directory()

    def set_version(self, version: int) -> None:
        super().set_version(version)
        self._numbers[2] = version

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self._layout:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            begin = pages.aligned(os.fstat(self._descriptor).st_size, nbytes)
            os.ftruncate(self._descriptor, begin + -(-max(1, nbytes) // PAGE) * PAGE)
            self._layout[name] = begin, shape, str(dtype).removeprefix("torch.")
            self._write_directory()
        begin, kept, kind = self._layout[name]
        assert (kept, kind) == (shape, str(dtype).removeprefix("torch.")), f"{name} was {kept} of {kind}"
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        return pages.shared(self._descriptor, begin, count * dtype.itemsize).view(dtype).view(shape)

    def _write_directory(self) -> None:
        """Write what there is beside what is read now, and then have that read."""
        text = json.dumps({"layout": self._layout, "notes": self.notes}).encode()
        room = (HEADER_BYTES - PAGE) // _SLOTS
        assert len(text) <= room, "too many tables"
        slot = int(self._numbers[0]) % _SLOTS
        begin = PAGE + slot * room
        self._header[begin : begin + len(text)] = text
        self._numbers[4 + slot] = len(text)
        self._numbers[0] += 1

    def _read_directory(self) -> None:
        slot = (int(self._numbers[0]) - 1) % _SLOTS
        begin = PAGE + slot * ((HEADER_BYTES - PAGE) // _SLOTS)
        found = json.loads(self._header[begin : begin + int(self._numbers[4 + slot])])
        self._layout = {name: (at, tuple(shape), kind) for name, (at, shape, kind) in found["layout"].items()}
        self.notes = found["notes"]
