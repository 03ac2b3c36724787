"""The classifier of sparse rows: its scores, its optimizers, what it learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from forked import gtrain
from helpers import ok
from torch import Tensor
from torch_geometric.data import Data

from gtrain.errors import ConfigError
from gtrain.model.classification import SparseClassifier
from gtrain.model.kinds import kind
from gtrain.nn import JointOptimizer, LazyAdam, RowwiseAdagrad


def batch(multilabel: bool = False) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 30, generator=generator) * (torch.rand(40, 30, generator=generator) < 0.1)
    x[3] = 0  # a row without features
    y = (torch.rand(40, 3, generator=generator) > 0.5).float() if multilabel else torch.arange(40) % 3
    return Data(x=x.to_sparse_csr(), y=y, seeds=torch.tensor([7, 3, 39, 0]))


def module(**settings: object) -> SparseClassifier:
    torch.manual_seed(0)
    made = SparseClassifier(30, 3, **settings)  # type: ignore[arg-type]
    made.log = made.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return made


def scores(model: SparseClassifier, x: Tensor) -> Tensor:
    """The network on dense rows."""
    made: Tensor = model.rest(x @ model.wide.weight + model.wide.bias)
    return made


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_scores_are_those_of_a_dense_network(num_layers: int) -> None:
    b, model = batch(), module(num_layers=num_layers, hidden_channels=8)
    expected = scores(model, b.x.to_dense()[b.seeds])
    torch.testing.assert_close(model.predict_step(b, 0), expected)
    b.x = b.x.to_dense()
    torch.testing.assert_close(model.predict_step(b, 0), expected)
    assert sum(layer.__class__.__name__ == "Linear" for layer in model.rest) == num_layers - 1


@pytest.mark.parametrize("multilabel", [False, True])
def test_the_loss_is_the_mean_over_the_seeds(multilabel: bool) -> None:
    b, model = batch(multilabel), module(multilabel=multilabel)
    out = model.training_step(b, 0)
    found, labels = scores(model, b.x.to_dense()[b.seeds]), b.y[b.seeds]
    expected = F.binary_cross_entropy_with_logits(found, labels) if multilabel else F.cross_entropy(found, labels)
    torch.testing.assert_close(out["loss"], expected)
    assert out["weight"] == (12 if multilabel else 4)


def test_embeddings_are_what_the_last_layer_reads() -> None:
    model, rows = module(num_layers=2).eval(), batch()
    embedded = model.embed(rows)
    assert len(embedded) == len(rows.seeds)
    torch.testing.assert_close(model.rest[-1](embedded), model.seed_scores(rows))
    with pytest.raises(ConfigError, match="no hidden layer"):
        module(num_layers=1).embed(rows)


def test_a_batch_without_seeds_has_loss_and_gradients_zero() -> None:
    b, model = batch(), module(sparse_optimizer=lambda p: LazyAdam(p))
    b.seeds = b.seeds[:0]
    out = model.training_step(b, 0)
    out["loss"].backward()
    assert (out["loss"].item(), out["weight"].item()) == (0.0, 0.0)
    assert not model.rest[-1].weight.grad.any()


def test_the_wide_layer_has_an_optimizer_and_a_sparse_gradient_of_its_own() -> None:
    b = batch()
    model = module(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), sparse_optimizer=lambda p: RowwiseAdagrad(p, lr=0.2))
    optimizer = model.configure_optimizers()
    assert isinstance(optimizer, JointOptimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
    assert [p is model.wide.weight for p in optimizer.param_groups[0]["params"]] == [True]
    before = model.wide.weight.detach().clone()
    model.training_step(b, 0)["loss"].backward()
    assert model.wide.weight.grad is not None and model.wide.weight.grad.is_sparse
    optimizer.step()
    used = (b.x.to_dense()[b.seeds] != 0).any(0)
    changed = (model.wide.weight != before).any(1)
    assert torch.equal(changed, used) and not used.all()


def test_an_optimizer_without_sparse_gradients_is_refused() -> None:
    model = module(sparse_optimizer=lambda p: torch.optim.AdamW(p))
    with pytest.raises(ConfigError, match=r"sparse_optimizer made a AdamW, which does not accept sparse gradients"):
        model.configure_optimizers()


def test_data_that_does_not_suit_is_refused() -> None:
    with pytest.raises(ConfigError, match="the data has no features"):
        SparseClassifier(None, 3)
    with pytest.raises(ConfigError, match="the data has no labels"):
        SparseClassifier(10, None)
    with pytest.raises(ConfigError, match="node types paper, author"):
        SparseClassifier({"paper": 3, "author": 4}, 3)  # type: ignore[arg-type]
    assert kind(module()) == "sparse"


def summary(tmp_path: Path, *overrides: str) -> dict[str, float]:
    """Metrics of a run."""
    ok(gtrain("strategy=single", "trainer.enable_progress_bar=false", "hydra.run.dir=run", *overrides, cwd=tmp_path))
    metrics: dict[str, float] = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    return metrics


@pytest.mark.slow
def test_logistic_regression_comes_near_the_best_possible_scores(tmp_path: Path) -> None:
    metrics = summary(
        tmp_path,
        "data=planted_sparse",
        "data.num_features=200",
        "data.batch_size=500",
        "model=sparse",
        "model.num_layers=1",
        "trainer.max_epochs=8",
    )
    assert metrics["data/best_auc"] - 0.02 < metrics["test/auc"] < metrics["data/best_auc"] + 0.02


@pytest.mark.slow
def test_a9a(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    """Linear models reach 0.850 on it."""
    folder = real_data("sparse")
    metrics = summary(tmp_path, "experiment=a9a", f"data.path={folder}/a9a", f"data.test_path={folder}/a9a.t")
    assert metrics["test/acc"] >= 0.849
