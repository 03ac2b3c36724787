"""What a user may set about how an edge list is written; light, since it is checked before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gtrain.errors import ConfigError, DataError

Column = int | str
IDS = ("auto", "int", "string")
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "space": " "}


@dataclass(frozen=True)
class EdgeFormat:
    """How an edge list is written; checks itself.

    Attributes:
        ids: ``int`` (0 .. N-1), ``string`` (anything, numbered in order of first appearance), or ``auto``: what the
            ids in the first line look like.
        columns: the columns of source and target, by position from 0 or by name; None means the first two, and a third
            column, if there is no fourth, is the weight.
        weight: column of the weights; None without.
        relation: column of the relations; None without.
        time: column of the times; None without.
        header: whether the first line names the columns; None finds out.
        separator: a character, or ``comma``, ``semicolon``, ``tab``, ``space`` (any run of spaces and tabs); None
            finds out.
        comments: characters that begin a comment line.
    """

    ids: str = "auto"
    columns: tuple[Column, ...] | None = None
    weight: Column | None = None
    relation: Column | None = None
    time: Column | None = None
    header: bool | None = None
    separator: str | None = None
    comments: str = "#%"

    def __post_init__(self) -> None:
        if self.ids not in IDS:
            raise ConfigError(f"data.ids={self.ids!r} is no kind of ids", hint=f"choose one of {', '.join(IDS)}")
        chosen = list(self.chosen.values())
        wrong = [column for column in chosen if not _is_column(column)]
        if wrong or len(chosen) != len(set(chosen)) or (self.columns is not None and len(self.columns) != 2):
            raise ConfigError(
                f"the columns {', '.join(f'{role}={column}' for role, column in self.chosen.items())} cannot be",
                hint="give data.columns two different columns, by position from 0 or by name, such as [src,dst], and "
                "data.weight, data.relation, data.time further ones",
            )
        if self.separator is not None and len(self.separator_character or "") != 1:
            raise ConfigError(
                f"data.separator={self.separator!r} is no separator",
                hint=f"give one character, or one of {', '.join(SEPARATORS)}",
            )
        if not self.comments.isascii():
            raise ConfigError(f"data.comments={self.comments!r} is not ASCII", hint="give ASCII characters, such as #%")

    @property
    def separator_character(self) -> str | None:
        """The separator as one character; None where the file decides."""
        return None if self.separator is None else SEPARATORS.get(self.separator, self.separator)

    @property
    def chosen(self) -> dict[str, Column]:
        """The columns that were set, by role."""
        ends: dict[str, Column] = dict(zip(("source", "target"), self.columns or (), strict=False))
        others = {"weight": self.weight, "relation": self.relation, "time": self.time}
        return ends | {role: column for role, column in others.items() if column is not None}

    def roles(self, names: Sequence[str], path: Path, *, by_name: bool) -> dict[str, int]:
        """Return the position of each role's column.

        Args:
            names: the columns of the file; text without a header has only their number.
            path: the file, for messages.
            by_name: whether ``names`` are names.

        Raises:
            DataError: the file has no such column.
        """
        chosen = dict(self.chosen)
        if self.columns is None:
            chosen = {"source": 0, "target": 1, **chosen}
            if not self.chosen and len(names) == 3:
                chosen["weight"] = 2
        places = {role: _place(role, column, names, path, by_name) for role, column in chosen.items()}
        if len(set(places.values())) < len(places):
            described = ", ".join(f"{role}={chosen[role]}" for role in places)
            raise ConfigError(
                f"{path}: two of {described} are the same column",
                hint="give each of data.columns, data.weight, data.relation and data.time a column of its own",
            )
        return places


def _is_column(column: object) -> bool:
    return isinstance(column, str) or (isinstance(column, int) and not isinstance(column, bool) and column >= 0)


def _place(role: str, column: Column, names: Sequence[str], path: Path, by_name: bool) -> int:
    key = "data.columns" if role in ("source", "target") else f"data.{role}"
    if isinstance(column, int):
        if column < len(names):
            return column
        raise DataError(
            f"{path} has {len(names)} columns, and {key} asks for column {column}, counted from 0",
            hint=f"set {key} to columns below {len(names)}",
        )
    if not by_name:
        raise DataError(
            f"{path} does not name its columns, and {key} asks for {column!r}",
            hint=f"set {key} by position from 0, or put a line of names first",
        )
    if column not in names:
        raise DataError(
            f"{path} has no column {column!r}, which {key} asks for; its columns are {', '.join(names)}",
            hint=f"set {key} to columns of the file",
        )
    return list(names).index(column)
