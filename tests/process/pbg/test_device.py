"""``strategy=pbg`` by the code for GPUs, on CPU tensors: what it trains is what a worker on a CPU trains.

A graph is the call that it would capture: it reads the inputs of a captured step, and no argument of a later call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked import python
from helpers import ok, summary

PROGRAM = """
import os

import torch

import gtrain_pbg.strategy
import gtrain_pbg.worker
from gtrain.cli import main
from gtrain_pbg.device.lanes import Device


class Replaying(Device):
    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.graphs = True

    def captured(self, work):
        return work


gtrain_pbg.worker.STEP_EDGES = int(os.environ.get("TEST_STEP_EDGES", gtrain_pbg.worker.STEP_EDGES))
if os.environ["TEST_DEVICE"] == "1":
    gtrain_pbg.strategy.PBGStrategy.make_device = lambda self: Replaying()
main()
"""
SMALL = ["strategy=pbg", "data=planted_kg", "model=kg", "data.num_entities=120", "data.num_positions=24",
         "data.num_triples=2400", "data.num_relations=4", "model.dimension=16", "model.init_scale=0.1",
         "data.batch_size=200", "strategy.matmul=float32", "trainer.max_epochs=3", "logger=none",
         "trainer.enable_progress_bar=false"]  # fmt: skip
SCORES = ("val/loss", "val/mrr", "test/mrr", "train/held_out_mrr_before", "train/held_out_mrr")


def train(folder: Path, name: str, *overrides: str, device: bool, **variables: str) -> dict[str, Any]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    arguments = [*SMALL, *overrides, f"hydra.run.dir={folder / name}"]
    ok(python(str(program), *arguments, cwd=folder, env={"TEST_DEVICE": str(int(device)), **variables}))
    return summary(folder / name)


def same(ours: dict[str, Any], theirs: dict[str, Any], near: float) -> None:
    assert [e["train/loss"] for e in ours["history"]] == pytest.approx(
        [e["train/loss"] for e in theirs["history"]], rel=near
    )
    scores = [name for name in SCORES if name in theirs["metrics"]]
    assert [ours["metrics"][name] for name in scores] == pytest.approx(
        [theirs["metrics"][name] for name in scores], rel=100 * near
    )


TYPES = ["data.num_types=3", "data.num_entities=240", "data.num_positions=16", "data.num_relations=6",
         "data.entities={type_1:{num_partitions:1}}", "strategy.num_partitions=3", "strategy.device_partitions=2",
         "trainer.precision=64-true"]  # fmt: skip
SWAPPED = ["strategy.num_partitions=4", "strategy.device_partitions=2"]


@pytest.mark.parametrize(
    "settings",
    [
        ["trainer.precision=64-true"],
        [*SWAPPED, "trainer.precision=64-true"],
        TYPES,
        pytest.param([*TYPES, "model.bias=true", "model.global_emb=true"], marks=pytest.mark.slow),
        pytest.param(["model.reciprocal=false", "model.operator=affine", *SWAPPED], marks=pytest.mark.slow),
        pytest.param(["model.comparator=cos", "model.bias=true", "model.loss=logistic"], marks=pytest.mark.slow),
        pytest.param(
            ["strategy.num_partitions=6", "strategy.buffer_partitions=3", "strategy.eval_fraction=0.1"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one partition", "swapped", "types", "types, plain", "static", "plain", "in files, held out"],
)
def test_a_device_trains_what_a_cpu_does(settings: list[str], tmp_path: Path) -> None:
    near = 1e-10 if "trainer.precision=64-true" in settings else 1e-5
    wanted, found = (train(tmp_path, str(device), *settings, device=device) for device in (False, True))
    same(found, wanted, near)
    assert wanted["metrics"]["val/mrr"] > 0.2  # chance is 0.05


def test_batches_that_are_prepared_ahead_are_those_of_a_run_that_is_resumed(tmp_path: Path) -> None:
    """An epoch has six steps of 400 edges; a checkpoint is written when the batches of the next one are prepared."""
    settings, steps = ["trainer.precision=64-true"], {"TEST_STEP_EDGES": "400"}
    wanted = train(tmp_path, "whole", *settings, device=False, **steps)
    saving = "_target_:lightning.pytorch.callbacks.ModelCheckpoint,every_n_train_steps:8,dirpath:often,save_top_k:-1"
    saved = [*settings, f"+callbacks.often={{{saving}}}"]
    same(train(tmp_path, "device", *saved, device=True, **steps), wanted, 1e-10)
    (within,) = (tmp_path / "often").glob("*step=8*")
    resumed = train(tmp_path, "resumed", *settings, f"ckpt_path='{within}'", device=False, **steps)
    assert resumed["metrics"]["test/mrr"] == pytest.approx(wanted["metrics"]["test/mrr"], rel=1e-8)
    assert resumed["history"][-1]["train/loss"] == pytest.approx(wanted["history"][-1]["train/loss"], rel=1e-10)


@pytest.mark.slow
def test_a_checkpoint_of_a_device_resumes_on_a_cpu_and_the_reverse(tmp_path: Path) -> None:
    wanted = train(tmp_path, "whole", *SWAPPED, device=False)
    for device in (False, True):
        train(tmp_path, f"first-{device}", *SWAPPED, "trainer.max_epochs=1", device=device)
        last = tmp_path / f"first-{device}" / "checkpoints" / "last.ckpt"
        resumed = train(tmp_path, f"second-{device}", *SWAPPED, f"ckpt_path={last}", device=not device)
        wanted_rest = {**wanted, "history": wanted["history"][1:]}
        same(resumed, wanted_rest, 1e-5)


@pytest.mark.slow
def test_machines_with_a_device_each_learn_as_machines_of_cpus(tmp_path: Path) -> None:
    two = ["strategy.num_partitions=4", "trainer.num_nodes=2", "trainer.max_epochs=8", "data.batch_size=50",
           "strategy.sync_interval=0.01"]  # fmt: skip
    run = train(tmp_path, "two", *two, device=True)
    assert [epoch["train/edges"] for epoch in run["history"]] == [2160.0] * 8
    assert run["metrics"]["val/mrr"] > 0.6  # one worker reaches 0.8
