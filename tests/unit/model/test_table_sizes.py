"""The line that tells the size of tables before they are made."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from gtrain.data.planted.kg import PlantedKGData
from gtrain.run.table_sizes import table_sizes

MODEL = {"_target_": "gtrain.model.kg.embedding.KGEmbedding", "dimension": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PlantedKGData:
    made = PlantedKGData(num_entities=64, num_positions=10, num_triples=500, store=str(tmp_path_factory.mktemp("s")))
    made.prepare_data()
    return made


@pytest.mark.parametrize(
    ("optimizer", "precision", "rows", "whole"),
    [
        ("torch.optim.Adam", "32-true", "2 KiB", "6 KiB"),
        ("gtrain.nn.Adagrad", "64-true", "4 KiB", "8 KiB"),
        ("gtrain.nn.RowwiseAdagrad", "32-true", "2 KiB", "2.25 KiB"),
        ("gtrain.nn.LazyAdam", "32-true", "2 KiB", "6.25 KiB"),
    ],
)
def test_rows_and_the_optimizers_state_count(
    optimizer: str, precision: str, rows: str, whole: str, data: PlantedKGData
) -> None:
    model = {**MODEL, "optimizer": {"_target_": optimizer, "lr": 0.1}}
    config: dict[str, Any] = {"model": model, "trainer": {"precision": precision}, "verb": "train"}
    before = torch.get_rng_state()
    with_state = f"with the optimizer's state {whole} over all ranks; a checkpoint takes at most the same on disk"
    assert table_sizes(config, data.open_store()) == f"table node 64 x 8: {rows}, {with_state}"
    assert torch.equal(torch.get_rng_state(), before), "the model that trains has other initial values"
    assert table_sizes({**config, "verb": "test"}, data.open_store()) == f"table node 64 x 8: {rows} over all ranks"


class Own(pl.LightningModule):
    """A user's module, whose constructor is called once."""

    def __init__(self) -> None:
        raise AssertionError("it was made to see its tables")


def test_models_of_users_are_not_made_for_the_line(data: PlantedKGData) -> None:
    config = {"model": {"_target_": f"{__name__}.Own"}, "trainer": {"precision": "32-true"}, "verb": "train"}
    assert table_sizes(config, data.open_store()) is None
