"""Entity types of a knowledge graph, which is stored as one node type with the entities numbered type after type.

``facts["entity_types"]`` has the number of entities of each type, ``facts["relation_ends"]`` the types that each
relation (``edge_type``) joins. Names are stored by type.

Each entity of a featurized type has a bag of features: a row of the node tensor ``bag``. ``facts["features"]`` has the
number of features of the type; its entities are in part 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gtrain.graph.store.store import Store


@dataclass(frozen=True)
class EntityType:
    """One entity type.

    Attributes:
        name: name of the type.
        first: original id of its first entity.
        count: number of its entities.
    """

    name: str
    first: int
    count: int


def entity_types(store: Store) -> list[EntityType]:
    """Return the entity types of a store in the order of their ids; a graph without them counts as one type."""
    node_type = store.node_types[0]
    counts = store.facts.get("entity_types") or {node_type: store.num_nodes_of(node_type)}
    firsts = accumulate(counts.values(), initial=0)
    return [EntityType(name, first, count) for (name, count), first in zip(counts.items(), firsts, strict=False)]


def entity_bags(store: Store, name: str) -> tuple[Tensor, Tensor, int] | None:
    """Return the bags of features of a featurized type; None for other types.

    Returns:
        Features ``[Z]`` and pointers ``[n + 1]``, both int64 (entity i of the type has the features
        ``pointers[i] .. pointers[i+1]-1``), and the number of features.
    """
    count = (store.facts.get("features") or {}).get(name)
    if count is None:
        return None
    entity_type = next(each for each in entity_types(store) if each.name == name)
    limits = torch.tensor([entity_type.first, entity_type.first + entity_type.count])
    start, stop = torch.searchsorted(store.node("orig_id", 0), limits).tolist()
    rows = store.node("bag", 0)
    pointer = rows.crow_indices()[start : stop + 1].long()
    features = rows.col_indices()[int(pointer[0]) : int(pointer[-1])].long()
    return features, pointer - pointer[0], int(count)


def feature_kind(name: str) -> str:
    """Return the key under which the store holds the names of a type's features."""
    return f"{name}.feature"
