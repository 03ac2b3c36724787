"""Link prediction over several ranks is that of one process: losses, ranks among all nodes, area under the curve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from forked import gtrain
from helpers import ok, rest_exhaustive, summary

SETTINGS = ["callbacks=none", "logger=none", "trainer.max_epochs=4", "trainer.precision=64-true", "model.dropout=0.3"]
PLANTED = ["data=planted", "data.split=random", "data.num_nodes=200", "data.num_edges=1500", "data.num_features=8"]
TYPED = [
    "data=planted_hetero",
    "data.num_papers=120",
    "data.num_authors=60",
    "data.num_terms=30",
    "data.num_writes=300",
    "data.num_cites=300",
    "data.num_mentions=300",
    "data.partitioner=random",
]
RELATIONS = ["data=planted_kg", "data.num_entities=80", "data.num_relations=4", "data.num_positions=20"]
CASES = {
    "features": ["model=link_sage", *PLANTED, "model.num_negatives=3", "model.decoder=mlp"],
    "two types": ["model=hetero_sage", "model.task=link", *TYPED, "data.target='author,writes,paper'"],
    "one of several types": ["model=hgt", "model.task=link", *TYPED, "data.target=paper__cites__paper"],
    "relations": ["model=rgcn", "model.task=link", "+model.decoder=distmult", *RELATIONS, "data.num_triples=900"],
}
NAMES = ("train/loss", "val/loss", "val/mrr", "val/hits@1", "val/hits@10", "val/auc")
Runner = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def sweep(tmp_path: Path) -> Runner:
    """Runs a sweep and returns the summaries of its jobs in order."""

    def run(*overrides: str, name: str) -> list[dict[str, Any]]:
        return forked.sweep(tmp_path / name, *overrides, *SETTINGS)

    return run


def check_equal(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Every epoch's values, and those of the test, to 1e-10; losses after several steps tell of gradients too."""
    assert len(found["history"]) == len(expected["history"]) == 4
    for mine, theirs in zip(expected["history"], found["history"], strict=True):
        for name in NAMES:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-10), name
    for name in ("test/loss", "test/mrr", "test/auc"):
        assert found["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-10), name


@pytest.mark.slow
@pytest.mark.parametrize("case", rest_exhaustive(CASES, "features", "relations"))
def test_sar_is_exact(sweep: Runner, case: str) -> None:
    (single,) = sweep("strategy=single", "strategy.layers=plain", *CASES[case], name="single")
    assert 0 < single["metrics"]["test/mrr"] < 1
    modes = "mode=1,2,3" if case == "features" else "mode=1"
    ranks = "trainer.num_nodes=3" if case == "features" else "trainer.num_nodes=2,4"
    runs = sweep("strategy=sar", modes, ranks, *CASES[case], name="sar")
    for run in runs:
        check_equal(single, run)
        for rank in run["ranks"]:
            assert 0 < rank["comm_bound_bytes"] <= rank["bytes_sent"]


def test_sar_in_one_process(sweep: Runner) -> None:
    single, sar = sweep("strategy=single,sar", *CASES["features"], name="both")
    check_equal(single, sar)


@pytest.mark.slow
def test_ranks_without_edges_take_part(sweep: Runner, tmp_path: Path) -> None:
    """All edges point at nodes 0 .. 9; parts 1 and 2 have none to score and none to aggregate."""
    edges = [(source, target) for source in range(30) for target in range(10) if (source * 7 + target) % 3]
    (tmp_path / "edges.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in edges))
    (tmp_path / "parts.txt").write_text("".join(f"{node // 10}\n" for node in range(30)))
    arguments = ["model=link_gcn", "data=edges", f"data.path={tmp_path / 'edges.tsv'}", "data.columns=[0,1]"]
    parts = ["data.partitioner=file", f"data.partition_path={tmp_path / 'parts.txt'}", "data.num_parts=3"]
    (single,) = sweep("strategy=single", "strategy.layers=plain", *arguments, name="single")
    (sar,) = sweep("strategy=sar", "trainer.num_nodes=3", *arguments, *parts, name="sar")
    check_equal(single, sar)


@pytest.mark.slow
@pytest.mark.parametrize("case", rest_exhaustive(CASES, "one of several types", "relations"))
def test_pyg_over_all_neighbours_is_exact(sweep: Runner, case: str) -> None:
    arguments = [*CASES[case], "data.batch_size=200"]
    (single,) = sweep("strategy=single", "strategy.layers=plain", *arguments, name="single")
    every = ["strategy=pyg", "data.num_neighbors=[-1,-1]", "strategy.seeds=global"]
    ways = ["strategy.transport=shm,tcp"] if case == "features" else ["strategy.transport=tcp"]
    for run in sweep(*every, *ways, "trainer.num_nodes=3", *arguments, name="pyg"):
        check_equal(single, run)


@pytest.mark.slow
def test_pyg_samples_by_times(sweep: Runner) -> None:
    """The same whatever the transport; other seeds of the order than a single process has, and a loss that falls."""
    data = ["data=planted_temporal", "data.num_nodes=100", "data.num_events=2000", "data.batch_size=400"]
    arguments = [*data, "model=link_sage", "data.temporal_strategy=uniform", "data.num_neighbors=[5,5]"]
    shm, tcp = sweep("strategy=pyg", "strategy.transport=shm,tcp", "trainer.num_nodes=2", *arguments, name="pyg")
    check_equal(shm, tcp)
    losses = [epoch["train/loss"] for epoch in shm["history"]]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", rest_exhaustive(["single", "pyg"], "pyg"))
def test_collegemsg(tmp_path: Path, real_data: Callable[[str], Path], strategy: str) -> None:
    """Better than ranking targets by how many messages they had while training, which gives 0.596."""
    data = f"data.path={real_data('temporal') / 'CollegeMsg.txt'}"
    settings = ["callbacks=none", "logger=none", "trainer.limit_val_batches=0", f"hydra.run.dir={tmp_path}/run"]
    ranks = ["trainer.num_nodes=2", "data.batch_size=null"] if strategy == "pyg" else []
    ok(gtrain("experiment=collegemsg", f"strategy={strategy}", data, *ranks, *settings, cwd=tmp_path))
    assert 0.61 < summary(tmp_path / "run")["metrics"]["test/auc"] < 0.7
