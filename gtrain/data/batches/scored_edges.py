"""The edges that a batch of a link task scores, true and negative ones, by the names that models read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

EdgeType = tuple[str, str, str]

FORMS = ("binary", "triplet")
"""What ``data.neg_sampling`` may be, as in PyG's ``NegativeSampling``."""


@dataclass(frozen=True)
class ScoredEdges:
    """B true edges of a batch and their negative edges, by the batch's local ids, or by global ids while it is built.

    Attributes:
        source, target: int64 ``[B]``, endpoints of the true edges.
        extra: ``type`` int64 (relation), ``weight`` (float) and ``time`` int64, those that the data has, ``[B]`` each.
        form: one of :data:`FORMS`; None: that of :class:`~gtrain.model.link_predictor.LinkPredictor`.
        negative_target: int64 ``[B, K]``, K negative targets of each edge; for ``binary`` int64 ``[M]``, the targets of
            M negative edges; None: no negative edges.
        negative_source: int64 ``[M]``, the sources of the M negative edges of ``binary``; None for other forms.
        edge_id: int64 ``[B]``, positions of the true edges among the split's in the source data.
    """

    source: Tensor
    target: Tensor
    extra: dict[str, Tensor]
    form: str | None = None
    negative_target: Tensor | None = None
    negative_source: Tensor | None = None
    edge_id: Tensor | None = None

    def at_sources(self) -> Tensor:
        """Return the ids of all sources, ``[B + M]``: of the true edges, then of the negative ones."""
        return self.source if self.negative_source is None else torch.cat([self.source, self.negative_source])

    def at_targets(self) -> Tensor:
        """Return the ids of all targets, ``[B + M]``: of the true edges, then of the negative ones.

        Of K negative targets of each edge, the first of all edges come first, then the second, and so on.
        """
        if self.negative_target is None:
            return self.target
        return torch.cat([self.target, self.negative_target.t().reshape(-1) if self._by_edge else self.negative_target])

    def renumbered(self, sources: Tensor, targets: Tensor) -> ScoredEdges:
        """Return the same edges with other ids, which are in the order of :meth:`at_sources` and :meth:`at_targets`."""
        count = self.source.numel()
        negative_target = None if self.negative_target is None else targets[count:]
        if negative_target is not None and self._by_edge and self.negative_target is not None:
            negative_target = negative_target.view(self.negative_target.size(1), count).t()
        negative_source = None if self.negative_source is None else sources[count:]
        return replace(
            self,
            source=sources[:count],
            target=targets[:count],
            negative_target=negative_target,
            negative_source=negative_source,
        )

    def entries(self) -> dict[str, Tensor]:
        """Return the entries of the batch.

        Returns:
            Without a form: ``edge_label_index`` int64 ``[2, B]``; ``edge_label_type``, ``edge_label_weight`` and
            ``edge_label_time`` ``[B]``, those that the data has; ``edge_label_id`` ``[B]``, the position of each edge
            among the split's in the source data; and with negatives ``dst_neg_index`` int64 ``[B, K]``.

            For ``binary``, as in PyG: ``edge_label_index`` ``[2, B + M]``, ``edge_label`` ``[B + M]`` (1 true, 0
            negative), and the others ``[B + M]``: a negative edge has the relation, weight, time and id of its true
            edge.

            For ``triplet``, as in PyG: ``src_index`` and ``dst_pos_index`` ``[B]``, and ``dst_neg_index`` ``[B, K]``,
            or ``[B]`` if K is 1.
        """
        named = {f"edge_label_{name}": value for name, value in self.extra.items()}
        if self.edge_id is not None:
            named["edge_label_id"] = self.edge_id
        if self.form == "triplet" and self.negative_target is not None:
            negative = self.negative_target.squeeze(1) if self.negative_target.size(1) == 1 else self.negative_target
            return {"src_index": self.source, "dst_pos_index": self.target, "dst_neg_index": negative} | named
        if self.form == "binary":
            return self._binary(named)
        entries = {"edge_label_index": torch.stack([self.source, self.target])} | named
        return entries if self.negative_target is None else entries | {"dst_neg_index": self.negative_target}

    def put_into(
        self,
        batch: Data | HeteroData,
        edge_type: EdgeType | None,
        copy: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """Set the entries of a batch; with a form, those of a ``HeteroData`` go to the types where PyG has them.

        Args:
            batch: changed in place.
            edge_type: the type of the edges in a ``HeteroData``.
            copy: called with each entry, to copy it to a device.
        """
        typed = isinstance(batch, HeteroData) and self.form is not None and edge_type is not None
        for name, value in self.entries().items():
            (_pyg_store(batch, name, edge_type) if typed else batch)[name] = copy(value)  # type: ignore[arg-type]

    @property
    def _by_edge(self) -> bool:
        return self.negative_source is None

    def _binary(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        count, total = self.source.numel(), self.at_sources().numel()
        # Negative edges follow in rounds of one per true edge.
        owner = torch.arange(total) % max(count, 1)
        label = (torch.arange(total) < count).to(torch.float)
        index = torch.stack([self.at_sources(), self.at_targets()])
        return {"edge_label_index": index, "edge_label": label} | {n: value[owner] for n, value in named.items()}


def _pyg_store(batch: HeteroData, name: str, edge_type: EdgeType) -> Data:
    """Return the storage of the node type or edge type to which PyG's link loader adds an entry."""
    if name == "src_index":
        return batch[edge_type[0]]
    return batch[edge_type[2]] if name.startswith("dst_") else batch[edge_type]
