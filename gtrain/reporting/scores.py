"""Figures of a test: confusion matrix, ROC and precision-recall curves, residuals, ranks, scores by relation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from gtrain.record.run import Row, RunRecord
from gtrain.record.score_counts import ScoreCounts
from gtrain.reporting.style import BLUE, HEAT, NEUTRAL, Figure, Table, colour, make_figure, thin

_DRAWN = 8
"""Classes whose curves are drawn one by one, the most frequent ones."""
_RELATIONS = 24
_POINTS = 2000
"""Nodes whose predicted numbers are drawn."""
_BINS = 1 << 17
"""Most bins of a curve; those of all ranks and classes together."""
Counts = NDArray[np.int64]


def test_counts(run: RunRecord, name: str) -> Counts | None:
    """Return counts of a test over all ranks; None if it has none of this name."""
    parts = [np.asarray(test["counts"][name], np.int64) for test in run.tests if name in test["counts"]]
    return np.sum(parts, axis=0) if parts else None


def score_counts(run: RunRecord) -> list[ScoreCounts]:
    """Return the counts of scores over all ranks, of each class or of edges; empty if the test has none."""
    ranks = [[ScoreCounts.of(content, _BINS) for content in test["scores"]] for test in run.tests if test.get("scores")]
    if ranks:
        return [_merged(parts) for parts in zip(*ranks, strict=True)]
    # Records of earlier releases have counts in equal bins of all scores.
    true, false = test_counts(run, "true"), test_counts(run, "false")
    if true is None or false is None:
        return []
    return [
        ScoreCounts.of({"shift": 0, "bins": range(len(some)), "positive": some, "negative": others}, _BINS)
        for some, others in zip(true, false, strict=True)
    ]


def _merged(counts: Sequence[ScoreCounts]) -> ScoreCounts:
    total = ScoreCounts(_BINS)
    for each in counts:
        total.merge(each)
    return total


def figures(run: RunRecord, class_names: list[str] | None, relation_names: list[str] | None) -> list[Figure]:
    """Return the figures that suit the task of the test.

    Args:
        run: the run.
        class_names: names of the classes; None: their numbers.
        relation_names: names of the relations; None: their numbers.
    """
    if not run.tests:
        return []
    by_class = [*_confusion(run, class_names), *_curves(run, class_names)]
    return [*by_class, *_predictions(run), *_residuals(run), *_ranks(run), *_relations(run, relation_names)]


def _confusion(run: RunRecord, names: list[str] | None) -> list[Figure]:
    counts = test_counts(run, "confusion")
    if counts is None:
        return []
    classes = len(counts)
    labels = names or [str(number) for number in range(classes)]
    rows: Table = []
    for true in range(classes):
        total = int(counts[true].sum())
        for predicted in range(classes):
            share = counts[true, predicted] / total if total else 0.0
            row = {"true": labels[true], "predicted": labels[predicted], "nodes": int(counts[true, predicted])}
            if classes <= 40 or row["nodes"]:
                rows.append({**row, "share": float(share)})
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(
            "predicted:N", sort=labels, title="predicted class", axis=alt.Axis(labelAngle=0 if classes <= 12 else -90)
        ),
        y=alt.Y("true:N", sort=labels, title="true class"),
        tooltip=["true:N", "predicted:N", "nodes:Q", alt.Tooltip("share:Q", format=".1%")],
    )
    chart = base.mark_rect().encode(
        color=alt.Color(
            "share:Q", scale=alt.Scale(domain=[0, 1], range=HEAT),
            legend=alt.Legend(title="share of the true class", orient="top", format=".0%", gradientLength=140),
        )
    )  # fmt: skip
    if classes <= 10:
        # A white number on the dark half of the scale.
        white = alt.condition("datum.share > 0.5", alt.value("white"), alt.value("currentColor"))
        chart += base.mark_text().encode(text="nodes:Q", color=white)
    right, total = int(np.trace(counts)), int(counts.sum())
    worst = counts - np.diag(np.diag(counts))
    text = f"Confusion matrix: {right:,} of {total:,} test nodes are classified correctly."
    if worst.any():
        actual, mistaken = divmod(int(worst.argmax()), classes)
        text += f" The most frequent mistake is {labels[mistaken]} for {labels[actual]}, {int(worst.max()):,} times."
    height = min(560, max(220, 26 * classes))
    return [make_figure("confusion", "Confusion matrix", text, chart, height=height)]


def _curves(run: RunRecord, names: list[str] | None) -> list[Figure]:
    counts = score_counts(run)
    if not counts:
        return []
    edges = run.tests[0]["task"] == "edges"
    if edges:
        series = {"edges": counts[0]}
    elif len(counts) == 2 and run.tests[0]["task"] == "classes":
        series = {names[1] if names else "class 1": counts[1]}
    else:
        sizes = np.asarray([each.positive.sum() for each in counts])
        frequent = np.argsort(-sizes, kind="stable")[:_DRAWN]
        series = {"all classes": _merged(counts)} if len(counts) > _DRAWN else {}
        named = {number: names[number] if names else f"class {number}" for number in sorted(frequent.tolist())}
        series |= {named[number]: counts[number] for number in named}
    roc: Table = []
    precision: Table = []
    areas = {}
    for name, each in series.items():
        positive, negative = each.positive, each.negative
        if not positive.sum() or not negative.sum():
            continue
        # From the highest score down.
        hits = np.concatenate([[0], np.cumsum(positive[::-1])]) / positive.sum()
        alarms = np.concatenate([[0], np.cumsum(negative[::-1])]) / negative.sum()
        areas[name] = float(np.trapezoid(hits, alarms))
        roc += [{"series": name, "x": x, "y": y, "order": n} for n, (x, y) in enumerate(_corners(alarms, hits))]
        retrieved = np.cumsum(positive[::-1]) + np.cumsum(negative[::-1])
        shown = retrieved > 0
        points = _corners(hits[1:][shown], np.cumsum(positive[::-1])[shown] / retrieved[shown])
        precision += [{"series": name, "x": x, "y": y, "order": n} for n, (x, y) in enumerate(points)]
    if not areas:
        return []
    said = ", ".join(f"{name} {area:.3f}" for name, area in areas.items())
    what = "true edges against one false edge each" if edges else "a class against the others"
    diagonal = alt.Chart(alt.Data(values=[{"x": 0, "y": 0}, {"x": 1, "y": 1}])).mark_line(
        color=NEUTRAL, strokeDash=[4, 4], strokeWidth=1
    ).encode(x="x:Q", y="y:Q")  # fmt: skip
    curve = _curve(roc, list(areas), "false positive rate", "true positive rate")
    note = f"Of {what}; from counts of scores in {max(len(each.bins) for each in series.values()):,} bins."
    return [
        make_figure("roc", "ROC curve", f"ROC curves; area under the curve: {said}.", diagonal + curve, note=note),
        make_figure(
            "precision-recall",
            "Precision and recall",
            f"Precision against recall of {', '.join(areas)}.",
            _curve(precision, list(areas), "recall", "precision"),
        ),
    ]


def _curve(rows: Table, names: list[str], x: str, y: str) -> Any:
    unit = alt.Scale(domain=[0, 1])
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line()
        .encode(
            x=alt.X("x:Q", title=x, scale=unit),
            y=alt.Y("y:Q", title=y, scale=unit),
            color=colour("series", names),
            order="order:Q",
            tooltip=["series:N", alt.Tooltip("x:Q", title=x, format=".3f"), alt.Tooltip("y:Q", title=y, format=".3f")],
        )
    )


def _corners(x: NDArray[Any], y: NDArray[Any]) -> list[tuple[float, float]]:
    """Return the points of a curve without those that repeat their neighbours to 3 digits."""
    points = np.stack([x, y], 1)
    if not len(points):
        return []
    rounded = (points * 500).round()
    keep = np.ones(len(points), bool)
    keep[1:-1] = (rounded[1:-1] != rounded[:-2]).any(1)
    return [(round(float(a), 4), round(float(b), 4)) for a, b in points[keep]]


def _predictions(run: RunRecord) -> list[Figure]:
    """Predicted against true numbers, of a sample."""
    scored = [test["scored"] for test in run.tests]
    true, predicted = (
        np.asarray([value for each in scored for value in each.get(name, ())]) for name in ("true", "predicted")
    )
    shown = np.isfinite(predicted) & np.isfinite(true)
    if not shown.any():
        return []
    points = thin(list(zip(true[shown].tolist(), predicted[shown].tolist(), strict=True)), _POINTS)
    low, high = (float(bound(points)) for bound in (np.min, np.max))
    scale = alt.Scale(domain=[low, high], nice=True, zero=False)
    line = alt.Chart(alt.Data(values=[{"x": low, "y": low}, {"x": high, "y": high}])).mark_line(
        color=NEUTRAL, strokeDash=[4, 4], strokeWidth=1
    ).encode(x="x:Q", y="y:Q")  # fmt: skip
    rows: Table = [{"true": float(f"{x:.6g}"), "predicted": float(f"{y:.6g}")} for x, y in points]
    dots = (
        alt.Chart(alt.Data(values=rows))
        .mark_circle(color=BLUE, opacity=0.45, size=16)
        .encode(
            x=alt.X("true:Q", title="true number", scale=scale),
            y=alt.Y("predicted:Q", title="predicted number", scale=scale),
            tooltip=["true:Q", "predicted:Q"],
        )
    )
    text = f"Predicted against true numbers of {len(points):,} test nodes"
    if true[shown].std() > 0 and predicted[shown].std() > 0:
        text += f"; their correlation is {np.corrcoef(true[shown], predicted[shown])[0, 1]:.3f}."
    else:  # which have no correlation
        text += "; all predictions are equal." if true[shown].std() > 0 else "; all true numbers are equal."
    note = f"A sample of {len(points):,}; predictions on the dashed line are exact."
    return [make_figure("predictions", "Predicted and true numbers", text, line + dots, note=note)]


def _residuals(run: RunRecord) -> list[Figure]:
    """Histogram of residuals, predicted less true, of all test nodes."""
    counts = test_counts(run, "residuals")
    if counts is None or not counts.sum():
        return []
    deviation, reach = (float(run.tests[0][name]) for name in ("deviation", "residual_reach"))
    edges = np.linspace(-reach, reach, len(counts) + 1) * deviation
    # Narrower than the bins of the record where all residuals are small.
    first, last = (int(np.nonzero(counts)[0][end]) for end in (0, -1))
    rows: Table = [
        {"low": float(edges[number]), "high": float(edges[number + 1]), "nodes": int(counts[number])}
        for number in range(first, last + 1)
    ]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(color=BLUE)
        .encode(
            x=alt.X("low:Q", bin="binned", title="predicted less true", scale=alt.Scale(zero=False, nice=False)),
            x2="high:Q",
            y=alt.Y("nodes:Q", title="nodes"),
            tooltip=[alt.Tooltip("low:Q", format=".4g"), alt.Tooltip("high:Q", format=".4g"), "nodes:Q"],
        )
    )
    within = int(counts[np.abs(edges[:-1] + edges[1:]) / 2 < deviation].sum())
    text = (
        f"Histogram of the residuals of {int(counts.sum()):,} test nodes; {within / counts.sum():.1%} are below "
        f"{deviation:.4g}, the standard deviation of the training labels."
    )
    note = f"The outermost bars have all residuals beyond {reach * deviation:.4g}." if counts[0] or counts[-1] else ""
    return [make_figure("residuals", "Residuals", text, chart, note=note)]


def _ranks(run: RunRecord) -> list[Figure]:
    counts = test_counts(run, "ranks")
    if counts is None or not counts.sum():
        return []
    last = int(np.nonzero(counts)[0].max())
    labels = [_rank_label(number) for number in range(last + 1)]
    rows = [{"ranks": labels[number], "share": float(counts[number] / counts.sum()), "count": int(counts[number])}
            for number in range(last + 1)]  # fmt: skip
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(color=BLUE)
        .encode(
            x=alt.X("ranks:N", sort=labels, title="rank of the true answer", axis=alt.Axis(labelAngle=-40)),
            y=alt.Y("share:Q", title="share of answers", axis=alt.Axis(format="%")),
            tooltip=["ranks:N", "count:Q", alt.Tooltip("share:Q", format=".1%")],
        )
    )
    text = f"Histogram of {int(counts.sum()):,} ranks of true answers; {counts[0] / counts.sum():.1%} are first."
    return [make_figure("ranks", "Ranks of the true answers", text, chart)]


def _rank_label(number: int) -> str:
    """Return the label of a bin, such as 2-3; the end of a large one is rounded, and is not in it."""
    low, end = 1 << number, 1 << number + 1
    if number == 0:
        return "1"
    return f"{low}-{end - 1}" if end <= 10_000 else f"{_short(low)}-<{_short(end)}"


def _short(value: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= max(unit, 10_000):
            return f"{value / unit:.3g}{name}"
    return str(value)


def _relations(run: RunRecord, names: list[str] | None) -> list[Figure]:
    sums: dict[int, list[float]] = {}
    for test in run.tests:
        for number, values in test.get("sums", {}).get("relation", {}).items():
            sums[int(number)] = [a + b for a, b in zip(sums.get(int(number), [0, 0, 0]), values, strict=True)]
    if len(sums) < 2:
        return []
    frequent = sorted(sums, key=lambda number: -sums[number][0])[:_RELATIONS]
    rows: Table = [
        {
            "relation": names[number] if names else f"relation {number}",
            "mrr": sums[number][1] / sums[number][0],
            "hits": sums[number][2] / sums[number][0],
            "edges": int(sums[number][0]),
        }
        for number in frequent
    ]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height={"band": 0.7}, color=BLUE)
        .encode(
            x=alt.X("mrr:Q", title="mean reciprocal rank"),
            y=alt.Y("relation:N", title=None, sort=[row["relation"] for row in rows]),
            tooltip=[
                "relation:N",
                "edges:Q",
                alt.Tooltip("mrr:Q", format=".4f"),
                alt.Tooltip("hits:Q", format=".4f", title="hits@10"),
            ],
        )
    )
    best = max(rows, key=lambda row: row["mrr"])
    text = f"Mean reciprocal rank by relation; highest for {best['relation']}, {best['mrr']:.4f}."
    note = f"The {len(rows)} most frequent of {len(sums)} relations." if len(sums) > len(rows) else ""
    height = max(120, 20 * len(rows) + 20)
    return [make_figure("relations", "Score by relation", text, chart, note=note, height=height)]


_SCORES = {"edges": ("reciprocal rank", "mean reciprocal rank"), "numbers": ("absolute error", "mean absolute error")}
"""The scores of nodes and edges by the task of the test; of classes: accuracy."""


def by_degree(scored: list[Row], task: str) -> list[Figure]:
    """Return the mean score by in-degree.

    Args:
        scored: rows with ``degree`` and ``score``; those whose score is not finite are left out.
        task: of the test; the degree is that of an edge's target if it is ``edges``.
    """
    scored = [row for row in scored if np.isfinite(row["score"])]
    if not scored:
        return []
    degrees = np.asarray([row["degree"] for row in scored])
    scores = np.asarray([row["score"] for row in scored])
    bins = np.where(degrees > 0, np.floor(np.log2(np.maximum(degrees, 1))).astype(int) + 1, 0)
    labels = {number: "0" if number == 0 else _rank_label(number - 1) for number in range(int(bins.max()) + 1)}
    rows: Table = []
    for number in np.unique(bins).tolist():
        chosen = scores[bins == number]
        mean, error = float(chosen.mean()), float(chosen.std() / np.sqrt(len(chosen)))
        row = {
            "degree": labels[number],
            "score": mean,
            "low": max(mean - 2 * error, 0),
            "high": mean + 2 * error if task == "numbers" else min(mean + 2 * error, 1),
        }
        rows.append({**row, "count": len(chosen)})
    order = [row["degree"] for row in rows]
    what, title = _SCORES.get(task, ("accuracy", "accuracy"))
    of_target = "in-degree of the target" if task == "edges" else "in-degree"
    x = alt.X("degree:N", sort=order, title=of_target, axis=alt.Axis(labelAngle=0))
    base = alt.Chart(alt.Data(values=rows)).encode(x=x)
    tooltip = ["degree:N", alt.Tooltip("score:Q", format=".4f", title=what), "count:Q"]
    chart = base.mark_bar(color=BLUE).encode(y=alt.Y("score:Q", title=title), tooltip=tooltip)
    chart += base.mark_rule(strokeWidth=1.5).encode(y="low:Q", y2="high:Q")
    text = f"Mean {what} by in-degree: " + ", ".join(f"{row['degree']}: {row['score']:.4g}" for row in rows) + "."
    note = f"A sample of {len(scored):,}; the lines are two standard errors."
    return [make_figure("degree", "Score by degree", text, chart, note=note)]
