"""Placement: which rows and columns of a table each server stores."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.nn import TableSpec

GOLDEN = (math.sqrt(5) - 1) / 2
# Ids are sent in 32 bits, and products of two row numbers fit int64.
MAX_ROWS = (1 << 31) - 1
MAX_ROW_BLOCKS = 256
"""Workers note the block of an id in 8 bits."""


@dataclass(frozen=True)
class Placement:
    """A table in ``row_blocks`` x ``column_blocks`` blocks; server ``i * column_blocks + j`` stores block (i, j).

    Row blocks are ranges of ``height`` rows of a permuted numbering: id ``r`` has the number ``r * multiplier mod n``.
    With the multiplier 1 they are ranges of ids. Other multipliers are near n times the golden ratio, and coprime to n:
    consecutive ids are then spread evenly over all blocks (the three-distance theorem; Knuth, TAOCP vol. 3, section
    6.4). Blocks get equal shares of a Zipf distribution, whose frequent ids are the first ones.

    Attributes:
        rows: n.
        dim: d.
        row_blocks: number of row blocks.
        column_blocks: number of column blocks.
        multiplier: of the permuted numbering.
    """

    rows: int
    dim: int
    row_blocks: int
    column_blocks: int
    multiplier: int = 1

    def __post_init__(self) -> None:
        if self.rows > MAX_ROWS:
            raise ConfigError(
                f"a table has {self.rows} rows; strategy=ps supports at most {MAX_ROWS}.",
                hint="hash the features into fewer buckets.",
            )
        if self.row_blocks > MAX_ROW_BLOCKS:
            raise ConfigError(
                f"a table is to be cut into {self.row_blocks} row blocks; strategy=ps supports at most "
                f"{MAX_ROW_BLOCKS}.",
                hint=f"set strategy.servers to {MAX_ROW_BLOCKS} or less.",
            )

    @property
    def servers(self) -> int:
        """Number of blocks."""
        return self.row_blocks * self.column_blocks

    @property
    def height(self) -> int:
        """Rows of a row block; the last blocks may have fewer."""
        return max(1, -(-self.rows // self.row_blocks))

    def block_rows(self, block: int) -> int:
        """Return the number of rows of a row block."""
        return max(0, min(self.height, self.rows - block * self.height))

    def columns(self, block: int) -> tuple[int, int]:
        """Return the first column of a column block, and its end."""
        return block * self.dim // self.column_blocks, (block + 1) * self.dim // self.column_blocks

    def block_of(self, server: int) -> tuple[int, slice]:
        """Return the row block and the columns of a server."""
        block, column = divmod(server, self.column_blocks)
        return block, slice(*self.columns(column))

    def ids(self, block: int, begin: int, end: int) -> Tensor:
        """Return the ids of the rows ``begin`` to ``end`` of a row block, int64."""
        # The inverse modulo n undoes the multiplication in ``locate``.
        numbers = torch.arange(block * self.height + begin, block * self.height + end)
        return numbers if self.multiplier == 1 else numbers * pow(self.multiplier, -1, self.rows) % self.rows

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row block of each id, and its row in that block."""
        numbers = ids if self.multiplier == 1 else ids * self.multiplier % self.rows
        return numbers // self.height, numbers % self.height

    def fill_initial(self, table: TableSpec, server: int, out: Tensor) -> None:
        """Fill a server's block ``[n_i, d_j]`` with the table's initial rows."""
        block, columns = self.block_of(server)
        # By ranges of ids, for which ``initial`` is defined: the rows do not depend on the placement.
        for begin in range(0, self.rows, 4096):
            end = min(begin + 4096, self.rows)
            owner, position = self.locate(torch.arange(begin, end))
            mine = owner == block
            if bool(mine.any()):
                out[position[mine]] = table.initial(begin, end)[mine, columns].to(out.dtype)

    def fields(self) -> dict[str, Any]:
        """Return the fields, as messages and checkpoints hold them."""
        return asdict(self)


def spreading_multiplier(rows: int) -> int:
    """Return the multiplier that spreads ids evenly: coprime to ``rows``, and nearest to its golden ratio."""
    if rows < 4:
        return 1
    golden = round(rows * GOLDEN)
    candidates = (number for distance in range(rows) for number in (golden + distance, golden - distance))
    return next((number for number in candidates if 1 < number < rows and math.gcd(number, rows) == 1), 1)
