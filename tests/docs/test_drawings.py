"""The drawings of the documentation are those of their script, and show what the command prints."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

import pytest
from helpers import REPO

IMAGES = REPO / "docs" / "images"


@pytest.fixture(scope="module")
def drawings() -> Any:
    """The module docs/drawings.py."""
    spec = importlib.util.spec_from_file_location("drawings", REPO / "docs" / "drawings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["drawings"] = module  # its dataclass looks the module up
    spec.loader.exec_module(module)
    return module


def test_drawings_are_written_by_their_script(drawings: Any) -> None:
    """``python docs/drawings.py`` writes them."""
    assert {path.stem for path in IMAGES.glob("*.svg")} == set(drawings.DRAWINGS)
    assert [
        name for name, draw in drawings.DRAWINGS.items() if draw().svg() != (IMAGES / f"{name}.svg").read_text()
    ] == []


def test_every_drawing_is_shown_on_a_page(drawings: Any) -> None:
    pages = [REPO / "README.md", *(REPO / "docs").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/(\w+)\.svg\)", page.read_text())}
    assert shown == set(drawings.DRAWINGS)


def test_the_run_of_the_readme_has_the_headings_of_the_report() -> None:
    said = (IMAGES / "run.txt").read_text()
    report = (REPO / "gtrain" / "run" / "report.py").read_text()
    (headings,) = re.findall(r"┃ (rank ┃.*)┃", said)
    for heading in map(str.strip, headings.split("┃")):
        assert f'"{heading}"' in report
    assert '"seconds per training epoch"' in report and "seconds per training epoch" in said
    assert max(map(len, said.splitlines())) <= 120
