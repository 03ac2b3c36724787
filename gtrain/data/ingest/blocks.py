"""Read a text file in blocks of whole lines, so that memory does not grow with the file."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gtrain.errors import DataError

BLOCK = 1 << 22
"""Bytes per read; a block with its parsed fields and hashes fits into the CPU caches."""
LONGEST_LINE = 1 << 23
"""Bytes. The dictionary stores the length of a name in 24 bits, so a line and a block must stay below 2^24 bytes."""
_BOM = b"\xef\xbb\xbf"  # the UTF-8 byte order mark, which spreadsheets write


@dataclass(frozen=True)
class Block:
    """Whole lines of a file.

    Attributes:
        path: the file.
        text: the lines, each terminated by LF, CR LF or CR.
        line: number of the first line, from 1.
        read: bytes of the file read so far; for a ``.gz`` file, compressed bytes.
    """

    path: Path
    text: bytes
    line: int
    read: int

    def line_at(self, position: int) -> int:
        """Return the line number of the byte at ``position``."""
        return self.line + _line_ends(self.text, position)

    def lines(self, comments: str, blanks: str = " \t") -> Iterator[tuple[int, str]]:
        """Yield (line number, line) for each line that is neither blank nor a comment.

        Bytes that are not UTF-8 are decoded with ``surrogateescape``.

        Args:
            comments: each of these characters starts a comment line.
            blanks: characters allowed before the comment character.
        """
        for number, raw in enumerate(self.text.splitlines(), start=self.line):
            line = raw.decode(errors="surrogateescape")
            first = line.lstrip(blanks)[:1]
            if first and first not in comments:
                yield number, line


def read_blocks(path: Path, block: int | None = None) -> Iterator[Block]:
    """Yield the lines of a text file, about ``block`` bytes at a time (None: ``BLOCK``); ``.gz`` is decompressed.

    Raises:
        DataError: the file cannot be read or decompressed, or a line is longer than ``LONGEST_LINE``.
    """
    try:
        with path.open("rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            yield from _blocks(path, raw, stream, block or BLOCK)
    except (OSError, EOFError, zlib.error) as err:
        if isinstance(err, OSError) and err.errno is not None:
            raise DataError(
                f"{path} cannot be read: {err.strerror}", hint="check the file and its permissions"
            ) from err
        raise DataError(
            f"{path} cannot be decompressed: {err}",
            hint="copy or download the file again, or remove .gz from its name if it is not compressed",
        ) from err


def _blocks(path: Path, raw: IO[bytes], stream: IO[bytes] | gzip.GzipFile, block: int) -> Iterator[Block]:
    rest, line = stream.read(len(_BOM)).removeprefix(_BOM), 1
    while data := stream.read(block):
        text = rest + data
        end = text.rfind(b"\n") + 1
        if not end:
            # Not the last byte: a CR there may be the first half of a CR LF.
            end = text.rfind(b"\r", 0, len(text) - 1) + 1
        if not end and len(text) > LONGEST_LINE:
            raise DataError(
                f"{path}, line {line}: the line has more than {LONGEST_LINE} bytes",
                hint="give a text file with one edge per line, or a Parquet file",
            )
        rest = text[end:]
        if end:
            yield Block(path, text[:end], line, raw.tell())
            line += _line_ends(text, end)
    if rest:
        yield Block(path, rest if rest.endswith((b"\n", b"\r")) else rest + b"\n", line, raw.tell())


def _line_ends(text: bytes, end: int) -> int:
    """Count the line ends before position ``end``."""
    num_cr = text.count(b"\r", 0, end)
    # CR LF is one line end: it was counted as an LF and as a CR. Most files have no CR, and need no third count.
    alone = num_cr - text.count(b"\r\n", 0, end) if num_cr else 0
    return text.count(b"\n", 0, end) + alone


def first_lines(path: Path, comments: str, count: int) -> list[tuple[int, str]]:
    """Return (line number, line) of the first ``count`` lines that are neither blank nor comments.

    Bytes that are not UTF-8 become U+FFFD, so that messages can print the line.
    """
    lines = (line for block in read_blocks(path, 1 << 16) for line in block.lines(comments))
    return [
        (number, line.encode(errors="surrogateescape").decode(errors="replace"))
        for number, line in itertools.islice(lines, count)
    ]
