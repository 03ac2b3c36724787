"""Prepare a graph for the store: check, split, scale features, partition."""

from gtrain.data.prepare.graph import Graph, Names, Preparation, cut, describe, group, prepare_graph

__all__ = ["Graph", "Names", "Preparation", "cut", "describe", "group", "prepare_graph"]
