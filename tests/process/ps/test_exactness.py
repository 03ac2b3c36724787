"""Every synchronous ps run trains what one process trains: the losses of 50 steps, to the stated tolerance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from helpers import rest_exhaustive

ROWS = ("data=planted_sparse", "data.num_rows=400", "data.num_features=150", "data.features_per_row=6")
STEPS = ("model=sparse", "model.hidden_channels=8", "data.train_fraction=0.8", "data.val_fraction=0.1")
SETTINGS = ("callbacks=none", "logger=none", "trainer.limit_test_batches=0", "trainer.max_epochs=10")
SMALL = (*ROWS, *STEPS, "data.batch_size=65", *SETTINGS)  # 5 steps an epoch, 65 rows and 60 in the last
OPTIMIZERS = {
    "SGD": (
        "model.sparse_optimizer.lr=0.5",
        "model.scheduler={_target_:torch.optim.lr_scheduler.StepLR,step_size:2,gamma:0.5}",
    ),
    "Adagrad": ("model.sparse_optimizer.lr=0.05", "model.sparse_optimizer.weight_decay=0.001"),
    "RowwiseAdagrad": ("model.sparse_optimizer.lr=0.05",),
    "LazyAdam": ("model.sparse_optimizer.lr=0.01",),
}
Runner = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def sweep(tmp_path: Path) -> Runner:
    """Runs a sweep and returns the summaries of its jobs in order."""

    def run(*overrides: str, name: str) -> list[dict[str, Any]]:
        return forked.sweep(tmp_path / name, *overrides)

    return run


def worst(expected: dict[str, Any], found: dict[str, Any], name: str = "train/loss") -> float:
    """Largest relative difference of a value over the epochs."""
    pairs = list(zip(expected["history"], found["history"], strict=True))
    assert len(pairs) == len(expected["epoch_seconds"])
    return max(abs(a[name] - b[name]) / abs(a[name]) for a, b in pairs)


def optimizer(name: str) -> tuple[str, ...]:
    return (f"model.sparse_optimizer._target_=gtrain.nn.{name}", *OPTIMIZERS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers", "servers"),
    rest_exhaustive(
        [("SGD", 4, 2), ("Adagrad", 2, 4), ("RowwiseAdagrad", 1, 2), ("LazyAdam", 2, 1)],
        ("Adagrad", 2, 4),
        ("LazyAdam", 2, 1),
    ),
)
def test_every_optimizer(sweep: Runner, name: str, workers: int, servers: int) -> None:
    """Other numbers of workers and servers: ``tests/unit/ps/test_service.py``, where they are threads."""
    arguments = (*SMALL, *optimizer(name), "trainer.precision=64-true")
    (single,) = sweep("strategy=single", *arguments, name="single")
    served = ("strategy=ps", f"trainer.num_nodes={workers}", f"strategy.servers={servers}")
    (run,) = sweep(*served, *arguments, name="served")
    assert run["world_size"] == workers
    assert worst(single, run) < 1e-12 and worst(single, run, "val/loss") < 1e-12
    assert single["history"][0]["train/loss"] - single["history"][-1]["train/loss"] > 1e-3  # it has learned something


@pytest.mark.slow
def test_single_precision(sweep: Runner) -> None:
    arguments = (*SMALL, *optimizer("LazyAdam"))
    (single,) = sweep("strategy=single", *arguments, name="single")
    (run,) = sweep("strategy=ps", "trainer.num_nodes=2", "strategy.servers=2", *arguments, name="served")
    assert worst(single, run) < 1e-5


KG = (
    "data=planted_kg",
    "data.num_entities=120",
    "data.num_positions=6",
    "data.num_relations=4",
    "data.num_triples=700",
    "data.num_types=3",
    "data.batch_size=100",
    "model=kg",
    "model.dimension=8",
    "model.init_scale=0.3",
    "model.num_batch_negs=7",
    "model.num_uniform_negs=5",
    "model.relation_prediction=0.5",
    "model.num_candidates=40",
    "trainer.precision=64-true",
)


@pytest.mark.parametrize(
    ("workers", "servers", "reciprocal"),
    [(3, 2, "true"), pytest.param(2, 1, "false", marks=pytest.mark.slow)],
)
def test_chunks_and_their_negatives_are_those_of_one_process(
    sweep: Runner, tmp_path: Path, workers: int, servers: int, reciprocal: str
) -> None:
    """Batches are not a multiple of a chunk, and an epoch's last one is shorter; a resumed run continues like that."""
    arguments = (*KG, f"model.reciprocal={reciprocal}", "logger=none", "trainer.limit_test_batches=0")
    (single,) = sweep("strategy=single", *arguments, "trainer.max_epochs=4", name="single")
    served = ("strategy=ps", f"trainer.num_nodes={workers}", f"strategy.servers={servers}", *arguments)
    (run,) = sweep(*served, "trainer.max_epochs=2", name="served")
    assert run["world_size"] == workers
    agree(single["history"][:2], run["history"])
    last = tmp_path / "served" / "0" / "checkpoints" / "last.ckpt"
    (resumed,) = sweep(*served, "trainer.max_epochs=4", f"ckpt_path={last}", name="resumed")
    agree(single["history"][2:], resumed["history"])


@pytest.mark.slow
def test_a_weighted_graph_with_learned_features(sweep: Runner, tmp_path: Path) -> None:
    """Weights of edges count: with all of them 1 the losses are others."""
    edges = [(node, (7 * node + step) % 60) for node in range(60) for step in range(1, 9)]
    for name, weights in (("weighted", (0.25, 1.0, 3.0)), ("ones", (1.0,))):
        lines = (f"{a} {b} {weights[(a + b) % len(weights)]}\n" for a, b in edges)
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    (tmp_path / "labels.txt").write_text("".join(f"{node % 3}\n" for node in range(60)))
    data = ("data=edges", "data.labels=labels.txt", "data.root=.", "data.num_nodes=60", "trainer.precision=64-true")
    model = ("model=gcn", "model.learn_features=true", *optimizer("RowwiseAdagrad"), *SETTINGS)
    single, ones = sweep("strategy=single", "data.path=weighted.txt,ones.txt", *data, *model, name="single")
    (run,) = sweep("strategy=ps", "data.path=weighted.txt", *data, *model, name="served")
    assert worst(single, run) < 1e-12 and worst(single, run, "val/loss") < 1e-12 and worst(single, ones) > 1e-3


def agree(expected: list[dict[str, float]], found: list[dict[str, float]]) -> None:
    """Epochs of a model of embeddings are the same."""
    names = ("train/loss", "val/loss", "val/mrr", "val/auc")
    for mine, other in zip(expected, found, strict=True):
        assert [mine[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-12)


@pytest.mark.slow
def test_every_protocol_cut_and_rest(sweep: Runner) -> None:
    """Blocks of columns are exact where a zero gradient changes nothing: without weight decay."""
    plain = ("model.sparse_optimizer.weight_decay=0", "trainer.max_epochs=4", "trainer.precision=64-true")
    arguments = (*SMALL, *optimizer("Adagrad"), *plain)
    (single,) = sweep("strategy=single", *arguments, name="single")
    served = ("strategy=ps", "trainer.num_nodes=2", "strategy.servers=4", *arguments)
    runs = sweep(*served, "strategy.protocol=pull,auto", name="protocols")
    runs += sweep(*served, "strategy.split=column,grid,auto", name="splits")
    runs += sweep(*served, "strategy.rest=allreduce", "strategy.blocks=range", "strategy.prefetch=0", name="others")
    assert len(runs) == 6
    for run in runs:
        assert worst(single, run) < 1e-12 and worst(single, run, "val/auc") < 1e-12
