"""What the columns of an edge list are: what was set, completed from the first line of the file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gtrain.data.ingest.blocks import first_lines
from gtrain.data.ingest.format import EdgeFormat
from gtrain.errors import DataError

_SOURCES = ("source", "src", "from", "head", "subject", "u", "source_id", "src_id", "from_id", "node1", "id1", "node_1")
_TARGETS = ("target", "dst", "to", "tail", "object", "v", "target_id", "dst_id", "to_id", "node2", "id2", "node_2")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")
_INTEGER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True)
class Kinds:
    """What the first file of a list settles for all of it: ``int`` or ``string`` ids and relations."""

    ids: str
    relation: str | None
    weight: bool


@dataclass(frozen=True)
class TextLayout:
    """The columns of one text file.

    Attributes:
        separator: the character between fields; a space stands for any run of spaces and tabs.
        header: number of the line that names the columns; 0 without.
        num_columns: fields of each line.
        roles: position of each role's column.
        kinds: what ids and relations are.
    """

    separator: str
    header: int
    num_columns: int
    roles: dict[str, int]
    kinds: Kinds


def text_layout(path: Path, options: EdgeFormat, kinds: Kinds | None) -> TextLayout | None:
    """Find out the layout of a text file; None where it has no lines other than comments.

    Args:
        path: the file.
        options: what was set.
        kinds: what an earlier file of the same list has settled.

    Raises:
        DataError: the first line cannot be one of an edge list, or has no such column.
    """
    lines = first_lines(path, options.comments, 2)
    if not lines:
        return None
    ids = kinds.ids if kinds is not None else options.ids
    separator = options.separator_character or line_separator(lines[0][1], ids)
    number, fields = lines[0][0], split_fields(lines[0][1], separator, f"{path}, line {lines[0][0]}")
    if not options.chosen and len(fields) not in (2, 3):
        raise DataError(
            f"{path}, line {number}: {len(fields)} columns, and 2 or 3 were expected: {lines[0][1].strip()[:60]!r}",
            hint="separate 2 or 3 columns by commas, semicolons, tabs or spaces (or set data.separator), or name the "
            "ones to take: data.columns=[0,1] data.weight=2",
        )
    second = split_fields(lines[1][1], separator, f"{path}, line {lines[1][0]}") if len(lines) > 1 else []
    named = any(isinstance(column, str) for column in options.chosen.values())
    header = options.header
    if header is None and named:
        header = True
    roles = options.roles(fields, path, by_name=bool(header))
    if header is None:
        header = _is_header(fields, second, roles, ids)
    row = second if header and len(second) == len(fields) else fields
    kinds = _kinds(row, roles, options.ids) if kinds is None else replace(kinds, weight="weight" in roles)
    return TextLayout(separator, number if header else 0, len(fields), roles, kinds)


def split_fields(line: str, separator: str, place: str) -> list[str]:
    """Return the fields of a line, without blanks and quotes around them.

    Args:
        line: the line, without its end.
        separator: the character between fields; a space stands for any run of spaces and tabs.
        place: file and line, for the message.

    Raises:
        DataError: a quote stands inside quotes, or is not closed.
    """
    if separator == " ":
        return re.findall(r"[^ \t]+", line)
    if separator == "\t" or '"' not in line:
        return [field.strip(" \t") for field in line.split(separator)]
    pattern = rf'(?:^|[{separator}])[ \t]*+(?:"([^"]*)"[ \t]*|((?!")[^{separator}]*))(?=[{separator}]|$)'
    cells = list(re.finditer(pattern, line))
    if sum(len(cell[0]) for cell in cells) < len(line):
        raise DataError(
            f"{place}: a quote inside quotes, or one that is not closed: {line.strip()[:60]!r}",
            hint="write each field plainly or in one pair of quotes, or separate the columns by tabs, where "
            "quotes have no meaning",
        )
    return [cell[1] if cell[2] is None else cell[2].rstrip(" \t") for cell in cells]


def to_integer(field: str) -> int | None:
    """Return the integer of 64 bits that a field spells; None where it spells none."""
    value = int(field) if _INTEGER.fullmatch(field) else None
    return value if value is not None and -(2**63) <= value < 2**63 else None


def to_number(field: str) -> float | None:
    """Return the number that a field spells; None where it spells none."""
    try:
        return float(field)
    except ValueError:
        return None


def line_separator(line: str, ids: str) -> str:
    """Return the separator of a line; tabs separate names that hold blanks, but are blanks between numbers."""
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


def _kinds(row: Sequence[str], roles: dict[str, int], ids: str) -> Kinds:
    if ids == "auto":
        numbers = all(_NUMBER.fullmatch(row[roles[end]]) for end in ("source", "target"))
        ids = "int" if numbers else "string"
    relation = None
    if "relation" in roles:
        relation = "string" if to_integer(row[roles["relation"]]) is None else "int"
    return Kinds(ids, relation, "weight" in roles)
