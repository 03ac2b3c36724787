"""Reading a libsvm file in blocks of lines, and naming the line that is malformed.

Of a file only one block of lines is in memory; entries go to temporary files, from which arrays are mapped.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.data.ingest.columns import Column
from gtrain.errors import DataError

BLOCK_BYTES = 1 << 26
_BOM = b"\xef\xbb\xbf"  # the byte order mark that some editors put in front


@dataclass(frozen=True)
class Rows:
    """The rows of a libsvm file.

    Attributes:
        path: the file.
        labels: the labels of all rows, float64 ``[L]``.
        label_ptr: row r has the labels ``labels[label_ptr[r]:label_ptr[r + 1]]``, int64 ``[N + 1]``.
        ids: feature ids as written, ascending in each row, int64, K of them.
        values: their values, float32, K.
        row_ptr: row r has the features ``row_ptr[r]`` to ``row_ptr[r + 1]``, int64 ``[N + 1]``.
        lowest, highest: of the ids; None without any.
    """

    path: Path
    labels: NDArray[np.float64]
    label_ptr: NDArray[np.int64]
    ids: Column
    values: Column
    row_ptr: NDArray[np.int64]
    lowest: int | None
    highest: int | None

    def __len__(self) -> int:
        return len(self.row_ptr) - 1

    def where(self, row: int) -> str:
        """Return ``file, line n`` of a row; slow, for messages."""
        with _open(self.path) as file:
            if file.read(len(_BOM)) != _BOM:
                file.seek(0)
            return f"{self.path}, line {nth_row(file, row)}"


def read_rows(path: Path, folder: Path) -> Rows:
    """Read a libsvm file, ``label[,label...] id:value id:value ...`` on each line; ``#`` begins a comment.

    Args:
        path: the file.
        folder: where temporary files are made, of 12 bytes an entry.

    Raises:
        DataError: names the file and the line that is malformed, or says that the disk is full.
    """
    ids, values = Column(folder, np.int64), Column(folder, np.float32)
    pieces: list[tuple[NDArray[Any], ...]] = []
    ends: list[tuple[int, int]] = []
    lines = 0
    for text in _blocks(path):
        labels, label_counts, block_ids, block_values, row_counts = _parse(path, text, lines)
        block_ids, block_values = _in_order(path, text, lines, row_counts, block_ids, block_values)
        pieces.append((labels, label_counts, row_counts))
        ids.append(block_ids)
        values.append(block_values)
        if block_ids.size:
            ends.append((int(block_ids.min()), int(block_ids.max())))
        lines += int(np.count_nonzero(text == ord("\n")))
    labels, label_counts, row_counts = (np.concatenate(piece) for piece in zip(*pieces, strict=True))
    if not len(row_counts):
        raise DataError(f"{path} is empty", hint="name a file with one row in each line: label id:value id:value ...")
    lowest, highest = (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (None, None)
    return Rows(path, labels, _pointers(label_counts), ids, values, _pointers(row_counts), lowest, highest)


def _open(path: Path) -> Any:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _blocks(path: Path) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of the file in blocks that end with a line."""
    rest = b""
    try:
        with _open(path) as file:
            rest = file.read(len(_BOM)).removeprefix(_BOM)
            while block := file.read(BLOCK_BYTES):
                head, newline, tail = block.rpartition(b"\n")
                if newline:
                    yield np.frombuffer(rest + head + newline, np.uint8)
                    rest = tail
                else:
                    rest += tail
    except (OSError, EOFError, zlib.error) as err:
        raise DataError(
            f"{path} cannot be read: {err}",
            hint="copy or download the file again, or take .gz off its name if it is not compressed",
        ) from err
    yield np.frombuffer(rest, np.uint8)


def _parse(path: Path, text: NDArray[np.uint8], lines: int) -> tuple[NDArray[Any], ...]:
    """Return labels, labels of each row, ids, values, and features of each row.

    Args:
        path: the file, for messages.
        text: the bytes of some of its lines.
        lines: lines of the file before these.
    """
    from gtrain.data.readers import libsvm_kernel as kernel  # compiled code is for ranks alone, not for what forks them

    most_rows = int(np.count_nonzero(text == ord("\n"))) + 1
    most_features = int(np.count_nonzero(text == ord(":")))
    labels = np.empty(most_rows + int(np.count_nonzero(text == ord(","))))
    label_ptr, row_ptr = np.empty(most_rows + 1, np.int64), np.empty(most_rows + 1, np.int64)
    ids, values = np.empty(most_features, np.int64), np.empty(most_features, np.float32)
    rows, code, at = kernel.parse(text, labels, label_ptr, ids, values, row_ptr)
    if code != kernel.OK:
        raise _malformed(path, text, lines, code, at)
    label_counts, row_counts = np.diff(label_ptr[: rows + 1]), np.diff(row_ptr[: rows + 1])
    return labels[: label_ptr[rows]], label_counts, ids[: row_ptr[rows]], values[: row_ptr[rows]], row_counts


def _malformed(path: Path, text: NDArray[np.uint8], lines: int, code: int, at: int) -> DataError:
    from gtrain.data.readers import libsvm_kernel as kernel

    raw = text.tobytes()
    start = raw.rfind(b"\n", 0, at) + 1
    number = lines + raw.count(b"\n", 0, start) + 1
    line = raw[start : raw.find(b"\n", at) if b"\n" in raw[at:] else len(raw)]
    first = max(raw.rfind(b" ", start, at), raw.rfind(b"\t", start, at), start - 1) + 1
    token = raw[first : start + len(line)].split()[:1]
    shown = (token[0] if token else b"").decode(errors="replace")[:40]
    wrong = {
        kernel.BAD_NUMBER: f"{shown!r} has no number where there should be one",
        kernel.NOT_FINITE: f"{shown!r} is not finite as a 32-bit number",
        kernel.NO_COLON: f"{shown!r} has no colon",
        kernel.QUERY_ID: f"{shown!r} groups rows for ranking, which is not served",
        kernel.BAD_ID: f"{shown!r} has no feature id",
        kernel.NEGATIVE_ID: f"{shown!r} has a negative feature id",
        kernel.LARGE_ID: f"{shown!r} has a feature id above {kernel.LARGEST_ID}, the largest that is served",
    }[code]
    where = f"{path}, line {number}: {wrong}: {line[:60].decode(errors='replace')!r}"
    if code == kernel.LARGE_ID:
        return DataError(where, hint="number the features without gaps, or hash the ids to fewer, such as id % 1048576")
    if code == kernel.QUERY_ID:
        return DataError(where, hint="take these fields out: sed 's/ qid:[0-9]*//' FILE > NEW")
    return DataError(
        where,
        hint="write each line as label id:value id:value ..., with ids that are whole numbers and finite values",
    )


def _pointers(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _in_order(
    path: Path, text: NDArray[np.uint8], lines: int, counts: NDArray[Any], ids: NDArray[Any], values: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sort the features of each row of a block by id, and refuse an id that a row has twice."""
    row_of = np.repeat(np.arange(len(counts)), counts)
    inside = row_of[1:] == row_of[:-1]
    if (inside & (ids[1:] < ids[:-1])).any():
        order = np.lexsort((ids, row_of))
        ids, values = ids[order], values[order]
    twice = inside & (ids[1:] == ids[:-1])
    if twice.any():
        at = int(twice.argmax())
        number = nth_row(text.tobytes().split(b"\n"), int(row_of[at]))
        raise DataError(
            f"{path}, line {lines + number}: the feature {ids[at]} occurs twice",
            hint="give each feature of a row one value",
        )
    return ids, values


def nth_row(lines: Iterable[bytes], row: int) -> int:
    """Return the number of the line, counted from 1, that holds a row."""
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip(b" \t").startswith(b"#"):
            if row == 0:
                return number
            row -= 1
    raise IndexError(row)
