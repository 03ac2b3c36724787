"""Interfaces between strategies, models, data modules and callbacks, in addition to Lightning's.

Each protocol is one optional capability of an object. Inheritance is not required: a LightningModule with the attribute
implements the protocol, and each docstring states the default for objects without it. Code tests for a capability with
``isinstance(module, Protocol)``, never with ``getattr`` and a member's name (``tests/test_walls.py``).
docs/contract.md lists the protocols with their readers, and the entries of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from gtrain.moved import renamed

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import Tensor, nn
    from torch_geometric.data import Data, HeteroData

    from gtrain.graph.store import Store
    from gtrain.nn.recipe import ModelRecipe

__getattr__ = renamed(__name__, {"entry": "batch_entry"})

Lists = tuple["Tensor", "Tensor"]
"""A list of ids for each of B queries, as pointers int64 ``[B + 1]`` and ids int64 ``[K]``."""

# --------------------------------------------------------------------------------------------------------- models


@runtime_checkable
class HasKind(Protocol):
    """A model that declares its kind, one of :mod:`gtrain.model.kinds`. By default its layers determine the kind.

    Attributes:
        kind: compared with :attr:`gtrain.backends.Serves.models`.
    """

    kind: str


@runtime_checkable
class ReadsEdgeData(Protocol):
    """A model that declares which tensors of edges it reads. By default unread tensors cause no warning.

    Attributes:
        edge_data: names in :data:`gtrain.model.inputs.EDGE_DATA`, in addition to those that its ``network`` reads.
    """

    edge_data: frozenset[str]


@runtime_checkable
class WeighsLoss(Protocol):
    """A model that can multiply the loss of an edge by the edge's weight. By default it does not.

    Attributes:
        weighs_loss: whether it does; weights of edges must then be 0 or more.
    """

    weighs_loss: bool


@runtime_checkable
class DrawsNegatives(Protocol):
    """A model that scores negatives. By default batches have none.

    Attributes:
        num_negatives: negative targets per true edge, K of ``dst_neg_index`` ``[B, K]``.
    """

    num_negatives: int


@runtime_checkable
class OrdersByQuery(Protocol):
    """A link model that can train an edge's ends in different steps. By default a step trains both.

    Attributes:
        by_query: whether training batches have edges ordered by query, and the end that is to be found,
            ``edge_label_end``: 0 for heads, 1 for tails.
    """

    by_query: bool


@runtime_checkable
class EncodesNodes(Protocol):
    """A link model whose evaluation scores edges against all nodes. By default evaluation uses training's batches.

    Attributes:
        encodes_nodes: whether evaluation batches of a strategy that samples have ``node_batches``.
    """

    encodes_nodes: bool


@runtime_checkable
class MultipliesRows(Protocol):
    """A model whose first layer multiplies the sparse rows of a batch's seeds. By default no rows are prefetched.

    Attributes:
        row_table: name of that layer, a table of :mod:`gtrain.nn`.
    """

    row_table: str


@runtime_checkable
class DealsEdges(Protocol):
    """A model that assigns the edges of a step to ranks. By default ranks get equal shares in order."""

    def deal(self, relation: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Return a rank's share of the edges of a step.

        Args:
            relation: int64 ``[B]``, the relation of each edge of the step.
            rank: the rank.
            ranks: number of ranks. A share may be empty.

        Returns:
            Positions of the edges, int64 ``[b]``, ascending, and the chunk of each edge, ``[b]``, which becomes the
            batch's ``edge_label_chunk``.
        """


@runtime_checkable
class HasRecipe(Protocol):
    """A model that a strategy can train from a description, without running ``training_step``.

    Attributes:
        filtered: whether evaluation excludes known edges from the ranking.
    """

    filtered: bool

    def recipe(self) -> ModelRecipe:
        """Return tables, operators, losses and negatives."""

    def log_training(self, total: Tensor, weight: Tensor) -> Tensor:
        """Log the mean loss and return it.

        Args:
            total: sum of the edges' losses.
            weight: sum of their weights.
        """


@runtime_checkable
class Embeds(Protocol):
    """A model that defines its embeddings. By default they are the input of the last layer of ``network``."""

    def embed(self, batch: Any) -> Tensor:
        """Return the embeddings of ``batch.seeds``, ``[S, D]``."""


@runtime_checkable
class EmbedsTypes(Protocol):
    """A model whose embeddings have a width per node type. By default all types have the same.

    Attributes:
        dimensions: number of columns by node type.
    """

    @property
    def dimensions(self) -> Mapping[str, int]: ...


@runtime_checkable
class HasBiases(Protocol):
    """A model that adds a number of each end to the score of an edge. By default ``gtrain export`` writes none."""

    def biases(self, batch: Any) -> Tensor | None:
        """Return the biases of ``batch.seeds``, ``[S]``; None: the model has none with its settings."""


# ----------------------------------------------------------------------------------------------- networks and layers


@runtime_checkable
class LayersInTurn(Protocol):
    """A network whose hops are its layers. By default (except for PyG's ``BasicGNN``) hops are measured.

    Attributes:
        layers_in_turn: whether ``forward`` applies the layers in the order of ``named_children``.
    """

    layers_in_turn: bool


@runtime_checkable
class ReturnsNodeIds(Protocol):
    """A layer that returns ids of nodes, so that a checkpoint depends on the numbering of the data.

    Attributes:
        returns_node_ids: whether the layer returns ids of nodes.
    """

    returns_node_ids: bool


def network_of(module: nn.Module) -> nn.Module | None:
    """Return the submodule ``network`` of a model, which computes on the graph; None if the model has none.

    Messages name a model by this class, and the arguments of its ``forward`` show which tensors of a graph the model
    reads. A protocol cannot express this: ``isinstance`` ignores submodules since Python 3.12.
    """
    return dict(module.named_children()).get("network")


# ------------------------------------------------------------------------------------------ data modules and callbacks


@runtime_checkable
class StoreData(Protocol):
    """A data module with a store, as :class:`gtrain.GraphDataModule` is.

    Attributes:
        batch_size: seeds per training step, over all ranks; None for all seeds.
    """

    batch_size: int | None

    def open_store(self) -> Store:
        """Return the store that ``prepare_data`` created."""


@runtime_checkable
class Restartable(Protocol):
    """A callback whose state is restored when its rank is restarted within a run."""

    def restart_state(self) -> dict[str, Any]:
        """Return the state as numbers, strings, lists and dictionaries."""

    def load_restart_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`restart_state` returned."""


def trainer_of(module: nn.Module) -> pl.Trainer | None:
    """Return the trainer that a LightningModule is attached to; None if it is not attached."""
    try:
        return cast("pl.Trainer", module.trainer)
    except (AttributeError, RuntimeError):
        # Not a LightningModule, or not attached.
        return None


def data_of(trainer: pl.Trainer) -> pl.LightningDataModule | None:
    """Return the data module of a run; None if the run uses data loaders, when Lightning does not set the attribute."""
    return vars(trainer).get("datamodule")


# ------------------------------------------------------------------------------------------------ entries of a batch

NodeBatches = Mapping[str, Callable[[], Iterable["Data | HeteroData"]]]
"""By node type (``node`` in a homogeneous graph), a function that returns batches of the nodes that a rank owns."""


class Spread(Protocol):
    """Entry ``spread`` of a link batch: access to the nodes that other ranks own. Collective: all ranks have a batch.

    Attributes:
        rank, size: this rank, and the number of ranks.
        source, target: int64 ``[B]``, global ids of the sources and targets of the batch's true edges.
        first: the first global id that this rank owns, of the source type and of the target type.
        num_own: the number of nodes that this rank owns, of the source type and of the target type.
    """

    rank: int
    size: int
    source: Tensor
    target: Tensor
    first: tuple[int, int]
    num_own: tuple[int, int]

    def rows(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Append the rows of remote nodes to this rank's, for sources and for targets; differentiable.

        Args:
            source: ``[num_own[0], D]``, rows of this rank's nodes of the source type.
            target: ``[num_own[1], D]``, of the target type. The same tensor as ``source`` if the types are equal.

        Returns:
            Two tensors whose rows the batch's ``edge_label_index`` and ``dst_neg_index`` index.
        """

    def known_targets(self, source: Tensor, relation: Tensor | None) -> Lists:
        """Return the known targets of sources, limited to the targets that this rank owns."""

    def known_sources(self, relation: Tensor | None) -> Lists:
        """Return all known sources of the targets of the batch's true edges."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum the tensors of all ranks, in place."""


def batch_entry(batch: Data | HeteroData, name: str) -> Any:
    """Return an entry of a batch that belongs to no node or edge type; None if the batch does not have it."""
    return batch.stores[0].get(name)
