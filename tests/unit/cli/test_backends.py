"""gtrain.backends: which strategies are installed, whatever metadata lies in the current folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from gtrain import __version__, backends
from gtrain.cli.entry import version_line

OURS = ["pbg", "ps", "pyg", "sar", "single"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, first on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.syspath_prepend(tmp_path)
    backends.installed.cache_clear()
    yield tmp_path
    backends.installed.cache_clear()


def egg_info(folder: Path, *points: str) -> None:
    info = folder / "gtrain.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: gtrain\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text("\n".join(["[gtrain.backends]", *points]) + "\n")


def test_an_older_build_in_the_current_folder_hides_no_strategy(folder: Path) -> None:
    egg_info(folder, "sar = gtrain_old_sar:backend", "gone = gtrain_gone:backend", "new = json:backend")
    assert distribution("gtrain").version == "0.0.1", "importlib.metadata reads the first alone"
    found = backends.installed()
    assert [name for name in found if name in (*OURS, "gone", "new")] == ["new", *OURS]
    assert found["sar"].value == "gtrain_sar:backend"
    assert found.outdated == [str(folder)]
    assert version_line().startswith(f"gtrain {__version__} (torch ")


def test_a_copy_with_the_same_strategies_is_not_worth_a_word(folder: Path) -> None:
    egg_info(folder, *(f"{name} = gtrain_{name}:backend" for name in OURS))
    assert backends.installed().outdated == []
    shutil.rmtree(folder / "gtrain.egg-info")
    egg_info(folder)  # of a build that knew no strategies
    backends.installed.cache_clear()
    assert set(OURS) <= set(backends.installed())
    assert backends.installed().outdated == []
