"""Tensors that several processes of one machine have in the same memory.

**Where the memory is.** In an anonymous file of the kernel (``memfd_create``). Others open it through
``/proc/<creator>/fd/<n>``, and find these numbers in a small file in the job's 0700 folder. So nothing is ever in
``/dev/shm``: when the last process that has the memory is gone, also by ``kill -9``, the kernel frees it, and the small
file goes with the folder. (POSIX shared memory, which ``multiprocessing`` and ``torch`` use, stays in ``/dev/shm`` when
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
from pathlib import Path
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


class SharedTensors(Mapping[str, Tensor]):
    """Named tensors in shared memory: ``shared["x"]`` is the same memory in every process that attached.

    Made by :meth:`create` in one process and :meth:`attach` in others; a forked child has what its parent had. Tensors
    stay valid after :meth:`close` as long as they are referenced.
    """

    def __init__(self, path: Path, descriptor: int, layout: _Layout, owner: int | None) -> None:
        self._path, self._descriptor, self._owner = path, descriptor, owner
        self._tensors = _tensors(descriptor, layout)

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        name: str,
        tensors: Mapping[str, Tensor | tuple[Sequence[int], torch.dtype]],
    ) -> SharedTensors:
        """Make tensors that others can attach to.

        Args:
            folder: the job's private folder, such as ``ipc_folder().path``.
            name: what others attach to.
            tensors: for each name a tensor to copy, or a shape and dtype, which begins as zeros.

        Raises:
            WireError: the name is taken by a process that lives, or the memory cannot be had.
        """
        path = _path(folder, name)
        if path.exists() and _is_open(json.loads(path.read_text())):
            raise WireError(
                f"shared tensors {name!r} exist in {path.parent}", hint="use another name, or attach to them"
            )
        layout, nbytes = _plan(tensors)
        token = f"gtrain-{secrets.token_hex(8)}"
        try:
            descriptor = os.memfd_create(token, os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
        except OSError as err:
            raise WireError(
                f"no {nbytes:,} bytes of shared memory: {err.strerror}", hint="use smaller tensors, or more memory"
            ) from err
        shared = cls(path, descriptor, layout, os.getpid())
        for key, value in tensors.items():
            if isinstance(value, Tensor):
                shared[key].copy_(value)
        content = {"pid": os.getpid(), "fd": descriptor, "token": token, "nbytes": nbytes, "layout": layout}
        temporary = path.with_name(f".{path.name}.{token}")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)  # at once, and after the tensors are filled
        return shared

    @classmethod
    def attach(cls, folder: str | os.PathLike[str], name: str, timeout_seconds: float = 60.0) -> SharedTensors:
        """Find tensors that another process made.

        Args:
            folder: where they were made.
            name: their name.
            timeout_seconds: how long to wait for them.

        Raises:
            DeadlineError: they were not there in time.
            WireError: what describes them is damaged.
        """
        path, deadline = _path(folder, name), time.monotonic() + timeout_seconds
        while (found := _open(path)) is None:
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"no process that lives has shared tensors {name!r} in {path.parent} after {timeout_seconds:g} s",
                    hint="look into the log of the process that makes them",
                    peer=str(path),
                    method="attach",
                    seconds=timeout_seconds,
                )
            time.sleep(_POLL_SECONDS)
        return cls(path, *found, None)

    def close(self) -> None:
        """Let go; if this process made them, nobody can attach any more. Those attached keep the memory."""
        self._tensors = {}
        if self._descriptor >= 0 and self._owner in (None, os.getpid()):
            if self._owner is not None:
                self._path.unlink(missing_ok=True)
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


def _path(folder: str | os.PathLike[str], name: str) -> Path:
    """The file that describes shared tensors."""
    if not name or "/" in name or name.startswith("."):
        raise WireError(f"{name!r} is no name for shared tensors", hint="use letters, digits and dashes")
    return Path(folder) / f"{name}.tensors"


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


def _open(path: Path) -> tuple[int, _Layout] | None:
    """The descriptor and layout that a file describes; None if there is none, or its maker is gone."""
    try:
        content = json.loads(path.read_text())
        if not _is_open(content):
            return None
        descriptor = os.open(_link(content), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise WireError(f"{path} describes no shared tensors: {err}", hint="end processes of an earlier job") from err
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(_target(content)):  # its number was used again
        os.close(descriptor)
        return None
    return descriptor, [(key, dtype, tuple(shape), begin) for key, dtype, shape, begin in content["layout"]]


def _is_open(content: dict[str, Any]) -> bool:
    """Whether the maker lives and has it open: process ids and descriptors are used again, the token is not."""
    try:
        return os.readlink(_link(content)).startswith(_target(content))
    except OSError:
        return False


def _target(content: dict[str, Any]) -> str:
    return f"/memfd:{content['token']} "


def _link(content: dict[str, Any]) -> str:
    return f"/proc/{int(content['pid'])}/fd/{int(content['fd'])}"
