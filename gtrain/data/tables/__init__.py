"""Graphs from tables: nodes and edges as rows of files, queries or data frames, with columns by name."""
