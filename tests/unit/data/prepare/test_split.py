"""gtrain.data.prepare.split: which nodes train, validate and test."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data

from gtrain.data.prepare.split import SplitOptions, split_nodes
from gtrain.errors import ConfigError, DataError

N = 100
ALL = torch.ones(N, dtype=torch.bool)


def labelled_graph() -> Data:
    return Data(y=torch.arange(N) % 4, edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=N)


def sizes(masks: dict[str, torch.Tensor]) -> list[int]:
    assert sum(mask.int() for mask in masks.values()).max() <= 1, "a node in two splits"  # type: ignore[union-attr]
    return [int(mask.sum()) for mask in masks.values()]


def test_random() -> None:
    known = ALL.clone()
    known[:10] = False
    options = SplitOptions("random", train_fraction=0.5, val_fraction=0.3, seed=1)
    masks = split_nodes(labelled_graph(), known, options)
    assert sizes(masks) == [45, 27, 18]
    assert not any(mask[:10].any() for mask in masks.values())
    again = split_nodes(labelled_graph(), known, options)
    assert torch.equal(masks["train_mask"], again["train_mask"])
    other = split_nodes(labelled_graph(), known, SplitOptions("random", seed=2))
    assert not torch.equal(masks["train_mask"], other["train_mask"])


def test_per_class() -> None:
    data = labelled_graph()
    masks = split_nodes(data, ALL, SplitOptions("per_class", train_per_class=5, val_per_class=7))
    assert sizes(masks) == [20, 28, 52]
    assert data.y[masks["train_mask"]].bincount().tolist() == [5, 5, 5, 5]
    assert data.y[masks["val_mask"]].bincount().tolist() == [7, 7, 7, 7]
    with pytest.raises(DataError, match=r"class 0 has 25 .*train_per_class=20 \+ data.val_per_class=30 = 50"):
        split_nodes(data, ALL, SplitOptions("per_class"))


def test_public() -> None:
    data = labelled_graph()
    with pytest.raises(ConfigError, match=r"without masks\nHINT: set data.split=random"):
        split_nodes(data, ALL, SplitOptions())
    data.train_mask = torch.zeros(N, 3, dtype=torch.bool)
    data.train_mask[:6, 1] = True
    data.test_mask = ~data.train_mask.any(dim=1)
    known = ALL.clone()
    known[0] = False
    assert sizes(split_nodes(data, known, SplitOptions(index=1))) == [5, 0, 94]
    with pytest.raises(ConfigError, match=r"split_index=3, and the data has 3(.|\n)*0\.\.2"):
        split_nodes(data, ALL, SplitOptions(index=3))
    with pytest.raises(DataError, match="train split is empty"):
        split_nodes(data, ALL, SplitOptions(index=0))


def test_several_labels_have_no_per_class_split() -> None:
    data = Data(y=torch.zeros(N, 3), num_nodes=N)
    with pytest.raises(ConfigError, match="several labels"):
        split_nodes(data, ALL, SplitOptions("per_class"))
    assert sizes(split_nodes(data, ALL, SplitOptions("random"))) == [60, 20, 20]


def test_options_check_themselves() -> None:
    with pytest.raises(ConfigError, match=r"train_fraction=0.8 \+ data.val_fraction=0.3 = 1.1"):
        SplitOptions("random", train_fraction=0.8, val_fraction=0.3)
    with pytest.raises(ConfigError, match="train_per_class=0"):
        SplitOptions("per_class", train_per_class=0)
