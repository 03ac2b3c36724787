"""``gtrain predict correct_and_smooth=true``: the labels of training nodes correct predictions of their neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import CorrectAndSmooth
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from gtrain.errors import ConfigError
from gtrain.graph.shard import load_whole
from gtrain.graph.store import Store

DEFAULTS: dict[str, Any] = {
    "num_correction_layers": 50,
    "correction_alpha": 0.979,
    "num_smoothing_layers": 50,
    "smoothing_alpha": 0.756,
    "autoscale": True,
    "scale": 1.0,
}
"""Those of the paper's scripts for OGB's arxiv with a multilayer perceptron."""


class Smoothing:
    """Corrects and smooths the scores of all nodes (Huang et al., "Combining Label Propagation and Simple Models
    Out-performs Graph Neural Networks", ICLR 2021), by PyG's ``CorrectAndSmooth`` in one process.

    Errors of the scores of training nodes are propagated along the edges and subtracted; then the corrected scores are
    propagated, with the labels at the training nodes. Edge weights are those of the graph, normalised as in a GCN.

    Args:
        settings: true, or arguments of ``CorrectAndSmooth`` that differ from :data:`DEFAULTS`.

    Raises:
        ConfigError: an argument is unknown, or its value has no meaning.
    """

    def __init__(self, settings: bool | Mapping[str, Any]) -> None:
        if not isinstance(settings, (bool, Mapping)):
            raise ConfigError(
                f"correct_and_smooth={settings} was set; it is true, false or arguments by name.",
                hint="for example 'correct_and_smooth={num_smoothing_layers:20}'.",
            )
        given = {} if isinstance(settings, bool) else dict(settings)
        if unknown := [name for name in given if name not in DEFAULTS]:
            raise ConfigError(
                f"correct_and_smooth.{unknown[0]}={given[unknown[0]]} was set; CorrectAndSmooth has no such argument.",
                hint=f"its arguments are {', '.join(DEFAULTS)}.",
            )
        for name, value in given.items():
            _check(name, value)
        self._module = CorrectAndSmooth(**{**DEFAULTS, **given})
        self.note: str | None = None
        """What the smoothing changed, once it is done: the accuracy of the held-out nodes before and after."""

    @staticmethod
    def check(store: Store) -> None:
        """Check that a graph has what the smoothing needs.

        Raises:
            ConfigError: it has several types, or no classes or training nodes.
        """
        reason = None
        if store.is_hetero:
            reason = (
                f"the graph has {len(store.node_types)} types of nodes; labels follow edges between nodes of one type"
            )
        elif store.facts.get("num_classes") is None:
            reason = "the labels are not classes"
        elif "train_mask" not in store.node_tensors() or not store.split_size("train"):
            reason = "no node of this data has a label of the training split"
        elif (negative := store.facts.get("negative_weight")) is not None:
            reason = f"{negative}; labels follow edges of positive weights"
        if reason is not None:
            raise ConfigError(f"correct_and_smooth was set, and {reason}.", hint="leave out correct_and_smooth.")

    def __call__(self, store: Store, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the probabilities of the classes after the smoothing, float32 ``[N, C]``; rows need not sum to 1.

        Args:
            store: the graph.
            ids: int64 ``[N]``, ids of the source data of all nodes, in any order.
            scores: logits ``[N, C]``.
        """
        shard = load_whole(store)
        tensors = shard.node_data
        place = torch.empty_like(ids)
        place[ids] = torch.arange(len(ids))
        rows = place[tensors["orig_id"]]  # of each node of the store
        multilabel = bool(store.facts.get("multilabel"))
        before = scores[rows].sigmoid() if multilabel else scores[rows].softmax(1)
        labels, train = tensors["y"], tensors["train_mask"]
        weight = shard.edge_data.get("edge_weight")
        index, weight = gcn_norm(shard.edge_index, weight, shard.num_local, add_self_loops=False, dtype=before.dtype)
        given = labels[train].to(before.dtype) if multilabel else labels[train]
        after = self._module(before, given, train, index, weight)
        # Where all scores of training nodes are right without a doubt, their errors have no scale.
        after = torch.where(after.isfinite().all(1, keepdim=True), after, before)
        if not multilabel:
            shares = [_shares(each, labels, tensors) for each in (before, after)]
            changes = (f"{split} {old:.4f} to {shares[1][split]:.4f}" for split, old in shares[0].items())
            self.note = f"correct_and_smooth changed the accuracy: {', '.join(changes)}"
        result = torch.empty_like(after)
        result[rows] = after
        return result


def _check(name: str, value: Any) -> None:
    """Refuse a value of an argument that PyG cannot use, which it would do after all predictions are computed."""
    kind = type(DEFAULTS[name])
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float:
        valid = is_number and (0 <= value <= 1 if name.endswith("alpha") else math.isfinite(value))
        demand = "a number from 0 to 1" if name.endswith("alpha") else "a number"
    elif kind is bool:
        valid, demand = isinstance(value, bool), "true or false"
    else:
        valid, demand = is_number and isinstance(value, int) and value >= 0, "an integer from 0"
    if not valid:
        raise ConfigError(
            f"correct_and_smooth.{name}={value} was set; it must be {demand}.", hint=f"the default is {DEFAULTS[name]}."
        )


def _shares(scores: Tensor, labels: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the accuracy of the held-out splits that the graph has."""
    right = scores.argmax(1) == labels
    masks = {split: tensors[f"{split}_mask"] for split in ("val", "test") if f"{split}_mask" in tensors}
    return {split: float(right[mask].float().mean()) for split, mask in masks.items() if mask.any()}
