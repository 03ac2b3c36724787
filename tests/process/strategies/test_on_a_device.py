"""Ranks whose model and batches are on a device, here a pretended one on which operations that mix devices fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import gtrain
from helpers import REPO, ok, some_slow, summary

ON_DEVICE = "+callbacks.device._target_=devices.pretended.OnDevice"
GRAPH = ("data.num_nodes=600", "data.num_edges=4800")
TYPED = ("data=planted_hetero", "model=hetero_sage")
CASES = {
    "single": ("strategy=single", "model=gat", *GRAPH),
    "pyg": ("strategy=pyg", "model=sage", *GRAPH, "data.batch_size=64", "data.num_neighbors=[5,5]"),
    "sar": ("strategy=sar", "mode=1", "model=gat", *GRAPH),
    "sar, links": ("strategy=sar", "model=link_sage", *GRAPH),
    "pyg, typed": ("strategy=pyg", *TYPED, "data.batch_size=128", "data.num_neighbors=[5,5]"),
    "sar, typed": ("strategy=sar", *TYPED),
    "pyg, links": ("strategy=pyg", "model=link_sage", *GRAPH, "data.batch_size=256", "data.num_neighbors=[5,5]"),
}


@pytest.mark.parametrize("case", some_slow(CASES, 3, "pyg, typed", "sar"))
def test_losses_are_those_of_the_cpu(case: str, tmp_path: Path) -> None:
    plain = ("trainer.precision=64-true", "trainer.max_epochs=2", "trainer.limit_test_batches=0", "callbacks=none")
    ranks = "trainer.num_nodes=1" if case == "single" else "trainer.num_nodes=2"
    histories = []
    for name, more in (("cpu", ()), ("device", (ON_DEVICE,))):
        settings = (*CASES[case], *plain, ranks, "model.dropout=0", f"hydra.run.dir={name}", *more)
        ok(gtrain(*settings, cwd=tmp_path, env={"PYTHONPATH": str(REPO / "tests" / "assets")}))
        histories.append(summary(tmp_path / name)["history"])
    expected, device = ([list(epoch.values()) for epoch in history] for history in histories)
    assert len(device) == 2 and device == [pytest.approx(epoch, rel=1e-12, nan_ok=True) for epoch in expected]
