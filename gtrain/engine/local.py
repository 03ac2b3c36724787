"""The engine over the edges of one process: a whole graph, or a sampled batch.

Known convolutions of PyG run by the engine's kernels. Every call that these do not compute, and every other
convolution, runs as PyG wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.conv import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    LGConv,
    MessagePassing,
    RGCNConv,
    SAGEConv,
    SGConv,
    TransformerConv,
)

from gtrain.engine.constants import Constants, version_of
from gtrain.engine.edges import EdgeBlock, EdgeBlocks, check_count, count_of
from gtrain.engine.fused_layers import FusedLayers, count_hop
from gtrain.engine.halo import HaloExchange
from gtrain.engine.normalize import exact_gcn_norm
from gtrain.engine.patching import MethodPatches, PatchedFunctions
from gtrain.engine.precision import in_autocast
from gtrain.engine.propagate import DeferredCoefficients, Propagation
from gtrain.engine.relations import RelationalConv
from gtrain.engine.schedule import Schedule
from gtrain.graph.shard.nodes import ShardNodes
from gtrain.kernels.available import has_triton
from gtrain.nn.compressed import CompressedMatrix
from gtrain.nn.dropout import DropoutRows, current_position, edge_ids, resumed_at
from gtrain.nn.relational import IdRGCNConv
from gtrain.strategy.group import Group

KNOWN: frozenset[type[nn.Module]] = frozenset(
    {GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, IdRGCNConv, LGConv, RGCNConv, SAGEConv, SGConv, TransformerConv}
)
"""Classes whose calls the engine takes; a subclass may compute something else, and runs as it is."""
_SCHEDULE = Schedule(mode=3)
_ALONE = Group(0, 1)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class LocalEngine:
    """Patches the known convolutions of a module while a run lasts.

    Args:
        constant: whether batches are made of the same tensors in every step. Their normalised edges and first
            aggregates are then computed once.
    """

    def __init__(self, *, constant: bool = False) -> None:
        self._constant = constant
        self._constants, self._patches = Constants(_SCHEDULE), MethodPatches()
        # edge_index -> (its version, numbers of sources and targets -> EdgeBlocks)
        self._known: Any = WeakIdKeyDictionary()
        self._convs: set[nn.Module] = set()
        self._propagation = Propagation(_SCHEDULE, self._constants, self._patches.add, AsWritten())
        # Of a whole graph, GAT computes its transformed rows again: one product for a matrix as large as the result.
        self._fused = FusedLayers(
            Schedule(mode=1) if constant else _SCHEDULE, self._constants, self._blocks, whole=True
        )

    def runs(self, conv: nn.Module) -> bool:
        """Whether the engine takes the calls of a convolution."""
        return conv in self._convs

    def add_constants(self, tensors: Iterable[Any]) -> None:
        """Declare tensors that do not change between steps."""
        if self._constant:
            self._constants.add(tensor for tensor in tensors if isinstance(tensor, Tensor))

    def install(self, module: nn.Module) -> None:
        """Shadow the methods of the known convolutions of ``module``."""
        convs = [layer for layer in module.modules() if type(layer) in KNOWN and layer not in self._convs]
        for conv in convs:
            if not isinstance(conv, MessagePassing) or conv.flow != "source_to_target" or conv.decomposed_layers > 1:
                continue
            self._convs.add(conv)
            self._patch(conv)
        if self._constant:
            functions = PatchedFunctions(self._constants, exact_gcn_norm)
            self._patches.undo_with(*functions.install([conv for conv in convs if conv in self._convs]))  # type: ignore[misc]

    def uninstall(self) -> None:
        """Undo every change, and forget the edges."""
        self._patches.undo()
        self._convs.clear()
        self._known.clear()

    def _patch(self, conv: MessagePassing) -> None:
        self._patches.undo_with(*self._propagation.watch(conv))
        self._patches.add(conv, "propagate", partial(self._propagate, conv))
        self._patches.add(conv, "edge_updater", partial(self._edge_updater, conv))
        self._propagation.transforms.install(conv)
        fused = self._fused.forward_of(conv)
        if isinstance(conv, (RGCNConv, IdRGCNConv)):
            fused = RelationalConv(conv, self._edges_of, _SCHEDULE, self._constants, whole=True).forward
        if fused is not None:
            self._patches.add(conv, "forward", partial(self._forward, conv, fused))

    # ------------------------------------------------------------------------ replacements of methods

    def _forward(self, conv: MessagePassing, fused: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer by one function, where tensors are of a kind that the kernels take."""
        tensors = [tensor for value in (*args, *kwargs.values()) for tensor in _tensors(value)]
        taken = _served(tensors) and not _drops_unknown_edges(conv)
        return (fused if taken else partial(type(conv).forward, conv))(*args, **kwargs)

    def _propagate(self, conv: MessagePassing, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        edges = self._edges(conv, edge_index, size, kwargs)
        if edges is None:
            deferred = next((name for name, value in kwargs.items() if isinstance(value, DeferredCoefficients)), None)
            if deferred is not None:
                kwargs[deferred] = run_as_written(conv, "edge_updater", edge_index, size, kwargs[deferred].kwargs)
            kwargs = {name: self._propagation.transforms.settle(value) for name, value in kwargs.items()}
            return run_as_written(conv, "propagate", edge_index, size, kwargs)
        return count_hop(conv, self._propagation.propagate(conv, edge_index, edges, kwargs))

    def _edge_updater(self, conv: MessagePassing, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        edges = self._edges(conv, edge_index, size, kwargs)
        if edges is None:
            return run_as_written(conv, "edge_updater", edge_index, size, kwargs)
        return self._propagation.edge_updater(conv, edge_index, edges, kwargs)

    # ------------------------------------------------------------------------ edges

    def _blocks(self, edge_index: Tensor, num_sources: int, num_targets: int) -> EdgeBlocks:
        return LocalEdges(num_sources, num_targets, self._known)(edge_index)

    def _edges_of(self, x: Any) -> LocalEdges:
        source, target = x if isinstance(x, tuple) else (x, x)
        return LocalEdges(len(source), len(target), self._known)

    def _edges(self, conv: MessagePassing, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> LocalEdges | None:
        """Return the edges of a call; None where the engine leaves the call to PyG."""
        tensors = [tensor for value in kwargs.values() for tensor in _tensors(value)]
        if type(edge_index) is not Tensor or edge_index.dtype != torch.int64 or not _served(tensors):
            return None
        if _drops_unknown_edges(conv):
            return None
        if any(conv.node_dim % tensor.dim() for tensor in tensors if tensor.dim() and tensor.is_floating_point()):
            return None
        counts = _counts(conv, size, kwargs)
        return None if counts is None else LocalEdges(*counts, self._known)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, DeferredCoefficients):
        return [tensor for inner in value.kwargs.values() for tensor in _tensors(inner)]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


def _served(tensors: list[Tensor]) -> bool:
    """Whether kernels take these tensors: dense, on one device that has kernels, of one of their dtypes.

    Autocast's dtype too is one of them.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    if torch.compiler.is_compiling() or not (device.type == "cpu" or (device.type == "cuda" and has_triton())):
        return False
    if in_autocast(device.type) and torch.get_autocast_dtype(device.type) not in _DTYPES:
        return False
    return all(
        type(tensor) in (Tensor, nn.Parameter, CompressedMatrix)
        and tensor.layout == torch.strided
        and tensor.device == device
        and (tensor.dtype in _DTYPES or not tensor.is_floating_point())
        for tensor in tensors
    )


def _drops_unknown_edges(conv: nn.Module) -> bool:
    """Whether a layer drops coefficients of edges whose ids the running step's dropout does not know."""
    drops = conv.training and isinstance(conv, (GATConv, GATv2Conv, TransformerConv)) and conv.dropout > 0  # type: ignore[operator]
    position = current_position() if drops else None
    return position is not None and position.ids is None


def _counts(conv: MessagePassing, size: Any, kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Return the numbers of sources and targets of a call, as PyG derives them from its arguments; None: unclear."""
    names = {*conv._user_args, *conv._edge_user_args}
    counts: list[int | None] = [None, None] if size is None else list(size)
    for name, value in kwargs.items():
        ends = [end for end, suffix in enumerate("ji") if f"{name}_{suffix}" in names]
        pair = value if isinstance(value, (tuple, list)) else (value, value)
        for end in (0, 1) if ends and isinstance(value, (tuple, list)) else ends:
            if isinstance(pair[end], Tensor):
                if counts[end] not in (None, len(pair[end])):
                    return None
                counts[end] = len(pair[end])
    sources, targets = counts
    if sources is None:
        return None
    return sources, sources if targets is None else targets


class LocalNodes(HaloExchange):
    """All nodes at one end of edges: no other process has any, so there is no halo.

    Args:
        num_nodes: their number.
        end: 0 for the sources of edges, 1 for their targets.
    """

    def __init__(self, num_nodes: int, end: int) -> None:
        bounds = torch.tensor([0, num_nodes], device="cpu")
        super().__init__(_ALONE, ShardNodes(0, 1, bounds, (0,), bounds, (bounds[:0],)))
        self._end = end

    @cached_property
    def all_ids(self) -> Tensor:
        """Ids by which the running step's dropout knows the nodes, int64 [num_nodes]; else their positions."""
        position, count = current_position(), self.shard.num_local
        ids = None if position is None else position.ids
        return torch.arange(count) if ids is None else ids[self._end][:count].contiguous()


class LocalEdges:
    """:class:`EdgeBlocks` of one block, by ``edge_index``, kept as long as that tensor lives and does not change.

    Args:
        num_sources: nodes at which edges start.
        num_targets: nodes at which they end.
        known: the edges by ``edge_index`` and these numbers, shared by all instances of a run.
    """

    def __init__(self, num_sources: int, num_targets: int, known: Any) -> None:
        self.num_sources, self.num_targets, self._known = num_sources, num_targets, known

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of sources and targets, as PyG's methods take them."""
        return self.num_sources, self.num_targets

    @cached_property
    def exchange(self) -> HaloExchange:
        """The sources."""
        return LocalNodes(self.num_sources, 0)

    def __call__(self, edge_index: Tensor) -> EdgeBlocks:
        """Return the edges in the orders in which kernels read them.

        Raises:
            ConfigError: there are more than :data:`~gtrain.engine.edges.MOST_EDGES`.
            IndexError: an edge names a node that does not exist.
        """
        # A module may change its edges in place; nobody asks for the former edges again.
        version, known = version_of(edge_index), self._known.get(edge_index)
        if known is None or known[0] != version:
            known = self._known[edge_index] = version, {}
        by_size: dict[tuple[int, int], EdgeBlocks] = known[1]
        if self.size not in by_size:
            by_size[self.size] = self._sorted(edge_index)
        return by_size[self.size]

    def into_rows(self, edge_index: Tensor, rows: Tensor, num_rows: int) -> EdgeBlocks:
        """Return the edges that end at the rows [E], below ``num_rows``, in place of their targets."""
        self.check(edge_index)
        return LocalEdges(self.num_sources, num_rows, self._known)._grouped(edge_index[0], rows)

    def from_rows(self, edge_index: Tensor, rows: Tensor, num_rows: int) -> EdgeBlocks:
        """Return the edges that start at the rows [E], below ``num_rows``, in place of their sources."""
        self.check(edge_index)
        return LocalEdges(num_rows, self.num_targets, self._known)._grouped(rows, edge_index[1])

    def _sorted(self, edge_index: Tensor) -> EdgeBlocks:
        self.check(edge_index)
        return self._grouped(*edge_index.detach())

    def check(self, edge_index: Tensor) -> None:
        """Raise ConfigError if there are too many edges, and IndexError if one names a node that does not exist."""
        check_count(edge_index)
        source, target = edge_index.detach()
        # Compiled loops do not check what they read. A GPU checks without the host, which would wait for it.
        if edge_index.is_cuda:
            inside = (edge_index >= 0).all() & (source < self.num_sources).all() & (target < self.num_targets).all()
            torch._assert_async(inside, "'edge_index' names nodes that do not exist")
        elif len(source) and (
            int(edge_index.min()) < 0 or int(source.max()) >= self.num_sources or int(target.max()) >= self.num_targets
        ):
            raise IndexError(
                f"'edge_index' names nodes from {int(edge_index.min())} to {int(source.max())} (sources) and "
                f"{int(target.max())} (targets), of {self.num_sources} and {self.num_targets} nodes."
            )

    def _grouped(self, source: Tensor, target: Tensor) -> EdgeBlocks:
        count = len(source)
        ids = torch.arange(count, dtype=torch.int32, device=source.device)
        block = EdgeBlock(ids, source, target, self.num_sources, self.num_targets)
        in_degree = count_of(target, self.num_targets)
        targets = LocalNodes(self.num_targets, 1)
        return EdgeBlocks(self.exchange, [block], self.num_targets, count, in_degree, targets)


class AsWritten:
    """Calls that run as PyG wrote them."""

    def propagate(self, conv: MessagePassing, edge_index: Tensor, edges: LocalEdges, kwargs: dict[str, Any]) -> Tensor:
        """Return the result of ``conv.propagate``, [num_targets, ...]."""
        return run_as_written(conv, "propagate", edge_index, edges.size, kwargs)

    def edge_updater(self, conv: MessagePassing, edge_index: Tensor, edges: LocalEdges, kwargs: dict[str, Any]) -> Any:
        """Return the result of ``conv.edge_updater``, [E, ...]."""
        return run_as_written(conv, "edge_updater", edge_index, edges.size, kwargs)

    def attend(
        self,
        conv: MessagePassing,
        edge_index: Tensor,
        edges: LocalEdges,
        kwargs: dict[str, Any],
        deferred: tuple[str, DeferredCoefficients],
    ) -> Tensor:
        """Return the result of ``conv.propagate``, after the deferred ``edge_updater``."""
        name, update = deferred
        alpha = run_as_written(conv, "edge_updater", update.edge_index, edges.size, update.kwargs)
        return run_as_written(conv, "propagate", edge_index, edges.size, {**kwargs, name: alpha})


def run_as_written(conv: MessagePassing, method: str, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
    """Call PyG's ``propagate`` or ``edge_updater``; dropout knows the edges along which messages are passed."""
    position, edges = current_position(), None
    if position is not None and position.ids is not None and isinstance(edge_index, Tensor):
        edges = DropoutRows("edge", edge_index.size(1), partial(edge_ids, edge_index, *position.ids))
    function = MessagePassing.propagate if method == "propagate" and conv.explain else getattr(type(conv), method)
    with resumed_at(position, edges):
        return function(conv, edge_index, size=size, **kwargs)
