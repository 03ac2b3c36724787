"""``gtrain export`` of several node types: a file of the labelled one, and a folder with the others."""

from __future__ import annotations

from pathlib import Path

import forked
import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import ok

SIZES = {"paper": 300, "author": 120, "term": 40}
GRAPH = ("data=planted_hetero", *(f"data.num_{name}s={count}" for name, count in SIZES.items()))
GRAPH += ("data.num_writes=900", "data.num_cites=900", "data.num_mentions=900", "model=hetero_sage")
TRAIN = ("trainer.max_epochs=2", "logger=none", "hydra.run.dir=run")
ENDS = ("", ".types")
SERVED = "model.sparse_optimizer={_target_:gtrain.nn.RowwiseAdagrad,lr:0.1}"


PARTS = ("trainer.num_nodes=2", "data.num_parts=2")


@pytest.mark.slow
def test_all_strategies_write_every_type(tmp_path: Path) -> None:
    """A rank writes the nodes of its part; the numbers are those of one process on the whole graph."""
    ok(forked.gtrain("strategy=single", *GRAPH, SERVED, *TRAIN, cwd=tmp_path))
    batches = ("data.batch_size=100", "data.num_neighbors=[-1,-1]")
    for strategy, settings in (("single", ()), ("sar", PARTS), ("pyg", (*PARTS, *batches)), ("ps", PARTS)):
        given = (f"strategy={strategy}", *GRAPH, SERVED, *settings, "ckpt_path=run/checkpoints/last.ckpt")
        ok(forked.gtrain("export", *given, f"output={strategy}.npy", cwd=tmp_path))
        assert sorted(path.name for path in tmp_path.glob(f"{strategy}.npy*")) == [
            f"{strategy}.npy{end}" for end in ENDS
        ]
        for name, count in SIZES.items():
            end = "" if name == "paper" else f".types/{name}.npy"
            whole, parts = (np.load(tmp_path / f"{each}.npy{end}") for each in ("single", strategy))
            assert whole.shape == (count, 64) and len(np.unique(whole, axis=0)) == count
            np.testing.assert_allclose(parts, whole, atol=1e-5)


@pytest.mark.slow
def test_types_of_a_link_task(tmp_path: Path) -> None:
    edges = ("model.task=link", "data.target='author,writes,paper'", "strategy=sar", "trainer.num_nodes=2")
    ok(forked.gtrain(*GRAPH, *edges, *TRAIN, cwd=tmp_path))
    for left in ("export.parquet.part", "export.parquet.done"):  # of a command that was killed
        (tmp_path / left).mkdir()
    for verb in ("export", "predict"):
        ok(forked.gtrain(verb, "run=run", f"output={verb}.parquet", cwd=tmp_path))
        for name, count in SIZES.items():
            end = "" if name == "paper" else f".types/{name}.parquet"
            rows = pq.read_table(tmp_path / f"{verb}.parquet{end}").to_pydict()
            assert sorted(rows["id"]) == list(range(count)) and np.isfinite(rows["values"]).all()
