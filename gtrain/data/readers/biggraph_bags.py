"""Featurized entities of PyTorch-BigGraph's folders: an edge has a bag of feature ids where others have an entity's id.

Each different bag becomes an entity, in the order in which edges first have it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.store.tables import csr_tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class EdgeBags:
    """One side's bags of the edges of a file: ``<side>d_offsets`` ``[E + 1]`` and ``<side>d_data``.

    Attributes:
        offsets: edge e has the features ``data[offsets[e]:offsets[e + 1]]``.
        data: feature ids.
    """

    offsets: Ints
    data: Ints

    @classmethod
    def read(cls, file: Any, side: str, edges: slice) -> EdgeBags | None:
        """Return what a file has of some edges; None where it has no features on this side."""
        if f"{side}d_data" not in file or not len(file[f"{side}d_data"]):
            return None
        offsets = np.asarray(file[f"{side}d_offsets"][edges.start : edges.stop + 1], dtype=np.int64)
        if not len(offsets):
            return cls(offsets, offsets)
        data = np.asarray(file[f"{side}d_data"][offsets[0] : max(offsets[0], offsets[-1])], dtype=np.int64)
        return cls(offsets - offsets[0], data)

    def check(self, path: object, side: str, edges: int, features: int) -> None:
        """Check that the bags are those of this many edges.

        Raises:
            DataError: they are not.
        """
        begins = self.offsets
        if len(begins) != edges + 1 or begins[-1] != len(self.data) or (np.diff(begins) < 0).any():
            raise DataError(
                f"{path}: {side}d_offsets are not those of its edges and of {len(self.data)} features",
                hint="write the folder anew with PyTorch-BigGraph's importer",
            )
        wrong = (self.data < 0) | (self.data >= features)
        if wrong.any():
            raise DataError(
                f"{path}: {side}d_data has the feature {self.data[int(wrong.argmax())]}, and there are {features}, "
                f"0..{features - 1}",
                hint="name entities and edges of the same import (data.path, data.edges)",
            )


@dataclass
class BagBook:
    """The different bags of one type.

    Attributes:
        features: how many features there are.
        bags: the features of each entity.
    """

    features: int
    bags: list[Ints] = field(default_factory=list)
    _known: dict[bytes, int] = field(default_factory=dict)

    def number(self, edges: EdgeBags, rows: Ints) -> Ints:
        """Return the entities of some edges."""
        found = np.empty(len(rows), dtype=np.int64)
        for place, row in enumerate(rows.tolist()):
            bag = edges.data[edges.offsets[row] : edges.offsets[row + 1]]
            entity = self._known.setdefault(bag.tobytes(), len(self.bags))
            if entity == len(self.bags):
                self.bags.append(bag)
            found[place] = entity
        return found


def bag_tensor(counts: dict[str, int], books: dict[str, BagBook]) -> Tensor:
    """Return the node tensor ``bag``, ``torch.sparse_csr``: a row for each entity of all types, one after the other."""
    lengths: list[int] = []
    for name, count in counts.items():
        lengths += [len(bag) for bag in books[name].bags] if name in books else [0] * count
    every = [bag for name in counts if name in books for bag in books[name].bags]
    data = np.concatenate([np.empty(0, dtype=np.int64), *every])
    pointer = torch.tensor([0, *lengths]).cumsum(0)
    columns = max(book.features for book in books.values())
    ids = torch.from_numpy(data)
    return csr_tensor(pointer, ids, torch.ones(len(ids)), (len(lengths), columns))
