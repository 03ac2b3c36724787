"""The edges of one split that point at the nodes of some parts, read from the store's memory maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gtrain.data.batches.scored_edges import EdgeType, ScoredEdges
from gtrain.graph.owners import owner_of
from gtrain.graph.store import Store

_OPTIONAL = ("type", "weight", "time")


class PartEdges:
    """S edges of one split and type, part by part; only the sizes of the parts are in memory.

    Within a part, edges of the graph are in the order of the store's columns, held-out edges in that of the source
    data.

    Args:
        store: the graph.
        edge_type: the type; None means the only one.
        split: ``train``, ``val`` or ``test``: the held-out edges. If training edges are not held out, ``train`` is
            every edge that messages pass along.
        parts: the parts; an edge is in the part of its target.
    """

    def __init__(self, store: Store, edge_type: EdgeType | None, split: str, parts: Sequence[int]) -> None:
        kind = edge_type or store.edge_types[0]
        self._pieces = [_Piece(store, kind, part, split) for part in parts]
        sizes = torch.tensor([0, *(len(piece) for piece in self._pieces)])
        self._start, self._parts = sizes.cumsum(0), torch.tensor(list(parts))

    def __len__(self) -> int:
        return int(self._start[-1])

    @property
    def owner(self) -> Tensor:
        """int64 ``[S]``, the part of each edge's target."""
        return torch.repeat_interleave(self._parts, self._start.diff())

    def edge_id(self, chosen: Tensor | None = None) -> Tensor:
        """Return int64 ``[B]``, positions among the split's edges of the source data.

        Args:
            chosen: int64 ``[B]``, positions in 0 .. S-1; None: all.
        """
        if chosen is None:
            return torch.cat([self._start[:0], *(piece.edge_id(slice(None)) for piece in self._pieces)])
        edge_ids = torch.empty_like(chosen)
        for piece, index, rows in self._by_piece(chosen):
            edge_ids[index] = piece.edge_id(rows)
        return edge_ids

    def select(self, chosen: Tensor | None = None) -> ScoredEdges:
        """Return edges by global ids.

        Args:
            chosen: int64 ``[B]``, positions in 0 .. S-1; None: all.
        """
        chosen = torch.arange(len(self)) if chosen is None else chosen
        source, target = torch.empty_like(chosen), torch.empty_like(chosen)
        extra: dict[str, Tensor] = {}
        for piece, index, rows in self._by_piece(chosen):
            source[index], target[index] = piece.ends(rows)
            for name in piece.optional:
                value = piece.tensor(name, rows)
                extra.setdefault(name, value.new_zeros(chosen.numel()))[index] = value
        return ScoredEdges(source, target, extra)

    def _by_piece(self, chosen: Tensor) -> list[tuple[_Piece, Tensor, Tensor]]:
        """Return each piece, the indices of its edges in ``chosen``, and the positions of these edges in the piece."""
        if len(self._pieces) == 1:
            return [(self._pieces[0], torch.arange(chosen.numel()), chosen)]
        number = owner_of(chosen, self._start)
        groups = []
        for i, piece in enumerate(self._pieces):
            index = (number == i).nonzero().flatten()
            groups.append((piece, index, chosen[index] - self._start[i]))
        return groups


class _Piece:
    """The edges of one part and split: the in-edges of its nodes, or held-out edges that point at them."""

    def __init__(self, store: Store, kind: EdgeType, part: int, split: str) -> None:
        self._indptr: Tensor | None = None
        if split == "train" and not store.holds_out(split, kind):
            self._indptr, self._first = store.edge("indptr", part, kind), int(store.offsets_of(kind[2])[part])
            names = store.edge_tensors(kind)
            read = {f"edge_{n}": f"edge_{n}" for n in ("id", *_OPTIONAL) if f"edge_{n}" in names}
            self._tensors = {name: store.edge(n, part, kind) for name, n in {"source": "indices", **read}.items()}
        else:
            names = store.held_out_tensors(split, kind)
            self._tensors = {name: store.held_out(name, part, split, kind) for name in names}
        self.optional = [name for name in _OPTIONAL if f"edge_{name}" in self._tensors]

    def __len__(self) -> int:
        return self._tensors["source"].numel() if self._tensors else 0

    def ends(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if not self._tensors:
            return rows, rows
        source = self._tensors["source"][rows].long()
        if self._indptr is None:
            return source, self._tensors["target"][rows]
        # The column that a position lies in: the last start that is not above it.
        return source, torch.searchsorted(self._indptr, rows.contiguous(), right=True) - 1 + self._first

    def edge_id(self, rows: Tensor | slice) -> Tensor:
        return self._tensors["edge_id"][rows] if self._tensors else torch.empty(0, dtype=torch.int64)

    def tensor(self, name: str, rows: Tensor) -> Tensor:
        return self._tensors[f"edge_{name}"][rows]
