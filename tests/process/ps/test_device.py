"""Workers whose layers are on a device, here a pretended one on which operations that mix devices fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from forked import gtrain
from helpers import REPO, ok, some_slow, summary

ON_DEVICE = "+callbacks.device._target_=devices.pretended.OnDevice"
ADAGRAD = "model.sparse_optimizer={_target_:gtrain.nn.Adagrad,lr:0.1}"
ROWS = ("data=planted_sparse", "model=sparse", "data.num_rows=400", "data.num_features=150", "data.batch_size=65")
GRAPH = ("data=edges", "data.path=edges.tsv", "data.labels=labels.tsv", "data.batch_size=17", "model.dropout=0")
LEARNED = (*GRAPH, "model.learn_features=true", "model.hidden_channels=8", ADAGRAD)
CASES = {
    "rows sent ahead": ROWS,
    "rows fetched, from blocks": (*ROWS, "strategy.protocol=pull", "strategy.split=grid", "strategy.servers=4"),
    "late, summed by workers": (*ROWS, "strategy.rest=allreduce", "trainer.num_nodes=1", "strategy.servers=1"),
    "embeddings": ("data=planted_kg", "data.num_entities=200", "data.num_triples=1500", "model=kg"),
    "whole graph": (*LEARNED, "model=gat"),
    "sampled": (*LEARNED, "model=sage", "data.num_neighbors=[3,2]"),
}


@pytest.mark.parametrize("case", some_slow(CASES, 3, "whole graph"))
def test_a_step_on_a_device_is_that_of_the_cpu(case: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    edges = generator.integers(0, 90, (500, 2))
    (tmp_path / "edges.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in edges))
    (tmp_path / "labels.tsv").write_text("".join(f"{node}\t{node % 3}\n" for node in range(90)))
    plain = ("trainer.precision=64-true", "trainer.max_epochs=2", "trainer.limit_test_batches=0", "callbacks=none")
    histories = []
    for name, more in (("cpu", ()), ("device", (ON_DEVICE,))):
        settings = ("strategy=ps", *CASES[case], *plain, f"hydra.run.dir={name}", *more)
        ok(gtrain(*settings, cwd=tmp_path, env={"PYTHONPATH": str(REPO / "tests" / "assets")}))
        histories.append(summary(tmp_path / name)["history"])
    expected, device = ([list(epoch.values()) for epoch in history] for history in histories)
    assert len(device) == 2 and device == [pytest.approx(epoch, rel=1e-12, nan_ok=True) for epoch in expected]
