"""Description of the training step of edge-embedding models, for strategies that compute it by their own kernels.

A model that can be described has a method ``recipe()``. Parameters and tables in it are the module's, not copies. The
module's ``training_step`` is the reference for the strategy's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from gtrain.nn.csr import Csr
from gtrain.nn.table import Table


@dataclass(frozen=True)
class EdgeRecipe:
    """How edges are scored, for relations that join the same two entity types by the same operator.

    Attributes:
        tables: rows of the heads' type and of the tails' type: D columns, then the bias, if any.
        types: positions of these types in :attr:`ModelRecipe.tables`.
        bags: for heads and for tails, the features of each entity, the mean of whose rows is its embedding; None: each
            entity has a row.
        relations: R ids of the data; parameters have a row for each, in this order.
        dimension: D.
        operator: ``none``, ``translation``, ``diagonal``, ``linear``, ``affine``, ``complex_diagonal`` or ``rotation``.
        comparator: ``dot``, ``cos``, ``l2`` or ``squared_l2``.
        loss: ``ranking``, ``logistic`` or ``softmax``.
        margin: of the ranking loss.
        reciprocal: whether queries are transformed, by parameters for each direction; else tails, by ``forwards``.
        bias: whether rows have a bias.
        num_batch_negs: edges of a chunk, each of which is a negative for the others.
        num_uniform_negs: entities of the side's type that are drawn for each chunk and side.
        all_negs: instead, all entities of the type are negatives.
        head_negs: whether heads are replaced.
        tail_negs: whether tails are replaced.
        self_negs: whether the fixed end of an edge is a negative for the other end; never with ``all_negs``.
        n3: weight of the N3 regulariser.
        dura: weight of the DURA regulariser; by inner products of an operator that multiplies.
        relation_prediction: weight of the loss of predicting an edge's relation among these; by inner products only.
        max_norm: rows with a larger norm are scaled to it when they are read; None: never.
        shifts: ``[1, D]`` each, added to all embeddings of the heads' type and of the tails' type; None: 0.
        relation_weight: factor of the loss by relation; None: all 1.
        forwards: the operator's parameters by name, each ``[R, ...]``; empty for ``none``.
        backwards: those of the other direction; empty unless ``reciprocal``.
    """

    tables: tuple[Table, Table]
    types: tuple[int, int]
    bags: tuple[Csr | None, Csr | None]
    relations: tuple[int, ...]
    dimension: int
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
    self_negs: bool
    n3: float
    dura: float
    relation_prediction: float
    max_norm: float | None
    shifts: tuple[nn.Parameter, nn.Parameter] | None
    relation_weight: tuple[float, ...] | None
    forwards: dict[str, nn.Parameter]
    backwards: dict[str, nn.Parameter]

    @property
    def num_relations(self) -> int:
        """Number of relations, R."""
        return len(self.relations)

    @property
    def chunk_size(self) -> int:
        """Edges of a chunk."""
        return self.num_batch_negs or self.num_uniform_negs

    @property
    def has_edge_losses(self) -> bool:
        """Whether an edge has losses in which no negatives are: regularizers, or that of its relation."""
        return bool(self.n3 or self.dura or self.relation_prediction)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters but the tables, by name; the shifts of heads and tails of one type are the same parameter."""
        named = {f"forwards.{name}": value for name, value in self.forwards.items()}
        named |= {f"backwards.{name}": value for name, value in self.backwards.items()}
        return named if self.shifts is None else {**named, "head_shift": self.shifts[0], "tail_shift": self.shifts[1]}


@dataclass(frozen=True)
class ModelRecipe:
    """A model that scores edges from a table for each entity type; see :class:`gtrain.model.kg.embedding.KGEmbedding`.

    Attributes:
        tables: by the entity type's name, in the order of the ids.
        firsts: for each type the id of its first entity, among the ids of all types.
        groups: each relation is in exactly one.
    """

    tables: dict[str, Table]
    firsts: tuple[int, ...]
    groups: tuple[EdgeRecipe, ...]

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The distinct parameters but the tables, by unique names."""
        parameters = [
            (f"{number}.{name}", value)
            for number, group in enumerate(self.groups)
            for name, value in group.parameters.items()
        ]
        names = {id(value): name for name, value in parameters}  # the last name of a shared parameter
        return {names[id(value)]: value for _, value in parameters}

    def names_of(self, group: int) -> dict[str, str]:
        """Return, for each parameter of a group, its name in :attr:`parameters`."""
        names = {id(value): name for name, value in self.parameters.items()}
        return {name: names[id(value)] for name, value in self.groups[group].parameters.items()}

    @property
    def chunk_size(self) -> int:
        """Edges of a chunk."""
        return self.groups[0].chunk_size

    @property
    def num_relations(self) -> int:
        """Number of relations of all groups."""
        return sum(group.num_relations for group in self.groups)
