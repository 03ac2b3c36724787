"""What a rank holds over a whole run: never the graph, whether the run makes the store or finds it.

Memory is ``peak_anonymous_bytes`` of ``summary.json`` above what imports took: mapped files do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import gtrain, ok, summary
from helpers import REPO, rest_exhaustive

from gtrain.nn.table import INIT_ROWS
from gtrain_pbg.machines.partition_server import PIECE_BYTES
from gtrain_ps.worker.served_table import PIECE_BYTES as PS_PIECE_BYTES

ASSETS = REPO / "tests" / "assets"
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
    trained = (*arguments, *GRAPH, "ckpt_path=made/checkpoints/best.ckpt")
    meter = ("+callbacks.meter._target_=memory_meter.MemoryMeter", "+callbacks.meter.folder=memory", "output=out.npy")
    ok(gtrain("test", *trained, "hydra.run.dir=tested", cwd=tmp_path))
    ok(gtrain("predict", *trained, *meter, cwd=tmp_path, env={"PYTHONPATH": str(ASSETS)}))
    predicting = [json.loads(path.read_text()) for path in (tmp_path / "memory").iterdir()]
    for ranks in (summary(tmp_path / "tested")["ranks"], predicting):
        assert len(ranks) == 2 and max(held(ranks)) <= 1.3 * (PART + more + LIBRARIES)


ENTITIES, DIMENSION, PARTITIONS = 320_000, 256, 12
KERNELS = 32 * MIB  # compiled code and its compiler, and the BLAS's buffers


@pytest.mark.slow
@pytest.mark.parametrize("machines", rest_exhaustive([1, 2], 2))
def test_a_worker_of_pbg_holds_its_buffer(machines: int, tmp_path: Path) -> None:
    """Two partitions of twelve in training and in ranking; the others are files, of the machines' servers if several.

    A worker that exchanges partitions with these servers may hold two more for a moment, one that is read and one that
    is written back, and both sides hold the pieces that they send.
    """
    for entities in (ENTITIES // 100, ENTITIES):  # the first run compiles, which takes memory, too
        result = gtrain(
            "strategy=pbg", "data=planted_kg", "model=kg", f"data.num_entities={entities}", "data.num_positions=1000",
            "data.num_triples=16000", "data.held_out=0.002", "data.batch_size=500", f"model.dimension={DIMENSION}",
            f"strategy.num_partitions={PARTITIONS}", "strategy.buffer_partitions=2", "trainer.max_epochs=1",
            f"trainer.num_nodes={machines}",
            f"hydra.run.dir=run-{entities}", cwd=tmp_path,
        )  # fmt: skip
        ok(result)
    ranks = summary(tmp_path / f"run-{ENTITIES}")["ranks"]
    table = ENTITIES * DIMENSION * 4
    sent = 2 * PIECE_BYTES if machines > 1 else 0
    buffer = 2 * machines * table // PARTITIONS + sent
    scores = 2 * 32 * ENTITIES // PARTITIONS * 4  # of the 32 edges that are ranked, and what is compared with them
    initial = 2 * INIT_ROWS * DIMENSION * 4  # rows as they are drawn, and those of a partition
    assert max(held(ranks)) <= 1.3 * (buffer + scores + initial + KERNELS) < 3 * table // 4
    for server in ranks[machines:]:  # what workers have not acknowledged, and what is being written
        used = server["peak_anonymous_bytes"] - server["baseline_anonymous_bytes"]
        assert used <= 1.3 * (4 * sent + LIBRARIES) < table // 3


WIDE, WIDTH, BATCH, ENTRIES = 400_000, 64, 200, 20


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "state", "readers"), [("LazyAdam", 2 * WIDTH + 1, 2), ("RowwiseAdagrad", 1, 1)])
def test_processes_of_ps_hold_their_share(rule: str, state: int, readers: int, tmp_path: Path) -> None:
    """Training with checkpoints, validation, test and export; a prediction, with one or two workers and servers."""
    common = (
        "strategy=ps", "data=planted_sparse", "data.num_rows=3000",
        f"data.features_per_row={ENTRIES}", f"data.batch_size={BATCH}", "model=sparse",
        f"model.hidden_channels={WIDTH}", f"model.sparse_optimizer._target_=gtrain.nn.{rule}", "trainer.max_epochs=1",
    )  # fmt: skip
    two = ("trainer.num_nodes=2", "strategy.servers=2", "strategy.export=tables")
    for features in (WIDE // 100, WIDE):  # the first run compiles, which takes memory, too
        run = f"run-{features}"
        ok(gtrain(*common, *two, f"data.num_features={features}", f"hydra.run.dir={run}", cwd=tmp_path))
    _check_ps(summary(tmp_path / run)["ranks"], WIDTH + state)
    assert np.load(tmp_path / "tables" / "wide.npy", mmap_mode="r").shape == (WIDE, WIDTH)
    processes = (f"trainer.num_nodes={readers}", f"strategy.servers={readers}")
    meter = ("+callbacks.meter._target_=memory_meter.MemoryMeter", "+callbacks.meter.folder=memory")
    trained = (f"data.num_features={WIDE}", f"ckpt_path={run}/checkpoints/best.ckpt", "output=scores.npy")
    ok(gtrain("predict", *common, *trained, *processes, *meter, cwd=tmp_path, env={"PYTHONPATH": str(ASSETS)}))
    ranks = [json.loads(path.read_text()) for path in (tmp_path / "memory").iterdir()]
    assert len(ranks) == 2 * readers
    _check_ps(ranks, WIDTH)


def _check_ps(ranks: list[dict[str, Any]], numbers: int) -> None:
    """Check all processes of a run of which the servers have so many numbers (4 bytes) for each row of the table."""
    pieces = 8 * PS_PIECE_BYTES  # of rows on their way to a file: four that a worker puts together, and those under way
    step = BATCH * (ENTRIES * (4 + 4 + 8) + 2 * WIDTH * 4)  # ids, values, their grouping; products, gradients
    libraries = 12 * MIB
    servers = [rank for rank in ranks if rank["role"] == "parameter"]
    share = WIDE // len(servers) * 4 * (numbers + 1)  # one more: where a row's entries end in a step
    bounds = {"worker": 3 * step + pieces + libraries, "parameter": share + 8 * step + pieces + libraries}
    for rank in ranks:
        used = rank["peak_anonymous_bytes"] - rank["baseline_anonymous_bytes"]
        assert used <= 1.3 * bounds[rank["role"]], (rank["role"], rank["rank"])
