"""What a model of edge embeddings computes in a training step, for strategies that do so by kernels of their own.

A model that can be described so has a method ``recipe()``. What it says is the model itself: parameters and table are
the module's, not copies. The module's own ``training_step`` is the reference for whatever a strategy does instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from gtrain.nn.table import Table


@dataclass(frozen=True)
class EdgeRecipe:
    """A model that scores edges from one table of embeddings; see :class:`gtrain.model.kg_embedding.KGEmbedding`.

    Attributes:
        table: rows of the graph's nodes, D columns and then the bias, if there is one.
        dimension: D.
        num_relations: R.
        operator: ``none``, ``translation``, ``diagonal``, ``linear``, ``affine`` or ``complex_diagonal``.
        comparator: ``dot``, ``cos``, ``l2`` or ``squared_l2``.
        loss: ``ranking``, ``logistic`` or ``softmax``.
        margin: of the ranking loss.
        reciprocal: whether queries are transformed, by parameters for each direction; else tails, by ``forwards``.
        bias: whether rows have a bias.
        num_batch_negs: edges of a chunk, which are each other's negatives.
        num_uniform_negs: nodes drawn for each chunk and side.
        all_negs: all nodes are negatives, instead.
        head_negs: whether heads are replaced.
        tail_negs: whether tails are replaced.
        n3: weight of the N3 regulariser.
        max_norm: rows are scaled to this norm when they are read, where theirs is larger; None: never.
        shift: ``[1, D]``, what all embeddings have in common; None: nothing.
        relation_weight: factor of the loss by relation; None: all 1.
        forwards: the operator's parameters by name, each ``[R, ...]``; none for ``none``.
        backwards: those of the other direction; none unless ``reciprocal``.
    """

    table: Table
    dimension: int
    num_relations: int
    operator: str
    comparator: str
    loss: str
    margin: float
    reciprocal: bool
    bias: bool
    num_batch_negs: int
    num_uniform_negs: int
    all_negs: bool
    head_negs: bool
    tail_negs: bool
    n3: float
    max_norm: float | None
    shift: nn.Parameter | None
    relation_weight: tuple[float, ...] | None
    forwards: dict[str, nn.Parameter]
    backwards: dict[str, nn.Parameter]

    @property
    def places(self) -> int:
        """Edges of a chunk."""
        return self.num_batch_negs or self.num_uniform_negs

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters but the table, by a name of their own."""
        found = {f"forwards.{name}": value for name, value in self.forwards.items()}
        found |= {f"backwards.{name}": value for name, value in self.backwards.items()}
        return found if self.shift is None else {**found, "shift": self.shift}
