"""The known answers of questions: edges of the store, those that are held out included."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gtrain.graph.store import Store

_SPLITS = ("train", "val", "test")


def known_answers(store: Store, given: Tensor, relation: Tensor, tails: bool) -> list[Tensor]:
    """Return the other ends of all edges with a given end and relation, in one pass over the edges.

    Args:
        store: the graph.
        given: int64 ``[Q]``, ids of the source data: heads if ``tails``, else tails.
        relation: int64 ``[Q]``.
        tails: whether tails are the answers.

    Returns:
        For each question the ids of the source data, ascending.
    """
    orig_ids = torch.cat([store.node("orig_id", part) for part in range(store.num_parts)])
    to_global = torch.empty_like(orig_ids)
    to_global[orig_ids] = torch.arange(len(orig_ids))
    wanted = to_global[given]
    count = int(relation.max()) + 1
    found, has_relations = [(wanted[:0], wanted[:0])], False
    for source, target, kind in _edges(store):
        ends, others = (source, target) if tails else (target, source)
        some = torch.isin(ends, wanted)
        if kind is not None:
            some &= kind < count
        # An edge's key is that of the questions it answers.
        found.append((ends[some] * count + (0 if kind is None else kind[some].long()), orig_ids[others[some]]))
        has_relations = kind is not None
    keys, others = (torch.cat(pieces) for pieces in zip(*found, strict=True))
    keys, order = keys.sort()
    asked = wanted * count + (relation if has_relations else 0)
    begin, end = torch.searchsorted(keys, asked), torch.searchsorted(keys, asked, right=True)
    return [others[order[a:b]].unique() for a, b in zip(begin.tolist(), end.tolist(), strict=True)]


def _edges(store: Store) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield sources, targets (global ids) and relations (None: one relation) of the edges, part by part."""
    for part in range(store.num_parts):
        first, degrees = int(store.offsets[part]), store.edge("indptr", part).diff()
        targets = torch.repeat_interleave(torch.arange(len(degrees)) + first, degrees)
        relations = store.edge("edge_type", part) if "edge_type" in store.edge_tensors() else None
        yield store.edge("indices", part).long(), targets, relations
        for split in _SPLITS:
            names = store.held_out_tensors(split)
            if names:
                columns = {name: store.held_out(name, part, split) for name in names}
                yield columns["source"].long(), columns["target"].long(), columns.get("edge_type")
