"""Tensors in memory that several processes of one machine share.

**The memory** is an anonymous file of the kernel (``memfd_create``). Other processes of the same user open it through
``/proc/<creator>/fd/<n>``, and find these numbers in a :class:`SharedDirectory`, which is an anonymous file as well.
Nothing is ever in a file system: the kernel frees the memory when the last process that maps it is gone, even after
``kill -9``. (POSIX shared memory, which ``multiprocessing`` and ``torch`` use, stays in ``/dev/shm`` when its owner is
killed, and is limited by that file system's size, 64 MB in many containers. Passing descriptors over a Unix socket
would need the creator to answer.)

**Lifetime.** Processes attach while the creator lives; attached processes keep the memory when it ends. All see writes
at once, and nothing is locked: the processes must agree on who writes.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gtrain.wire.errors import DeadlineError, WireError
from gtrain.wire.message import DTYPE_NAMES, DTYPES

_ALIGNMENT = 64  # bytes; a cache line, and enough for any vector instruction
_POLL_SECONDS = 0.01
_TensorLayout = list[tuple[str, str, tuple[int, ...], int]]
"""For each tensor its key, dtype, shape and offset in bytes."""


class _AnonymousFile(NamedTuple):
    """An anonymous file of a process.

    Args:
        pid: the process that created it.
        fd: its descriptor in that process.
        token: its name. Process ids and descriptors are reused, tokens are not.
    """

    pid: int
    fd: int
    token: str

    @classmethod
    def create(cls) -> _AnonymousFile:
        """Create a file of this process.

        Raises:
            OSError: the process has no free descriptor.
        """
        token = f"gtrain-{secrets.token_hex(8)}"
        return cls(os.getpid(), os.memfd_create(token, os.MFD_CLOEXEC), token)

    @property
    def _path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"

    def exists(self) -> bool:
        """Whether the creator lives and has the file open."""
        return self._is_at(self._path)

    def _is_at(self, path: str) -> bool:
        try:
            return os.readlink(path).startswith(f"/memfd:{self.token} ")
        except OSError:
            return False

    def open(self, flags: int) -> int | None:
        """Return a descriptor of the file in this process; None if the file is gone.

        Raises:
            WireError: another user created it.
        """
        try:
            descriptor = os.open(self._path, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except PermissionError as err:
            raise WireError(
                "another user created the shared tensors", hint="start all ranks of a machine as one user"
            ) from err
        if self._is_at(f"/proc/self/fd/{descriptor}"):
            return descriptor
        os.close(descriptor)
        return None


class SharedDirectory:
    """The directory in which processes of one user and machine find shared tensors: one line of text for each.

    Attributes:
        name: other processes find the directory by it, as long as its creator lives.
    """

    def __init__(self) -> None:
        file = _AnonymousFile.create()
        self._descriptor, self.name = file.fd, json.dumps(file)

    def close(self) -> None:
        """Remove the directory; attached processes keep their tensors."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SharedTensors(Mapping[str, Tensor]):
    """Named tensors in shared memory: ``shared["x"]`` is the same memory in every process that attached.

    One process calls :meth:`create`, others :meth:`attach`; a forked child inherits its parent's. Tensors stay valid
    after :meth:`close` as long as they are referenced.
    """

    def __init__(self, descriptor: int, layout: _TensorLayout, owner: int | None) -> None:
        self._descriptor, self._owner = descriptor, owner
        self._tensors = _map_tensors(descriptor, layout)

    @classmethod
    def create(
        cls,
        directory: str,
        name: str,
        tensors: Mapping[str, Tensor | tuple[Sequence[int], torch.dtype]],
    ) -> SharedTensors:
        """Create tensors that others can attach to.

        Args:
            directory: name of a :class:`SharedDirectory`.
            name: name for :meth:`attach`.
            tensors: for each key a tensor to copy, or a shape and dtype to fill with zeros.

        Raises:
            WireError: a live process has tensors of this name, the creator of the directory is gone, or the memory
                cannot be allocated.
        """
        entries = _read_directory(directory)
        if entries is None:
            raise WireError(
                "the process that created the directory of shared tensors is gone",
                hint="look into the log of its machine",
            )
        # Entries are never removed; those of processes that have ended do not count.
        if any(entry["name"] == name and _AnonymousFile(*entry["file"]).exists() for entry in entries):
            raise WireError(f"shared tensors {name!r} exist already", hint="use another name, or attach to them")
        layout, nbytes = _plan_layout(tensors)
        try:
            file = _AnonymousFile.create()
            os.ftruncate(file.fd, nbytes)
        except OSError as err:
            raise WireError(
                f"{nbytes:,} bytes of shared memory cannot be allocated: {err.strerror}",
                hint="use smaller tensors, or more memory",
            ) from err
        shared = cls(file.fd, layout, file.pid)
        for key, value in tensors.items():
            if isinstance(value, Tensor):
                shared[key].copy_(value)
        # other processes can attach from here on: the tensors have their values
        _add_entry(directory, {"name": name, "file": file, "layout": layout})
        return shared

    @classmethod
    def attach(cls, directory: str, name: str, timeout_seconds: float = 60.0) -> SharedTensors:
        """Attach to tensors that another process created.

        Args:
            directory: name of the directory that they were created in.
            name: their name.
            timeout_seconds: how long to wait for them.

        Raises:
            DeadlineError: they were not created in time.
            WireError: another user created them.
        """
        deadline = time.monotonic() + timeout_seconds
        while (opened := _open(directory, name)) is None:
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"no live process has shared tensors {name!r} after {timeout_seconds:g} s",
                    hint="look into the log of the process that creates them",
                    peer=name,
                    method="attach",
                    seconds=timeout_seconds,
                )
            time.sleep(_POLL_SECONDS)
        return cls(*opened, None)

    def close(self) -> None:
        """Drop the tensors. If this process created them, no process can attach any more; attached ones keep them."""
        self._tensors = {}
        if self._descriptor >= 0 and self._owner in (None, os.getpid()):
            os.close(self._descriptor)
            self._descriptor = -1

    def __getitem__(self, key: str) -> Tensor:
        """Return the shared tensor of that key."""
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys, in the order of creation."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._tensors)

    def __enter__(self) -> SharedTensors:
        """Return the tensors."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close them."""
        self.close()


def _plan_layout(
    tensors: Mapping[str, Tensor | tuple[Sequence[int], torch.dtype]],
) -> tuple[_TensorLayout, int]:
    """Return the layout of tensors, and their size in bytes: at least one, because mmap refuses empty files."""
    layout: _TensorLayout = []
    end = 0
    for key, value in tensors.items():
        shape, dtype = (value.shape, value.dtype) if isinstance(value, Tensor) else value
        if dtype not in DTYPE_NAMES:
            raise WireError(f"a tensor of {dtype} cannot be shared", hint=f"use one of {', '.join(DTYPES)}")
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        layout.append((key, DTYPE_NAMES[dtype], tuple(shape), offset))
        end = offset + torch.Size(shape).numel() * dtype.itemsize
    return layout, max(end, 1)


def _map_tensors(descriptor: int, layout: _TensorLayout) -> dict[str, Tensor]:
    """Return tensors over a mapping of the file; they keep the mapping alive."""
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    tensors = {}
    for key, dtype_name, shape, offset in layout:
        dtype, count = DTYPES[dtype_name], torch.Size(shape).numel()
        if count:  # frombuffer refuses 0
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        else:
            flat = torch.empty(0, dtype=dtype)
        tensors[key] = flat.view(shape)
    return tensors


def _open(directory: str, name: str) -> tuple[int, _TensorLayout] | None:
    """Return the descriptor and layout of tensors; None if they do not exist or their creator is gone."""
    # The latest entry first: a restarted process creates tensors of the same name again.
    for entry in reversed(_read_directory(directory) or ()):
        if entry["name"] == name and (descriptor := _AnonymousFile(*entry["file"]).open(os.O_RDWR)) is not None:
            return descriptor, [(key, dtype, tuple(shape), offset) for key, dtype, shape, offset in entry["layout"]]
    return None


def _read_directory(directory: str) -> list[dict[str, Any]] | None:
    """Return the entries of a directory; None if its creator is gone."""
    descriptor = _AnonymousFile(*json.loads(directory)).open(os.O_RDONLY)
    if descriptor is None:
        return None
    with open(descriptor) as file:
        # A line without its end is being written.
        return [json.loads(line) for line in file if line.endswith("\n")]


def _add_entry(directory: str, entry: dict[str, Any]) -> None:
    descriptor = _AnonymousFile(*json.loads(directory)).open(os.O_WRONLY | os.O_APPEND)
    if descriptor is not None:
        # One write: lines of two processes do not mix.
        os.write(descriptor, (json.dumps(entry) + "\n").encode())
        os.close(descriptor)
