"""What a step of several ranks costs, in counts that do not depend on the machine: messages, bytes, kernel calls.

Counts of one process are in ``tests/unit/engine/test_budgets.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
from torch import nn
from torch_geometric.nn import GAT, GraphSAGE

from gtrain import NodeClassifier, PlantedData, PygStrategy, SarStrategy, run_local
from gtrain.engine import blocks, linear
from gtrain.engine.attention import fused

FEATURES, HIDDEN, CLASSES, NODES = 64, 32, 8, 400
KERNELS = ("spmm", "attention_forward", "attention_backward")


class LastEpoch(pl.Callback):
    """Counts the last epoch of a rank: the bytes of each message, and the calls of each kernel."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.calls: Counter[str] = Counter()
        self._kernels = pytest.MonkeyPatch()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch != (trainer.max_epochs or 0) - 1:
            return
        counters: Any = trainer.strategy.counters  # type: ignore[attr-defined]
        counters.start()
        counters.sent = lambda nbytes: self.sizes.append(nbytes) if counters.recording else None
        for module in (linear, blocks, fused):
            for name in KERNELS:
                if hasattr(module, name):
                    self._kernels.setattr(module, name, self._counted(name, getattr(module, name)))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.counters.stop()  # type: ignore[attr-defined]
        self._kernels.undo()

    def _counted(self, name: str, kernel: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return kernel(*args, **kwargs)

        return call


class Counts(NamedTuple):
    """Of rank 0's last epoch; ``halo``: for each rank, how many nodes of the other its edges start at."""

    sizes: list[int]
    calls: Counter[str]
    halo: list[int]
    parameters: int


def train(strategy: Any, network: nn.Module, **data: Any) -> Counts:
    """Train three epochs as one of two ranks."""
    pl.seed_everything(0)
    counts = LastEpoch()
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", num_nodes=2, devices=1, max_epochs=3, callbacks=[counts], **quiet
    )
    source = PlantedData(num_nodes=NODES, num_edges=10 * NODES, num_features=FEATURES, num_classes=CLASSES, **data)
    trainer.fit(NodeClassifier(network, num_classes=CLASSES), datamodule=source)
    store, halo = source.open_store(), []
    for part in range(2):
        starts, (first, last) = store.edge("indices", part), store.offsets[part : part + 2]
        halo.append(starts[(starts < first) | (starts >= last)].unique().numel())
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Counts(counts.sizes, counts.calls, halo, parameters)


def train_all() -> dict[str, Counts]:
    """Train GraphSAGE and GAT in each mode of sar, and GraphSAGE on sampled batches."""
    counts = {}
    for mode in (1, 2, 3):
        counts[f"sage, mode {mode}"] = train(SarStrategy(mode=mode), GraphSAGE(FEATURES, HIDDEN, 3, CLASSES))
        counts[f"gat, mode {mode}"] = train(SarStrategy(mode=mode), GAT(FEATURES, HIDDEN, 3, CLASSES, heads=4))
    batches = {"batch_size": 100, "num_neighbors": [5, 5]}
    counts["pyg"] = train(PygStrategy(transport="tcp"), GraphSAGE(FEATURES, HIDDEN, 2, CLASSES), **batches)
    return counts


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counts]:
    folder = tmp_path_factory.mktemp("budgets")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the store is made there
        return run_local(train_all, num_nodes=2, log_dir=folder / "logs")  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_an_epoch_of_sage_sends_each_row_once_in_each_direction(counts: dict[str, Counts], mode: int) -> None:
    found = counts[f"sage, mode {mode}"]
    received, sent = found.halo
    # Layers whose result is narrower than their input are multiplied before they are summed.
    widths = (HIDDEN, HIDDEN, CLASSES)
    rows = [4 * sent * width for width in widths] + [4 * received * width for width in reversed(widths)]
    # A sum of the seeds' weight; gradients, with a number for each tensor that says whether it has one.
    assert found.sizes == [*rows[:3], 8, *rows[3:], 4 * (found.parameters + 9)]
    assert found.calls == {"spmm": 2 * 2 * 3}  # a pass over the edges of each rank's rows: blocks, directions, layers


@pytest.mark.slow
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_an_epoch_of_gat_sends_logits_with_the_rows(counts: dict[str, Counts], mode: int) -> None:
    found = counts[f"gat, mode {mode}"]
    sent = found.halo[1]
    assert found.sizes[:4] == [4 * sent * (HIDDEN + 4)] * 3 + [8]  # no logits of edges
    assert len(found.sizes) == 3 + 1 + 2 * 3 + 1 and found.sizes[-1] == 4 * (found.parameters + 12)
    # Backward: at most the rows' gradients, and for the other's targets what their softmax needs.
    assert sum(found.sizes[4:-1]) <= 3 * 4 * sum(found.halo) * (HIDDEN + 2 * 4)
    assert found.calls == {"attention_forward": 2 * 3, "attention_backward": 2 * 3}


@pytest.mark.slow
def test_a_step_of_sampled_batches_sends_gradients_once(counts: dict[str, Counts]) -> None:
    found = counts["pyg"]
    assert found.sizes == 3 * [8, 4 * (found.parameters + 6)]  # features are requested apart from these messages
    assert found.calls == {"spmm": 3 * 3}  # of the first layer forward only: features need no gradient
