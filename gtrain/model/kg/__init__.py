"""Embeddings of entities and relations, trained on edges alone."""
