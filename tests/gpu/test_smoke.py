"""The command on a GPU trains what it trains on the CPU, with one rank and with two that share the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import gtrain
from helpers import ok, summary


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("sar", 1), ("sar", 2), ("pyg", 1), ("pyg", 2)])
def test_losses_of_the_embedded_default_equal_those_of_the_cpu(strategy: str, ranks: int, tmp_path: Path) -> None:
    losses = {}
    for accelerator in ("cpu", "gpu"):
        settings = [f"trainer.accelerator={accelerator}", f"hydra.run.dir={accelerator}", "trainer.precision=64-true"]
        settings += ["trainer.max_epochs=2", f"strategy={strategy}", f"trainer.num_nodes={ranks}"]
        ok(gtrain(*settings, cwd=tmp_path, timeout=100))
        losses[accelerator] = [epoch["train/loss"] for epoch in summary(tmp_path / accelerator)["history"]]
    assert len(losses["gpu"]) == 2
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=1e-9)
