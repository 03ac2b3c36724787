"""The CSC arrays that sampling reads, checked once so that the kernels need no checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import DataError
from gtrain.graph.sampling import spans
from gtrain.graph.sampling.scratch import read_only

Array = NDArray[Any]

_PIECE = 1 << 22  # edges checked at a time, so that checking a mapped file needs little memory
_HEAVIEST = np.float64(1e300)  # keeps the sum of a column's weights finite


@dataclass(frozen=True)
class Columns:
    """The edges of one type by target, in compressed sparse columns (CSC).

    With N targets, M sources and E edges; the in-edges of target v are ``indptr[v] .. indptr[v+1]-1``. In a homogeneous
    graph targets and sources are the same nodes. Arrays may be memory maps; they are copied only if their dtype differs
    from the one stated here.

    Attributes:
        indptr: int64 ``[N + 1]``, from 0 to E, not descending.
        indices: int32 or int64 ``[E]``, the source of each edge, ``0 .. M-1``.
        num_sources: M; None means N.
        weight: float32 or float64 ``[E]``, at least 0 and finite; an edge of weight 0 is never chosen. None: uniform.
        edge_time: int64 ``[E]``, ascending within each column. None: edges have no times.
        source_time: int64 ``[E]``, times of the edges' sources, in any order; replaces ``edge_time``, see
            :meth:`timed_by_sources`. None: not set.
        edge_id: int64 ``[E]``, the edge's position in the source data. None: unknown.
        first_target: added to a target's number to select its random stream: the part's first global id, if one part
            of a graph is sampled.
        checked: skip the checks of the values, which read all E edges; for arrays of a store.

    Raises:
        DataError: an array has the wrong length, dtype or values.
    """

    indptr: Array
    indices: Array
    num_sources: int | None = None
    weight: Array | None = None
    edge_time: Array | None = None
    source_time: Array | None = None
    edge_id: Array | None = None
    first_target: int = 0
    checked: bool = False

    def __post_init__(self) -> None:
        dtypes = {"indptr": ("i8",), "indices": ("i4", "i8"), "weight": ("f4", "f8"), "edge_time": ("i8",)}
        for name, allowed in {**dtypes, "source_time": ("i8",), "edge_id": ("i8",)}.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, readable(getattr(self, name), name, allowed))
        if self.num_sources is None:
            object.__setattr__(self, "num_sources", self.num_targets)
        self._check_lengths()
        if not self.checked:
            self._check_values()

    @property
    def num_targets(self) -> int:
        """N, the number of columns."""
        return int(self.indptr.size) - 1

    @property
    def num_edges(self) -> int:
        """E."""
        return int(self.indices.size)

    def timed_by_sources(self, node_time: Any) -> Columns:
        """Return the same edges with the time of each edge's source as ``source_time``; needs 8 bytes per edge.

        Args:
            node_time: int64 ``[M]``, the time of each source.

        Raises:
            DataError: the length is not M, or the times are not integers.
        """
        times = readable(node_time, "node_time", ("i8",))
        if times.size != self.num_sources:
            raise DataError(
                f"node_time has {times.size} values for {self.num_sources} source nodes.",
                hint="give one time per node.",
            )
        return replace(self, source_time=times[self.indices], checked=True)

    def check_weight(self) -> None:
        """Check all weights.

        Raises:
            DataError: a weight is negative, infinite or NaN.
        """
        if self.weight is None:
            return
        for start in range(0, self.num_edges, _PIECE):
            piece = self.weight[start : start + _PIECE]
            valid = (piece >= 0) & (piece <= _HEAVIEST)  # False for NaN
            if not valid.all():
                edge = start + int(np.argmin(valid))
                raise DataError(
                    f"the weight of edge {edge} is {self.weight[edge]}; weights are numbers from 0 to {_HEAVIEST:g}.",
                    hint="shift the weights to 0 or more, or sample without weights.",
                )

    def _check_lengths(self) -> None:
        if self.indptr.size == 0 or self.indptr[0] != 0 or self.indptr[-1] != self.num_edges:
            actual = f"runs from {self.indptr[0]} to {self.indptr[-1]}" if self.indptr.size else "is empty"
            raise DataError(
                f"indptr {actual}; with {self.num_edges} edges it must run from 0 to {self.num_edges}.",
                hint="give the columns' N + 1 offsets into indices.",
            )
        for name in ("weight", "edge_time", "source_time", "edge_id"):
            array = getattr(self, name)
            if array is not None and array.size != self.num_edges:
                raise DataError(
                    f"{name} has {array.size} values for {self.num_edges} edges.", hint="give one value per edge."
                )

    def _check_values(self) -> None:
        if np.any(self.indptr[1:] < self.indptr[:-1]):
            column = int(np.argmax(self.indptr[1:] < self.indptr[:-1]))
            raise DataError(
                f"indptr descends after column {column}.", hint="give the columns' offsets in ascending order."
            )
        for start in range(0, self.num_edges, _PIECE):
            sources = self.indices[start : start + _PIECE]
            if sources.min() < 0 or sources.max() >= (self.num_sources or 0):
                wrong = int(sources.min()) if sources.min() < 0 else int(sources.max())
                raise DataError(
                    f"indices hold source {wrong}, and there are {self.num_sources} sources, "
                    f"0 .. {self.num_sources}-1.",
                    hint="check the numbering of the edges' sources.",
                )
        self.check_weight()
        if self.edge_time is not None and (column := spans.first_unsorted(self.indptr, self.edge_time)) >= 0:
            raise DataError(
                f"the edge times of column {column} are not ascending.",
                hint="sort the in-edges of each node by time, as gtrain's store does.",
            )


def readable(array: Any, name: str, dtypes: tuple[str, ...]) -> Array:
    """Return a read-only view of a vector, converted to the last of ``dtypes`` if its dtype is not among them.

    Args:
        array: anything that numpy accepts: a memory map, a torch tensor on the CPU.
        name: name of the array, for messages.
        dtypes: allowed dtypes as numpy codes, such as ``i8``.

    Raises:
        DataError: the array is not a vector, or its dtype cannot be converted without loss.
    """
    plain = np.asarray(array).view(np.ndarray)
    if plain.ndim != 1:
        raise DataError(f"{name} has {plain.ndim} dimensions.", hint=f"give {name} as a vector.")
    if plain.dtype not in [np.dtype(code) for code in dtypes]:
        dtype = np.dtype(dtypes[-1])
        convertible = "iub" if dtype.kind == "i" else "iubf"
        # uint64 may exceed int64; an empty list of any dtype has no value to lose.
        if plain.size and (plain.dtype.kind not in convertible or plain.dtype == np.uint64):
            raise DataError(f"{name} is {plain.dtype}.", hint=f"convert it to {dtype}.")
        plain = plain.astype(dtype)
    return read_only(np.ascontiguousarray(plain))
