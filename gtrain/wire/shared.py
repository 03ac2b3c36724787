"""Tensors that several processes of one machine have in the same memory.

**Where the memory is.** In an anonymous file of the kernel (``memfd_create``). Others open it through
``/proc/<creator>/fd/<n>``, and find these numbers in a :class:`SharedDirectory`, an anonymous file as well. So nothing
is ever in a file system: when the last process that has the memory is gone, also by ``kill -9``, the kernel frees it.
(POSIX shared memory, which ``multiprocessing`` and ``torch`` use, stays in ``/dev/shm`` when
its owner is killed, and is limited by that file system's size, 64 MB in many containers. Passing descriptors over a
unix socket would need the creator to answer.) Only processes of the same user can open it.

**Who may come when.** Processes attach while the creator lives; those attached keep the memory when it ends. Writes are
seen by all at once, and nothing is locked: who writes what has to be agreed on otherwise.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from gtrain.wire.errors import DeadlineError, WireError
from gtrain.wire.message import DTYPES

_ALIGNMENT = 64  # bytes; a cache line, and enough for any vector instruction
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_POLL_SECONDS = 0.01
_Layout = list[tuple[str, str, tuple[int, ...], int]]


class SharedDirectory:
    """Where processes of one user and machine find each other's shared tensors: a line of text for each.

    Attributes:
        name: by which other processes find it as long as this one lives.
    """

    def __init__(self) -> None:
        token = _token()
        self._descriptor = os.memfd_create(token, os.MFD_CLOEXEC)
        self.name = f"{os.getpid()} {self._descriptor} {token}"

    def close(self) -> None:
        """Let go; nothing more is found in it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SharedTensors(Mapping[str, Tensor]):
    """Named tensors in shared memory: ``shared["x"]`` is the same memory in every process that attached.

    Made by :meth:`create` in one process and :meth:`attach` in others; a forked child has what its parent had. Tensors
    stay valid after :meth:`close` as long as they are referenced.
    """

    def __init__(self, descriptor: int, layout: _Layout, owner: int | None) -> None:
        self._descriptor, self._owner = descriptor, owner
        self._tensors = _tensors(descriptor, layout)

    @classmethod
    def create(
        cls,
        directory: str,
        name: str,
        tensors: Mapping[str, Tensor | tuple[Sequence[int], torch.dtype]],
    ) -> SharedTensors:
        """Make tensors that others can attach to.

        Args:
            directory: name of a :class:`SharedDirectory`.
            name: what others attach to.
            tensors: for each name a tensor to copy, or a shape and dtype, which begins as zeros.

        Raises:
            WireError: the name is taken by a process that lives, the maker of the directory is gone, or the memory
                cannot be had.
        """
        found = _lines(directory)
        if found is None:
            raise WireError(
                "the process that made the directory of shared tensors is gone", hint="look into the log of its machine"
            )
        if any(line["name"] == name and _is_open(line) for line in found):
            raise WireError(f"shared tensors {name!r} are there already", hint="use another name, or attach to them")
        layout, nbytes = _plan(tensors)
        token = _token()
        try:
            descriptor = os.memfd_create(token, os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
        except OSError as err:
            raise WireError(
                f"no {nbytes:,} bytes of shared memory: {err.strerror}", hint="use smaller tensors, or more memory"
            ) from err
        shared = cls(descriptor, layout, os.getpid())
        for key, value in tensors.items():
            if isinstance(value, Tensor):
                shared[key].copy_(value)
        _add_line(directory, {"name": name, "pid": os.getpid(), "fd": descriptor, "token": token, "layout": layout})
        return shared  # others find it from now on, when the tensors are filled

    @classmethod
    def attach(cls, directory: str, name: str, timeout_seconds: float = 60.0) -> SharedTensors:
        """Find tensors that another process made.

        Args:
            directory: where they were made.
            name: their name.
            timeout_seconds: how long to wait for them.

        Raises:
            DeadlineError: they were not there in time.
            WireError: they are of another user.
        """
        deadline = time.monotonic() + timeout_seconds
        while (found := _open(directory, name)) is None:
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"no process that lives has shared tensors {name!r} after {timeout_seconds:g} s",
                    hint="look into the log of the process that makes them",
                    peer=name,
                    method="attach",
                    seconds=timeout_seconds,
                )
            time.sleep(_POLL_SECONDS)
        return cls(*found, None)

    def close(self) -> None:
        """Let go; if this process made them, nobody can attach any more. Those attached keep the memory."""
        self._tensors = {}
        if self._descriptor >= 0 and self._owner in (None, os.getpid()):
            os.close(self._descriptor)
            self._descriptor = -1

    def __getitem__(self, key: str) -> Tensor:
        """The tensor of that name, shared."""
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        """Names, in the order of their making."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._tensors)

    def __enter__(self) -> SharedTensors:
        """The tensors themselves."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _plan(tensors: Mapping[str, Tensor | tuple[Sequence[int], torch.dtype]]) -> tuple[_Layout, int]:
    """Where each tensor begins, and bytes in all (at least one: nothing cannot be mapped)."""
    layout: _Layout = []
    end = 0
    for key, value in tensors.items():
        shape, dtype = (value.shape, value.dtype) if isinstance(value, Tensor) else value
        if dtype not in _NAMES:
            raise WireError(f"a tensor of {dtype} cannot be shared", hint="use a plain dtype")
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        layout.append((key, _NAMES[dtype], tuple(shape), begin))
        end = begin + torch.Size(shape).numel() * dtype.itemsize
    return layout, max(end, 1)


def _tensors(descriptor: int, layout: _Layout) -> dict[str, Tensor]:
    """Tensors over a mapping of the file; they keep the mapping."""
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    tensors = {}
    for key, dtype_name, shape, begin in layout:
        dtype, count = DTYPES[dtype_name], torch.Size(shape).numel()
        flat = (
            torch.frombuffer(memory, dtype=dtype, count=count, offset=begin) if count else torch.empty(0, dtype=dtype)
        )
        tensors[key] = flat.view(shape)
    return tensors


def _open(directory: str, name: str) -> tuple[int, _Layout] | None:
    """The descriptor and layout of tensors; None if there are none, or their maker is gone."""
    for line in reversed(_lines(directory) or ()):
        if line["name"] == name and (descriptor := _opened(line, os.O_RDWR)) is not None:
            return descriptor, [(key, dtype, tuple(shape), begin) for key, dtype, shape, begin in line["layout"]]
    return None


def _lines(directory: str) -> list[dict[str, Any]] | None:
    """What is in a directory; None where its maker is gone."""
    descriptor = _opened(_place(directory), os.O_RDONLY)
    if descriptor is None:
        return None
    with open(descriptor) as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def _add_line(directory: str, line: dict[str, Any]) -> None:
    descriptor = _opened(_place(directory), os.O_WRONLY | os.O_APPEND)
    if descriptor is not None:
        os.write(descriptor, (json.dumps(line) + "\n").encode())  # at once: lines of two processes do not mix
        os.close(descriptor)


def _place(directory: str) -> dict[str, Any]:
    pid, descriptor, token = directory.split()
    return {"pid": int(pid), "fd": int(descriptor), "token": token}


def _opened(place: dict[str, Any], flags: int) -> int | None:
    """Another process's anonymous file; None where it is gone, whoever has its numbers now.

    Raises:
        WireError: it is of another user.
    """
    try:
        descriptor = os.open(_link(place), flags | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError as err:
        raise WireError("shared tensors are of another user", hint="start all ranks of a machine as one user") from err
    if os.readlink(f"/proc/self/fd/{descriptor}").startswith(_target(place)):
        return descriptor
    os.close(descriptor)
    return None


def _is_open(place: dict[str, Any]) -> bool:
    """Whether the maker lives and has it open: process ids and descriptors are used again, the token is not."""
    try:
        return os.readlink(_link(place)).startswith(_target(place))
    except OSError:
        return False


def _token() -> str:
    return f"gtrain-{secrets.token_hex(8)}"


def _target(place: dict[str, Any]) -> str:
    return f"/memfd:{place['token']} "


def _link(place: dict[str, Any]) -> str:
    return f"/proc/{place['pid']}/fd/{place['fd']}"
