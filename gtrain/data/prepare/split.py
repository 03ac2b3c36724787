"""Split the labelled nodes into train, val and test."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtrain.data.config import DataConfig
from gtrain.errors import ConfigError, DataError

log = logging.getLogger("gtrain")

MASKS = ("train_mask", "val_mask", "test_mask")


@dataclass(frozen=True)
class SplitOptions:
    """How to split the labelled nodes, or the edges where edges are predicted.

    Attributes:
        kind: ``public`` (the data's masks or held-out edges), ``random`` (fractions of the labelled nodes or of the
            edges), ``per_class`` (a number of nodes of each class, the rest for test; Shchur et al. 2018, section 3),
            or ``time`` (fractions in the order of the times: the past trains, the future tests).
        index: number of the published split, for masks ``[N, S]``.
        train_fraction: share of train, for ``random`` and ``time``.
        val_fraction: share of val, for ``random`` and ``time``; the rest is test.
        train_per_class: train nodes of each class, for ``per_class``.
        val_per_class: val nodes of each class, for ``per_class``.
        seed: seed of ``random`` and ``per_class``.
    """

    kind: str = DataConfig.split
    index: int = DataConfig.split_index
    train_fraction: float = DataConfig.train_fraction
    val_fraction: float = DataConfig.val_fraction
    train_per_class: int = DataConfig.train_per_class
    val_per_class: int = DataConfig.val_per_class
    seed: int = DataConfig.seed

    def __post_init__(self) -> None:
        train, val = self.train_fraction, self.val_fraction
        if self.kind in ("random", "time") and not (train > 0 and val >= 0 and train + val <= 1 + 1e-9):
            raise ConfigError(
                f"data.train_fraction={train:g} + data.val_fraction={val:g} = {train + val:g}",
                hint="give a positive train fraction and a sum of 1 or less; the rest is for test",
            )
        if self.kind == "per_class" and (self.train_per_class < 1 or self.val_per_class < 0):
            raise ConfigError(
                f"data.train_per_class={self.train_per_class}, data.val_per_class={self.val_per_class}",
                hint="train on at least 1 node of each class, and validate on 0 or more",
            )

    def identity(self) -> dict[str, Any]:
        """Return the options that affect this kind of split."""
        names = {
            "public": ("index",),
            "random": ("train_fraction", "val_fraction", "seed"),
            "per_class": ("train_per_class", "val_per_class", "seed"),
            "time": ("train_fraction", "val_fraction"),
        }[self.kind]
        return {"kind": self.kind, **{name: getattr(self, name) for name in names}}

    def sizes(self, total: int) -> tuple[int, int, int]:
        """Return the sizes of train, val and test for ``total`` items, by the two fractions."""
        train = round(self.train_fraction * total)
        val = min(round(self.val_fraction * total), total - train)
        return train, val, total - train - val

    def permutation(self, total: int) -> Tensor:
        """Return the random order in which ``random`` assigns ``total`` items, int64 ``[total]``."""
        return torch.randperm(total, generator=torch.Generator().manual_seed(self.seed))


def split_nodes(data: Mapping[str, Any], labelled: Tensor, options: SplitOptions) -> dict[str, Tensor]:
    """Return the three masks.

    Args:
        data: the node tensors by name: labels ``y``; the masks for ``public``; ``time`` for ``time``. A PyG ``Data``,
            or the storage of one node type of a ``HeteroData``.
        labelled: the nodes that have a label, ``[N]`` bool; the others are in no split.
        options: how to split.

    Returns:
        ``train_mask``, ``val_mask`` and ``test_mask``, each ``[N]`` bool.

    Raises:
        ConfigError: the kind of split does not suit the data.
        DataError: a class is too small, or the train split is empty.
    """
    if options.kind == "public":
        masks = [mask & labelled for mask in _public(data, options.index)]
        _warn_of_overlap(masks)
    else:
        draw = {"random": _random, "per_class": _per_class, "time": _by_time}[options.kind]
        groups = draw(data, labelled.nonzero().flatten(), options)
        masks = [torch.zeros_like(labelled).index_fill_(0, group, True) for group in groups]
    if not masks[0].any():
        raise DataError(
            f"the train split is empty: data.split={options.kind} of {int(labelled.sum())} labelled nodes",
            hint="choose another data.split, or larger fractions",
        )
    return dict(zip(MASKS, masks, strict=True))


def _public(data: Mapping[str, Any], index: int) -> list[Tensor]:
    """Return the published masks; a missing val or test mask selects nothing."""
    if "train_mask" not in data:
        raise ConfigError(
            "data.split=public, and the data comes without masks",
            hint="set data.split=random or data.split=per_class",
        )
    empty = torch.zeros_like(data["train_mask"])
    return [_column(data[name] if name in data else empty, index) for name in MASKS]


def _warn_of_overlap(masks: list[Tensor]) -> None:
    for (first, second), shared in (((0, 1), masks[0] & masks[1]), ((0, 2), masks[0] & masks[2])):
        if count := int(shared.sum()):
            names = [MASKS[position].removesuffix("_mask") for position in (first, second)]
            log.warning("%d nodes are both in the %s and the %s split of the data", count, *names)


def _column(mask: Tensor, index: int) -> Tensor:
    if mask.dim() == 1:
        return mask.bool()
    if not 0 <= index < mask.size(1):
        raise ConfigError(
            f"data.split_index={index}, and the data has {mask.size(1)} published splits",
            hint=f"choose 0..{mask.size(1) - 1}",
        )
    return mask[:, index].bool()


def _random(data: Mapping[str, Any], nodes: Tensor, options: SplitOptions) -> list[Tensor]:
    return list(nodes[options.permutation(nodes.numel())].split(options.sizes(nodes.numel())))


def _by_time(data: Mapping[str, Any], nodes: Tensor, options: SplitOptions) -> list[Tensor]:
    if "time" not in data:
        raise ConfigError("data.split=time, and the nodes have no times", hint="set data.split=random")
    order = torch.argsort(data["time"][nodes], stable=True)
    return list(nodes[order].split(options.sizes(nodes.numel())))


def _per_class(data: Mapping[str, Any], nodes: Tensor, options: SplitOptions) -> list[Tensor]:
    labels = data["y"]
    if not isinstance(labels, Tensor) or labels.dim() != 1:
        raise ConfigError("data.split=per_class, and the nodes have several labels each", hint="set data.split=random")
    if labels.is_floating_point():
        raise ConfigError("data.split=per_class, and the labels are numbers to predict", hint="set data.split=random")
    generator = torch.Generator().manual_seed(options.seed)
    train, needed = options.train_per_class, options.train_per_class + options.val_per_class
    groups: list[list[Tensor]] = [[], [], []]
    for label in labels[nodes].unique():
        members = nodes[labels[nodes] == label]
        members = members[torch.randperm(members.numel(), generator=generator)]
        if members.numel() < needed:
            raise DataError(
                f"class {int(label)} has {members.numel()} labelled nodes, and data.train_per_class={train} + "
                f"data.val_per_class={options.val_per_class} = {needed}",
                hint="lower the two, or set data.split=random",
            )
        for group, piece in zip(groups, members.tensor_split([train, needed]), strict=True):
            group.append(piece)
    return [torch.cat(group) if group else nodes[:0] for group in groups]
