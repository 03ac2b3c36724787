"""``Trainer(strategy="sar")``: the names of backends in Lightning's registry."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import StrategyRegistry

from gtrain import PlantedData, backends


@pytest.mark.parametrize("name", ["single", "sar", "pyg", "ps", "pbg"])
def test_a_trainer_knows_backends_by_name(name: str) -> None:
    assert PlantedData.__name__ == "PlantedData", "the import of a data module adds the names"
    trainer = pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    strategy = backends.get(name).load_strategy()
    assert type(trainer.strategy) is strategy
    assert trainer.strategy.settings == strategy().settings  # type: ignore[attr-defined]
    assert StrategyRegistry[name]["description"] == backends.get(name).description
