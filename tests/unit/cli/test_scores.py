"""``model.score`` may be any value that a task logs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose
from torch import Tensor
from torch_geometric.data import Data

from gtrain import GraphDataModule, SingleStrategy, config
from gtrain.data.planted.kg import PlantedKGData
from gtrain.data.planted.sparse import PlantedSparseData
from gtrain.run import build
from gtrain.run.preflight import logged_values
from gtrain.run.sketch import ModelSketch

CLASSES = {"val/acc", "val/f1"}
EDGES = {"val/mrr", "val/hits@1", "val/hits@10", "val/auc"}
NODES = 60


def labelled(y: Tensor) -> GraphDataModule[Any]:
    generator = torch.Generator().manual_seed(0)
    x, index = torch.randn(NODES, 5, generator=generator), torch.randint(NODES, (2, 300), generator=generator)
    return GraphDataModule.from_pyg(Data(x=x, y=y, edge_index=index))


def linked() -> GraphDataModule[Any]:
    generator = torch.Generator().manual_seed(0)
    x, index = torch.randn(NODES, 5, generator=generator), torch.randint(NODES, (2, 300), generator=generator)
    return GraphDataModule.from_pyg(Data(x=x, edge_index=index), task="link")


TASKS: dict[str, tuple[list[str], Callable[[], GraphDataModule[Any]], set[str]]] = {
    "several classes": (["model=gcn"], lambda: labelled(torch.arange(NODES) % 3), CLASSES),
    "two classes": (["model=gcn"], lambda: labelled(torch.arange(NODES) % 2), CLASSES | {"val/auc"}),
    "several labels": (
        ["model=sage"],
        lambda: labelled((torch.arange(NODES)[:, None] % torch.tensor([2, 3, 5]) == 0).float()),
        CLASSES | {"val/auc"},
    ),
    "numbers": (["model=sage"], lambda: labelled(torch.arange(NODES) / 7), {"val/mae", "val/rmse", "val/r2"}),
    "edges": (["model=link_sage", "data=planted_temporal"], linked, EDGES),
    "knowledge graph": (
        ["model=kg", "data=planted_kg", "model.dimension=8"],
        lambda: PlantedKGData(num_entities=60, num_positions=10, num_triples=500),
        EDGES | {"val/hits@50", "val/mean_rank"},
    ),
    "sparse rows": (
        ["model=sparse", "data=planted_sparse"],
        lambda: PlantedSparseData(num_rows=300, num_features=50, features_per_row=5),
        CLASSES | {"val/auc"},
    ),
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, composed_by_hydra: None) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("task", TASKS)
def test_scores_are_the_values_that_a_task_logs(task: str) -> None:
    overrides, make, expected = TASKS[task]
    cfg = compose("config", overrides=["paths.run=here", "strategy=single", *overrides])
    settings, data = config.plain(cfg), make()
    before = ModelSketch(settings, data)
    if before.certain:
        assert logged_values(before) >= {"train/loss", "val/loss", *expected}
    data.prepare_data()
    logged = logged_values(ModelSketch(settings, data))
    trainer = pl.Trainer(strategy=SingleStrategy(), accelerator="cpu", max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(build.make_model(settings["model"], data.open_store()), datamodule=data)
    assert set(trainer.callback_metrics) == logged == {"train/loss", "val/loss", *expected}
