"""Graph partitioners: assign each node to a part."""

from gtrain.graph.partition.methods import (
    AUTO,
    METHODS,
    group_hetero,
    installed_method,
    partition_hetero,
    partition_nodes,
    read_assignment,
)

__all__ = [
    "AUTO",
    "METHODS",
    "group_hetero",
    "installed_method",
    "partition_hetero",
    "partition_nodes",
    "read_assignment",
]
