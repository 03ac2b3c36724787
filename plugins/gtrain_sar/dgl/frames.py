"""Columns of node and edge data, as DGL's graphs have them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from gtrain.errors import DataError


class Frame(UserDict[str, Any]):
    """Tensors of as many rows as there are nodes, or edges.

    Args:
        rows: their number.
        of: what they are, for messages.
        columns: what is there already.

    Raises:
        DataError: a tensor with another number of rows is set.
    """

    def __init__(self, rows: int, of: str, columns: dict[str, Tensor] | None = None) -> None:
        self.rows, self.of = rows, of
        super().__init__(columns or {})

    def __setitem__(self, name: str, value: Tensor) -> None:
        if len(value) != self.rows:
            raise DataError(
                f"a convolution sets {name!r} with {len(value)} rows on a graph whose part has {self.rows} {self.of}.",
                hint="give the convolution the features of the batch's own nodes and edges.",
            )
        super().__setitem__(name, value)

    def copied(self) -> Frame:
        """The same columns in a frame of their own."""
        return Frame(self.rows, self.of, self.data)


class Columns(Mapping[str, Any]):
    """Columns brought to the edges, each when it is asked for.

    Args:
        frame: the columns.
        bring: [n, ...] -> [E, ...].
        note: told the name of each column that is asked for.
    """

    def __init__(
        self,
        frame: Mapping[str, Tensor],
        bring: Callable[[Tensor], Tensor],
        note: Callable[[str], Any] = lambda name: None,
    ) -> None:
        self._frame, self._bring, self._note = frame, bring, note
        self._known: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            self._note(name)
            self._known[name] = self._bring(self._frame[name])
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._frame

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)
