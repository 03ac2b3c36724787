"""Subgraphs around seeds, hop by hop, over all parts."""
