"""What strategies, models, data modules and callbacks know of each other beyond Lightning's own interfaces.

Each protocol is one thing that an object may offer. Nobody has to inherit from it: a plain LightningModule that has the
attribute takes part, and one that lacks it gets what the protocol's docstring states. Readers ask
``isinstance(module, Protocol)``; ``getattr`` with the name of a member is not used (``tests/test_walls.py``).
docs/contract.md lists them with who reads them, and the entries of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import Tensor, nn
    from torch_geometric.data import Data, HeteroData

    from gtrain.graph.store import Store
    from gtrain.nn.recipe import ModelRecipe

Lists = tuple["Tensor", "Tensor"]
"""Pointers int64 ``[B + 1]`` and ids int64 ``[K]``: a list of ids for each of B queries."""

# --------------------------------------------------------------------------------------------- what a model offers


@runtime_checkable
class HasKind(Protocol):
    """A model that names its kind, one of :mod:`gtrain.model.kinds`; without, its layers decide.

    Attributes:
        kind: compared with :attr:`gtrain.backends.Serves.models`.
    """

    kind: str


@runtime_checkable
class ReadsEdgeData(Protocol):
    """A model that declares which tensors of the edges it reads; without, it is not known, and nobody warns.

    Attributes:
        edge_data: names of :data:`gtrain.model.inputs.EDGE_DATA`, besides those that its ``network`` reads.
    """

    edge_data: frozenset[str]


@runtime_checkable
class WeighsLoss(Protocol):
    """A model that can weigh the loss of an edge; without, it does not.

    Attributes:
        weighs_loss: whether the weight of an edge is the factor of its loss, which must then be 0 or more.
    """

    weighs_loss: bool


@runtime_checkable
class DrawsNegatives(Protocol):
    """A model that scores false edges; without, batches have none.

    Attributes:
        num_negatives: false targets for each true edge, K of ``dst_neg_index`` ``[B, K]``.
    """

    num_negatives: int


@runtime_checkable
class EncodesNodes(Protocol):
    """A link model whose evaluation scores edges against all nodes; without, evaluation batches are like training's.

    Attributes:
        encodes_nodes: whether a strategy that samples gives evaluation batches ``node_batches``.
    """

    encodes_nodes: bool


@runtime_checkable
class MultipliesRows(Protocol):
    """A model whose first layer multiplies the sparse rows of a batch's seeds; without, no rows are sent ahead.

    Attributes:
        row_table: the name of that layer, a table of :mod:`gtrain.nn`.
    """

    row_table: str


@runtime_checkable
class DealsEdges(Protocol):
    """A model whose edges of a step belong together in groups; without, ranks get equal shares in order."""

    def deal(self, relation: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Return a rank's share of the edges of a step.

        Args:
            relation: int64 ``[B]``, of all edges of the step.
            rank: which of the ranks.
            ranks: how many there are; one may get no edges.

        Returns:
            positions int64 ``[b]``, ascending, and the number of each one's chunk, ``[b]``, which the strategy hands
            over as ``edge_label_chunk``.
        """


@runtime_checkable
class HasRecipe(Protocol):
    """A model that a strategy can train by its description, without running ``training_step``.

    Attributes:
        filtered: whether evaluation leaves known edges out of the ranking.
    """

    filtered: bool

    def recipe(self) -> ModelRecipe:
        """Return tables, operators, losses and negatives."""

    def log_training(self, total: Tensor, weight: Tensor) -> Tensor:
        """Log the loss, summed over edges, and the sum of their weights; return the mean loss."""


@runtime_checkable
class Embeds(Protocol):
    """A model that computes embeddings itself; without, they are what the last layer of ``network`` reads."""

    def embed(self, batch: Any) -> Tensor:
        """Return one row for each of ``batch.seeds``, ``[S, D]``."""


@runtime_checkable
class EmbedsTypes(Protocol):
    """A model whose embeddings differ in width by node type; without, all have the same.

    Attributes:
        dimensions: columns by node type.
    """

    @property
    def dimensions(self) -> Mapping[str, int]: ...


# --------------------------------------------------------------------------------- what a network or a layer offers


@runtime_checkable
class LayersInTurn(Protocol):
    """A network whose number of hops follows from its layers; without (PyG's ``BasicGNN`` aside), it is measured.

    Attributes:
        layers_in_turn: whether the layers follow each other in the order of ``named_children``.
    """

    layers_in_turn: bool


@runtime_checkable
class ReturnsNodeIds(Protocol):
    """A layer whose result are ids of nodes, so that a checkpoint depends on the numbering of the data.

    Attributes:
        returns_node_ids: whether it does.
    """

    returns_node_ids: bool


def network_of(module: nn.Module) -> nn.Module | None:
    """Return the submodule ``network`` of a model, what it runs on the graph; None: it has none.

    Messages name a model by it, and its ``forward`` shows what of a graph the model reads. It is no protocol, because
    ``isinstance`` does not see submodules since Python 3.12.
    """
    return dict(module.named_children()).get("network")


# ------------------------------------------------------------------------------ what data modules and callbacks offer


@runtime_checkable
class StoreData(Protocol):
    """A data module with a store, as :class:`gtrain.GraphDataModule` is.

    Attributes:
        batch_size: seeds of a training step of all ranks; None: all of them.
    """

    batch_size: int | None

    def open_store(self) -> Store:
        """Return the store, which ``prepare_data`` has made."""


@runtime_checkable
class Restartable(Protocol):
    """A callback with a state that a rank which is started again within a run goes on with."""

    def restart_state(self) -> dict[str, Any]:
        """Return plain values: numbers, strings, lists and dictionaries of them."""

    def load_restart_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`restart_state` returned."""


def trainer_of(module: nn.Module) -> pl.Trainer | None:
    """Return the trainer that a LightningModule is attached to; None: it is attached to none."""
    try:
        return cast("pl.Trainer", module.trainer)
    except (AttributeError, RuntimeError):  # not a LightningModule; not attached
        return None


def data_of(trainer: pl.Trainer) -> pl.LightningDataModule | None:
    """Return the data module of a run; None: it was given loaders. Lightning sets the attribute where there is one."""
    return vars(trainer).get("datamodule")


# ------------------------------------------------------------------------------------------- what a batch carries

NodeBatches = Mapping[str, Callable[[], Iterable["Data | HeteroData"]]]
"""By node type (``node`` where there is one), what returns batches of a rank's own nodes."""


class Spread(Protocol):
    """What a link batch carries as ``spread`` where the nodes belong to several ranks, which all have such a batch.

    Attributes:
        rank, size: which rank this is, and of how many.
        source, target: int64 ``[B]``, global ids of the ends of the batch's true edges, which are this rank's.
        first: the first global id that this rank owns of the sources' type, and of the targets'.
        num_own: how many it owns of each.
    """

    rank: int
    size: int
    source: Tensor
    target: Tensor
    first: tuple[int, int]
    num_own: tuple[int, int]

    def rows(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the own nodes' rows ``[num_own, D]`` with those of the remote nodes after them that the batch's
        ``edge_label_index`` and ``dst_neg_index`` name; with gradients."""

    def known_targets(self, source: Tensor, relation: Tensor | None) -> Lists:
        """Return, of any sources, the known targets that this rank owns."""

    def known_sources(self, relation: Tensor | None) -> Lists:
        """Return, of the targets of the batch's true edges, all known sources."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up the ranks' tensors, in place."""


def entry(batch: Data | HeteroData, name: str) -> Any:
    """Return an optional entry of a batch, not one of a node or edge type; None: the batch lacks it."""
    return batch.stores[0].get(name)
