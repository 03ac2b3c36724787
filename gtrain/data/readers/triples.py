"""Read the triples of a knowledge graph from tab-separated text."""

from __future__ import annotations

import gzip
import io
import itertools
import tarfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from gtrain.errors import DataError, unreadable

COLUMNS = ("head", "relation", "tail")
SPLITS = {"train": ("train",), "valid": ("valid", "val", "validation", "dev"), "test": ("test",)}
"""Names of the file of each split, without its ending."""
ENDINGS = ("", ".txt", ".tsv", ".txt.gz", ".tsv.gz", ".gz")
_TAR = (".tar.gz", ".tgz", ".tar")


@dataclass(frozen=True)
class Triples:
    """The triples of one file.

    Attributes:
        where: the file, for messages.
        text: its bytes, decompressed.
        columns: heads, relations and tails: pyarrow chunked arrays of strings, ``[T]`` each.
    """

    where: str
    text: bytes
    columns: tuple[Any, Any, Any]

    def __len__(self) -> int:
        return len(self.columns[0])

    def line(self, row: int) -> int:
        """Return the line number (from 1) of a row (from 0); slow, for messages."""
        return next(itertools.islice(_lines(self.text), row, None))[0]


def is_archive(path: Path) -> bool:
    """Return whether a file is a tar archive, by its name."""
    return path.name.endswith(_TAR)


def split_files(path: Path, needed: Collection[str] = ("train",)) -> dict[str, Path]:
    """Return the file of each split in a folder or its subfolder ``raw``; empty if a needed split is missing."""
    for folder in (path, path / "raw"):
        files = {
            split: folder / (name + ending)
            for split, names in SPLITS.items()
            for name in reversed(names)  # the first name wins
            for ending in reversed(ENDINGS)
            if (folder / (name + ending)).is_file()
        }
        if files.keys() >= set(needed):
            return files
    return {}


def read_file(file: Path) -> Triples:
    """Read the triples of a file."""
    return parse_triples(str(file), decompress(file))


def read_archive(path: Path) -> dict[str, Triples]:
    """Read the triples of each split in a tar archive, in any folder of the archive."""
    known = {name + ending: split for split, names in SPLITS.items() for name in names for ending in ENDINGS}
    triples = {}
    hint = "copy or download the archive again, or unpack it and set data.path to the folder"
    errors = (tarfile.TarError, OSError, EOFError, zlib.error)
    with unreadable(f"{path} cannot be unpacked", hint, *errors), tarfile.open(path) as archive:
        for member in archive:
            split = known.get(Path(member.name).name)
            file = archive.extractfile(member) if split and member.isfile() else None
            if split and file is not None:
                text = gzip.decompress(file.read()) if member.name.endswith(".gz") else file.read()
                triples[split] = parse_triples(f"{path}:{member.name}", text)
    return triples


def decompress(path: Path) -> bytes:
    """Return the bytes of a file, decompressed if its name ends in ``.gz``.

    Raises:
        DataError: the file cannot be decompressed.
    """
    raw = path.read_bytes()
    hint = "copy or download the file again, or remove .gz from its name if it is not compressed"
    with unreadable(f"{path} cannot be read", hint, OSError, EOFError, zlib.error):
        return gzip.decompress(raw) if path.suffix == ".gz" else raw


def parse_triples(where: str, text: bytes) -> Triples:
    """Parse ``head<TAB>relation<TAB>tail`` lines; blank lines are skipped.

    Raises:
        DataError: names the file and the malformed line.
    """
    # Spreadsheets write a byte order mark.
    text = text.removeprefix(b"\xef\xbb\xbf")
    if b"\r" in text:  # count lines like Arrow's reader
        text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if not text.strip():
        raise DataError(f"{where} is empty", hint="give the file one triple in each line: head, relation, tail")
    try:
        table = pa.csv.read_csv(
            io.BytesIO(text),
            read_options=pa.csv.ReadOptions(column_names=COLUMNS),
            parse_options=pa.csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(COLUMNS, pa.string()), null_values=[""], strings_can_be_null=True
            ),
        )
    except pa.ArrowInvalid as err:
        raise _malformed(where, text) from err
    if any(column.null_count for column in table.columns):
        raise _malformed(where, text)
    return Triples(where, text, tuple(table.columns))


def _lines(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and contents of each line that is not empty, as Arrow's reader counts them."""
    for number, line in enumerate(io.BytesIO(text), start=1):
        if line := line.rstrip(b"\r\n"):
            yield number, line


def _malformed(where: str, text: bytes) -> DataError:
    """Return the error for the first malformed line."""
    for number, line in _lines(text):
        fields = line.split(b"\t")
        shown = line[:60].decode(errors="replace")
        if len(fields) != len(COLUMNS):
            return DataError(
                f"{where}, line {number}: {len(fields)} columns, and 3 were expected: {shown!r}",
                hint="give each line a head, a relation and a tail, separated by tabs",
            )
        if not all(fields):
            return DataError(
                f"{where}, line {number}: the {COLUMNS[fields.index(b'')]} is empty: {shown!r}",
                hint="name a head, a relation and a tail in each line",
            )
        try:
            line.decode()
        except UnicodeDecodeError:
            return DataError(
                f"{where}, line {number}: the text is not UTF-8: {shown!r}", hint="save the file as UTF-8 text"
            )
    return DataError(
        f"{where} cannot be read as triples", hint="write plain text: head, relation and tail separated by tabs"
    )
