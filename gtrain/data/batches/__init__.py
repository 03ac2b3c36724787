"""Batches: the seeds of each step, negative edges, and what a strategy has to know to sample neighbours."""
