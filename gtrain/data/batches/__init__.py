"""Batches: the seeds of each step, false edges, and what a strategy has to know to draw neighbours."""
