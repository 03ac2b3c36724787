"""A graph of events: edges with times."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.compute as pc
import pyarrow.csv
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from gtrain.data.config import TemporalConfig
from gtrain.data.ingest.blocks import first_lines
from gtrain.data.ingest.format import to_number
from gtrain.data.module import EVENTS_OUTLINE, GraphDataModule, file_stamp, log
from gtrain.data.readers.files import Ints, find_file, first_true
from gtrain.data.readers.triples import decompress
from gtrain.errors import ConfigError, DataError


class TemporalData(GraphDataModule[TemporalConfig]):
    """A graph of events, one per line: ``source target time``, optionally with further columns.

    Ids are integers, renumbered in ascending order unless they are 0..N-1, or strings (such as 007), numbered in the
    order of first mention; renumbered ids become names. Events are sorted by time. The class reads CollegeMsg of SNAP
    (``u v unixtime``) as it is, and Wikipedia and Reddit of Kumar et al. 2019 (JODIE; ``user_id,item_id,timestamp,
    state_label,features``) with ``bipartite=True``; ``features="4:"`` also reads the features.

    Its settings are those of :class:`~gtrain.data.config.TemporalConfig`.
    """

    name = "temporal"
    outline = EVENTS_OUTLINE

    def __init__(self, settings: TemporalConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        self._columns = _slice(self.settings.features)

    def identity(self) -> dict[str, Any]:
        """Return the stamp of the file and the options that control how it is read."""
        keys = ("time_column", "time_scale", "features", "bipartite")
        return {"path": file_stamp(self._file), **{key: getattr(self.settings, key) for key in keys}}

    def check_files(self) -> None:
        """Refuse a missing file, and columns that its first event lacks."""
        check_columns(self._file, self.settings.time_column, self._columns)

    def read(self) -> Data:
        """Read the events, number their nodes and sort the events by time."""
        events = read_events(self._file, self.settings.time_column, self._columns)
        edge_index, num_nodes = self._number(events)
        time = self._integer_times(events)
        tensors = {"edge_index": torch.from_numpy(edge_index), "edge_time": torch.from_numpy(time)}
        if events.features is not None:
            tensors["edge_attr"] = torch.from_numpy(events.features)
        if (time[1:] < time[:-1]).any():
            log.info("%s: the events are not in the order of their times; sorting %d events", events.path, len(time))
            order = torch.from_numpy(np.argsort(time, kind="stable"))
            tensors = {
                name: value[:, order] if name == "edge_index" else value[order] for name, value in tensors.items()
            }
        return Data(num_nodes=num_nodes, **tensors)

    @property
    def _file(self) -> Path:
        return find_file("data.path", self.settings.path, self.root)

    def _number(self, events: Events) -> tuple[Ints, int]:
        """Return the numbers of sources and targets ``[2, E]``, and the number of nodes; set the names."""
        if not self.settings.bipartite:
            ends = pa.chunked_array([*events.source.chunks, *events.target.chunks], pa.string())
            numbers, names = _compact(events, ends)
            self._names = {} if names is None else {"node": names}
            return numbers.reshape(2, -1), int(numbers.max()) + 1
        sides: list[Ints] = []
        names_of_sides: list[Any] = []
        for prefix, column in (("source:", events.source), ("target:", events.target)):
            numbers, names = _compact(events, column)
            if names is None:
                # Both sides have a node 0, so that ids alone cannot be names.
                names = pc.cast(pa.array(np.arange(int(numbers.max()) + 1)), pa.string())
            sides.append(numbers + (len(names_of_sides[0]) if names_of_sides else 0))
            names_of_sides.append(pc.binary_join_element_wise(prefix, names, ""))
        self._names = {"node": (names := pa.concat_arrays(names_of_sides))}
        return np.stack(sides), len(names)

    def _integer_times(self, events: Events) -> Ints:
        """Return the times as int64, multiplied by ``time_scale``."""
        scale = self.settings.time_scale
        if events.time.dtype == np.int64 and scale == 1:
            return events.time
        scaled = events.time.astype(np.float64) * scale
        if (row := first_true(np.abs(scaled) >= 2.0**63)) is not None:  # would wrap around
            raise DataError(
                f"{events.where(row)}: the time {events.time[row]} exceeds 64 bits",
                hint="correct the line, or lower data.time_scale",
            )
        whole = np.round(scaled)
        if (row := first_true(np.abs(scaled - whole) > 1e-6 * np.maximum(1, np.abs(scaled)))) is not None:
            raise DataError(
                f"{events.where(row)}: the time {events.time[row]} times data.time_scale={scale:g} is not a whole "
                "number",
                hint="set data.time_scale=1000 to keep thousandths, and so on",
            )
        return whole.astype(np.int64)


def _compact(events: Events, column: Any) -> tuple[Ints, Any]:
    """Number ids 0..N-1. Return the number of each id, and the id of each number as its name.

    The names are None if the ids are 0..N-1 already.
    """
    try:
        ids = pc.cast(column, pa.int64()).to_numpy().copy()
        # Arrow also casts 0x10, and 007 as 7.
        is_decimal = not pc.any(pc.match_substring_regex(column, "^(-0|0.)")).as_py()
    except pa.ArrowInvalid:
        is_decimal = False
    if not is_decimal:
        names = pc.unique(column)
        return pc.index_in(column, value_set=names).to_numpy().astype(np.int64), names
    if (position := first_true(ids < 0)) is not None:
        raise DataError(
            f"{events.where(position % len(events.time))}: the id {ids[position]} is negative",
            hint="number nodes from 0, or give them names",
        )
    distinct, numbers = np.unique(ids, return_inverse=True)
    # Ids are not negative here, so these are 0..N-1.
    if distinct[-1] == len(distinct) - 1:
        return ids, None
    return numbers.astype(np.int64), pc.cast(pa.array(distinct), pa.string())


def _slice(text: str | None) -> slice | None:
    """Return the columns that ``4:`` or ``3:5`` selects."""
    if text is None:
        return None
    parts = str(text).split(":")
    if len(parts) != 2 or not all(part.strip().isdigit() or not part.strip() for part in parts):
        raise ConfigError(
            f"data.features={text!r} is not a slice of columns", hint="set it like '4:' or '3:5', or to null"
        )
    return slice(*(int(part) if part.strip() else None for part in parts))


_COMMENT = re.compile(rb"^[ \t]*[#%][^\n]*\n?", re.MULTILINE)


@dataclass(frozen=True)
class Events:
    """The events of a file.

    Attributes:
        path: the file.
        source: ids as written, a pyarrow array of strings ``[E]``.
        target: likewise.
        time: int64 ``[E]`` if all times are whole numbers, else float64.
        features: float32 ``[E, F]``, or None.
        skipped: 1 if the first line that is not a comment names the columns, else 0.
    """

    path: Path
    source: Any
    target: Any
    time: NDArray[Any]
    features: NDArray[np.float32] | None
    skipped: int

    def where(self, row: int) -> str:
        """Return ``file, line n`` for an event; slow, for messages."""
        return f"{self.path}, line {_line(_text(self.path), row + self.skipped)[0]}"


def read_events(path: Path, time_column: int, features: slice | None) -> Events:
    """Read a file of events, ``source target ... time ...`` on each line.

    Columns are separated by commas, semicolons, tabs or spaces, lines that start with ``#`` or ``%`` are comments, a
    first line of column names is skipped, and ``.gz`` is decompressed.

    Args:
        path: the file.
        time_column: the column of times, counted from 0.
        features: the columns that become features of the edges; None for none.

    Raises:
        ConfigError: the file lacks a column.
        DataError: names the file and the malformed line.
    """
    text = _text(path)
    separator, skipped, width = _layout(text, path)
    columns = _columns(width, time_column, features, path)
    table = _parse(text, separator, width, columns, skipped, path)
    names = [str(column) for column in columns]  # source, target, time, features
    matrix = np.stack([table[name].to_numpy() for name in names[3:]], axis=1) if len(names) > 3 else None
    events = Events(path, table["0"], table["1"], table[names[2]].to_numpy().copy(), matrix, skipped)
    _check(events)
    return events


def check_columns(path: Path, time_column: int, features: slice | None) -> None:
    """Check that the first event has the columns, without reading the rest of the file.

    Raises:
        ConfigError, DataError: see :func:`read_events`.
    """
    text = b"".join(f"{line}\n".encode() for _, line in first_lines(path, "#%", 2))
    _columns(_layout(text, path)[2], time_column, features, path)


def _text(path: Path) -> bytes:
    # Spreadsheets write a byte order mark.
    return decompress(path).removeprefix(b"\xef\xbb\xbf")


def _layout(text: bytes, path: Path) -> tuple[str, int, int]:
    """Return the separator, the number of lines with column names, and the number of columns."""
    first = next(_data_lines(text), None)
    if first is None:
        raise DataError(f"{path} is empty", hint="name a file with one event in each line: source target time")
    separator = _separator(first[1])
    skipped = int(all(to_number(field) is None for field in _split(first[1], separator)))
    second = _line(text, skipped, path)[1] if skipped else first[1]
    return separator, skipped, len(_split(second, separator))


def _separator(line: str) -> str:
    """Return the separator of a line: one that gives three fields, if there is one. Others may be parts of names."""
    for separator in "\t,; ":
        fields = _split(line, separator)
        if len(fields) >= 3 and not any(field.endswith((",", ";")) for field in fields):
            return separator
    return "," if "," in line else ";" if ";" in line else "\t" if "\t" in line else " "


def _data_lines(text: bytes) -> Iterator[tuple[int, str]]:
    """Yield the number and contents of each line that is neither blank nor a comment."""
    for number, raw in enumerate(io.BytesIO(text), start=1):
        line = raw.decode(errors="replace").strip()
        if line and line[0] not in "#%":
            yield number, line


def _line(text: bytes, row: int, path: Path | None = None) -> tuple[int, str]:
    if (line := next(itertools.islice(_data_lines(text), row, None), None)) is None:
        raise DataError(f"{path} has no line below the column names", hint="name a file with one event in each line")
    return line


def _split(line: str, separator: str) -> list[str]:
    return line.split() if separator == " " else [field.strip() for field in line.split(separator)]


def _columns(width: int, time_column: int, features: slice | None, path: Path) -> list[int]:
    """Return the columns to read: source, target, time, then features."""
    if width < 3:
        raise DataError(
            f"{path}: the lines have {width} columns; at least 3 are needed",
            hint="give each line source, target and time, separated by commas, semicolons, tabs or spaces",
        )
    if not 2 <= time_column < width:
        raise ConfigError(
            f"data.time_column={time_column}, and {path} has the columns 0..{width - 1}",
            hint=f"choose 2..{width - 1}; 0 and 1 are source and target",
        )
    chosen = list(range(width))[features] if features is not None else []
    if features is not None and (not chosen or {0, 1} & set(chosen)):
        raise ConfigError(
            f"data.features takes the columns {chosen}, and {path} has the columns 0..{width - 1}",
            hint="set data.features to a slice of the columns after source and target, such as '4:', or to null",
        )
    return [0, 1, time_column, *chosen]


def _parse(text: bytes, separator: str, width: int, columns: list[int], skipped: int, path: Path) -> Any:
    """Return the chosen columns as a pyarrow table, whose columns are named by their positions."""
    types = {"0": pa.string(), "1": pa.string(), **{str(column): pa.float32() for column in columns[3:]}}
    body = _normalise(text, separator)
    # Integers first: float64 would round large times.
    for time_type in (pa.int64(), pa.float64()):
        try:
            return pa.csv.read_csv(
                io.BytesIO(body),
                read_options=pa.csv.ReadOptions(column_names=[str(n) for n in range(width)], skip_rows=skipped),
                parse_options=pa.csv.ParseOptions(delimiter=separator, quote_char=False),
                convert_options=pa.csv.ConvertOptions(
                    column_types={str(columns[2]): time_type, **types},
                    include_columns=list(dict.fromkeys(map(str, columns))),
                    null_values=[],
                    strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as err:
            reason = err
    raise _malformed(text, separator, width, columns, skipped, path) from reason


def _normalise(text: bytes, separator: str) -> bytes:
    """Remove what Arrow's reader cannot skip: comments, and blanks next to the separator."""
    if b"#" in text or b"%" in text:
        text = _COMMENT.sub(b"", text)
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    if separator == " ":
        while b"  " in text:
            text = text.replace(b"  ", b" ")
    elif b" " in text or b"\t" in text:
        blanks = b" *" if separator == "\t" else b"[ \t]*"
        text = re.sub(b"%b([%b\n])%b" % (blanks, separator.encode(), blanks), rb"\1", text)
    return text.replace(b" \n", b"\n").replace(b"\n ", b"\n").strip(b" \n")


def _malformed(text: bytes, separator: str, width: int, columns: list[int], skipped: int, path: Path) -> DataError:
    """Return the error for the first malformed line."""
    for number, line in itertools.islice(_data_lines(text), skipped, None):
        fields = _split(line, separator)
        if len(fields) != width:
            return DataError(
                f"{path}, line {number}: {len(fields)} columns, and the lines before have {width}: {line[:60]!r}",
                hint=f"give the line {width} columns, or put # in front of it if it is a comment",
            )
        if "\N{REPLACEMENT CHARACTER}" in line:
            return DataError(f"{path}, line {number}: the text is not UTF-8: {line[:60]!r}", hint="save it as UTF-8")
        for column in columns[2:]:
            if to_number(fields[column]) is None:
                role = "time" if column == columns[2] else "feature"
                return DataError(
                    f"{path}, line {number}: the {role} {fields[column][:30]!r} in column {column} is not a number",
                    hint="correct the line, or set data.time_column and data.features (columns count from 0)",
                )
    return DataError(f"{path} cannot be read as events", hint="write plain text: source target time in each line")


def _check(events: Events) -> None:
    """Refuse empty ids, and times and features that are not finite."""
    for name, column in (("source", events.source), ("target", events.target)):
        if (row := first_true(pa.compute.equal(column, "").to_numpy())) is not None:
            raise DataError(f"{events.where(row)}: the {name} is empty", hint="name two nodes")
    checks = {"time": ~np.isfinite(events.time)}
    if events.features is not None:
        checks["feature"] = ~np.isfinite(events.features).all(axis=1)
    for name, infinite in checks.items():
        if (row := first_true(infinite)) is not None:
            raise DataError(
                f"{events.where(row)}: the {name} is not finite, as in {int(infinite.sum())} of {len(infinite)} lines",
                hint="correct or delete these lines",
            )
