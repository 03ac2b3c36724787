"""The loss, its weight and the metrics of a node classifier."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from gtrain.errors import ConfigError, DataError
from gtrain.graph.store.writer import write_store
from gtrain.model.classification import NodeClassifier, default_score
from gtrain.model.kinds import kind
from gtrain.model.metrics import classification_metrics, update
from gtrain.model.networks import gat, gcn, mlp, sage
from gtrain.run import build


class Scores(nn.Module):
    """Returns what it was given: scores are then known."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def batch(classes: int = 3, seeds: int = 20, multilabel: bool = False) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, classes, generator=generator)
    y = torch.randint(0, classes, (50,), generator=generator)
    if multilabel:
        y = (torch.rand(50, classes, generator=generator) > 0.5).float()
    return Data(x=x, y=y, edge_index=torch.zeros(2, 0, dtype=torch.int64), seeds=torch.arange(seeds))


def module(classes: int = 3, **kwargs: object) -> NodeClassifier:
    made = NodeClassifier(Scores(), classes, **kwargs)  # type: ignore[arg-type]
    made.log = made.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return made


def test_the_loss_is_the_mean_cross_entropy_over_the_seeds() -> None:
    b = batch()
    out = module().training_step(b, 0)
    assert out["weight"] == 20
    torch.testing.assert_close(out["loss"], F.cross_entropy(b.x[:20], b.y[:20]))


def test_class_weights_weigh_loss_and_weight() -> None:
    b, weights = batch(), [1.0, 2.0, 5.0]
    out = module(class_weights=weights).training_step(b, 0)
    torch.testing.assert_close(out["loss"], F.cross_entropy(b.x[:20], b.y[:20], weight=torch.tensor(weights)))
    torch.testing.assert_close(out["weight"], torch.tensor(weights)[b.y[:20]].sum())


@pytest.mark.parametrize(
    ("facts", "weights"),
    [
        ({"train_classes": [6, 3, 0]}, [0.5, 1.0, 0.0]),
        ({}, [5 / 3, 5 / 6, 5 / 6]),  # a store of an early version: counted
        ({"train_classes": [0, 0, 0]}, None),  # new data for a model of an early version
    ],
)
def test_balanced_class_weights_are_inverse_frequencies_in_training(
    facts: dict[str, Any], weights: list[float] | None, tmp_path: Path
) -> None:
    graph = HeteroData()
    graph["a"].y, graph["a"].train_mask = torch.tensor([0, 1, 1, 2, 2, 2]), torch.tensor([1, 1, 1, 1, 1, 0]).bool()
    graph["a"].num_nodes, graph["b"].num_nodes = 6, 1
    graph["a", "to", "b"].edge_index = torch.zeros(2, 1, dtype=torch.int64)
    parts = {"a": torch.tensor([0, 0, 0, 1, 1, 1]), "b": torch.tensor([0])}
    facts = {"num_classes": 3, "multilabel": False, "target": "a", **facts}
    store = write_store(tmp_path / "s", graph, parts, 2, source={}, facts=facts, partitioner="random", seed=0)
    made = build._class_weights("balanced", store)
    assert made == (weights if weights is None else pytest.approx(weights))


@pytest.mark.parametrize("weights", [["a", 1, 1], [None, 1, 1], [-1, 2, 1], [0, 0, 0], [math.inf, 1, 1], [True, 1, 1]])
def test_weights_without_a_meaning_are_refused(weights: list[Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.class_weights=.* was set; the weights must be numbers of at least 0"
    ):
        module(class_weights=weights)


def test_smoothing_gives_a_class_of_weight_0_no_loss() -> None:
    b, made = batch(), module(label_smoothing=0.1, class_weights=[0.0, 1.0, 2.0])
    kept = b.y[:20] > 0
    expected = F.cross_entropy(
        b.x[:20][kept], b.y[:20][kept], weight=torch.tensor([0.0, 1.0, 2.0]), label_smoothing=0.1
    )
    torch.testing.assert_close(made.training_step(b, 0)["loss"], expected)
    b.y[:20] = 0
    assert made.training_step(b, 0)["loss"] == 0


@pytest.mark.parametrize("class_weights", [None, [1.0, 2.0, 5.0]])
def test_label_smoothing_is_torchs_and_of_the_training_only(class_weights: list[float] | None) -> None:
    b, made = batch(), module(label_smoothing=0.2, class_weights=class_weights)
    weights = None if class_weights is None else torch.tensor(class_weights)
    expected = {e: F.cross_entropy(b.x[:20], b.y[:20], weight=weights, label_smoothing=e) for e in (0.0, 0.2)}
    torch.testing.assert_close(made.training_step(b, 0)["loss"], expected[0.2])
    torch.testing.assert_close(made._loss(b, "val")[0], expected[0.0])
    assert abs(expected[0.2] - expected[0.0]) > 1e-3
    with pytest.raises(ConfigError, match="label_smoothing=1 was set; it must be at least 0 and below 1"):
        module(label_smoothing=1)


def test_label_smoothing_of_several_labels_is_over_the_two_values_of_each() -> None:
    b = batch(multilabel=True)
    smooth = torch.where(b.y[:20] > 0, 0.9, 0.1)
    out = module(multilabel=True, label_smoothing=0.2).training_step(b, 0)
    torch.testing.assert_close(out["loss"], F.binary_cross_entropy_with_logits(b.x[:20], smooth))


def test_several_labels_use_binary_cross_entropy() -> None:
    b = batch(multilabel=True)
    out = module(multilabel=True).training_step(b, 0)
    torch.testing.assert_close(out["loss"], F.binary_cross_entropy_with_logits(b.x[:20], b.y[:20]))


@pytest.mark.parametrize("class_weights", [None, [1.0, 2.0, 5.0]])
def test_scores_of_bfloat16_have_a_loss_of_float32(class_weights: list[float] | None) -> None:
    """In bfloat16, 257 seeds would count as 256."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(257, 3, generator=generator).bfloat16()
    y = torch.randint(0, 3, (257,), generator=generator)
    b = Data(x=x, y=y, edge_index=torch.zeros(2, 0, dtype=torch.int64), seeds=torch.arange(257))
    out = module(class_weights=class_weights).bfloat16().training_step(b, 0)
    weights = None if class_weights is None else torch.tensor(class_weights)
    assert out["weight"] == (257 if weights is None else weights[y].sum())
    torch.testing.assert_close(out["loss"], F.cross_entropy(x.float(), y, weight=weights))


def test_a_batch_without_seeds_has_loss_and_weight_zero_and_zero_gradients() -> None:
    b = batch(seeds=0)
    b.x.requires_grad_()
    out = module().training_step(b, 0)
    assert (out["loss"].item(), out["weight"].item()) == (0.0, 0.0)
    out["loss"].backward()
    assert b.x.grad is not None and not b.x.grad.any()


def computed(b: Data, classes: int, multilabel: bool = False, *, empty_batch_first: bool = False) -> dict[str, float]:
    metrics = classification_metrics(classes, multilabel, ("acc", "f1", "auc"), "")
    if empty_batch_first:
        update(metrics, b.x[:0], b.y[:0], multilabel)
    update(metrics, b.x, b.y, multilabel)
    return {name: float(value) for name, value in metrics.compute().items()}


@pytest.mark.parametrize("empty_batch_first", [False, True])
def test_metrics_agree_with_scikit_learn(empty_batch_first: bool) -> None:
    for classes in (2, 4):
        b = batch(classes)
        found = computed(b, classes, empty_batch_first=empty_batch_first)
        predicted, probabilities = b.x.argmax(-1), b.x.softmax(-1)
        scores = probabilities[:, 1] if classes == 2 else probabilities
        assert found["acc"] == pytest.approx(accuracy_score(b.y, predicted))
        assert found["f1"] == pytest.approx(f1_score(b.y, predicted, average="binary" if classes == 2 else "macro"))
        assert found["auc"] == pytest.approx(roc_auc_score(b.y, scores, multi_class="ovr"), abs=1e-6)


@pytest.mark.parametrize("empty_batch_first", [False, True])
def test_multilabel_metrics_agree_with_scikit_learn(empty_batch_first: bool) -> None:
    b = batch(multilabel=True)
    found, predicted = computed(b, 3, True, empty_batch_first=empty_batch_first), (b.x > 0).int()
    assert found["acc"] == pytest.approx(float((predicted == b.y).float().mean()))
    assert found["f1"] == pytest.approx(f1_score(b.y, predicted, average="micro"))
    assert found["auc"] == pytest.approx(roc_auc_score(b.y, b.x, average="macro"), abs=1e-6)


@pytest.mark.parametrize("label", [0, 1])
def test_what_one_class_alone_does_not_define_is_nan(label: int) -> None:
    b = batch(2)
    b.y = torch.full_like(b.y, label)
    assert math.isnan(computed(b, 2)["auc"]) and not math.isnan(computed(b, 2)["f1"])
    b.x = torch.tensor([2.0, -2.0]).expand(len(b.x), 2)  # nothing is predicted to be positive
    assert math.isnan(computed(b, 2)["f1"]) == (label == 0) and computed(b, 2)["acc"] == 1 - label


def test_the_macro_auc_leaves_out_classes_that_do_not_occur() -> None:
    b = batch(4)
    b.y = b.y % 3
    probabilities = b.x.softmax(-1)
    each = [roc_auc_score(b.y == c, probabilities[:, c]) for c in range(3)]
    assert computed(b, 4)["auc"] == pytest.approx(sum(each) / 3, abs=1e-6)
    b = batch(multilabel=True)
    b.y[:, 1] = 1
    assert computed(b, 3, True)["auc"] == pytest.approx(roc_auc_score(b.y[:, ::2], b.x[:, ::2]), abs=1e-6)
    b.y[:] = 0
    assert math.isnan(computed(b, 3, True)["auc"])


def test_the_default_score_of_several_labels_or_two_unbalanced_classes_is_auc() -> None:
    assert default_score(module(multilabel=True), {}) == "val/auc"
    assert default_score(module(), {"train_classes": [70, 30]}) == "val/auc"
    assert default_score(module(), {"train_classes": [2, 8]}) == "val/auc"
    assert default_score(module(), {"train_classes": [65, 35]}) == "val/acc"
    assert default_score(module(), {"train_classes": [9, 1, 1]}) == "val/acc"
    assert default_score(pl.LightningModule(), {"train_classes": [9, 1]}) == "val/acc"  # which need not log an AUC


def test_a_network_gets_what_its_forward_names() -> None:
    b = batch()
    b.edge_weight = torch.ones(0)

    class Asks(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, extra: int = 0) -> Tensor:
            assert edge_weight is b.edge_weight and extra == 0
            return x

    assert NodeClassifier(Asks(), 3)(b) is b.x


def test_metrics_of_the_test_are_chosen_by_name() -> None:
    assert list(module(test_metrics=["f1"]).test_scores) == ["test/f1"]
    with pytest.raises(ConfigError, match="test_metrics has precision, which is not a metric of classes"):
        module(test_metrics=["acc", "precision"])


def test_missing_inputs_and_wrong_networks_are_explained() -> None:
    class NeedsEdgeAttributes(nn.Module):
        def forward(self, x: Tensor, edge_attr: Tensor) -> Tensor:
            return x

    class TakesTriples(nn.Module):
        def forward(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
            return head

    with pytest.raises(DataError, match="NeedsEdgeAttributes needs edge_attr"):
        NodeClassifier(NeedsEdgeAttributes(), 3)(batch())
    with pytest.raises(ConfigError, match=r"takes \(head, relation, tail\)"):
        NodeClassifier(TakesTriples(), 3)
    with pytest.raises(ConfigError, match="class_weights has 2 numbers, but the graph has 3 classes"):
        NodeClassifier(Scores(), 3, class_weights=[1, 2])


def test_networks_are_pygs_own_with_our_names_for_norms() -> None:
    sizes = {"in_channels": 5, "out_channels": 3, "hidden_channels": 8, "num_layers": 2}
    assert type(gcn(**sizes, norm="none")).__module__.startswith("torch_geometric.")
    assert sage(**sizes, norm="layer").norms[0].mode == "node"
    assert kind(gcn(**sizes)) == "message-passing" and kind(mlp(**sizes)) == "per-node"
    with pytest.raises(ConfigError, match=r"norm=instance was set\.\nHINT: the norms are batch, layer, none"):
        gcn(**sizes, norm="instance")
    with pytest.raises(ConfigError, match=r"8 / 3 = 2\.66667"):
        gat(**sizes, heads=3)


def test_input_dropout_acts_in_training_only() -> None:
    network = gcn(in_channels=4, out_channels=2, hidden_channels=8, num_layers=2, input_dropout=0.9)
    x, edges = torch.ones(30, 4), torch.tensor([[0, 1], [1, 0]])
    assert not torch.equal(network(x=x, edge_index=edges), network(x=x, edge_index=edges))
    network.eval()
    assert torch.equal(network(x=x, edge_index=edges), network(x=x, edge_index=edges))


def test_optimizer_and_scheduler_come_from_factories() -> None:
    made = module(
        optimizer=lambda parameters: torch.optim.SGD(parameters or [nn.Parameter(torch.ones(1))], lr=0.5),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )
    configured = made.configure_optimizers()
    assert configured["optimizer"].param_groups[0]["lr"] == 0.5
    assert configured["lr_scheduler"]["interval"] == "epoch"
    assert isinstance(made, pl.LightningModule)
