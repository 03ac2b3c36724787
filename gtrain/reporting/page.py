"""Renders pages: templates, the inlined script of the figures, and the files beside a page."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from gtrain import __version__
from gtrain.files import replace_text, user_cache
from gtrain.reporting.style import Figure
from gtrain.units import size

_FILE_WIDTH = 640
"""Width in pixels of the files beside a page."""
FIGURES = frozenset(
    (
        *("balance", "bytes", "bytes-by-epoch", "confusion", "degree", "device-memory", "loss-by-epoch"),
        *("loss-by-seconds", "memory", "parts", "picture", "precision-recall", "predictions", "ranks"),
        *("relations", "residuals", "roc", "score-by-epoch", "score-by-seconds", "time", "time-by-epoch"),
        "timeline",
    )
)
"""Names of all figures; the files of those that a report does not have are left by an earlier report."""


def write_page(path: Path, template: str, figures: Sequence[Figure], **values: Any) -> None:
    """Write a page that needs no other file and no network.

    Args:
        path: the file.
        template: name of the template.
        figures: the figures of all sections.
        values: what the template shows.
    """
    environment = Environment(
        loader=PackageLoader("gtrain.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": _bytes, "seconds": _seconds, "number": _number, "score": _score}
    specs = json.dumps({figure.name: figure.spec for figure in figures}, separators=(",", ":"))
    content = environment.get_template(template).render(
        script=vega_bundle() if figures else "",
        # Tags and comments within the script would end it, or hide its end.
        specs=specs.replace("<", "\\u003c"),
        version=__version__,
        **values,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, content)


def write_files(folder: Path, figures: Sequence[Figure], form: str) -> None:
    """Write each figure as ``<name>.<form>`` into a folder, and delete those of an earlier report.

    Args:
        folder: created if missing.
        figures: the figures.
        form: ``svg`` or ``png``.
    """
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    for name in FIGURES - {figure.name for figure in figures if form == "svg"}:
        (folder / f"{name}.svg").unlink(missing_ok=True)
    for name in FIGURES - {figure.name for figure in figures if form == "png"}:
        (folder / f"{name}.png").unlink(missing_ok=True)
    for figure in figures:
        text = json.dumps({**figure.spec, "width": _FILE_WIDTH, "background": "white", "padding": 10})
        spec = text.replace('"currentColor"', '"#222222"')
        if form == "svg":
            (folder / f"{figure.name}.svg").write_text(vl_convert.vegalite_to_svg(spec))
        else:
            (folder / f"{figure.name}.png").write_bytes(vl_convert.vegalite_to_png(spec, scale=2))


def vega_bundle() -> str:
    """Return the script that draws the figures: vega, vega-lite and vega-embed, which vl-convert contains.

    Bundling takes seconds, so the result is kept in the user's cache.
    """
    import vl_convert

    name = f"vega-{version('vl-convert-python')}.js"
    cache = user_cache() / name
    try:
        return cache.read_text()
    except OSError:
        bundle = vl_convert.javascript_bundle(None)  # type: ignore[arg-type]  # None: all of vega-embed
        # "</script" within a string would end the element.
        script = re.sub(r"</(script)", r"<\\/\1", bundle, flags=re.IGNORECASE)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        replace_text(cache, script)
    except OSError:  # a home folder that cannot be written to
        pass
    return script


def _bytes(value: float | None) -> str:
    return "-" if value is None else size(value)


def _seconds(value: float | None) -> str:
    """Return seconds, from a minute on as minutes and hours."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
