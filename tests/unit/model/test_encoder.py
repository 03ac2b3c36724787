"""gtrain.model.encoder: the nodes of each type at one width."""

from __future__ import annotations

import torch
from torch_geometric.data import HeteroData

from gtrain.model.encoder import NodeEncoder


def test_a_type_may_have_the_name_of_a_method() -> None:
    names = ("items", "keys", "type", "a.b")
    encoder = NodeEncoder(4, dict.fromkeys(names, 3), {"items": 2, "keys": None, "type": 5, "a.b": 1})
    batch = HeteroData()
    for name, columns in (("items", 2), ("type", 5), ("a.b", 1)):
        batch[name].x = torch.ones(3, columns)
    batch["keys"].orig_id = torch.arange(3)
    rows = encoder(batch)
    assert isinstance(rows, dict) and {name: tuple(rows[name].shape) for name in rows} == dict.fromkeys(names, (3, 4))
