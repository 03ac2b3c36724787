"""``strategy=pbg`` on a GPU: the step against autograd and as a CUDA graph, whole runs against those of a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import gtrain
from helpers import ok, summary
from torch import Tensor
from unit.pbg.test_device_step import OnDevice
from unit.pbg.test_step import LOSSES, VARIANTS, Reference, make_edges, make_model, tolerance_of

from gtrain.model.kg.embedding import KGEmbedding
from gtrain_pbg.device.batches import BatchShape, BatchTensors, Ends
from gtrain_pbg.device.step import FusedStep, PlainStep

BY_COLUMN = ("none", "translation", "diagonal", "complex_diagonal")


class Captured(OnDevice):
    """Runs the first batch of a shape as it is, and later ones by replaying a CUDA graph."""

    def __init__(self, model: KGEmbedding, lr: float, **settings: Any) -> None:
        super().__init__(model, lr, device="cuda", **settings)
        self._graphs: dict[BatchShape, tuple[BatchTensors, Callable[[], None] | None]] = {}
        self.replays = 0

    def run(self, batch: BatchTensors, shape: BatchShape, ends: Ends, relations: Tensor) -> None:
        if shape not in self._graphs:
            inputs, _ = self._graphs[shape] = batch.like(), None
            inputs.memory.copy_(batch.memory)
            super().run(inputs, shape, ends, relations)
            return
        inputs, replay = self._graphs[shape]
        inputs.memory.copy_(batch.memory)
        if replay is None:
            replay = self.device.captured(lambda: self.step(inputs, shape, (ends, ends), relations))
            self._graphs[shape] = inputs, replay
        replay()
        self.replays += 1


@pytest.mark.parametrize("dimension", [8, 100])
@pytest.mark.parametrize(("operator", "loss"), list(itertools.product(BY_COLUMN, LOSSES)))
def test_the_fused_step_trains_as_autograd_does(operator: str, loss: str, dimension: int) -> None:
    model = make_model(torch.float64, operator=operator, loss=loss, dimension=dimension)
    ours, reference = OnDevice(model, 0.05, "sgd", "sgd", device="cuda"), Reference(model, 0.05, plain=True)
    assert isinstance(ours.step, FusedStep)
    for number in range(3):
        edges = make_edges(20, False, number, torch.float64, weighted=True)
        assert ours.train(edges, number) == pytest.approx(reference.train(edges, number), rel=1e-10)
    ours.same_as(model, 1e-8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_models_train_as_autograd_does(variant: str) -> None:
    turn = list(VARIANTS).index(variant)
    operator, comparator = ("affine", "complex_diagonal")[turn % 2], ("dot", "cos", "squared_l2")[turn % 3]
    settings = {"operator": operator, "comparator": comparator, "loss": LOSSES[turn % 3], **VARIANTS[variant]}
    weighted, near = settings.pop("weighted", False), tolerance_of(operator, comparator)
    model = make_model(torch.float64, reciprocal=bool(turn % 2), **settings)
    ours, reference = OnDevice(model, 0.05, "sgd", "sgd", device="cuda"), Reference(model, 0.05, plain=True)
    for number in range(3):
        edges = make_edges(20, not turn % 2, number, torch.float64, weighted)
        assert ours.train(edges, number) == pytest.approx(reference.train(edges, number), rel=near)
    ours.same_as(model, 100 * near)


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("settings", [{}, {"n3": 0.1}, {"bias": True, "operator": "affine", "reciprocal": False}])
def test_a_graph_trains_as_its_kernels_do(settings: dict[str, Any], low: torch.dtype | None) -> None:
    """Of batches of two shapes, whose last chunks have empty slots."""
    model = make_model(torch.float32, **settings)
    eager, captured = OnDevice(model, 0.05, device="cuda", low=low), Captured(model, 0.05, low=low)
    assert isinstance(eager.step, PlainStep if settings else FusedStep)
    near = 1e-4 if low is None else 2e-2
    for number in range(8):
        edges = make_edges(20 - 7 * (number % 2), settings.get("reciprocal") is False, number, torch.float32)
        assert captured.train(edges, number) == pytest.approx(eager.train(edges, number), rel=near)
    assert captured.replays == 6
    torch.testing.assert_close(captured.rows, eager.rows, rtol=10 * near, atol=10 * near)


def test_large_rows_and_many_candidates_in_single_precision() -> None:
    """A chunk of 50 edges and 1,050 candidates at dimension 400, as in FB15k-237's benchmark; rows stay near."""
    model = make_model(torch.float32, dimension=400, num_batch_negs=50, num_uniform_negs=1000, init_scale=0.05)
    ours, reference = OnDevice(model, 0.05, "sgd", "sgd", device="cuda"), Reference(model, 0.05, plain=True)
    for number in range(3):
        edges = make_edges(120, False, number, torch.float32)
        assert ours.train(edges, number) == pytest.approx(reference.train(edges, number), rel=1e-5)
    ours.same_as(model, 1e-5)


SMALL = ["strategy=pbg", "data=planted_kg", "model=kg", "data.num_entities=120", "data.num_positions=24",
         "data.num_triples=2400", "data.num_relations=4", "model.dimension=16", "model.init_scale=0.1",
         "data.batch_size=200", "strategy.matmul=float32", "trainer.max_epochs=3", "logger=none",
         "trainer.enable_progress_bar=false"]  # fmt: skip
SCORES = ("val/loss", "val/mrr", "test/mrr")
IN_DOUBLE = "trainer.precision=64-true"
FOUR = ["strategy.num_partitions=4"]
SWAPPED = [*FOUR, "strategy.device_partitions=2"]


def train(folder: Path, name: str, *overrides: str, gpu: bool = True) -> dict[str, Any]:
    where = [f"trainer.accelerator={'gpu' if gpu else 'cpu'}", f"hydra.run.dir={folder / name}"]
    ok(gtrain(*SMALL, *where, *overrides, cwd=folder))
    return summary(folder / name)


def losses(run: dict[str, Any]) -> list[float]:
    return [epoch["train/loss"] for epoch in run["history"]]


def scores(run: dict[str, Any]) -> list[float]:
    return [run["metrics"][name] for name in SCORES]


@pytest.mark.parametrize("partitions", [[], FOUR], ids=["one partition", "four"])
def test_losses_and_scores_are_those_of_a_cpu(partitions: list[str], tmp_path: Path) -> None:
    """To 1e-8 in float64 after three epochs; the files of tables too."""
    wanted, found = (train(tmp_path, str(gpu), IN_DOUBLE, *partitions, gpu=gpu) for gpu in (False, True))
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-8)
    assert scores(found) == pytest.approx(scores(wanted), rel=1e-8)


def test_swapping_changes_nothing_and_checkpoints_go_from_device_to_device(tmp_path: Path) -> None:
    """All of four partitions on the GPU, two and three at a time; and each half of a run elsewhere."""
    wanted = train(tmp_path, "all", IN_DOUBLE, *FOUR)
    for name, partitions in (("two", 2), ("three", 3)):
        swapped = train(tmp_path, name, IN_DOUBLE, *FOUR, f"strategy.device_partitions={partitions}")
        assert losses(swapped) == pytest.approx(losses(wanted), rel=1e-10)
    for gpu in (False, True):
        train(tmp_path, f"first-{gpu}", IN_DOUBLE, *SWAPPED, "trainer.max_epochs=1", gpu=gpu)
        last = f"ckpt_path={tmp_path / f'first-{gpu}' / 'checkpoints' / 'last.ckpt'}"
        rest = train(tmp_path, f"rest-{gpu}", IN_DOUBLE, *SWAPPED, last, gpu=not gpu)
        assert losses(rest) == pytest.approx(losses(wanted)[1:], rel=1e-8)


@pytest.mark.parametrize("matmul", ["float32", "bfloat16"])
def test_what_is_learned_is_what_a_cpu_learns(matmul: str, tmp_path: Path) -> None:
    """The MRR of a planted graph after eight epochs is 0.892 with one worker; that of several seeds spreads by 0.03."""
    more = ["trainer.max_epochs=8", "data.batch_size=50", "model.dimension=32", f"strategy.matmul={matmul}"]
    assert train(tmp_path, "gpu", *more)["metrics"]["val/mrr"] == pytest.approx(0.892, abs=0.05)


def test_machines_share_a_gpu(tmp_path: Path) -> None:
    two = [*FOUR, "trainer.num_nodes=2", "trainer.max_epochs=8", "data.batch_size=50", "strategy.sync_interval=0.01"]
    run = train(tmp_path, "two", *two)
    assert [epoch["train/edges"] for epoch in run["history"]] == [2160.0] * 8
    assert run["metrics"]["val/mrr"] > 0.5  # one worker reaches 0.8


def test_int8_is_refused(tmp_path: Path) -> None:
    done = gtrain(*SMALL, "trainer.accelerator=gpu", "strategy.matmul=int8", cwd=tmp_path)
    assert done.returncode == 1 and "set strategy.matmul=bfloat16" in done.stderr


def test_large_batches_are_prepared_while_a_graph_is_captured(tmp_path: Path) -> None:
    """Batches whose preparation takes tens of megabytes, as many as are under way at a time, and more."""
    large = ["data.num_entities=14541", "data.num_positions=500", "data.num_relations=237", "data.num_triples=64000",
             "model.dimension=400", "model.num_uniform_negs=1000", "data.batch_size=1000", "trainer.max_epochs=2",
             "trainer.limit_val_batches=0", "trainer.enable_checkpointing=false"]  # fmt: skip
    first, second = losses(train(tmp_path, "large", *large))
    assert second < first - 0.5
