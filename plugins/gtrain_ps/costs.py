"""Cost model: bytes that a step sends, for every placement of a table and both protocols.

Bytes of one worker and step, both directions. Z: entries in its rows; U: distinct ids among them; m: rows; d: width. An
id has 4 bytes, a value v (0 if all values are 1), a number of a product or a gradient w, the length of a row 2. With
P = Pr x Pc servers, Pr blocks of rows by Pc of columns:

=====  =================================================
ship   Pc Z (4 + v) + 2 Pr Pc m + 2 w Pr m d
pull   4 Pc U + 2 w U d
=====  =================================================

With row blocks every server sends all columns of all rows; with column blocks every server receives all entries. A grid
with Pr / Pc near the number of entries per row over the width sends the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gtrain.errors import ConfigError


@dataclass(frozen=True)
class Load:
    """The average demand of one worker and step on a table.

    Attributes:
        entries: Z, entries in the worker's rows.
        unique: U, distinct ids.
        rows: m, rows.
    """

    entries: float
    unique: float
    rows: float


@dataclass(frozen=True)
class Plan:
    """A protocol and the shape of a placement.

    Attributes:
        protocol: ``ship`` or ``pull``.
        row_blocks: Pr.
        column_blocks: Pc.
    """

    protocol: str
    row_blocks: int
    column_blocks: int

    def nbytes(self, load: Load, width: int, value_bytes: int, number_bytes: int) -> float:
        """Return the bytes of one worker and step; see the module."""
        if self.protocol == "pull":
            return load.unique * (4 * self.column_blocks + 2 * number_bytes * width)
        sent = self.column_blocks * load.entries * (4 + value_bytes)
        lengths = 2 * self.row_blocks * self.column_blocks * load.rows
        return sent + lengths + 2 * number_bytes * self.row_blocks * load.rows * width

    def __str__(self) -> str:
        return f"{self.protocol} {self.row_blocks} x {self.column_blocks}"


def grid_shapes(split: str, servers: int, width: int) -> list[tuple[int, int]]:
    """Return the placements (Pr, Pc) of a table with ``width`` columns that ``strategy.split`` allows.

    Raises:
        ConfigError: no placement is possible: the table has too few columns.
    """
    shapes = [(servers // columns, columns) for columns in range(1, servers + 1) if servers % columns == 0]
    allowed = {
        "row": lambda rows, columns: columns == 1,
        "column": lambda rows, columns: rows == 1,
        # Fewer than 4 servers form no grid.
        "grid": lambda rows, columns: servers < 4 or (rows > 1 and columns > 1),
        "auto": lambda rows, columns: True,
    }[split]
    shapes = [shape for shape in shapes if allowed(*shape) and shape[1] <= width]
    if not shapes:
        raise ConfigError(
            f"strategy.split={split} was set with strategy.servers={servers}; a table has {width} columns.",
            hint="set strategy.split=row, or fewer servers"
            + (" (a grid needs a number that is a product of two)." if split == "grid" else "."),
        )
    return shapes


def allowed_plans(protocol: str, split: str, servers: int, width: int) -> list[Plan]:
    """Return every plan that the settings allow."""
    protocols = ("ship", "pull") if protocol == "auto" else (protocol,)
    return [Plan(name, *shape) for name in protocols for shape in grid_shapes(split, servers, width)]


def cheapest(plans: Iterable[Plan], load: Load, width: int, value_bytes: int, number_bytes: int) -> Plan:
    """Return the plan that sends the fewest bytes; of equal plans the first."""
    return min(plans, key=lambda plan: plan.nbytes(load, width, value_bytes, number_bytes))


def cost_table(name: str, plans: list[Plan], load: Load, width: int, value_bytes: int, number_bytes: int) -> str:
    """Return a printable table of the plans and their bytes."""
    chosen = cheapest(plans, load, width, value_bytes, number_bytes)
    lines = [
        f"table {name}: {load.entries:,.0f} entries, {load.unique:,.0f} distinct ids and {load.rows:,.0f} "
        f"rows of {width} columns per worker and step; KiB per worker and step:"
    ]
    for plan in plans:
        mark = "  <- chosen" if plan == chosen else ""
        lines.append(f"  {plan!s:<12}{plan.nbytes(load, width, value_bytes, number_bytes) / 1024:>12,.1f}{mark}")
    return "\n".join(lines)
