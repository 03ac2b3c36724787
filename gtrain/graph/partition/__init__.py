"""Graph partitioners: assign each node to a part."""

from gtrain.graph.partition.methods import (
    AUTO,
    METHODS,
    ORDERING,
    adjacency_of,
    check_installed,
    choose_method,
    edges_of,
    explain_choice,
    group_nodes,
    needs_adjacency,
    partition_hetero,
    partition_nodes,
    possible_methods,
    read_assignment,
)

__all__ = [
    "AUTO",
    "METHODS",
    "ORDERING",
    "adjacency_of",
    "check_installed",
    "choose_method",
    "edges_of",
    "explain_choice",
    "group_nodes",
    "needs_adjacency",
    "partition_hetero",
    "partition_nodes",
    "possible_methods",
    "read_assignment",
]
