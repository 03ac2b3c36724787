"""What a model of edge embeddings computes in a training step, for strategies that do so by kernels of their own.

A model that can be described so has a method ``recipe()``. What it says is the model itself: parameters and tables are
the module's, not copies. The module's own ``training_step`` is the reference for whatever a strategy does instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from gtrain.nn.csr import Csr
from gtrain.nn.table import Table


@dataclass(frozen=True)
class EdgeRecipe:
    """How edges of some relations are scored, which all join the same two entity types by the same operator.

    Attributes:
        tables: rows of the heads' type and of the tails' type, D columns and then the bias, if there is one.
        types: places of these types in :attr:`ModelRecipe.tables`.
        bags: for heads and for tails, the features of each entity, whose rows' mean is its embedding; None: an entity
            has a row of its own.
        relations: R ids, those of the data; parameters have a row for each, in this order.
        dimension: D.
        operator: ``none``, ``translation``, ``diagonal``, ``linear``, ``affine`` or ``complex_diagonal``.
        comparator: ``dot``, ``cos``, ``l2`` or ``squared_l2``.
        loss: ``ranking``, ``logistic`` or ``softmax``.
        margin: of the ranking loss.
        reciprocal: whether queries are transformed, by parameters for each direction; else tails, by ``forwards``.
        bias: whether rows have a bias.
        num_batch_negs: edges of a chunk, which are each other's negatives.
        num_uniform_negs: entities drawn for each chunk and side, of the side's type.
        all_negs: all entities of the type are negatives, instead.
        head_negs: whether heads are replaced.
        tail_negs: whether tails are replaced.
        self_negs: whether the end of an edge that is given is a negative of the other one; never with ``all_negs``.
        n3: weight of the N3 regulariser.
        max_norm: rows are scaled to this norm when they are read, where theirs is larger; None: never.
        shifts: ``[1, D]`` each, what all embeddings of the heads' type and of the tails' type have in common; None:
            nothing.
        relation_weight: factor of the loss by relation; None: all 1.
        forwards: the operator's parameters by name, each ``[R, ...]``; none for ``none``.
        backwards: those of the other direction; none unless ``reciprocal``.
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
    max_norm: float | None
    shifts: tuple[nn.Parameter, nn.Parameter] | None
    relation_weight: tuple[float, ...] | None
    forwards: dict[str, nn.Parameter]
    backwards: dict[str, nn.Parameter]

    @property
    def num_relations(self) -> int:
        """R."""
        return len(self.relations)

    @property
    def places(self) -> int:
        """Edges of a chunk."""
        return self.num_batch_negs or self.num_uniform_negs

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters but the tables, by a name of their own; the two shifts of one type are the same."""
        found = {f"forwards.{name}": value for name, value in self.forwards.items()}
        found |= {f"backwards.{name}": value for name, value in self.backwards.items()}
        return found if self.shifts is None else {**found, "head_shift": self.shifts[0], "tail_shift": self.shifts[1]}


@dataclass(frozen=True)
class ModelRecipe:
    """A model that scores edges from a table for each entity type; see :class:`gtrain.model.kg.embedding.KGEmbedding`.

    Attributes:
        tables: by the entity type's name, in the order of the ids.
        firsts: for each type the id of its first entity, among the ids of all types.
        groups: each relation is in one of them.
    """

    tables: dict[str, Table]
    firsts: tuple[int, ...]
    groups: tuple[EdgeRecipe, ...]

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters but the tables, each once, by a name of its own."""
        named = {id(value): name for number, _ in enumerate(self.groups) for name, value in self._of(number).items()}
        every = {id(value): value for group in self.groups for value in group.parameters.values()}
        return {named[key]: value for key, value in every.items()}

    def names_of(self, group: int) -> dict[str, str]:
        """The names in :attr:`parameters` of a group's own ones."""
        names = {id(value): name for name, value in self.parameters.items()}
        return {name: names[id(value)] for name, value in self.groups[group].parameters.items()}

    def _of(self, group: int) -> dict[str, nn.Parameter]:
        return {f"{group}.{name}": value for name, value in self.groups[group].parameters.items()}

    @property
    def places(self) -> int:
        """Edges of a chunk."""
        return self.groups[0].places

    @property
    def num_relations(self) -> int:
        """Relations of all groups."""
        return sum(group.num_relations for group in self.groups)
