"""From what a source read to what a store keeps: checked, split, scaled, cut into parts."""

from gtrain.data.prepare.graph import Graph, Names, Preparation, cut, describe, group, prepare_graph

__all__ = ["Graph", "Names", "Preparation", "cut", "describe", "group", "prepare_graph"]
