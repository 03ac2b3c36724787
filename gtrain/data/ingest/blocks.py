"""Reading a file in blocks that end where a line ends, so that its size does not matter."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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
        text: the lines; LF, CR LF or CR ends them.
        line: number of the first line, from 1.
        read: bytes of the file, packed if it is, that were read so far.
    """

    path: Path
    text: bytes
    line: int
    read: int

    def line_at(self, position: int) -> int:
        """Return the number of the line that a byte is in."""
        return self.line + _line_ends(self.text, position)

    def lines(self, comments: str, blanks: str = " \t") -> Iterator[tuple[int, str]]:
        """Yield number and contents of each line that is neither blank nor a comment; surrogates stand for bytes that
        are not UTF-8.

        Args:
            comments: characters that begin a comment line.
            blanks: characters that may stand in front of them.
        """
        for number, raw in enumerate(self.text.splitlines(), start=self.line):
            line = raw.decode(errors="surrogateescape")
            begin = line.lstrip(blanks)[:1]
            if begin and begin not in comments:
                yield number, line


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
    while data := stream.read(block):
        text = rest + data
        end = text.rfind(b"\n") + 1
        if not end:
            end = text.rfind(b"\r", 0, len(text) - 1) + 1  # a carriage return at the very end may be half a line end
        if not end and len(text) > LONGEST_LINE:
            raise DataError(
                f"{path}, line {line}: the line has more than {LONGEST_LINE} bytes",
                hint="name a text file with one edge in each line, or a Parquet file",
            )
        rest = text[end:]
        if end:
            yield Block(path, text[:end], line, raw.tell())
            line += _line_ends(text, end)
    if rest:
        yield Block(path, rest if rest.endswith((b"\n", b"\r")) else rest + b"\n", line, raw.tell())


def _line_ends(text: bytes, end: int) -> int:
    returns = text.count(b"\r", 0, end)
    return text.count(b"\n", 0, end) + (returns and returns - text.count(b"\r\n", 0, end))


def first_lines(path: Path, comments: str, count: int) -> list[tuple[int, str]]:
    """Return number and contents of the first lines of a file that are neither blank nor comments."""
    lines = (line for block in read_blocks(path, 1 << 16) for line in block.lines(comments))
    return [
        (number, line.encode(errors="surrogateescape").decode(errors="replace"))
        for number, line in itertools.islice(lines, count)
    ]
