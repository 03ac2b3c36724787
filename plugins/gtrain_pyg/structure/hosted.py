"""The edges that a rank reads by itself: those of the parts that it hosts, and what is copied around them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling import Columns, Rule
from gtrain.graph.sampling.columns import readable
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType
from gtrain_pyg.ranks.hosting import Hosting
from gtrain_pyg.ranks.parts import PartBook
from gtrain_pyg.ranks.sharing import Sharing
from gtrain_pyg.structure.columns import PartColumns
from gtrain_pyg.structure.needs import Needs
from gtrain_pyg.structure.replica import Members, Replica

Array = NDArray[Any]


@dataclass(frozen=True)
class Graph:
    """What one way of sampling reads.

    Attributes:
        needs: what it needs.
        rules: how each edge type is sampled: one without weights or times is sampled without them.
        columns: by edge type and hosted part.
        replicas: by edge type and other part; empty where nothing is copied.
        members: the nodes whose in-edges are copied, by node type and other part; likewise.
    """

    needs: Needs
    rules: dict[EdgeType, Rule]
    columns: dict[EdgeType, dict[int, Columns]]
    replicas: dict[EdgeType, dict[int, Replica]]
    members: dict[str, dict[int, Members]]


class Structure:
    """The structure of a store as one rank reads it. Threads may share it.

    Args:
        store: the store.
        book: its offsets.
        hosting: which parts this rank reads.
        sharing: memory shared by the machine's ranks, for what is computed; None: nothing is shared.
        hops: the in-edges of nodes within so many hops of the hosted parts are copied; None: the structure of all
            parts is mapped, and nothing is asked for.

    Attributes:
        store, book, hosting: as given.
        parts: the parts whose columns are read here.
    """

    def __init__(
        self,
        store: Store,
        book: PartBook,
        hosting: Hosting,
        sharing: Sharing | None = None,
        *,
        hops: int | None = 0,
    ) -> None:
        self.store, self.book, self.hosting = store, book, hosting
        self.parts = hosting.parts if hops is not None else tuple(range(book.num_parts))
        self._hops = hops if len(self.parts) < book.num_parts else 0
        self._columns = PartColumns(store, book, hosting, sharing or Sharing(hosting.rank))
        self._graphs: dict[Needs, Graph] = {}
        self._lock = threading.Lock()

    @property
    def node_types(self) -> tuple[str, ...]:
        """Names of the node types."""
        return self.store.node_types

    @property
    def edge_types(self) -> tuple[EdgeType, ...]:
        """The edge types, in the order in which they are sampled."""
        return self.store.edge_types

    def graph(self, needs: Needs) -> Graph:
        """The columns with what sampling needs; opened, and computed where they have to be, when first asked for.

        Raises:
            DataError: no edge type has the weights or times asked for, or weights or times cannot be used.
        """
        with self._lock:
            if needs not in self._graphs:
                needs.check(self.store)
                self._graphs[needs] = self._open(needs)
            return self._graphs[needs]

    def node_time(self, name: str, node_type: str, ids: Array) -> Array | None:
        """Times of nodes by global id; None where one of them is of a part that is not hosted."""
        owner = self.book.owner(node_type, ids)
        found = np.empty(ids.size, np.int64)
        for part in np.unique(owner).tolist():
            if part not in self.parts:
                return None
            chosen = owner == part
            times = readable(self.store.node(name, part, node_type).numpy(), name, ("i8",))
            found[chosen] = times[ids[chosen] - self.book.offsets[node_type][part]]
        return found

    def _open(self, needs: Needs) -> Graph:
        made, kinds = self._columns, self.edge_types
        own_first = sorted(self.parts, key=lambda part: part != self.hosting.rank)  # other ranks may wait for it
        columns = {kind: {part: made.hosted(kind, part, needs) for part in own_first} for kind in kinds}
        members = made.members(self._hops) if self._hops else {}
        replicas = {
            kind: {part: made.replica(kind, part, needs, found) for part, found in members[kind[2]].items()}
            for kind in (kinds if members else ())
        }
        return Graph(needs, {kind: needs.rule(self.store, kind) for kind in kinds}, columns, replicas, members)
