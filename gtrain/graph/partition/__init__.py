"""Cutting a graph into parts: which part owns which node."""

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
