"""Checkpoints have only the rows of a table that training has changed, and restore all of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gtrain.nn import Adagrad as RowAdagrad
from gtrain.nn import LazyAdam, RowwiseAdagrad, SparseLinear, changed_rows
from gtrain.nn.changed_rows import KEY, pieces, restored
from gtrain.strategy import checkpoint as checkpoints
from gtrain.strategy.group import Group

ROWS, DIM, TOUCHED = 20_000, 16, 300
OPTIMIZERS: dict[str, tuple[bool, Callable[[Any], torch.optim.Optimizer]]] = {
    "Adam": (False, lambda parameters: torch.optim.Adam(parameters, lr=0.1)),
    "Adagrad with a start": (
        False,
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.25),
    ),
    "momentum": (False, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    "rows: Adagrad": (True, lambda parameters: RowAdagrad(parameters, lr=0.1)),
    "rows: Adam": (True, lambda parameters: LazyAdam(parameters, lr=0.1)),
    "rows: one number": (True, lambda parameters: RowwiseAdagrad(parameters, lr=0.1)),
}


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_rows, "LEAST_BYTES", 1 << 12)


class Model(nn.Module):
    def __init__(self, sparse: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.wide = SparseLinear(ROWS, DIM, sparse=sparse, dtype=dtype)
        self.out = nn.Linear(DIM, 1, dtype=dtype)


def train(model: Model, optimizer: torch.optim.Optimizer, steps: int, touched: int = TOUCHED) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(ROWS, generator=generator)[:touched]
    for _ in range(steps):
        optimizer.zero_grad()
        rows = (ids, None, torch.arange(0, touched + 1, 10))
        model.out(model.wide(rows).relu()).square().mean().backward()
        optimizer.step()


def write(model: Model, optimizer: torch.optim.Optimizer, path: Path) -> dict[str, Any]:
    saved = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1}
    checkpoints.save(Group(), path, copy.deepcopy(saved), {}, model)
    return saved


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_restores_every_bit_from_the_rows_that_changed(name: str, tmp_path: Path) -> None:
    sparse, make = OPTIMIZERS[name]
    model = Model(sparse)
    optimizer = make(list(model.parameters()) if not sparse else [model.wide.weight])
    train(model, optimizer, 3)
    saved = write(model, optimizer, tmp_path / "last.ckpt")
    file = tmp_path / "last.ckpt" / "trainer.pt"
    whole = ROWS * DIM * 4
    assert file.stat().st_size < whole / 10, "300 of 20,000 rows"
    assert json.loads((file.parent / "manifest.json").read_text())["format"] == 2
    entry = torch.load(file, weights_only=True)["state_dict"]["wide.weight"][KEY]
    assert len(entry["ids"]) <= TOUCHED and entry["shape"] == [ROWS, DIM]
    loaded = checkpoints.load(Group(), tmp_path / "last.ckpt", Model(sparse), restore_rng=False).checkpoint
    assert same(loaded["state_dict"], dict(saved["state_dict"]))
    assert same(loaded["optimizer_states"], saved["optimizer_states"])
    resumed = Model(sparse)  # has another seed, so another table before it is loaded
    again = make(list(resumed.parameters()) if not sparse else [resumed.wide.weight])
    resumed.load_state_dict(loaded["state_dict"])
    again.load_state_dict(loaded["optimizer_states"][0])
    for each, its in ((model, optimizer), (resumed, again)):
        train(each, its, 2)
    assert same(dict(model.state_dict()), dict(resumed.state_dict())), "an unbroken run"


def test_other_strategies_read_the_rows_in_pieces(tmp_path: Path) -> None:
    model = Model(False, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    write(model, optimizer, tmp_path / "last.ckpt")
    _, rows = checkpoints.load_other(tmp_path / "last.ckpt", Model(False, torch.float64), None, None)
    assert rows["wide"].count == ROWS
    found = torch.cat([piece for _, piece in rows["wide"].pieces()])
    assert torch.equal(found, model.wide.weight) and found.dtype == torch.float64


def test_tables_that_training_changed_everywhere_are_stored_as_before(tmp_path: Path) -> None:
    model = Model(False)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1, touched=ROWS)
    write(model, optimizer, tmp_path / "last.ckpt")
    content = torch.load(tmp_path / "last.ckpt" / "trainer.pt", weights_only=True)
    assert torch.equal(content["state_dict"]["wide.weight"], model.wide.weight)
    assert json.loads((tmp_path / "last.ckpt" / "manifest.json").read_text())["format"] == 1
    assert torch.equal(torch.cat([rows for _, rows in pieces(model.wide.weight)]), model.wide.weight)


def test_initial_rows_of_another_machine_are_noticed(tmp_path: Path) -> None:
    model = Model(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    write(model, optimizer, tmp_path / "last.ckpt")
    content = torch.load(tmp_path / "last.ckpt" / "trainer.pt", weights_only=True)
    content["state_dict"]["wide.weight"][KEY]["first"][0] *= 1 + 2**-23
    with pytest.warns(UserWarning, match="initial rows of the table features that differ in the last digits"):
        restored(content)
