"""Entity types of a graph whose nodes have one numbering, type after type.

Such a graph is stored as one node type; ``facts["entity_types"]`` says how many nodes of each type there are,
``facts["relation_ends"]`` which types each relation (``edge_type``) joins. Names are kept by type.

A featurized type has for each entity a bag of features: a row of the node tensor ``bag``. ``facts["features"]`` says
how many features the type has; its entities are in part 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.graph.store.store import Store


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


def entity_bags(store: Store, name: str) -> tuple[Tensor, Tensor, int] | None:
    """Return the bags of a featurized type; None for another.

    Returns:
        Features ``[Z]`` and pointers ``[n + 1]`` (both int64; the bag of entity i of the type is between the i-th and
        the next), and the number of features.
    """
    count = (store.facts.get("features") or {}).get(name)
    if count is None:
        return None
    own = next(each for each in entity_types(store) if each.name == name)
    place = torch.searchsorted(store.node("orig_id", 0), torch.tensor([own.first, own.first + own.count]))
    rows = store.node("bag", 0)
    pointer = rows.crow_indices()[int(place[0]) : int(place[1]) + 1].long()
    features = rows.col_indices()[int(pointer[0]) : int(pointer[-1])].long()
    return features, pointer - pointer[0], int(count)


def feature_kind(name: str) -> str:
    """What the names of a type's features are kept as."""
    return f"{name}.feature"
