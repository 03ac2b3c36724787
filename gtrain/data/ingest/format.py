"""Format of an edge list: the user's settings, and the columns of a file, detected from its first lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gtrain.data.ingest.blocks import first_lines
from gtrain.errors import ConfigError, DataError

ColumnKey = int | str
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "space": " "}


@dataclass(frozen=True)
class EdgeFormat:
    """Format of an edge list; validates itself.

    Attributes:
        ids: ``int`` (0 .. N-1), ``string`` (any text, numbered in order of first appearance), or ``auto``: detect from
            the first line.
        columns: the columns of source and target, by position from 0 or by name. None means the first two; the third
            of exactly three columns is then the weight.
        weight: column of the weights, or None.
        relation: column of the relations, or None.
        time: column of the times, or None.
        header: whether the first line names the columns; None detects it.
        separator: a character, or ``comma``, ``semicolon``, ``tab``, ``space`` (any run of spaces and tabs); None
            detects it.
        comments: each of these characters starts a comment line.
    """

    ids: str = "auto"
    columns: tuple[ColumnKey, ...] | None = None
    weight: ColumnKey | None = None
    relation: ColumnKey | None = None
    time: ColumnKey | None = None
    header: bool | None = None
    separator: str | None = None
    comments: str = "#%"

    def __post_init__(self) -> None:
        chosen = list(self.chosen.values())
        wrong = [column for column in chosen if not _is_column(column)]
        if wrong or len(chosen) != len(set(chosen)) or (self.columns is not None and len(self.columns) != 2):
            raise ConfigError(
                f"the columns {', '.join(f'{role}={column}' for role, column in self.chosen.items())} are not valid",
                hint="set data.columns to two different columns, by position from 0 or by name, such as [src,dst], and "
                "data.weight, data.relation, data.time to other columns",
            )
        if self.separator is not None and len(self.separator_character or "") != 1:
            raise ConfigError(
                f"data.separator={self.separator!r} is not a separator",
                hint=f"set one character, or one of {', '.join(SEPARATORS)}",
            )
        if not self.comments.isascii():
            raise ConfigError(f"data.comments={self.comments!r} is not ASCII", hint="give ASCII characters, such as #%")

    @property
    def separator_character(self) -> str | None:
        """The separator as one character; None if it is detected from the file."""
        return None if self.separator is None else SEPARATORS.get(self.separator, self.separator)

    @property
    def chosen(self) -> dict[str, ColumnKey]:
        """The columns that were set, by role."""
        ends: dict[str, ColumnKey] = dict(zip(("source", "target"), self.columns or (), strict=False))
        others = {"weight": self.weight, "relation": self.relation, "time": self.time}
        return ends | {role: column for role, column in others.items() if column is not None}

    def roles(self, names: Sequence[str], path: Path, *, by_name: bool) -> dict[str, int]:
        """Return the position of each role's column.

        Args:
            names: the fields of the file's first line, or the names of a Parquet file's columns.
            path: the file, for messages.
            by_name: whether ``names`` are column names, as opposed to values.

        Raises:
            ConfigError: two roles have the same column.
            DataError: the file lacks a column that was set.
        """
        chosen = dict(self.chosen)
        if self.columns is None:
            chosen = {"source": 0, "target": 1, **chosen}
            if not self.chosen and len(names) == 3:
                chosen["weight"] = 2
        positions = {role: _position(role, column, names, path, by_name) for role, column in chosen.items()}
        if len(set(positions.values())) < len(positions):
            raise ConfigError(
                f"{path}: two of {', '.join(f'{role}={key}' for role, key in chosen.items())} are the same column",
                hint="set data.columns, data.weight, data.relation and data.time to different columns",
            )
        return positions


def _is_column(column: object) -> bool:
    return isinstance(column, str) or (isinstance(column, int) and not isinstance(column, bool) and column >= 0)


def _position(role: str, column: ColumnKey, names: Sequence[str], path: Path, by_name: bool) -> int:
    key = "data.columns" if role in ("source", "target") else f"data.{role}"
    if isinstance(column, int):
        if column < len(names):
            return column
        raise DataError(
            f"{path} has {len(names)} columns, but {key} is column {column}, counted from 0",
            hint=f"set {key} to columns below {len(names)}",
        )
    if not by_name:
        raise DataError(
            f"{path} does not name its columns, but {key} is {column!r}",
            hint=f"set {key} by position from 0, or add a first line of column names to the file",
        )
    if column not in names:
        raise DataError(
            f"{path} has no column {column!r}, which {key} names; its columns are {', '.join(names)}",
            hint=f"set {key} to columns of the file",
        )
    return list(names).index(column)


_SOURCES = ("source", "src", "from", "head", "subject", "u", "source_id", "src_id", "from_id", "node1", "id1", "node_1")
_TARGETS = ("target", "dst", "to", "tail", "object", "v", "target_id", "dst_id", "to_id", "node2", "id2", "node_2")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")
_INTEGER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True)
class IdTypes:
    """The types of an edge list's columns. The first file with an edge decides them for all files.

    Attributes:
        ids: type of the node ids, ``int`` or ``string``.
        relation: type of the relations, ``int`` or ``string``; None without relations.
        weight: whether the edges have weights.
    """

    ids: str
    relation: str | None
    weight: bool

    @classmethod
    def detect(cls, ids: str, is_integer: Mapping[str, bool]) -> IdTypes:
        """Return the types, given which roles' columns hold integers; ``ids`` is the setting ``data.ids``."""
        if ids == "auto":
            ids = "int" if is_integer["source"] and is_integer["target"] else "string"
        relation = ("int" if is_integer["relation"] else "string") if "relation" in is_integer else None
        return cls(ids, relation, "weight" in is_integer)


@dataclass(frozen=True)
class TextLayout:
    """The columns of one text file.

    Attributes:
        separator: the character between fields; a space stands for any run of spaces and tabs.
        header: number of the line that names the columns; 0 if no line does.
        num_columns: fields per line.
        roles: column position by role (``source``, ``target``, ``weight``, ``relation``, ``time``).
        id_types: the types of ids and relations.
    """

    separator: str
    header: int
    num_columns: int
    roles: dict[str, int]
    id_types: IdTypes


def text_layout(path: Path, options: EdgeFormat, id_types: IdTypes | None) -> TextLayout | None:
    """Detect the layout of a text file; return None if it holds only comments.

    Args:
        path: the file.
        options: the user's settings.
        id_types: types from an earlier file of the same edge list; None for the first.

    Raises:
        DataError: the first line is not a line of an edge list, or lacks a column that was set.
    """
    lines = first_lines(path, options.comments, 2)
    if not lines:
        return None
    ids = id_types.ids if id_types is not None else options.ids
    separator = options.separator_character or line_separator(lines[0][1], ids)
    number, fields = lines[0][0], split_fields(lines[0][1], separator, f"{path}, line {lines[0][0]}")
    if not options.chosen and len(fields) not in (2, 3):
        raise DataError(
            f"{path}, line {number}: {len(fields)} columns, and 2 or 3 were expected: {lines[0][1].strip()[:60]!r}",
            hint="separate 2 or 3 columns by commas, semicolons, tabs or spaces (or set data.separator), or select "
            "columns: data.columns=[0,1] data.weight=2",
        )
    second = split_fields(lines[1][1], separator, f"{path}, line {lines[1][0]}") if len(lines) > 1 else []
    header = options.header
    if header is None and any(isinstance(column, str) for column in options.chosen.values()):
        header = True
    roles = options.roles(fields, path, by_name=bool(header))
    if header is None:
        header = _is_header(fields, second, roles, ids)
    if id_types is None:
        row = second if header and len(second) == len(fields) else fields
        is_integer = {role: bool(_NUMBER.fullmatch(row[position])) for role, position in roles.items()}
        if "relation" in roles:
            # A relation, unlike a node id, may not be written as 1.0.
            is_integer["relation"] = to_integer(row[roles["relation"]]) is not None
        id_types = IdTypes.detect(options.ids, is_integer)
    id_types = replace(id_types, weight="weight" in roles)
    return TextLayout(separator, number if header else 0, len(fields), roles, id_types)


def split_fields(line: str, separator: str, location: str) -> list[str]:
    """Return the fields of a line, without surrounding blanks and quotes.

    Args:
        line: the line, without its line end.
        separator: the character between fields; a space stands for any run of spaces and tabs.
        location: file and line, for the message.

    Raises:
        DataError: a quoted field contains a quote, or its quote is not closed.
    """
    if separator == " ":
        return re.findall(r"[^ \t]+", line)
    if separator == "\t" or '"' not in line:
        return [field.strip(" \t") for field in line.split(separator)]
    # A field in quotes, or one that does not start with a quote, each with the separator before it. The possessive *+
    # keeps blanks before a quote out of the second form.
    pattern = rf'(?:^|[{separator}])[ \t]*+(?:"([^"]*)"[ \t]*|((?!")[^{separator}]*))(?=[{separator}]|$)'
    cells = list(re.finditer(pattern, line))
    if sum(len(cell[0]) for cell in cells) < len(line):  # a part of the line matches neither form
        raise DataError(
            f"{location}: a quote inside quotes, or one that is not closed: {line.strip()[:60]!r}",
            hint="write each field without quotes or in one pair of quotes, or separate the columns by tabs, where "
            "quotes have no meaning",
        )
    return [cell[1] if cell[2] is None else cell[2].rstrip(" \t") for cell in cells]


def to_integer(field: str) -> int | None:
    """Parse a 64-bit integer; return None if the field is not one."""
    value = int(field) if _INTEGER.fullmatch(field) else None
    return value if value is not None and -(2**63) <= value < 2**63 else None


def to_number(field: str) -> float | None:
    """Parse a number; return None if the field is not one."""
    try:
        return float(field)
    except ValueError:
        return None


def line_separator(line: str, ids: str) -> str:
    """Detect the separator of a line. A tab separates columns of names, but counts as a blank between numbers."""
    numbers = ids == "int" or (ids == "auto" and all(_NUMBER.fullmatch(word) for word in line.split()))
    if "\t" in line.strip() and not numbers:
        return "\t"
    return "," if "," in line else ";" if ";" in line else " "


def _is_header(first: Sequence[str], second: Sequence[str], roles: dict[str, int], ids: str) -> bool:
    ends = [first[roles["source"]], first[roles["target"]]]
    if any(_NUMBER.fullmatch(end) for end in ends):
        return False
    below = [second[roles[end]] for end in ("source", "target")] if len(second) == len(first) else []
    if ids == "int" or (ids == "auto" and below and all(_NUMBER.fullmatch(end) for end in below)):
        return True
    if ends[0].lower() in _SOURCES and ends[1].lower() in _TARGETS:
        return True
    numbers = [roles[role] for role in ("weight", "time") if role in roles]
    return bool(below) and any(to_number(first[at]) is None and to_number(second[at]) is not None for at in numbers)
