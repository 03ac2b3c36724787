"""The 2-D picture of a sample of embeddings, or of the inputs of the network's last layer."""

from __future__ import annotations

import importlib.util
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from gtrain.reporting.style import BLUE, OTHER, Figure, Table, colour, make_figure

Points = NDArray[np.float64]
_MOST = 1000
"""Points of the picture; t-SNE of more takes longer than most readers wait."""
_COLOURED = 20
"""Classes with a colour each; with more, the rare ones share grey."""
_LINEAR = "the first two principal components"


def read_hidden(files: list[Path]) -> tuple[NDArray[np.int64], Points, NDArray[np.int64] | None]:
    """Return ids, rows ``[n, D]`` and labels (None without) of the samples of all ranks, each id once.

    Rows that are not finite, and files that cannot be read, are left out.
    """
    samples = [sample for file in files if (sample := _read(file)) is not None]
    if not samples:
        return np.empty(0, np.int64), np.empty((0, 0)), None
    ids, first = np.unique(np.concatenate([sample["id"] for sample in samples]), return_index=True)
    rows = np.concatenate([sample["values"] for sample in samples])[first]
    labelled = all("label" in sample for sample in samples)
    labels = np.concatenate([sample["label"] for sample in samples])[first] if labelled else None
    keep = np.flatnonzero(np.isfinite(rows).all(1))
    keep = keep[:: max(1, -(-len(keep) // _MOST))]
    return ids[keep], rows[keep].astype(np.float64), None if labels is None else labels[keep]


def _read(file: Path) -> dict[str, NDArray[Any]] | None:
    """Return the arrays of a sample; None if it is damaged, or was cut off by the end of its process."""
    try:
        with np.load(file) as arrays:
            sample = dict(arrays)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
        return None
    return sample if {"id", "values"} <= set(sample) and sample["values"].ndim == 2 else None


def project(rows: Points) -> tuple[Points, str]:
    """Return a point ``[n, 2]`` for each row, and the method: openTSNE, UMAP, or principal components."""
    if rows.shape[1] < 2 or np.linalg.matrix_rank(rows - rows.mean(0)) < 2:  # points of one line, or of one place
        return principal_components(rows, 2), _LINEAR
    rows = principal_components(rows, 50)
    if len(rows) > 30 and importlib.util.find_spec("openTSNE") is not None:
        from openTSNE import TSNE

        tsne = TSNE(perplexity=min(30, len(rows) // 4), random_state=0, theta=0.8, negative_gradient_method="bh")
        return np.asarray(tsne.fit(rows)), "t-SNE (openTSNE)"
    if len(rows) > 30 and importlib.util.find_spec("umap") is not None:
        from umap import UMAP

        return UMAP(random_state=0).fit_transform(rows), "UMAP"
    return principal_components(rows, 2), f"{_LINEAR}; openTSNE is not installed"


def principal_components(rows: Points, count: int) -> Points:
    """Return the rows' coordinates along their first principal components, ``[n, count]``; 0 beyond their rank."""
    centred = rows - rows.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    points = (left * sizes)[:, :count]
    return np.pad(points, ((0, 0), (0, max(0, count - points.shape[1])))) if count <= 2 else points


def picture(
    files: list[Path],
    names_of: Callable[[NDArray[np.int64]], list[str]],
    class_names: list[str] | None,
    subject: str,
) -> list[Figure]:
    """Return the picture, coloured by label; empty without a sample.

    Args:
        files: the samples of the ranks.
        names_of: returns names of nodes by original id.
        class_names: names of the classes; None: their numbers.
        subject: what the rows are: ``the embeddings``, ``the last hidden layer``.
    """
    if not files:
        return []
    ids, rows, labels = read_hidden(files)
    if len(ids) < 3:
        return []
    points, method = project(rows)
    if not np.isfinite(points).all():
        points, method = principal_components(rows, 2), _LINEAR
    points = points / (np.abs(points).max() or 1.0)
    table: Table = [
        {"x": round(float(x), 4), "y": round(float(y), 4), "name": name}
        for (x, y), name in zip(points, names_of(ids), strict=True)
    ]
    text = f"{len(ids):,} nodes by {subject}, in two dimensions by {method}"
    base = alt.Chart(alt.Data(values=table)).mark_circle(size=26, opacity=0.75, color=BLUE)
    none = alt.Axis(labels=False, ticks=False, grid=False, domain=False, title=None)
    place = {"x": alt.X("x:Q", axis=none), "y": alt.Y("y:Q", axis=none)}
    if labels is None:
        chart = base.encode(**place, tooltip=["name:N"])
    else:
        values, counts = np.unique(labels, return_counts=True)
        frequent = sorted(values[np.argsort(-counts, kind="stable")][:_COLOURED].tolist())
        label_of = {label: class_names[label] if class_names else str(label) for label in frequent}
        for row, label in zip(table, labels.tolist(), strict=True):
            row["label"] = label_of.get(label, OTHER)
        shown = [*label_of.values(), *([OTHER] if len(values) > len(frequent) else [])]
        chart = base.encode(**place, color=colour("label", shown, "label"), tooltip=["name:N", "label:N"])
        text += f", coloured by their {len(values)} labels"
    title = f"Picture of {subject}"
    return [make_figure("picture", title, f"{text}.", chart, note=f"{text}.", wide=True, height=460)]
