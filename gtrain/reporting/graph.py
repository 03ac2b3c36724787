"""What a report reads from the graph's store: the partition's quality, names, and degrees of nodes."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.batches.loader import target_type
from gtrain.errors import GtrainError
from gtrain.graph.store import Store
from gtrain.record.run import Row, RunRecord
from gtrain.reporting.style import HEAT, Figure, Table, colour, make_figure

_COUNTED = 1 << 22
"""Edges of a part that are counted for the matrix of parts; of more, an evenly spaced sample."""
_MATRIX_PARTS = 64


def open_store(run: RunRecord) -> Store | None:
    """Return the store of a run; None if it is not on this machine, or cannot be read."""
    try:
        return None if run.store is None else Store.open(run.store)
    except (GtrainError, OSError):
        return None


def relation_names(store: Store) -> list[str] | None:
    """Return the names of the relations; None if they have none."""
    names = store.names("relation")
    return None if names is None else names.decode(torch.arange(int(store.facts.get("num_relations") or 0)))


def node_names(store: Store, ids: NDArray[np.int64]) -> list[str]:
    """Return the names of nodes of the target type, by original id; their numbers if they have no names."""
    names = store.names(target_type(store))
    return [f"node {number}" for number in ids.tolist()] if names is None else names.decode(torch.from_numpy(ids))


def scored_rows(run: RunRecord, store: Store) -> list[Row]:
    """Return the test's sample of scores, each with the in-degree of its node."""
    tests = [test["scored"] for test in run.tests if test.get("scored")]
    ids = np.asarray([node for test in tests for node in test["ids"]], np.int64)
    scores = [score for test in tests for score in test["score"]]
    if not len(ids) or store.num_edges == 0:
        return []
    degrees = _in_degrees(store, ids)
    return [
        {"score": score, "degree": degree}
        for score, degree in zip(scores, degrees.tolist(), strict=True)
        if degree >= 0
    ]


def _in_degrees(store: Store, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the in-degrees of nodes of the target type by original id, over all edge types; -1 for unknown nodes."""
    node_type = target_type(store)
    wanted = np.unique(ids)
    degrees = np.full(len(wanted), -1, np.int64)
    for part in range(store.num_parts):
        orig = store.node("orig_id", part, node_type).numpy()
        place = np.searchsorted(wanted, orig).clip(max=len(wanted) - 1)
        rows = np.nonzero(wanted[place] == orig)[0]
        degrees[place[rows]] = 0
        for edge_type in store.edge_types:
            if edge_type[2] == node_type:
                pointer = store.edge("indptr", part, edge_type).numpy()
                degrees[place[rows]] += pointer[rows + 1] - pointer[rows]
    return degrees[np.searchsorted(wanted, ids)]


# ------------------------------------------------------------------------------------------------- partition


def partition_facts(store: Store) -> list[tuple[str, str]]:
    """Return names and values of the partition's quality."""
    partition, edges = store.manifest.partition, max(store.num_edges, 1)
    nodes = max(store.num_nodes, 1)
    halo = sum(partition.halo)
    facts = [
        ("nodes", f"{store.num_nodes:,}"),
        ("edges", f"{store.num_edges:,}"),
        ("parts", f"{store.num_parts:,}"),
        ("partitioner", partition.partitioner),
        ("edge cut", f"{partition.edge_cut:,} ({partition.edge_cut / edges:.1%} of the edges)"),
        ("halo nodes", f"{halo:,} ({halo / nodes:.2f} per node)"),
    ]
    balance = [
        (f"largest part / mean, {name.replace('_', ' ')}", f"{value:.3f}")
        for name, value in partition.imbalance.items()
        if value
    ]
    return facts + balance


def partition_figures(store: Store) -> list[Figure]:
    """Return the matrix of parts, and the sizes of the parts."""
    if store.num_parts == 1:
        return []
    partition = store.manifest.partition
    sizes: Table = []
    for name, values in (("nodes", partition.nodes), ("edges", partition.edges), ("halo nodes", partition.halo)):
        mean = sum(values) / len(values)
        rows = enumerate(values) if mean else ()
        sizes += [{"part": str(p), "what": name, "count": n, "relative": n / mean} for p, n in rows]
    what = list(dict.fromkeys(str(row["what"]) for row in sizes))
    order = [str(part) for part in range(store.num_parts)]
    bars = (
        alt.Chart(alt.Data(values=sizes))
        .mark_bar()
        .encode(
            x=alt.X("part:N", sort=order, title="part", axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset("what:N", sort=what),
            y=alt.Y("relative:Q", title="size / mean of the parts"),
            color=colour("what", what),
            tooltip=["part:N", "what:N", alt.Tooltip("count:Q", format=","), alt.Tooltip("relative:Q", format=".3f")],
        )
    )
    text = "Sizes of the parts relative to their mean; the largest " + ", ".join(
        f"has {max(row['relative'] for row in sizes if row['what'] == name):.3f} times the mean of {name}"
        for name in what
    )
    charts = [make_figure("balance", "Balance of the parts", text + ".", bars)]
    if store.num_parts <= _MATRIX_PARTS:
        charts.append(_matrix(store))
    return charts


def _matrix(store: Store) -> Figure:
    counts, share = parts_matrix(store)
    parts = [str(part) for part in range(store.num_parts)]
    total = max(counts.sum(), 1)
    rows: Table = [
        {"from": parts[i], "to": parts[j], "edges": round(float(counts[i, j])), "share": float(counts[i, j] / total)}
        for i in range(store.num_parts)
        for j in range(store.num_parts)
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("to:N", sort=parts, title="part of the target", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("from:N", sort=parts, title="part of the source"),
        tooltip=["from:N", "to:N", alt.Tooltip("edges:Q", format=","), alt.Tooltip("share:Q", format=".2%")],
    )
    top = max(row["share"] for row in rows) or 1.0
    scale = alt.Scale(domain=[0, top], range=HEAT)
    legend = alt.Legend(title="share of all edges", orient="top", format=".1%", gradientLength=140)
    chart = base.mark_rect().encode(color=alt.Color("share:Q", scale=scale, legend=legend))
    if store.num_parts <= 8:
        white = alt.condition(f"datum.share > {top / 2}", alt.value("white"), alt.value("currentColor"))
        chart += base.mark_text().encode(text=alt.Text("share:Q", format=".1%"), color=white)
    inside = float(np.trace(counts) / total)
    text = f"Matrix of parts: {inside:.1%} of the edges connect nodes of one part."
    note = "" if share == 1.0 else f"Estimated from {share:.2g} of the edges."
    height = min(480, max(200, 26 * store.num_parts))
    return make_figure("parts", "Edges between parts", text, chart, note=note, height=height)


def parts_matrix(store: Store) -> tuple[NDArray[np.float64], float]:
    """Return the edges from part i (row) to part j (column), and the share of the edges that was counted."""
    counts, counted = np.zeros((store.num_parts, store.num_parts)), 0
    for edge_type in store.edge_types:
        starts = store.offsets_of(edge_type[0]).numpy()[1:-1]
        for part in range(store.num_parts):
            indices: Tensor = store.edge("indices", part, edge_type)
            step = max(1, -(-len(indices) // _COUNTED))
            sources = indices[::step].numpy()
            owners = np.searchsorted(starts, sources, side="right")
            counts[:, part] += np.bincount(owners, minlength=store.num_parts) * (len(indices) / max(len(sources), 1))
            counted += len(sources)
    return counts, counted / max(store.num_edges, 1)


def class_labels(store: Store | None) -> list[str] | None:
    """Return the names of the classes, if the data names them."""
    names: Any = None if store is None else store.facts.get("label_values")
    return [str(name) for name in names] if names else None
