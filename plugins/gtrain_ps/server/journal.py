"""The journal: a server's state on disk, as snapshots and a write-ahead log of the requests since the last one.

A record is on disk before its request is acknowledged. A server that has lost its memory, also by a power failure,
therefore loses nothing that was acknowledged. A record that was being written at that moment is incomplete: it is
detected by its checksum and dropped; it was never acknowledged. Each snapshot starts a new log, so that both stay
bounded.

::

    job.json         the job that the state belongs to
    snapshot-<n>     the memory after all records of the logs before <n>
    log-<n>          records: length and CRC-32 (int64 each), and the packed content
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
from gtrain_ps.config import make_folder
from gtrain_ps.packing import pack, prepare, unpack
from gtrain_ps.server.memory import ServerMemory

RECORD_HEAD = struct.Struct("<qq")  # length, checksum
LOG_BYTES = 256 << 20
"""A snapshot is taken when the log is longer than this, and longer than the memory."""


class Journal:
    """The snapshots and logs of one server.

    Args:
        folder: their folder; created if it is missing.
        job: settings that identify the job.
        log_bytes: see :data:`LOG_BYTES`.

    Raises:
        ConfigError: the folder has another job's state.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], log_bytes: int = LOG_BYTES) -> None:
        self._folder, self._limit = folder, log_bytes
        self._number, self._length = 0, 0
        self._region_bytes = 0
        self._log = -1
        self._claim_folder(json.loads(json.dumps(job)))

    # ------------------------------------------------------------------------------------------ recovery

    def load(self, memory: ServerMemory) -> None:
        """Fill empty memory from the last snapshot."""
        numbers = [int(path.name.partition("-")[2]) for path in self._folder.glob("snapshot-*") if path.suffix == ""]
        self._number = max(numbers, default=0)
        if self._number:
            content = torch.from_numpy(np.memmap(self._path("snapshot"), np.uint8, "c"))
            snapshot = unpack(content)
            for name, tensor in snapshot["tensors"].items():
                memory.tensor(name, tuple(tensor.shape), tensor.dtype).copy_(tensor)
            memory.notes, memory.version = snapshot["notes"], snapshot["version"]
            self._region_bytes = content.numel()
        self._remove_older()

    def records(self) -> Iterator[Any]:
        """Yield the records since the snapshot, and then open the log for writing, without an incomplete record."""
        end = 0
        if self._path("log").exists():
            with open(self._path("log"), "rb") as log:
                while (content := _read_record(log)) is not None:
                    end = log.tell()
                    yield unpack(content)
        self._open_log(end)

    # ------------------------------------------------------------------------------------------ writing

    def append(self, value: Any) -> None:
        """Append a record; it is on disk when this returns."""
        content = pack(value).numpy()
        head = RECORD_HEAD.pack(content.nbytes, zlib.crc32(content.data))
        with naming(self._path("log")):
            _write_all(self._log, head)
            _write_all(self._log, content.data)
            os.fdatasync(self._log)
        self._length += len(head) + content.nbytes

    @property
    def snapshot_due(self) -> bool:
        """Whether the log is long enough for a snapshot."""
        return self._length > max(self._limit, self._region_bytes)

    def take_snapshot(self, memory: ServerMemory) -> None:
        """Write a snapshot of the memory, to which all records of the log were applied, and start a new log."""
        packed = prepare({"tensors": memory.tensors, "notes": memory.notes, "version": memory.version})
        part = self._folder / "part"
        with naming(part), open(part, "wb") as file:
            for offset, content in packed.pieces():
                # Zeros up to the alignment of the next tensor.
                file.write(bytes(offset - file.tell()))
                file.write(content)
            file.write(bytes(packed.nbytes - file.tell()))
            file.flush()
            os.fsync(file.fileno())
        self._number += 1
        # The snapshot counts from the rename on; a kill before it leaves the former snapshot and its log.
        part.rename(self._path("snapshot"))
        os.close(self._log)
        self._open_log(0)
        self._region_bytes = packed.nbytes
        self._remove_older()

    def remove(self) -> None:
        """Delete the state of a job that has ended."""
        os.close(self._log)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------ files

    def _claim_folder(self, job: Mapping[str, Any]) -> None:
        """Write the job's settings to the folder, or compare them with those of the job that wrote it."""
        path = self._folder / "job.json"
        make_folder(self._folder, "strategy.folder")
        if not path.exists():
            self._write_job(path, job)
            return
        try:
            previous = json.loads(path.read_text())
        except ValueError:
            # Earlier releases could lose its content, but not its name, when the machine stopped.
            if any(path.stat().st_size for kind in ("snapshot-*", "log-*") for path in self._folder.glob(kind)):
                raise ConfigError(
                    f"{path} is not JSON; it says to which job the server's state in this folder belongs.",
                    hint="delete the folder, and resume from the last checkpoint (ckpt_path=last).",
                ) from None
            self._write_job(path, job)
            return
        different = sorted(key for key in {*previous, *job} if previous.get(key) != job.get(key))
        if different:
            raise ConfigError(
                f"{self._folder} has the state of a job that did not end, with another {different[0]}.",
                hint="use that job's settings, or delete the folder.",
            )

    def _write_job(self, path: Path, job: Mapping[str, Any]) -> None:
        part = self._folder / "part"
        with naming(part), open(part, "w") as file:
            file.write(json.dumps(job))
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}-{self._number}"

    def _open_log(self, length: int) -> None:
        """Open the log for appending behind its first ``length`` bytes; drop the rest."""
        self._log = os.open(self._path("log"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._log, length)
        os.lseek(self._log, length, os.SEEK_SET)
        os.fsync(self._log)
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)  # the names of new files
        os.close(folder)
        self._length = length

    def _remove_older(self) -> None:
        for path in [*self._folder.glob("snapshot-*"), *self._folder.glob("log-*")]:
            if int(path.name.partition("-")[2]) != self._number:
                path.unlink()


def _read_record(log: Any) -> Tensor | None:
    """Return the next record; None at the end, or if the rest is incomplete."""
    head = log.read(RECORD_HEAD.size)
    if len(head) < RECORD_HEAD.size:
        return None
    length, checksum = RECORD_HEAD.unpack(head)
    # A torn head may claim any length, and a tail that was never written is zeros.
    if length <= 0 or length > os.fstat(log.fileno()).st_size - log.tell():
        return None
    content = np.fromfile(log, np.uint8, length)
    return torch.from_numpy(content) if zlib.crc32(content.data) == checksum else None


def _write_all(descriptor: int, content: Any) -> None:
    view = memoryview(content).cast("B")
    while len(view):
        view = view[os.write(descriptor, view) :]
