"""The edges that a rank reads by itself: those of the parts that it hosts, and what is copied around them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling import Columns, Rule, spans
from gtrain.graph.sampling.columns import readable
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType, edge_key, safe_name
from gtrain_pyg.ranks.hosting import Hosting
from gtrain_pyg.ranks.parts import PartBook
from gtrain_pyg.ranks.sharing import Sharing
from gtrain_pyg.structure.needs import Needs
from gtrain_pyg.structure.replica import Members, Replica, copied_edges, copied_tensor, reached

Array = NDArray[Any]
SORTED_TIME = "edge_time"
"""The edge tensor by which a store sorts its columns."""
_PIECE = 1 << 21  # edges handled at a time


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
        node_times = np.empty(ids.size, np.int64)
        for part in np.unique(owner).tolist():
            if part not in self.parts:
                return None
            chosen = owner == part
            times = readable(self.store.node(name, part, node_type).numpy(), name, ("i8",))
            node_times[chosen] = times[ids[chosen] - self.book.offsets[node_type][part]]
        return node_times

    def _open(self, needs: Needs) -> Graph:
        made, kinds = self._columns, self.edge_types
        own_first = sorted(self.parts, key=lambda part: part != self.hosting.rank)  # other ranks may wait for it
        columns = {kind: {part: made.hosted(kind, part, needs) for part in own_first} for kind in kinds}
        members = made.members(self._hops) if self._hops else {}
        replicas = {
            kind: {part: made.replica(kind, part, needs, chosen) for part, chosen in members[kind[2]].items()}
            for kind in (kinds if members else ())
        }
        return Graph(needs, {kind: needs.rule(self.store, kind) for kind in kinds}, columns, replicas, members)


class PartColumns:
    """Opens columns, and computes what is not stored as sampling wants it, in memory that the machine's ranks share.

    Args:
        store: the store.
        book: its offsets.
        hosting: who is where.
        sharing: memory shared by the machine's ranks.
    """

    def __init__(self, store: Store, book: PartBook, hosting: Hosting, sharing: Sharing) -> None:
        self._store, self._book, self._hosting, self._sharing = store, book, hosting, sharing
        self._first = hosting.machines[hosting.rank] if len(hosting.parts) > 1 else hosting.rank

    def hosted(self, kind: EdgeType, part: int, needs: Needs) -> Columns:
        """The columns of a part, mapped.

        Raises:
            DataError: weights are negative (read by the part's owner alone), or times are no whole numbers.
        """
        indptr, indices = self._edge(kind, part, "indptr"), self._edge(kind, part, "indices")
        columns = Columns(
            indptr,
            indices,
            num_sources=self._book.count(kind[0]),
            weight=self._edge(kind, part, str(needs.weight)) if needs.weights(self._store, kind) else None,
            first_target=int(self._book.offsets[kind[2]][part]),
            checked=True,
            **self._times(kind, part, needs, indices),
        )
        if part == self._hosting.rank:
            columns.check_weight()
        return columns

    def members(self, hops: int) -> dict[str, dict[int, Members]]:
        """The nodes of other parts whose in-edges are copied, by node type and part."""
        made = self._sharing.arrays(f"members-{hops}", self._first, lambda: self._members(hops))
        members: dict[str, dict[int, Members]] = {name: {} for name in self._store.node_types}
        for i, name in enumerate(self._store.node_types):
            for part in range(self._book.num_parts):
                if part not in self._hosting.parts:
                    members[name][part] = Members(made[f"{i}-{part}-bits"], made[f"{i}-{part}-before"])
        return members

    def replica(self, kind: EdgeType, part: int, needs: Needs, members: Members) -> Replica:
        """The copied in-edges of a part's members."""
        key = f"{safe_name(edge_key(kind))}-{part}"
        made = self._sharing.arrays(
            f"replica-{key}", self._first, lambda: copied_edges(self._store, kind, part, members.nodes())
        )
        more: dict[str, Array] = {}
        if needs.weights(self._store, kind):
            more["weight"] = self._copied(kind, part, str(needs.weight), key, made)
        if needs.times(self._store, kind):
            if needs.node_time is None:
                stored = self._copied(kind, part, str(needs.edge_time), key, made)
                more |= _by_order(stored, made["indptr"], str(needs.edge_time))
            else:
                more["loose_time"] = self._source_times(f"replica-{key}", self._first, kind, needs, made["indices"])
        size = self._book.count(kind[0])
        columns = Columns(made["indptr"], made["indices"], num_sources=size, checked=True, **more)
        return Replica(columns, made["shift"])

    # ------------------------------------------------------------------------------------------ inside

    def _edge(self, kind: EdgeType, part: int, name: str) -> Array:
        return self._store.edge(name, part, kind).numpy()

    def _times(self, kind: EdgeType, part: int, needs: Needs, indices: Array) -> dict[str, Array]:
        if not needs.times(self._store, kind):
            return {}
        if needs.node_time is not None:
            maker = part if part in self._hosting.parts else self._first
            return {
                "loose_time": self._source_times(f"{safe_name(edge_key(kind))}-{part}", maker, kind, needs, indices)
            }
        name = str(needs.edge_time)
        return _by_order(self._edge(kind, part, name), self._edge(kind, part, "indptr"), name)

    def _source_times(self, key: str, maker: int, kind: EdgeType, needs: Needs, indices: Array) -> Array:
        name = str(needs.node_time)

        def make() -> dict[str, Array]:
            return {"time": source_times(self._store, self._book, kind[0], name, indices)}

        return self._sharing.arrays(f"times-{safe_name(name)}-{key}", maker, make)["time"]

    def _copied(self, kind: EdgeType, part: int, name: str, key: str, made: Mapping[str, Array]) -> Array:
        def make() -> dict[str, Array]:
            return {"values": copied_tensor(self._store, kind, part, name, made["indptr"], made["shift"])}

        return self._sharing.arrays(f"replica-{safe_name(name)}-of-{key}", self._first, make)["values"]

    def _members(self, hops: int) -> dict[str, Array]:
        marks = reached(self._store, self._book, self._hosting.parts, hops)
        made: dict[str, Array] = {}
        for i, name in enumerate(self._store.node_types):
            for part in range(self._book.num_parts):
                if part not in self._hosting.parts:
                    members = Members.of(marks[name][slice(*self._book.range(name, part))])
                    made |= {f"{i}-{part}-bits": members.bits, f"{i}-{part}-before": members.before}
        return made


def _by_order(times: Array, indptr: Array, name: str) -> dict[str, Array]:
    """Times of edges as the field of :class:`Columns` that they can serve as: a store sorts by ``edge_time`` alone."""
    checked = readable(times, name, ("i8",))
    if name == SORTED_TIME or spans.first_unsorted(readable(indptr, "indptr", ("i8",)), checked) < 0:
        return {"edge_time": checked}
    return {"loose_time": np.asarray(checked)}


def source_times(store: Store, book: PartBook, node_type: str, name: str, indices: Array) -> Array:
    """Look up the times of edges' sources, of whatever part.

    Args:
        store: the store, whose files of all parts are read.
        book: its offsets.
        node_type: the type of the sources.
        name: of the node tensor.
        indices: ``[e]``, the sources, global ids.

    Returns:
        int64 ``[e]``.

    Raises:
        DataError: times are no whole numbers.
    """
    times = [readable(store.node(name, p, node_type).numpy(), name, ("i8",)) for p in range(store.num_parts)]
    source_time = np.empty(indices.size, np.int64)
    for start in range(0, indices.size, _PIECE):
        source, out = indices[start : start + _PIECE], source_time[start : start + _PIECE]
        owner = book.owner(node_type, source)
        for p in np.unique(owner).tolist():
            chosen = owner == p
            out[chosen] = times[p][source[chosen] - book.offsets[node_type][p]]
    return source_time
