"""How figures look: one theme for light and dark pages, colours, and the form in which a page includes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

BLUE, ORANGE, GREEN, RED = "#4a8fdc", "#e0892b", "#3ba272", "#d65f5f"
COLOURS = [
    *(BLUE, ORANGE, GREEN, RED, "#9a7fd1", "#2ea6a8", "#d177a6", "#98983a", "#aa1ea0", "#b0784a"),
    *("#3c6e14", "#1450f0", "#e614f0", "#5a648c", "#aa3c32", "#8c46f0", "#e61496", "#3c826e", "#a0648c", "#d26ef0"),
]
"""Colours of series, which are legible on white and on near-black; those from the tenth on have another dash too."""
OTHER = "other"
"""The series of all that have no colour of their own; it is grey."""
NEUTRAL = "#8a8f98"
HEAT = ["rgba(74,143,220,0.06)", "#2f74c8"]
"""Ends of the scale of heat maps; the low end lets the page's background through."""
_SOLID = 10
"""Series with solid lines."""
HEIGHT = 260
"""Height of a figure in pixels; the width is that of its column on the page."""
Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """A figure of a page.

    Attributes:
        name: of its files, and of its element.
        title: of the figure.
        alt: what it shows, for readers who do not see it; with the most important numbers.
        spec: the specification in Vega-Lite.
        note: a sentence under the figure.
        wide: whether it spans all columns of the page.
    """

    name: str
    title: str
    alt: str
    spec: dict[str, Any]
    note: str = ""
    wide: bool = False


def make_figure(
    name: str, title: str, description: str, chart: Any, *, note: str = "", wide: bool = False, height: int = HEIGHT
) -> Figure:
    """Return a figure of a chart of Altair, with the theme; numbers that are not finite are left out of it."""
    themed = chart.properties(width="container", height=height).configure(**_THEME)
    spec = _finite(themed.to_dict())
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return Figure(name, title, description, spec, note, wide)


def _finite(node: Any) -> Any:
    """Return a specification with None, which has no mark, for NaN and infinity, which JSON lacks."""
    if isinstance(node, dict):
        return {name: _finite(value) for name, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


def colour(field: str, names: Sequence[str], title: str | None = None) -> alt.Color:
    """Return the encoding of series by colour, with a legend above the figure in as many columns as fit its width."""
    pixels = 34 + 7 * min(25, max(map(len, names), default=0))
    columns = alt.ExprRef(f"max(1, floor(width / {pixels}))")
    palette = [NEUTRAL if name == OTHER else COLOURS[number % len(COLOURS)] for number, name in enumerate(names)]
    legend = alt.Legend(title=title, orient="top", columns=columns, symbolLimit=24) if len(names) > 1 else None
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=list(names), range=palette), legend=legend, sort=list(names))


def dashes(field: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the encoding that dashes the lines of series from the tenth on; empty with fewer."""
    if len(names) <= _SOLID:
        return {}
    scale = alt.Scale(domain=list(names), range=[[1, 0] if number < _SOLID else [6, 3] for number in range(len(names))])
    return {"strokeDash": alt.StrokeDash(f"{field}:N", scale=scale, legend=None)}


def thin(rows: Sequence[Any], most: int = 400) -> list[Any]:
    """Return at most this many evenly spaced rows, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(number * (len(rows) - 1) / (most - 1))] for number in range(most)]


_INK = "currentColor"  # of the page, light or dark
_THEME: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": _INK, "titleColor": _INK, "domainColor": _INK, "tickColor": _INK, "gridColor": _INK,
        "gridOpacity": 0.12, "domainOpacity": 0.4, "tickOpacity": 0.4, "labelFontSize": 11, "titleFontSize": 12,
        "titleFontWeight": 500, "titlePadding": 8, "labelOverlap": "greedy", "labelSeparation": 8, "labelLimit": 140,
    },
    "legend": {
        "labelColor": _INK, "titleColor": _INK, "labelFontSize": 11, "titleFontSize": 11, "symbolStrokeWidth": 2.5,
        "symbolType": "circle", "labelLimit": 180, "columnPadding": 14, "offset": 6, "titleFontWeight": 500,
    },
    "text": {"color": _INK, "fill": _INK, "fontSize": 11},
    "line": {"strokeWidth": 2},
    "rule": {"color": _INK},
    "bar": {"cornerRadiusEnd": 2},
}  # fmt: skip
