"""A server's state on disk: a snapshot now and then, and a log of what was done since.

A record is on the disk before anybody is told of it. So when a server has lost its memory, and the machine its power,
nothing is lost that was acknowledged. A record that was being written then is incomplete, which its checksum tells, and
nobody was told of it. With each snapshot the log begins anew, so that both stay bounded.

::

    job.json         what the state is of
    snapshot-<n>     the region after all that the logs before <n> say
    log-<n>          records: length and checksum (int64 each), and the packed content
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.errors import ConfigError, naming
from gtrain_ps.folders import make_folder
from gtrain_ps.packing import Packed, pack, prepare, unpack
from gtrain_ps.server.memory import Region

HEAD = struct.Struct("<qq")
LOG_BYTES = 256 << 20
"""A log is cut when it is longer than this, and than the region."""


class Journal:
    """The snapshots and logs of one server.

    Args:
        folder: where they are; made if it is not there.
        job: what tells this job from others.
        log_bytes: see :data:`LOG_BYTES`.

    Raises:
        ConfigError: the folder has another job's state.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], log_bytes: int = LOG_BYTES) -> None:
        self._folder, self._limit = folder, log_bytes
        self._number, self._length = 0, 0
        self._region_bytes = 0
        self._log = -1
        self._claim(json.loads(json.dumps(job)))

    # ------------------------------------------------------------------------------------------ coming back

    def load(self, region: Region) -> None:
        """Give a new region what the last snapshot has."""
        numbers = [int(path.name.partition("-")[2]) for path in self._folder.glob("snapshot-*") if path.suffix == ""]
        self._number = max(numbers, default=0)
        if self._number:
            room = torch.from_numpy(np.memmap(self._path("snapshot"), np.uint8, "c"))
            found = unpack(room)
            for name, tensor in found["tensors"].items():
                region.tensor(name, tuple(tensor.shape), tensor.dtype).copy_(tensor)
            region.notes, region.version = found["notes"], found["version"]
            self._region_bytes = room.numel()
        self._remove_older()

    def records(self) -> Iterator[Any]:
        """What was done since the snapshot, one after the other; what is incomplete at the end is cut off."""
        end = 0
        if self._path("log").exists():
            with open(self._path("log"), "rb") as log:
                while (content := _read_record(log)) is not None:
                    end = log.tell()
                    yield unpack(content)
        self._log = os.open(self._path("log"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._log, end)
        os.lseek(self._log, end, os.SEEK_SET)
        os.fsync(self._log)
        _sync_folder(self._folder)
        self._length = end

    # ------------------------------------------------------------------------------------------ going on

    def append(self, value: Any) -> None:
        """Have a record on the disk when this returns."""
        content = pack(value).numpy()
        head = HEAD.pack(content.nbytes, zlib.crc32(content.data))
        with naming(self._path("log")):
            _write_all(self._log, head)
            _write_all(self._log, content.data)
            os.fdatasync(self._log)
        self._length += len(head) + content.nbytes

    @property
    def due(self) -> bool:
        """Whether the log is long enough for a snapshot to be worth it."""
        return self._length > max(self._limit, self._region_bytes)

    def cut(self, region: Region) -> None:
        """Take a snapshot, of all that the log says, and begin a new log."""
        packed = prepare({"tensors": region.tensors, "notes": region.notes, "version": region.version})
        part = self._folder / "part"
        with naming(part), open(part, "wb") as file:
            _write_packed(file, packed)
            file.flush()
            os.fsync(file.fileno())
        self._number += 1
        part.rename(self._path("snapshot"))
        os.close(self._log)
        self._log = os.open(self._path("log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        _sync_folder(self._folder)
        self._length, self._region_bytes = 0, packed.nbytes
        self._remove_older()

    def remove(self) -> None:
        """The job has come to its end: nothing needs to be found again."""
        os.close(self._log)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------ inside

    def _claim(self, job: Mapping[str, Any]) -> None:
        told = self._folder / "job.json"
        make_folder(self._folder, "strategy.folder")
        if not told.exists():
            part = self._folder / "part"
            part.write_text(json.dumps(job))
            part.rename(told)
            return
        found = json.loads(told.read_text())
        different = sorted(key for key in {*found, *job} if found.get(key) != job.get(key))
        if different:
            raise ConfigError(
                f"{self._folder} has the state of a job that did not come to its end, with another {different[0]}.",
                hint="go on with that job's settings, or delete the folder.",
            )

    def _path(self, kind: str) -> Path:
        return self._folder / f"{kind}-{self._number}"

    def _remove_older(self) -> None:
        for path in [*self._folder.glob("snapshot-*"), *self._folder.glob("log-*")]:
            if int(path.name.partition("-")[2]) != self._number:
                path.unlink()


def _read_record(log: Any) -> Tensor | None:
    """The next record; None at the end, or where the rest is not whole."""
    head = log.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    length, checksum = HEAD.unpack(head)
    if length < 0 or length > os.fstat(log.fileno()).st_size - log.tell():
        return None
    content = np.fromfile(log, np.uint8, length)
    return torch.from_numpy(content) if zlib.crc32(content.data) == checksum else None


def _write_packed(file: Any, packed: Packed) -> None:
    """Write what :meth:`Packed.write` would, tensor by tensor."""
    for begin, content in packed.pieces():
        file.write(bytes(begin - file.tell()))
        file.write(content)
    file.write(bytes(packed.nbytes - file.tell()))


def _write_all(descriptor: int, content: Any) -> None:
    view = memoryview(content).cast("B")
    while len(view):
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
