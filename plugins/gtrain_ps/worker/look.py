"""What a table is asked for in the first steps: read from the store, before anything is trained."""

from __future__ import annotations

from itertools import islice

import torch

from gtrain.data.batches.loader import SeedLoader
from gtrain.nn import as_csr
from gtrain_ps.costs import Load
from gtrain_ps.worker.batches import chunks
from gtrain_ps.worker.rows import RowTable, is_rows

STEPS = 4
"""Steps that are looked at."""


def first_load(loader: SeedLoader, workers: int) -> tuple[Load, bool]:
    """What the first worker asks of a table in the first steps of an epoch.

    Args:
        loader: of the training split.
        workers: K.

    Returns:
        the mean over the steps, and whether an entry has a value other than 1. All workers read the same store, so all
        come to the same.
    """
    store = loader.store
    if not is_rows(store):
        found = [
            as_csr(store.node("x", part, kind))
            for kind in store.node_types
            for part in range(store.num_parts)
            if "x" in store.node_tensors(kind) and store.node("x", part, kind).layout == torch.sparse_csr
        ]
        ids = torch.cat([rows.ids for rows in found]) if found else torch.empty(0)
        rows = sum(piece.num_rows for piece in found)
        weighted = any(piece.values is not None and bool((piece.values != 1).any()) for piece in found)
        return Load(ids.numel(), ids.unique().numel(), rows), weighted
    table = RowTable(store, torch.float32)
    seeds = table.rows_of(loader.split)
    figures, weighted = [], False
    for chunk in islice(chunks(loader, len(seeds), loader.epoch), STEPS):
        rows = table.batch(seeds[chunk[: -(-chunk.numel() // workers)]]).x
        figures.append((rows.ids.numel(), rows.ids.unique().numel(), rows.num_rows))
        weighted = weighted or bool((rows.values != 1).any())
    means = [sum(column) / max(1, len(figures)) for column in zip(*figures, strict=True)]
    return Load(*means), weighted
