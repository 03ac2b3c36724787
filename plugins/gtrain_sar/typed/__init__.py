"""Graphs with types of nodes and edges."""
