"""Which rows and columns of a table each server keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.nn import TableSpec

GOLDEN = (math.sqrt(5) - 1) / 2
MOST_ROWS = (1 << 31) - 1


@dataclass(frozen=True)
class Placement:
    """A table cut into ``row_blocks`` x ``column_blocks`` blocks; server ``i * column_blocks + j`` keeps block (i, j).

    Row blocks are ranges of ``height`` rows of a permuted numbering: id ``r`` has the number ``r * multiplier mod n``.
    With the multiplier 1 they are ranges of ids. Else it is near n times the golden ratio, and coprime to n: ids that
    follow each other are then spread evenly over all blocks (the three-distance theorem; Knuth, TAOCP 3, 6.4), so that
    blocks have equal shares of a Zipf distribution whose frequent ids are the first ones.

    Attributes:
        rows: n.
        dim: d.
        row_blocks: ranges of rows.
        column_blocks: ranges of columns.
        multiplier: of the numbering.
    """

    rows: int
    dim: int
    row_blocks: int
    column_blocks: int
    multiplier: int = 1

    def __post_init__(self) -> None:
        if self.rows > MOST_ROWS:
            raise ConfigError(
                f"a table has {self.rows} rows, and strategy=ps numbers at most {MOST_ROWS}.",
                hint="hash the features into fewer buckets.",
            )

    @property
    def servers(self) -> int:
        """Number of blocks."""
        return self.row_blocks * self.column_blocks

    @property
    def height(self) -> int:
        """Rows of a block; the last blocks may have fewer."""
        return max(1, -(-self.rows // self.row_blocks))

    def block_rows(self, block: int) -> int:
        """Rows of a row block."""
        return max(0, min(self.height, self.rows - block * self.height))

    def columns(self, block: int) -> tuple[int, int]:
        """First column of a column block, and the first behind it."""
        return block * self.dim // self.column_blocks, (block + 1) * self.dim // self.column_blocks

    def ids(self, block: int, begin: int, end: int) -> Tensor:
        """The ids of rows ``begin`` to ``end`` of a row block, int64."""
        numbers = torch.arange(block * self.height + begin, block * self.height + end)
        return numbers if self.multiplier == 1 else numbers * pow(self.multiplier, -1, self.rows) % self.rows

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The row block of each id, and its row in that block."""
        numbers = ids if self.multiplier == 1 else ids * self.multiplier % self.rows
        return numbers // self.height, numbers % self.height

    def initial(self, table: TableSpec, server: int, out: Tensor) -> None:
        """Fill a server's block ``[n_i, d_j]`` with the table's initial rows."""
        block, column = divmod(server, self.column_blocks)
        first, last = self.columns(column)
        for begin in range(0, self.rows, 4096):
            end = min(begin + 4096, self.rows)
            owner, place = self.places(torch.arange(begin, end))
            mine = owner == block
            if bool(mine.any()):
                out[place[mine]] = table.initial(begin, end)[mine, first:last].to(out.dtype)

    def fields(self) -> dict[str, Any]:
        """What a message says of it."""
        return {name: getattr(self, name) for name in ("rows", "dim", "row_blocks", "column_blocks", "multiplier")}


def spread(rows: int) -> int:
    """A multiplier that spreads ids evenly: nearest to the golden ratio of ``rows``, and coprime to it."""
    if rows < 4:
        return 1
    wanted = round(rows * GOLDEN)
    for away in range(rows):
        for number in (wanted + away, wanted - away):
            if 1 < number < rows and math.gcd(number, rows) == 1:
                return number
    return 1
