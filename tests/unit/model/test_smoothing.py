"""``correct_and_smooth`` is PyG's, whatever the order of the nodes in the store and in the predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import CorrectAndSmooth
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from gtrain import GraphDataModule, Store
from gtrain.callbacks.smoothing import DEFAULTS, Smoothing
from gtrain.errors import ConfigError

N = 40
GENERATOR = torch.Generator().manual_seed(0)
INDEX = torch.randint(N, (2, 160), generator=GENERATOR)
SCORES = torch.randn(N, 3, generator=GENERATOR)
TRAIN = torch.arange(N) % 4 == 0
MASKS = {"train_mask": TRAIN, "val_mask": torch.arange(N) % 4 == 1, "test_mask": torch.arange(N) % 4 == 2}


def store(folder: Path, y: torch.Tensor, **data: Any) -> Store:
    graph = Data(edge_index=INDEX, num_nodes=N, y=y, **MASKS, **data)
    module = GraphDataModule.from_pyg(graph, store=str(folder), num_parts=2, partitioner="random")
    module.prepare_data()
    return module.open_store()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("multilabel", [False, True])
def test_scores_are_those_of_pyg(weighted: bool, multilabel: bool, tmp_path: Path) -> None:
    labels = (torch.arange(N)[:, None] % torch.tensor([2, 3, 5]) == 0).float() if multilabel else torch.arange(N) % 3
    weight = torch.rand(INDEX.size(1), generator=GENERATOR) if weighted else None
    opened = store(tmp_path, labels, **({} if weight is None else {"edge_weight": weight}))
    settings = {"num_correction_layers": 3, "smoothing_alpha": 0.6}
    order = torch.randperm(N, generator=GENERATOR)
    smoothing = Smoothing(settings)
    found = smoothing(opened, order, SCORES[order])
    reference = CorrectAndSmooth(**{**DEFAULTS, **settings})
    soft = SCORES.sigmoid() if multilabel else SCORES.softmax(1)
    index, norm = gcn_norm(INDEX, weight, N, add_self_loops=False)
    expected = reference(soft, labels[TRAIN], TRAIN, index, norm)
    assert torch.allclose(found, expected[order], atol=1e-6)
    if multilabel:
        assert smoothing.note is None
    else:
        shares = [float((each.argmax(1) == labels)[MASKS["test_mask"]].float().mean()) for each in (soft, expected)]
        assert smoothing.note is not None and f"test {shares[0]:.4f} to {shares[1]:.4f}" in smoothing.note


def test_scores_without_errors_are_left_as_they_are(tmp_path: Path) -> None:
    """PyG divides errors by their mean."""
    labels = torch.arange(N) % 3
    scores = 1e4 * torch.nn.functional.one_hot(labels, 3).float()
    found = Smoothing(True)(store(tmp_path, labels), torch.arange(N), scores)
    assert bool(found.isfinite().all()) and torch.equal(found.argmax(1)[TRAIN], labels[TRAIN])


def test_what_has_no_labels_to_propagate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="correct_and_smooth.alpha=1 was set"):
        Smoothing({"alpha": 1})
    for wrong in (
        {"num_correction_layers": "many"},
        {"correction_alpha": None},
        {"smoothing_alpha": 1.5},
        {"autoscale": 1},
    ):
        with pytest.raises(ConfigError, match=rf"correct_and_smooth\.{next(iter(wrong))}=.* was set; it must be"):
            Smoothing(wrong)
    with pytest.raises(ConfigError, match="correct_and_smooth=50 was set; it is true, false or arguments by name"):
        Smoothing(50)  # type: ignore[arg-type]
    signed = store(
        tmp_path / "signed", torch.arange(N) % 3, edge_weight=torch.randn(INDEX.size(1), generator=GENERATOR)
    )
    with pytest.raises(ConfigError, match="labels follow edges of positive weights"):
        Smoothing.check(signed)
    with pytest.raises(ConfigError, match="the labels are not classes"):
        Smoothing.check(store(tmp_path, torch.arange(N) / 7))
    graph = HeteroData()
    graph["paper"].x, graph["paper"].y, graph["author"].x = torch.zeros(N, 2), torch.arange(N) % 3, torch.zeros(N, 2)
    graph["author", "writes", "paper"].edge_index = INDEX
    module = GraphDataModule.from_pyg(graph, store=str(tmp_path))
    module.prepare_data()
    with pytest.raises(ConfigError, match="2 types of nodes"):
        Smoothing.check(module.open_store())
