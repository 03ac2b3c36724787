"""Every file of examples/ runs as its docstring says, and prints what it promises."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import python
from helpers import REPO, ok

EXAMPLES = REPO / "examples"


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that a pattern's group matches, in order."""
    return [float(match) for match in re.findall(pattern, text)]


def check_own_module(said: str, folder: Path) -> None:
    one, two = numbers(r"norm of the weights, \d rank\(s\): ([\d.]+)", said)
    assert one == pytest.approx(two, abs=2e-5)


def check_own_data(said: str, folder: Path) -> None:
    (accuracy,) = numbers(r"test accuracy: ([\d.]+)", said)
    assert accuracy > 0.8, "the quadrants were not learned"


def check_knowledge_graph(said: str, folder: Path) -> None:
    (rank,) = numbers(r"test MRR: ([\d.]+)", said)
    assert rank > 0.4, "three siblings share the first ranks"
    rows = (folder / "vectors.tsv").read_text().splitlines()
    assert len(rows) == 360
    assert {len(row.split("\t")) for row in rows} == {33}


def check_click_log(said: str, folder: Path) -> None:
    (auc,) = numbers(r"test AUC: ([\d.]+)", said)
    assert auc > 0.7, "the advertisers' click rates were not learned"
    assert re.findall(r"^(\w+) \d: [\d.]+ MiB sent", said, re.MULTILINE) == ["worker"] * 2 + ["parameter"] * 2


def check_pyg_loader(said: str, folder: Path) -> None:
    (accuracy,) = numbers(r"validation accuracy: ([\d.]+)", said)
    assert accuracy > 0.7, "one of 8 classes is 0.125"


def check_sweep(said: str, folder: Path) -> None:
    losses = {name: numbers(rf"(?m)^{name} +\d +([\d.]+)", said) for name in ("single", "sar")}
    assert len(losses["single"]) == 2
    assert losses["single"] == pytest.approx(losses["sar"], abs=1e-5)


def check_new_backend(said: str, folder: Path) -> None:
    assert len(re.findall(r"^epoch \d: loss [\d.]+ on one rank", said, re.MULTILINE)) == 5


def check_plain_loop(said: str, folder: Path) -> None:
    for figure in (r"loss ([\d.]+)", r"norm of the gradients ([\d.]+)"):
        one, two = numbers(figure, said)
        assert one == pytest.approx(two, rel=1e-10)
    assert numbers(r"loss ([\d.]+)", said)[0] < 0.75, "of four classes, ln 4 is 1.39"


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "own_module": check_own_module,
    "own_data": check_own_data,
    "knowledge_graph": check_knowledge_graph,
    "click_log": check_click_log,
    "pyg_loader": check_pyg_loader,
    "plain_loop": check_plain_loop,
    "sweep": check_sweep,
    "new_backend": check_new_backend,
}


@pytest.mark.slow
@pytest.mark.parametrize("example", CHECKS)
def test_an_example_runs(example: str, tmp_path: Path) -> None:
    CHECKS[example](ok(python(str(EXAMPLES / f"{example}.py"), cwd=tmp_path)).stdout, tmp_path)


def test_every_example_is_listed_and_tested() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == set(CHECKS)
    listed = re.findall(r"^\| \[([\w.]+)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
