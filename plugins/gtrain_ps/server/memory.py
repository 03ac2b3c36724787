"""The memory that holds a server's tensors: private to the process, or an anonymous file that survives a restart."""

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
_SLOTS = 2
"""Copies of the directory: one is complete while the other is written."""
_SLOT_BYTES = (HEADER_BYTES - PAGE) // _SLOTS


class ServerMemory:
    """Named tensors, and notes (small values by name), in the memory of the process.

    Attributes:
        survives: whether tensors and notes survive a kill and restart of the process.
        notes: the notes; :meth:`set_note` changes them.
        version: number of steps that were applied to the tensors.
    """

    survives = False

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.notes: dict[str, Any] = {}
        self.version = 0

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor of a name; a new one holds zeros."""
        if name not in self.tensors:
            self.tensors[name] = self._allocate(name, shape, dtype)
        return self.tensors[name]

    def set_note(self, name: str, value: Any) -> None:
        """Store a small value that JSON can hold."""
        self.notes[name] = value

    def set_version(self, version: int) -> None:
        """Store how many steps were applied to the tensors."""
        self.version = version

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return pages.zeros(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)


class PersistentServerMemory(ServerMemory):
    """Tensors in an anonymous file (``memfd``), which the agent keeps open.

    A restarted server maps the file again and has all writes of the killed process, up to its last one. The kernel
    frees the memory when the job ends; nothing remains in a file system.

    Layout of the file: a header of :data:`HEADER_BYTES`, then the tensors. The header has a page of eight int64 and two
    slots for the *directory*, a JSON object with the offset, shape and dtype of each tensor, and the notes.

    Args:
        descriptor: of the file; an empty file becomes memory without tensors.
    """

    survives = True

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        if os.fstat(descriptor).st_size < HEADER_BYTES:
            os.ftruncate(descriptor, HEADER_BYTES)
        self._header = mmap.mmap(self._descriptor, HEADER_BYTES)
        # [0] directories written so far (the last one is in slot (n - 1) % 2), [2] version, [4 + s] bytes in slot s
        self._numbers = np.frombuffer(self._header, np.int64, count=8)
        self._layout: dict[str, tuple[int, tuple[int, ...], str]] = {}  # offset, shape and dtype
        if int(self._numbers[0]):
            self._read_directory()
        self.version = int(self._numbers[2])

    def set_note(self, name: str, value: Any) -> None:
        super().set_note(name, value)
        self._write_directory()

    def set_version(self, version: int) -> None:
        super().set_version(version)
        self._numbers[2] = version

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes, dtype_name = torch.Size(shape).numel() * dtype.itemsize, str(dtype).removeprefix("torch.")
        if name not in self._layout:
            # At the end of the file: tensors never move, so mappings of other tensors stay valid.
            offset = pages.aligned(os.fstat(self._descriptor).st_size, nbytes)
            os.ftruncate(self._descriptor, offset + -(-max(1, nbytes) // PAGE) * PAGE)
            self._layout[name] = offset, shape, dtype_name
            self._write_directory()
        offset, *layout = self._layout[name]  # of the process before, if this one was restarted
        assert layout == [shape, dtype_name], f"{name} has the layout {layout}"
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        return pages.map_shared(self._descriptor, offset, nbytes).view(dtype).view(shape)

    def _write_directory(self) -> None:
        """Write the directory to the slot that is not current, then make that slot the current one."""
        text = json.dumps({"layout": self._layout, "notes": self.notes}).encode()
        assert len(text) <= _SLOT_BYTES, "too many tables"
        slot = int(self._numbers[0]) % _SLOTS
        start = PAGE + slot * _SLOT_BYTES
        self._header[start : start + len(text)] = text
        self._numbers[4 + slot] = len(text)
        # The commit: a kill before this store leaves the other slot current, which is complete.
        self._numbers[0] += 1

    def _read_directory(self) -> None:
        slot = (int(self._numbers[0]) - 1) % _SLOTS
        start = PAGE + slot * _SLOT_BYTES
        directory = json.loads(self._header[start : start + int(self._numbers[4 + slot])])
        self._layout = {name: (offset, tuple(shape), d) for name, (offset, shape, d) in directory["layout"].items()}
        self.notes = directory["notes"]
