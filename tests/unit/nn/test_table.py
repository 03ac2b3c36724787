"""A table whose rows are stored elsewhere trains as one that stores them itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import gtrain.nn.table
from gtrain.data.planted.sparse import PlantedSparseData
from gtrain.errors import ConfigError
from gtrain.model.classification import SparseClassifier
from gtrain.nn import (
    SGD,
    Adagrad,
    Csr,
    Embedding,
    EmbeddingBag,
    JointOptimizer,
    LazyAdam,
    LocalTableStorage,
    RemoteTableStorage,
    RowwiseAdagrad,
    SparseLinear,
    TableSpec,
    as_csr,
    deferred,
    tables,
)
from gtrain.nn.csr import product, transposed
from gtrain.nn.rules import Rule, Settings, update
from gtrain_single.strategy import SingleStrategy

OPTIMIZERS = {"sgd": SGD, "adagrad": Adagrad, "rowwise_adagrad": RowwiseAdagrad, "lazy_adam": LazyAdam}


class TwoBlocks(RemoteTableStorage):
    """Two blocks of rows, as two servers would hold them: each answers for its rows and updates them by itself."""

    def __init__(self, table: TableSpec, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(table)
        self.cut = table.rows // 3
        self.blocks = [table.initial(0, self.cut).to(dtype), table.initial(self.cut, table.rows).to(dtype)]
        self.states: list[dict[str, Tensor]] = [{}, {}]
        self.zero_grad()
        self.requests = 0

    def fetch(self, ids: Tensor) -> Tensor:
        self.requests += 1
        found = self.blocks[0].new_empty(len(ids), self.table.dim)
        for number, (mine, chosen) in enumerate(self._split(ids)):
            found[chosen] = self.blocks[number][mine]
        return found

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        for number, (mine, chosen) in enumerate(self._split(ids)):
            self.gradients[number].append((mine, gradients[chosen]))

    def multiply(self, rows: Csr) -> tuple[Tensor, Any]:
        """Ship to each block its columns and add up what comes back: the table itself does not move."""
        pieces = [self._columns(rows, chosen, mine) for mine, chosen in self._split(rows.ids)]
        return sum(product(piece, block) for piece, block in zip(pieces, self.blocks, strict=True)), pieces

    def push_product(self, ticket: Any, gradient: Tensor) -> None:
        for number, piece in enumerate(ticket):
            self.gradients[number].append(transposed(piece, gradient))

    def update(self, rule: Rule, settings: Settings) -> None:
        for block, state, gradients in zip(self.blocks, self.states, self.gradients, strict=True):
            if not gradients:
                continue
            if not state:
                state.update(rule.initial(block, settings))
            ids, rows = (torch.cat(part) for part in zip(*gradients, strict=True))
            update(rule, block, state, ids, rows, settings)

    def zero_grad(self) -> None:
        self.gradients: list[list[tuple[Tensor, Tensor]]] = [[], []]

    def read(self, begin: int, end: int) -> Tensor:
        return torch.cat(self.blocks)[begin:end]

    def state(self) -> dict[str, Any]:
        return {"blocks": [block.clone() for block in self.blocks], "states": [dict(state) for state in self.states]}

    def load_state(self, state: dict[str, Any]) -> None:
        self.blocks, self.states = state["blocks"], state["states"]

    def _split(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Ids within each block, and which of the ids they are."""
        first = ids < self.cut
        return [(ids[first], first), (ids[~first] - self.cut, ~first)]

    @staticmethod
    def _columns(rows: Csr, chosen: Tensor, ids: Tensor) -> Csr:
        counts = torch.bincount(rows.row_of_entry()[chosen], minlength=rows.num_rows)
        values = None if rows.values is None else rows.values[chosen]
        return Csr(ids, values, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


class Model(nn.Module):
    """A layer of each kind and a dense one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.nodes = Embedding(10, 4, node_type="paper", dtype=torch.float64)
        self.wide = SparseLinear(12, 4, dtype=torch.float64)
        self.bag = EmbeddingBag(8, 4, mode="mean", dtype=torch.float64)
        self.head = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 10, (5, 3), generator=generator)
        x = torch.randn(5, 12, dtype=torch.float64, generator=generator).relu()
        bags = Csr(torch.randint(0, 8, (9,), generator=generator), None, torch.tensor([0, 2, 2, 5, 6, 9]))
        hidden = self.nodes(ids).sum(1) + self.wide(as_csr(x)) + self.bag(bags)
        return self.head(hidden.tanh()).square().mean()


def test_no_ids_have_no_rows() -> None:
    """A rank whose share of a split is empty looks nothing up."""
    layer = Embedding(10, 4, dtype=torch.float64)
    layer.move(TwoBlocks(layer.table))
    found = layer(torch.empty(0, 3, dtype=torch.int64))
    assert found.shape == (0, 3, 4)
    found.sum().backward()


def moved(model: Model) -> dict[str, TwoBlocks]:
    storages = {name: TwoBlocks(layer.table) for name, layer in tables(model)}
    for name, layer in tables(model):
        layer.move(storages[name])
    return storages


def optimizer_of(model: Model, kind: str) -> JointOptimizer:
    rows = [layer.weight for _, layer in tables(model)]
    rest = [p for p in model.parameters() if all(p is not row for row in rows)]
    return JointOptimizer([torch.optim.Adam(rest, lr=0.05), OPTIMIZERS[kind](rows, lr=0.1, weight_decay=0.01)])


def train(model: Model, optimizer: JointOptimizer, steps: range) -> list[float]:
    """Losses of the steps, the learning rates halved after every second one."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for number in steps:
        optimizer.zero_grad()
        for part in (2 * number, 2 * number + 1):  # gradients add up over two batches
            loss = model(part)
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
        scheduler.step()
    return losses


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before", [True, False], ids=["moved before the optimizer is made", "after"])
def test_rows_in_another_storage_train_the_same(kind: str, before: bool) -> None:
    local, remote = Model(), Model()
    if before:
        storages = moved(remote)
    optimizer = optimizer_of(remote, kind)
    if not before:
        storages = moved(remote)
    assert [tuple(layer.weight.shape) for _, layer in tables(remote)] == [(0, 4)] * 3
    assert set(remote.state_dict()) == set(local.state_dict())
    wanted = train(local, optimizer_of(local, kind), range(5))
    assert train(remote, optimizer, range(5)) == pytest.approx(wanted, abs=1e-13)
    assert len(set(wanted)) == 10 and storages["nodes"].requests == 10
    for name, layer in tables(remote):
        layer.move_back(storages[name].read(0, layer.table.rows))
    for name, value in local.state_dict().items():
        torch.testing.assert_close(remote.state_dict()[name], value, rtol=0, atol=1e-12)
    assert float(remote(99)) == pytest.approx(float(local(99)), abs=1e-12)
    assert all(layer.weight.requires_grad for _, layer in tables(remote))


def test_a_storage_keeps_its_state_over_a_checkpoint() -> None:
    straight, halted, again = Model(), Model(), Model()
    moved(straight)
    wanted = train(straight, optimizer_of(straight, "lazy_adam"), range(4))
    storages, optimizer = moved(halted), optimizer_of(halted, "lazy_adam")
    train(halted, optimizer, range(2))
    saved = {"model": halted.state_dict(), "optimizer": optimizer.state_dict()}
    saved["storages"] = {name: storage.state() for name, storage in storages.items()}
    storages, optimizer = moved(again), optimizer_of(again, "lazy_adam")
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for name, storage in storages.items():
        storage.load_state(saved["storages"][name])
    assert train(again, optimizer, range(2, 4)) == wanted[4:]


def test_tables_can_be_made_without_rows() -> None:
    with deferred():
        remote = Model()
    assert [layer.weight.size(0) for _, layer in tables(remote)] == [0, 0, 0]
    moved(remote)
    assert float(remote(0)) == float(Model()(0))


def test_gradients_of_values_are_refused_away_from_home() -> None:
    layer = SparseLinear(4, 2, dtype=torch.float64)
    layer.move(TwoBlocks(layer.table))
    values = torch.ones(1, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ConfigError, match=r"features is stored in another process.*\n.*strategy=single"):
        layer((torch.tensor([0]), values, torch.tensor([0, 1])))


# ---------------------------------------------------------------------------------------------- within a strategy


class Elsewhere(SingleStrategy):
    """``single`` whose tables live in two blocks."""

    def install(self, module: nn.Module) -> None:
        self.storages = {name: TwoBlocks(layer.table) for name, layer in tables(module)}
        for name, layer in tables(module):
            layer.move(self.storages[name])

    def uninstall(self, module: nn.Module) -> None:
        for name, layer in tables(module):
            layer.move_back(self.storages[name].read(0, layer.table.rows))

    def shard_state(self) -> dict[str, Any]:
        return {name: storage.state() for name, storage in self.storages.items()}

    def load_shard_state(self, state: dict[str, Any]) -> None:
        for name, storage in self.storages.items():
            storage.load_state(state[name])


def fit(strategy: SingleStrategy, folder: Path, epochs: int, resume: Path | None = None) -> tuple[dict, Path, dict]:
    """Train a sparse classifier; return its metrics, its last checkpoint and its parameters."""
    pl.seed_everything(0, verbose=False)
    data = PlantedSparseData(store=str(folder / "stores"), num_rows=300, num_features=60, batch_size=50)
    model = SparseClassifier(60, 2, hidden_channels=8, sparse_optimizer=lambda p: LazyAdam(p, lr=0.05))
    name = f"{type(strategy).__name__}-{epochs}"
    trainer = pl.Trainer(
        strategy=strategy,
        precision="64-true",
        max_epochs=epochs,
        logger=False,
        callbacks=[ModelCheckpoint(dirpath=folder, filename=name, enable_version_counter=False)],
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, folder / f"{name}.ckpt", model.state_dict()


@pytest.mark.slow
def test_a_strategy_takes_tables_over_and_gives_them_back(tmp_path: Path) -> None:
    """Under Lightning's automatic optimisation, and over a checkpoint."""
    wanted, _, rows = fit(SingleStrategy(), tmp_path, 3)
    found, _, given_back = fit(Elsewhere(), tmp_path, 3)
    assert wanted["val/loss"] < 0.65
    assert found == pytest.approx(wanted, abs=1e-12)
    for name, value in rows.items():
        torch.testing.assert_close(given_back[name], value, rtol=0, atol=1e-12)
    halfway = [fit(kind(), tmp_path, 2)[1] for kind in (SingleStrategy, Elsewhere)]
    assert torch.load(halfway[1] / "trainer.pt", weights_only=True)["state_dict"]["wide.weight"].shape == (0, 8)
    resumed = [
        fit(kind(), tmp_path, 3, path)[0] for kind, path in zip((SingleStrategy, Elsewhere), halfway, strict=True)
    ]
    assert resumed[1] == pytest.approx(resumed[0], abs=1e-12)


def test_a_table_beyond_memory_is_refused_with_its_size() -> None:
    with pytest.raises(ConfigError, match=r"'features' has 35184372088832 rows of 64 numbers: .* = 8,388,608 GiB"):
        SparseLinear(1 << 45, 64)
    with deferred():
        assert SparseLinear(1 << 45, 64).weight.shape == (0, 64)  # its rows will live elsewhere


def test_former_names_of_the_storage_warn() -> None:
    for old, new in gtrain.nn.table.RENAMED.items():
        for module in (gtrain.nn, gtrain.nn.table):
            with pytest.warns(FutureWarning, match=f"{old} is now .*{new}"):
                assert getattr(module, old) is getattr(module, new)
    with pytest.warns(FutureWarning, match="Table.home is now Table.storage"):
        assert isinstance(Embedding(3, 2).home, LocalTableStorage)
