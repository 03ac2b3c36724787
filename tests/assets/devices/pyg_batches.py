"""Batches of strategy=pyg as a module receives them on a device, compared with those on the CPU.

    python pyg_batches.py cuda      # or cpu, where the stages of a device run on CPU tensors

Prints one JSON object: by case, whether all tensors of all batches are equal to the CPU's, bit by bit.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch_geometric.nn import GraphSAGE

from gtrain import PlantedData
from gtrain_pyg.device import DeviceCopies
from gtrain_pyg.strategy import PygStrategy

STEPS, WARM_UP = 24, 4
CYCLES = 4_000_000  # some two milliseconds
CASES: dict[str, dict[str, Any]] = {
    "all rows cached": {"device_cache": 10_000_000, "threads": 4},
    "some rows cached": {"device_cache": 100_000, "threads": 4},
    "no rows cached": {"device_cache": 0, "threads": 4},
    "on demand": {"device_cache": 100_000, "prefetch": 0},
    "one thread": {"device_cache": 100_000, "threads": 1, "prefetch": 1},
}


class Keeper(pl.LightningModule):
    """Keeps copies of all batches, made on the training stream after a delay: copies that come too late would show.

    Args:
        strict: torch raises an error where the host waits for the device, after the first steps.
    """

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network = GraphSAGE(1, 1, 3)  # as many layers as hops; never called
        self.weight, self.strict = nn.Parameter(torch.zeros(1)), strict
        self.batches: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(CYCLES)
            if self.strict and batch_idx == WARM_UP:
                torch.cuda.set_sync_debug_mode("error")
        assert all(value.device == self.device for _, value in batch if isinstance(value, Tensor))
        self.batches.append({name: value.clone() for name, value in batch if isinstance(value, Tensor)})

    def on_train_epoch_end(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(device: str, precision: str, strict: bool = False, **settings: Any) -> list[dict[str, Tensor]]:
    """Return the tensors of an epoch's batches."""
    pl.seed_everything(0, verbose=False)
    data = PlantedData(
        num_nodes=3000, num_edges=60_000, num_features=50, batch_size=64, num_neighbors=[5, 4, 3], seed=0
    )
    strategy, module = PygStrategy(**settings), Keeper(strict)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=device,
        devices=1,
        max_epochs=1,
        limit_train_batches=STEPS,
        limit_val_batches=0,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    if device == "gpu":
        assert strategy.pool.tensor((100_000,)).is_pinned()
    return [{name: tensor.cpu() for name, tensor in batch.items()} for batch in module.batches]


def equal(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    """Return whether all tensors of all batches are the same."""
    assert len(one) == len(other) == STEPS and len(one[0]) > 5
    return all(
        a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def main(device: str) -> None:
    """Compare all cases."""
    results = {}
    for precision in ("32-true", "64-true", "bf16-true"):
        expected = batches("cpu", precision)
        if device == "cpu":
            PygStrategy._device_copies = lambda self: DeviceCopies(torch.device("cpu"))  # type: ignore[method-assign]
        for name, settings in CASES.items() if precision == "32-true" else [*CASES.items()][:3]:
            made = batches("cpu" if device == "cpu" else "gpu", precision, name != "on demand", **settings)
            results[f"{name}, {precision}"] = equal(made, expected)
    print(json.dumps(results))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main(sys.argv[1])
