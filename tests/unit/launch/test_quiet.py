"""What warns of nothing that a user could mend, and leaves no files."""

from __future__ import annotations

import inspect
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import template
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv import message_passing

from gtrain.callbacks.checkpoint import RunCheckpoint
from gtrain.data.batches.edge_seeds import KnownEdges
from gtrain.graph.shard.nodes import shard_nodes
from gtrain.graph.store.numbering import GlobalIds
from gtrain.launch import templates
from gtrain.model.edge_model import Auc
from gtrain.strategy.row_exchange import RowExchange

COLUMN = torch.tensor([[3, 0], [1, 0], [2, 0]])[:, 0]


class Filed(MessagePassing):
    """Its code is generated as PyG does."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return 2 * x_j


class InMemory(MessagePassing):
    """Its code is generated as ranks do."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return 2 * x_j


@pytest.fixture
def strict() -> Iterator[None]:
    """Every warning is an error, and torch repeats those that it gives once."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_warn_always(always)


@pytest.mark.usefixtures("strict")
def test_columns_of_tables_are_looked_up_without_a_warning() -> None:
    """``searchsorted`` warns of what is not contiguous."""
    with pytest.raises(UserWarning, match="contiguous"):
        torch.searchsorted(torch.arange(4), COLUMN)
    store: Any = SimpleNamespace(
        offsets_of=lambda kind: torch.tensor([0, 4]), node=lambda *_: torch.arange(4), num_parts=1
    )
    assert GlobalIds(store)(COLUMN).tolist() == [3, 1, 2]
    nodes = shard_nodes(0, torch.tensor([0, 2, 4]), [COLUMN])
    order, local = nodes.by_block(COLUMN)
    assert order is not None and COLUMN[order].tolist() == [1, 3, 2] and local.tolist() == [1, 3, 2]
    known = KnownEdges(torch.tensor([[0, 1], [0, 2], [3, 1]]).t(), None)
    assert [t.tolist() for t in known.tails(COLUMN, None)] == [[0, 1, 1, 1], [1]]
    auc = Auc()
    auc.update(torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64)[:, 0], torch.tensor([2.0]))
    assert float(auc.compute()) == 0.5
    exchange = RowExchange.__new__(RowExchange)
    exchange.remote_ids, exchange.num_own, exchange._first = torch.tensor([2, 3]), 2, 0
    assert exchange.local(COLUMN).tolist() == [3, 1, 2]


@pytest.mark.parametrize(("epoch", "compared"), [(0, False), (1, True), (2, False), (3, True)])
def test_an_epoch_without_validation_is_not_compared(
    epoch: int, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(RunCheckpoint.__mro__[1], "on_train_epoch_end", lambda *_: seen.append(epoch))
    checkpoint = RunCheckpoint(monitor="val/acc")
    monkeypatch.setattr(checkpoint, "_should_skip_saving_checkpoint", lambda trainer: True)
    trainer: Any = SimpleNamespace(check_val_every_n_epoch=2, current_epoch=epoch, callback_metrics={})
    checkpoint.on_train_epoch_end(trainer, torch.nn.Module())
    assert bool(seen) == compared
    trainer.callback_metrics["val/acc"] = torch.tensor(1.0)  # a score of the training step, say
    checkpoint.on_train_epoch_end(trainer, torch.nn.Module())
    assert seen.count(epoch) == 1 + compared


def test_pygs_generated_code_is_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    graph = torch.rand(5, 4), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    monkeypatch.setattr(message_passing, "module_from_template", template.module_from_template, raising=False)
    filed = Filed()(*graph)
    assert list(tmp_path.iterdir()), "PyG writes a file for each method that it generates"
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.unlink()
    left = list(tmp_path.iterdir())
    monkeypatch.setattr(message_passing, "module_from_template", templates._module_from_template, raising=False)
    ours = InMemory()
    assert torch.equal(ours(*graph), filed)
    assert list(tmp_path.iterdir()) == left
    assert "def propagate" in inspect.getsource(type(ours).propagate)
    if sys.version_info < (3, 14):  # which TorchScript does not support
        assert torch.equal(torch.jit.script(ours)(*graph), filed)
