"""Checks of the Trainer's settings."""

import pytest
import torch
from torch import nn

from gtrain.model.kg.embedding import KGEmbedding
from gtrain.strategy import trainer_checks

CPU = torch.device("cpu")
LAYERS = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("precision", "device", "module", "has", "warns"),
    [
        ("bf16-mixed", CPU, LAYERS, False, True),
        ("bf16-true", CPU, LAYERS, False, True),
        ("32-true", CPU, LAYERS, False, False),
        ("bf16-mixed", CPU, LAYERS, True, False),
        ("bf16-mixed", torch.device("cuda"), LAYERS, False, False),
        ("bf16-mixed", CPU, KGEmbedding(3, 1, dimension=2), False, False),  # multiplies in float32 there
    ],
)
def test_layers_in_bfloat16_on_a_cpu_that_lacks_it_are_slow(
    precision: str, device: torch.device, module: nn.Module, has: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_checks, "cpu_multiplies_bfloat16", lambda: has)
    warning = trainer_checks.slow_precision(precision, device, module)
    assert (warning is not None) is warns
    assert warning is None or f"trainer.precision={precision}" in warning
