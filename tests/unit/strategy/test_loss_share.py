"""A loss is scaled to a rank's share alike, whether the share is a number or a tensor of the device."""

from __future__ import annotations

import pytest
import torch

from gtrain.strategy.base import _scaled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 1 / 3, 1.0])
def test_number_and_tensor_agree(share: float, dtype: torch.dtype) -> None:
    results = []
    for given in (share, torch.tensor(share, dtype=torch.float64)):
        loss = torch.tensor(1.7, dtype=dtype, requires_grad=True)
        scaled = _scaled(loss, given)
        scaled.backward()
        assert loss.grad is not None and scaled.dtype == dtype
        results.append((float(scaled.detach()), float(loss.grad)))
    assert results[0] == results[1]
    assert results[0][1] == pytest.approx(share, rel=1e-7)


@pytest.mark.parametrize("share", [0.0, torch.tensor(0.0)])
def test_a_mean_over_no_seeds_adds_nothing(share: float | torch.Tensor) -> None:
    loss = torch.tensor(float("nan"), requires_grad=True)
    scaled = _scaled(loss, share)
    scaled.backward()
    assert float(scaled.detach()) == 0 and loss.grad is not None and float(loss.grad) == 0
