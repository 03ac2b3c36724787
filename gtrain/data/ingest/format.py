"""The user's settings for the format of an edge list. Light to import: they are checked before any file is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gtrain.errors import ConfigError, DataError

ColumnKey = int | str
IDS = ("auto", "int", "string")
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
        if self.ids not in IDS:
            raise ConfigError(f"data.ids={self.ids!r} is not a type of ids", hint=f"choose one of {', '.join(IDS)}")
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
