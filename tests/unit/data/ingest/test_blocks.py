"""gtrain.data.ingest: blocks of lines, the fields in them, columns larger than memory."""

from __future__ import annotations

import errno
import gzip
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gtrain.data.batches.loader import prefetched
from gtrain.data.ingest import blocks, columns
from gtrain.data.ingest.blocks import first_lines, read_blocks
from gtrain.data.ingest.columns import Column
from gtrain.data.ingest.lines import LineReader
from gtrain.errors import DataError

# ------------------------------------------------------------------------------------------------------ blocks


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_blocks_hold_whole_lines_and_know_their_numbers(end: str, size: int, tmp_path: Path) -> None:
    lines = ["first", "", "x" * 40, "# é", "last"]
    text = ("\ufeff" + end.join(lines)).encode()  # no line end behind the last line
    (tmp_path / "plain").write_bytes(text)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text[:20]) + gzip.compress(text[20:]))
    for name in ("plain", "packed.gz"):
        found: list[str] = []
        for block in read_blocks(tmp_path / name, size):
            assert block.line == len(found) + 1
            found += block.text.decode().splitlines()
            assert block.line_at(len(block.text)) == len(found) + 1
        assert found == lines


def test_a_file_that_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "e").write_bytes(b"a b\n" + b"x" * 5000)
    monkeypatch.setattr(blocks, "LONGEST_LINE", 4096)
    with pytest.raises(DataError, match=r"e, line 2: the line has more than 4096 bytes(.|\n)*HINT"):
        list(read_blocks(tmp_path / "e", 1000))


def test_first_lines(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("# x\n" * 50_000 + "\n  % y\na b\n\nc d\ne f\n")
    assert first_lines(tmp_path / "e", "#%", 2) == [(50_003, "a b"), (50_005, "c d")]
    assert first_lines(tmp_path / "e", "", 1) == [(1, "# x")]
    (tmp_path / "e").write_text("")
    assert first_lines(tmp_path / "e", "#%", 2) == []


# ------------------------------------------------------------------------------------------------------ fields


def fields_of(path: Path, separator: str, width: int, wanted: list[int]) -> list[list[str]]:
    reader = LineReader(path, separator, 0, width, dict.fromkeys(wanted, pa.string()), "#")
    found: list[list[str]] = []
    for piece in reader.pieces():
        found += [list(row) for row in zip(*(piece.strings(i).to_pylist() for i in range(len(wanted))), strict=True)]
    return found


@pytest.mark.parametrize("separator", [" ", "\t", ",", ";"])
def test_fields_are_those_of_a_plain_split(separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 333)
    draw = random.Random(3)
    rows, text = [], ""
    for _ in range(500):
        row = ["".join(draw.choices("ab0é-_.\x01", k=draw.randint(1, 12))) for _ in range(3)]
        rows.append(row)
        glue = [
            draw.choice([" ", "\t", "  \t "]) if separator == " " else draw.choice(["", " "]) + separator for _ in "ab"
        ]
        text += draw.choice(["", "# a b\n", "  \n"]) + draw.choice(["", " "])
        text += row[0] + glue[0] + row[1] + glue[1] + row[2] + draw.choice(["", " "]) + draw.choice(["\n", "\r\n"])
    (tmp_path / "e").write_bytes(text.encode())
    assert fields_of(tmp_path / "e", separator, 3, [0, 1, 2]) == rows
    assert fields_of(tmp_path / "e", separator, 3, [2, 0]) == [[row[2], row[0]] for row in rows]


def test_quotes(tmp_path: Path) -> None:
    (tmp_path / "e").write_text('"Smith, John" , "b"\na,"c#"\n')
    assert fields_of(tmp_path / "e", ",", 2, [0, 1]) == [["Smith, John", "b"], ["a", "c#"]]
    (tmp_path / "e").write_text('"a"\tb c\n')
    assert fields_of(tmp_path / "e", "\t", 2, [0, 1]) == [['"a"', "b c"]]
    for text in ('a,b\n"a""c",b\n', 'a,b\n"a,b\n'):
        (tmp_path / "e").write_text(text)
        with pytest.raises(DataError, match=r"e, line 2: a quote inside quotes, or one that is not closed"):
            fields_of(tmp_path / "e", ",", 2, [0, 1])


def test_numbers_are_read_as_python_reads_them(tmp_path: Path) -> None:
    words = ["1", "-0.5", "+1.5", "1e-3", "0.1234567890123456789", "7.", ".5", "1e400", "nan", "9007199254740993"]
    (tmp_path / "e").write_text("".join(f"x {word}\n" for word in words))
    (piece,) = LineReader(tmp_path / "e", " ", 0, 2, {0: pa.string(), 1: pa.float64()}, "#").pieces()
    np.testing.assert_array_equal(piece.numbers(1), np.array([float(word) for word in words]))
    words.remove("+1.5")  # which Arrow does not know
    (tmp_path / "e").write_text("x 0\n" + "".join(f"x {word}\n" for word in words))
    (piece,) = LineReader(tmp_path / "e", " ", 0, 2, {0: pa.string(), 1: pa.float64()}, "#").pieces()
    np.testing.assert_array_equal(piece.numbers(1), np.array([0, *(float(word) for word in words)]))
    with pytest.raises(DataError, match="line 8: the weight is inf: 'x 1e400'"):
        piece.finite(1, "weight")


@pytest.mark.parametrize("word", ["", "-", "+", "1a", "0x1", "9223372036854775808", "-9223372036854775809", "1.0", "١"])
def test_what_is_no_integer(word: str, tmp_path: Path) -> None:
    (tmp_path / "e").write_text(f"9223372036854775807,-9223372036854775808\n+5,{word}\n")
    (piece,) = LineReader(tmp_path / "e", ",", 0, 2, {0: pa.int64(), 1: pa.int64()}, "#").pieces()
    with pytest.raises(DataError, match="line 2: .* is not an integer"):
        piece.integers(0, 2)
    assert piece.integers(0, 1).tolist() == [2**63 - 1, 5]


# ----------------------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_a_column_in_memory_and_in_a_file(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "IN_MEMORY", limit)
    monkeypatch.setattr(columns, "CHUNK", 7)
    column = Column(tmp_path / "made", np.int32)
    values = np.arange(100)
    column.append(values[:30])
    column.append(values[30:])
    assert [len(chunk) for chunk in column.chunks()] == [7] * 14 + [2]
    for chunk in column.chunks():
        column.append(chunk + 1000)  # behind what is being read
    assert column.array().tolist() == [*range(100), *range(1000, 1100)] and column.array().dtype == np.int32
    column.append(np.array([2**31]))
    array = column.array()
    assert array.dtype == np.int64 and array.tolist() == [*range(100), *range(1000, 1100), 2**31]
    assert isinstance(array, np.memmap) == (limit == 0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "the file has no name"
    del column
    assert array[-1] == 2**31, "the array outlives the column"


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(columns, "IN_MEMORY", 0)
    monkeypatch.setattr(columns.tempfile, "TemporaryFile", lambda **options: Full())
    with pytest.raises(DataError, match=r"the disk is full: .* of 3 edges(.|\n)*data\.store"):
        Column(tmp_path, np.int32).append(np.arange(3))


def test_reading_ahead_hands_on_items_and_errors() -> None:
    assert list(prefetched(iter(range(10)), 3, "ahead")) == list(range(10))

    def broken():
        yield 1
        raise DataError("broken", hint="mend it")

    items = prefetched(broken(), 3, "ahead")
    assert next(items) == 1
    with pytest.raises(DataError, match="broken"):
        next(items)
