"""Entity types of a graph whose nodes have one numbering, type after type.

Such a graph is stored as one node type; ``facts["entity_types"]`` says how many nodes of each type there are,
``facts["relation_ends"]`` which types each relation (``edge_type``) joins. Names are kept by type.
"""

from __future__ import annotations

from dataclasses import dataclass

from gtrain.graph.store import Store


@dataclass(frozen=True)
class EntityType:
    """One type.

    Attributes:
        name: its name.
        first: id of its first node in the source data.
        count: its nodes.
    """

    name: str
    first: int
    count: int


def entity_types(store: Store) -> list[EntityType]:
    """Return the entity types of a store, in the order of their ids: one, if the graph has none."""
    if not store.facts.get("entity_types"):
        name = store.node_types[0]
        return [EntityType(name, 0, store.num_nodes_of(name))]
    found, first = [], 0
    for name, count in store.facts["entity_types"].items():
        found.append(EntityType(name, first, count))
        first += count
    return found
