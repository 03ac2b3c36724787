"""Reading a file in blocks that end where a line ends, so that its size does not matter."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from gtrain.data.ingest.scan import PAD, Bytes
from gtrain.errors import DataError

BLOCK = 1 << 22
"""Bytes read at once; a block with its fields and hashes stays near the caches."""
LONGEST_LINE = 1 << 23
"""Bytes; with a block more it is below 2^24, since the dictionary keeps lengths of names in 24 bits."""
_BOM = b"\xef\xbb\xbf"  # the byte order mark that spreadsheets put in front


@dataclass(frozen=True)
class Block:
    """Whole lines of a file.

    Attributes:
        path: the file.
        data: the bytes, the last of which ends a line, and ``PAD`` more.
        size: bytes without the padding.
        line: number of the first line, from 1.
        read: bytes of the file, packed if it is, that were read so far.
    """

    path: Path
    data: Bytes
    size: int
    line: int
    read: int

    def line_at(self, position: int) -> int:
        """Return the number of the line that a byte is in."""
        return self.line + _line_ends(self.data[:position].tobytes())

    def text_at(self, position: int) -> str:
        """Return the line that begins at a byte, without blanks around it."""
        text = self.data[position : self.size].tobytes()
        return text.splitlines()[0].decode(errors="replace").strip()


def read_blocks(path: Path, block: int | None = None) -> Iterator[Block]:
    """Yield the lines of a text file, ``.gz`` unpacked, about ``block`` bytes at a time (None: ``BLOCK``).

    Raises:
        DataError: the file cannot be read or unpacked, or a line is too long for a line of text.
    """
    try:
        with path.open("rb") as raw, _unpacked(raw, path) as stream:
            yield from _blocks(path, raw, stream, block or BLOCK)
    except (OSError, EOFError, zlib.error) as err:
        if isinstance(err, OSError) and err.errno is not None:
            raise DataError(
                f"{path} cannot be read: {err.strerror}", hint="check the file and its permissions"
            ) from err
        raise DataError(
            f"{path} cannot be unpacked: {err}",
            hint="copy or download the file again, or take .gz off its name if it is not compressed",
        ) from err


def _unpacked(raw: IO[bytes], path: Path) -> contextlib.AbstractContextManager[IO[bytes]]:
    return gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else contextlib.nullcontext(raw)  # type: ignore[return-value]


def _blocks(path: Path, raw: IO[bytes], stream: IO[bytes], block: int) -> Iterator[Block]:
    rest, line = stream.read(len(_BOM)).removeprefix(_BOM), 1
    while True:
        data, size, ended = _fill(stream, rest, len(rest) + block)
        if ended and size and data[size - 1] not in b"\r\n":
            data[size] = ord("\n")
            size += 1
        end = size if ended else _last_line_end(data, size)
        if not end and size > LONGEST_LINE:
            raise DataError(
                f"{path}, line {line}: the line has more than {LONGEST_LINE} bytes",
                hint="name a text file with one edge in each line, or a Parquet file",
            )
        rest = data[end:size].tobytes()
        if end:
            yield Block(path, data, end, line, raw.tell())
            line += _line_ends(data[:end].tobytes())
        if ended:
            return


def _fill(stream: IO[bytes], rest: bytes, wanted: int) -> tuple[Bytes, int, bool]:
    """Return ``rest`` and what follows it, how many bytes that are, and whether the file ends there."""
    data = np.empty(wanted + 1 + PAD, dtype=np.uint8)
    data[: len(rest)] = np.frombuffer(rest, dtype=np.uint8)
    size, view = len(rest), data.data
    while size < wanted:
        count = stream.readinto(view[size:wanted])  # type: ignore[attr-defined]
        if not count:
            return data, size, True
        size += count
    return data, size, False


def _last_line_end(data: Bytes, size: int) -> int:
    """Return where the last complete line ends; 0 where none does."""
    tail = data[max(0, size - 4096) : size].tobytes()
    if b"\n" not in tail:
        tail = data[:size].tobytes()
    found = tail.rfind(b"\n")
    if found < 0:
        found = tail.rfind(b"\r", 0, len(tail) - 1)  # a carriage return at the very end may be half of a line end
    return size - len(tail) + found + 1 if found >= 0 else 0


def _line_ends(text: bytes) -> int:
    ends = text.count(b"\n")
    if b"\r" in text:
        ends += text.count(b"\r") - text.count(b"\r\n")
    return ends


def first_lines(path: Path, comments: bytes, count: int) -> list[tuple[int, str]]:
    """Return number and contents of the first lines of a file that are neither blank nor comments."""
    found: list[tuple[int, str]] = []
    for block in read_blocks(path, 1 << 16):
        lines = io.BytesIO(block.data[: block.size].tobytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
        for number, raw in enumerate(lines, start=block.line):
            shown = raw.strip()
            if shown and shown[:1] not in [comments[i : i + 1] for i in range(len(comments))]:
                found.append((number, raw.rstrip(b"\n").decode(errors="replace")))
                if len(found) == count:
                    return found
    return found
