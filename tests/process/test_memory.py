"""What a rank holds over a whole run: never the graph, whether the run makes the store or finds it.

Memory is ``peak_anonymous_bytes`` of ``summary.json`` above what imports took: mapped files do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import gtrain, ok, summary

from gtrain.nn.table import INIT_ROWS

MIB = 1 << 20
NODES, FEATURES, HIDDEN = 16384, 1024, 16
GRAPH = (
    f"data.num_nodes={NODES}",
    f"data.num_features={FEATURES}",
    "data.num_edges=160000",
    "data.partitioner=random",
    f"model.hidden_channels={HIDDEN}",
    "model.dropout=0",
    "trainer.max_epochs=1",
    "trainer.num_nodes=2",
)
WHOLE = NODES * FEATURES * 4
PART = WHOLE // 2
LIBRARIES = 8 * MIB  # kernels and metrics, which a run of a small graph loads as well


def held(ranks: list[dict[str, Any]]) -> Iterator[int]:
    """Of each worker, bytes above imports."""
    for rank in ranks:
        if rank["role"] == "worker":
            yield rank["peak_anonymous_bytes"] - rank["baseline_anonymous_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        # halo rows (up to all nodes') and activations, forward and backward, of two layers
        (("strategy=sar",), 6 * NODES * HIDDEN * 4),
        # 4 batches in the making: 64 seeds, 5 neighbours each, 5 of those each
        (("strategy=pyg", "data.batch_size=64", "data.num_neighbors=[5,5]"), 4 * 64 * 31 * FEATURES * 4),
    ],
    ids=["sar", "pyg"],
)
def test_a_rank_holds_its_part(arguments: tuple[str, ...], more: int, tmp_path: Path) -> None:
    for name in ("made", "found"):
        ok(gtrain(*arguments, *GRAPH, f"hydra.run.dir={name}", cwd=tmp_path))
        content = summary(tmp_path / name)
        assert max(held(content["ranks"])) <= 1.3 * (PART + more + LIBRARIES) < WHOLE + more
        preparation = content["store"]["preparation"]
        assert (preparation is None) == (name == "found")
        if preparation is not None:
            assert preparation["peak_anonymous_bytes"] - preparation["baseline_anonymous_bytes"] > WHOLE


ENTITIES, DIMENSION = 160_000, 256


@pytest.mark.slow
def test_a_worker_of_pbg_holds_its_buffer(tmp_path: Path) -> None:
    """Two partitions of eight in training and in ranking; the others are files. A small table shows what else is."""
    used = {}
    for entities in (ENTITIES // 100, ENTITIES):
        run = f"run-{entities}"
        result = gtrain(
            "strategy=pbg", "data=planted_kg", "model=kg", f"data.num_entities={entities}", "data.num_positions=1000",
            "data.num_triples=16000", "data.held_out=0.002", "data.batch_size=500", f"model.dimension={DIMENSION}",
            "strategy.num_partitions=8", "strategy.buffer_partitions=2", "trainer.max_epochs=1", f"hydra.run.dir={run}",
            cwd=tmp_path,
        )  # fmt: skip
        ok(result)
        (used[entities],) = held(summary(tmp_path / run)["ranks"])
    small, large = used.values()
    table = ENTITIES * DIMENSION * 4
    scores = 2 * 32 * ENTITIES // 8 * 4  # of the 32 edges that are ranked, and what is compared with them
    initial = 3 * INIT_ROWS * DIMENSION * 4  # rows as they are drawn, in their order, and in a partition's
    assert large - small <= 1.3 * (table // 4 + scores + initial) < table // 2
