"""What a step costs on the wire, for every way to cut a table and both protocols.

Bytes of one worker and step, both directions: Z entries in its rows, U distinct ids among them, m rows, width d; an id
has 4 bytes, a value v of them (0 where all are 1), a number of a product or a gradient w, the length of a row 2. With
P = Pr x Pc servers, Pr blocks of rows by Pc of columns:

=====  =================================================
ship   Pc Z (4 + v) + 2 Pr Pc m + 2 w Pr m d
pull   4 Pc U + 2 w U d
=====  =================================================

Cutting rows makes every server answer with all columns of all rows, cutting columns sends every server all entries: a
grid with Pr / Pc near the entries of a row over its width moves fewest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gtrain.errors import ConfigError


@dataclass(frozen=True)
class Load:
    """What one worker asks of a table in a step, on average.

    Attributes:
        entries: Z.
        unique: U.
        rows: m.
    """

    entries: float
    unique: float
    rows: float


@dataclass(frozen=True)
class Plan:
    """A way to serve a table.

    Attributes:
        protocol: ``ship`` or ``pull``.
        row_blocks: Pr.
        column_blocks: Pc.
    """

    protocol: str
    row_blocks: int
    column_blocks: int

    def nbytes(self, load: Load, width: int, value_bytes: int, number_bytes: int) -> float:
        """Bytes of one worker and step; see the module."""
        if self.protocol == "pull":
            return load.unique * (4 * self.column_blocks + 2 * number_bytes * width)
        sent = self.column_blocks * load.entries * (4 + value_bytes)
        lengths = 2 * self.row_blocks * self.column_blocks * load.rows
        return sent + lengths + 2 * number_bytes * self.row_blocks * load.rows * width

    def __str__(self) -> str:
        return f"{self.protocol} {self.row_blocks} x {self.column_blocks}"


def shapes(split: str, servers: int, width: int) -> list[tuple[int, int]]:
    """The ways to cut a table of ``width`` columns over so many servers, as ``strategy.split`` allows.

    Raises:
        ConfigError: there are not enough columns.
    """
    found = [(servers // columns, columns) for columns in range(1, servers + 1) if servers % columns == 0]
    allowed = {
        "row": lambda rows, columns: columns == 1,
        "column": lambda rows, columns: rows == 1,
        "grid": lambda rows, columns: servers < 4 or (rows > 1 and columns > 1),
        "auto": lambda rows, columns: True,
    }[split]
    found = [shape for shape in found if allowed(*shape) and shape[1] <= width]
    if not found:
        raise ConfigError(
            f"strategy.split={split} was set with strategy.servers={servers}; a table has {width} columns.",
            hint="set strategy.split=row, or fewer servers"
            + (" (a grid needs a number that is a product of two)." if split == "grid" else "."),
        )
    return found


def plans(protocol: str, split: str, servers: int, width: int) -> list[Plan]:
    """Every plan that the settings allow."""
    protocols = ("ship", "pull") if protocol == "auto" else (protocol,)
    return [Plan(name, *shape) for name in protocols for shape in shapes(split, servers, width)]


def choose(allowed: Iterable[Plan], load: Load, width: int, value_bytes: int, number_bytes: int) -> Plan:
    """The plan that moves fewest bytes; of equals the first."""
    return min(allowed, key=lambda plan: plan.nbytes(load, width, value_bytes, number_bytes))


def table(name: str, allowed: list[Plan], load: Load, width: int, value_bytes: int, number_bytes: int) -> str:
    """The plans with their bytes, for people."""
    chosen = choose(allowed, load, width, value_bytes, number_bytes)
    lines = [
        f"table {name}: {load.entries:,.0f} entries, {load.unique:,.0f} different ids, {load.rows:,.0f} rows of "
        f"{width} columns a worker and step; KiB a worker and step:"
    ]
    for plan in allowed:
        mark = "  <- chosen" if plan == chosen else ""
        lines.append(f"  {plan!s:<12}{plan.nbytes(load, width, value_bytes, number_bytes) / 1024:>12,.1f}{mark}")
    return "\n".join(lines)
