"""Node and edge tensors of batches: hosted rows, rows of other ranks, rows that are kept here."""
