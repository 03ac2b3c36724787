"""plugins/example_backend: installed as a stranger's would be, found, and exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers
import jsonschema
import pytest
from forked import gtrain
from helpers import REPO, example_site, ok, show, summary

SMALL = (
    "trainer.precision=64-true",
    "trainer.max_epochs=4",
    "model.dropout=0.5",
    "data.num_nodes=600",
    "data.num_edges=4800",
    "hydra.run.dir=run",
)


@pytest.fixture(scope="module")
def installed() -> dict[str, str]:
    """The environment in which the example is installed."""
    return {"PYTHONPATH": str(example_site())}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("single")
    ok(gtrain("strategy=single", *SMALL, cwd=folder))
    return losses(folder / "run")


def losses(run_dir: Path) -> dict[str, list[float]]:
    """Training and validation loss of each epoch, and the test's."""
    content = summary(run_dir)
    jsonschema.validate(content, json.loads((REPO / "docs" / "summary.schema.json").read_text()))
    found = {name: [epoch[name] for epoch in content["history"]] for name in ("train/loss", "val/loss")}
    return {**found, "test/loss": [content["metrics"]["test/loss"]]}


def test_help_lists_it(installed: dict[str, str], tmp_path: Path) -> None:
    text = ok(helpers.gtrain("--help", cwd=tmp_path, env=installed)).stdout
    strategies = text.partition("Strategies")[2].partition("== Configuration groups")[0]
    names = [line.split()[0] for line in strategies.splitlines()[1:] if line.strip()]
    assert names == ["pbg", "ps", "pyg", "replicated", "sar", "sar_auto", "single"]


def slow(*overrides: str) -> Any:
    return pytest.param(overrides, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "overrides",
    [
        slow("strategy=replicated", "trainer.num_nodes=3", "strategy.share=contiguous"),
        slow("strategy=sar_auto", "trainer.num_nodes=2", "strategy.halo_limit=0"),
        slow("strategy=sar_auto", "trainer.num_nodes=3", "strategy.halo_limit=100"),
    ],
    ids=" ".join,
)
def test_it_trains_what_one_process_trains(
    overrides: tuple[str, ...], installed: dict[str, str], reference: dict[str, list[float]], tmp_path: Path
) -> None:
    result = ok(gtrain(*overrides, *SMALL, cwd=tmp_path, env=installed))
    found = losses(tmp_path / "run")
    for name, values in reference.items():
        assert found[name] == pytest.approx(values, rel=1e-10), name
    if "strategy=sar_auto" in overrides:
        mode = 1 if "strategy.halo_limit=0" in overrides else 3
        assert result.stdout.count(f"using mode {mode}") == 1, show(result)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("strategy=replicated", "strategy.share=odd"), "strategy.share=odd was set.\nHINT: choose strided: "),
        (("strategy=sar_auto", "strategy.halo_limit=-1"), "strategy.halo_limit=-1.0 was set; it must be 0 or more "),
        (("strategy=sar_auto", "model=mlp"), "Strategies that do: replicated, single."),
        (("strategy=sar_auto", "mode=1"), "HINT: mode is a setting of strategy=sar."),
        (("strategy=replicated", "data.batch_size=9"), "strategy=replicated trains in full batch."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_its_refusals_read_as_ours(
    overrides: tuple[str, ...], message: str, installed: dict[str, str], tmp_path: Path
) -> None:
    result = gtrain(*overrides, *SMALL, cwd=tmp_path, env=installed)
    assert result.returncode == 1, show(result)
    assert message in result.stderr and "Traceback" not in result.stderr, show(result)
