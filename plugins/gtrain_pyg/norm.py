"""Symmetric normalisation of sampled subgraphs by the whole graph's degrees: an unbiased estimate.

``gcn_norm`` (Kipf and Welling 2017, equation 2) divides the message of edge (j, i) by sqrt(d_i d_j). PyG counts these
degrees in the edges of its argument, and a sampled subgraph has too few: a node whose neighbours were not sampled has
none. Here degrees are the whole graph's, and if k of a node's d in-neighbours were drawn, each message is multiplied by
d / k (Horvitz and Thompson 1952), so that its expectation is the sum over all of them; a self-loop that the layer adds
is exact. With k = d nothing is estimated, and layers compute the result for the whole graph.

Drawn in proportion to weights w with replacement, a message is multiplied by sum(w) / (k w_j), which is unbiased too.
Without replacement that is an approximation, never below 1; it is exact if all neighbours are taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data import Data, HeteroData

from gtrain.engine.precision import sum_dtype
from gtrain.errors import ConfigError
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE, EdgeType
from gtrain.nn.patching import namespaces, patch_function
from gtrain_pyg.graph_structure import edge_blocks
from gtrain_pyg.peers import NodeOrEdgeType

NAME = "in_degree"
WEIGHT = "edge_weight"
"""The edge tensor that networks over weighted graphs receive."""

_BLOCK_EDGES = 1 << 22  # edges counted at a time

Floats = NDArray[np.float64]

_FUNCTION = "gcn_norm"
Key = tuple[int, int]


@dataclass(frozen=True)
class Degrees:
    """In-edges of n nodes in the whole graph; float ``[n]`` each.

    Attributes:
        edges: number of in-edges.
        loops: number of self-loops.
        weight: sum of the in-edges' weights; None if edges have none.
        loop_weights: sum of the self-loops' weights; None likewise.
        last_loop: weight of the last self-loop, 0 without; None likewise. PyG keeps this one and drops the others.
        drawable: number of in-edges that weighted sampling can draw, those with weights above 0; None if sampling is
            not weighted.
        drawable_weight: sum of these weights; None likewise.
    """

    edges: Tensor
    loops: Tensor
    weight: Tensor | None = None
    loop_weights: Tensor | None = None
    last_loop: Tensor | None = None
    drawable: Tensor | None = None
    drawable_weight: Tensor | None = None

    def first(self, num_nodes: int) -> Degrees:
        """Return the degrees of the first nodes."""
        return Degrees(**{name: column[:num_nodes] for name, column in vars(self).items() if column is not None})

    def packed(self, dtype: torch.dtype) -> Tensor:
        """Return the bits of these numbers as integers, ``[n, columns]``, in the order of the attributes.

        Floating features are converted to the run's precision, and to half precision on the wire; degrees must not be.

        Args:
            dtype: float32 or float64, of the numbers.
        """
        columns = [column.to(dtype) for column in vars(self).values() if column is not None]
        return torch.stack(columns, 1).view(torch.int32 if dtype == torch.float32 else torch.int64)

    @classmethod
    def unpacked(cls, bits: Tensor, weighted: bool, drawn_by_weight: bool) -> Degrees:
        """Return the degrees of :meth:`packed` bits."""
        numbers = bits.contiguous().view(torch.float32 if bits.dtype == torch.int32 else torch.float64)
        names = ["edges", "loops"]
        names += ["weight", "loop_weights", "last_loop"] if weighted else []
        names += ["drawable", "drawable_weight"] if drawn_by_weight else []
        return cls(**dict(zip(names, numbers.unbind(1), strict=True)))

    @classmethod
    def counted(cls, edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int, dtype: torch.dtype) -> Degrees:
        """Count the degrees in a graph with these edges, ``[2, e]`` with weights ``[e]``."""
        target = edge_index[1]
        loop = edge_index[0] == target
        ones = torch.ones(len(target), dtype=dtype, device=target.device)

        def total(values: Tensor, at: Tensor) -> Tensor:
            return torch.zeros(num_nodes, dtype=dtype, device=target.device).index_add_(0, at, values)

        edges, loops = total(ones, target), total(loop.to(dtype), target)
        if edge_weight is None:
            return cls(edges, loops)
        weight, last = edge_weight.to(dtype), torch.zeros_like(edges)
        last[target[loop]] = weight[loop]
        return cls(edges, loops, total(weight, target), total(weight[loop], target[loop]), last)


def degree_rows(
    store: Store, edge_type: EdgeType, part: int, drawn_by: str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Count the in-edges of the nodes that a part owns; see :meth:`Degrees.packed`.

    Args:
        store: the graph.
        edge_type: from a node type to itself.
        part: the part.
        drawn_by: the edge tensor that neighbours are drawn in proportion to; None draws them uniformly.
        dtype: precision of the result; sums are float64.
    """
    indptr = store.edge("indptr", part, edge_type).numpy()
    sources = store.edge("indices", part, edge_type).numpy()
    first = int(store.offsets_of(edge_type[2])[part])
    stored = store.edge_tensors(edge_type)
    weights = store.edge(WEIGHT, part, edge_type).numpy() if WEIGHT in stored else None
    chances = store.edge(drawn_by, part, edge_type).numpy() if drawn_by in stored and drawn_by else None
    count = len(indptr) - 1
    columns: dict[str, Floats] = {"edges": np.diff(indptr).astype(np.float64), "loops": np.zeros(count)}
    if weights is not None:
        columns |= {name: np.zeros(count) for name in ("weight", "loop_weights", "last_loop")}
    if drawn_by is not None:
        columns |= {name: np.zeros(count) for name in ("drawable", "drawable_weight")}
    for nodes, edges in edge_blocks(indptr, _BLOCK_EDGES):
        target = np.repeat(np.arange(nodes.start, nodes.stop), np.diff(indptr[nodes.start : nodes.stop + 1]))
        loop = sources[edges] == target + first

        def add(name: str, at: NDArray[np.int64], values: Floats | None = None, nodes: slice = nodes) -> None:
            columns[name][nodes] += np.bincount(at - nodes.start, values, nodes.stop - nodes.start)

        add("loops", target[loop])
        if weights is not None:
            weight = weights[edges].astype(np.float64)
            add("weight", target, weight)
            add("loop_weights", target[loop], weight[loop])
            columns["last_loop"][target[loop]] = weight[loop]
        if drawn_by is not None:
            chance = np.ones(len(target)) if chances is None else chances[edges].astype(np.float64)
            add("drawable", target[chance > 0])
            add("drawable_weight", target, chance)
    return Degrees(**{name: torch.from_numpy(column) for name, column in columns.items()}).packed(dtype)


@dataclass
class _SampledEdges:
    """The sampled edges of one type of one batch, with e edges between n nodes.

    Attributes:
        edge_index: int64 ``[2, e]``, as the batch has it; a weak reference.
        num_nodes: n.
        weight: ``[e]``, the graph's weights; None without.
        drawn_by: ``[e]``, the weights that neighbours were drawn in proportion to; None if they were drawn uniformly.
        degrees: of the n nodes.
        exact: the degrees are those of these edges: messages are not scaled.
        replace: neighbours were drawn with replacement.
        took_all: bool ``[n]``, nodes that were expanded with a fan-out of -1; None: counting edges tells.
        results: by arguments, of earlier calls.
    """

    edge_index: Callable[[], Tensor | None]
    num_nodes: int
    weight: Tensor | None
    drawn_by: Tensor | None
    degrees: Degrees
    exact: bool
    replace: bool = False
    took_all: Tensor | None = None
    results: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)


class SampledGcnNorm:
    """Makes a module's layers normalise sampled subgraphs by the whole graph's degrees, while it is installed.

    Layers look ``gcn_norm`` up in their own Python modules at call time; :meth:`install` replaces it there. The
    replacement handles the edges of batches passed to :meth:`register` (or their first hops, if layers are trimmed);
    PyG's function handles any others, such as edges that a network makes.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._edges: dict[Key, _SampledEdges] = {}
        self._options: Any = WeakIdKeyDictionary()  # by batch

    @staticmethod
    def applies_to(module: nn.Module) -> bool:
        """Return whether a layer of the module may normalise by degrees."""
        return any(True for _ in namespaces(module.modules(), _FUNCTION))

    @staticmethod
    def names(edge_types: Iterable[EdgeType]) -> dict[EdgeType, str]:
        """Return the name of the node tensor of degrees for each edge type from a node type to itself."""
        return {t: NAME if t == EDGE_TYPE else f"{NAME}:{t[1]}" for t in edge_types if t[0] == t[2]}

    @classmethod
    def tensors(
        cls, store: Store, parts: Iterable[int], drawn_by: str | None, dtype: torch.dtype
    ) -> dict[NodeOrEdgeType, dict[str, dict[int, Tensor]]]:
        """Return the node tensors that batches must carry, by node type, name and part.

        Args:
            store: the graph.
            parts: the parts whose degrees are computed.
            drawn_by: the edge tensor that neighbours are drawn in proportion to; None draws them uniformly.
            dtype: precision of the run.
        """
        parts, precision = list(parts), torch.float64 if dtype == torch.float64 else torch.float32
        tensors: dict[NodeOrEdgeType, dict[str, dict[int, Tensor]]] = {}
        for edge_type, name in cls.names(store.edge_types).items():
            rows = {part: degree_rows(store, edge_type, part, drawn_by, precision) for part in parts}
            tensors.setdefault(edge_type[2], {})[name] = rows
        return tensors

    # ------------------------------------------------------------------------------------------------- installation

    def install(self, module: nn.Module) -> None:
        """Replace the function in the Python modules of the module's layers.

        Raises:
            ConfigError: a layer caches the first batch's edges.
        """
        check_uncached(module)
        self._undo += patch_function(module.modules(), _FUNCTION, self._gcn_norm)

    def uninstall(self) -> None:
        """Restore the function."""
        while self._undo:
            self._undo.pop()()
        self._edges.clear()

    # ------------------------------------------------------------------------------------------------ batches

    def register(self, batch: Data | HeteroData, options: SamplingOptions) -> None:
        """Register a batch that layers will receive, until its edges are deleted.

        A batch without the tensors of :meth:`tensors` (temporal sampling, where degrees depend on the seed's time) is
        normalised by the degrees of its sampled edges, as by PyG, and by all of them in every layer.
        """
        if not self._undo:
            return
        self._options[batch] = options
        if isinstance(batch, Data):
            self._register(batch, batch, EDGE_TYPE, options)
        elif isinstance(batch, HeteroData):
            for edge_type in batch.edge_types:
                if edge_type[0] == edge_type[2]:
                    self._register(batch[edge_type[2]], batch[edge_type], edge_type, options)

    def register_moved(self, batch: Any) -> None:
        """Register a batch again after it was moved to another device."""
        options = self._options.get(batch) if isinstance(batch, (Data, HeteroData)) else None
        if options is not None:
            self.register(batch, options)

    def _register(self, nodes: Any, edges: Any, edge_type: EdgeType, options: SamplingOptions) -> None:
        edge_index, count = edges.edge_index, int(nodes.num_nodes)
        weight = edges[WEIGHT] if WEIGHT in edges else None
        name = self.names([edge_type])[edge_type]
        drawn_by = edges[options.weight] if options.weight is not None and options.weight in edges else None
        if name in nodes:
            degrees = Degrees.unpacked(nodes[name], weight is not None, options.weight is not None)
        else:
            precision = sum_dtype(torch.get_default_dtype() if weight is None else weight.dtype)
            degrees = Degrees.counted(edge_index, weight, count, precision)
        key = _key(edge_index)
        self._edges[key] = _SampledEdges(
            weakref.ref(edge_index, partial(self._forget, key)),
            count,
            weight,
            drawn_by,
            degrees,
            name not in nodes,
            options.replace,
            _took_all(nodes, edge_type, options, count) if drawn_by is not None and options.replace else None,
        )

    def _forget(self, key: Key, reference: Any) -> None:
        edges = self._edges.get(key)
        if edges is not None and edges.edge_index is reference:
            # The memory may have new edges by now.
            del self._edges[key]

    # -------------------------------------------------------------------------------------------- the replacement

    def _gcn_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace ``gcn_norm`` in a layer's Python module: ours for the edges of a batch, PyG's for others."""
        result = self.normalised(*args, **kwargs)
        return original(*args, **kwargs) if result is None else result

    def normalised(
        self,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return the edges and weights of ``gcn_norm``; None if the edges are not a batch's. Arguments as PyG's."""
        edges = self._find(edge_index, edge_weight, num_nodes, flow)
        if edges is None or num_nodes is None:
            return None
        arguments = (edge_index.size(1), edge_weight is None, num_nodes, improved, add_self_loops, dtype)
        if arguments not in edges.results:
            with torch.no_grad():
                # PyG fills in 1 if no edge has a weight.
                fill = 2.0 if improved and edge_weight is not None else 1.0
                edges.results[arguments] = _normalise(
                    edges, edge_index, edge_weight, num_nodes, fill, add_self_loops, dtype
                )
        return edges.results[arguments]

    def _find(
        self, edge_index: Any, edge_weight: Tensor | None, num_nodes: int | None, flow: str
    ) -> _SampledEdges | None:
        """Return the batch's edges of which these are all, or those of the first hops; None if there are none."""
        if type(edge_index) is not Tensor or edge_index.is_sparse or edge_index.layout != torch.strided:
            return None
        edges = self._edges.get(_key(edge_index))
        whole = None if edges is None else edges.edge_index()
        if edges is None or whole is None or num_nodes is None or flow != "source_to_target":
            return None
        fits = edge_index.stride() == whole.stride() and edge_index.size(1) <= whole.size(1)
        if not fits or num_nodes > edges.num_nodes:
            return None
        if edge_weight is None:
            return edges
        same = edges.weight is not None and _key(edge_weight) == _key(edges.weight) and edge_weight.dim() == 1
        return edges if same and edge_weight.size(0) == edge_index.size(1) else None


def check_uncached(module: nn.Module) -> None:
    """Raise if a layer caches the edges of the first batch.

    Raises:
        ConfigError: names the layer.
    """
    for name, layer in module.named_modules():
        if getattr(layer, "cached", False) is True:
            raise ConfigError(
                f"the layer {name or 'itself'} ({type(layer).__name__}) was made with cached=True: it would keep the "
                "first batch's edges for all others.",
                hint="make it with cached=False, or set strategy=sar or single.",
            )


def _key(tensor: Tensor) -> Key:
    """Return what identifies a tensor and its first rows or columns: their common start in memory.

    Storages without memory, which empty tensors have, all start at 0: such a storage is identified as an object.
    """
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata, int(tensor.storage_offset())


def _took_all(nodes: Any, edge_type: EdgeType, options: SamplingOptions, count: int) -> Tensor:
    """Return which nodes were expanded with a fan-out of -1, bool ``[n]``; nodes are in the order of the hops."""
    per_hop = torch.tensor(list(nodes.num_sampled_nodes))
    takes_all = [number == -1 for number in options.fan_out([edge_type])[edge_type]]
    # Nodes of the last hop are not expanded.
    takes_all += [True] * (len(per_hop) - len(takes_all))
    return torch.tensor(takes_all[: len(per_hop)]).repeat_interleave(per_hop, output_size=count)


def _normalise(
    edges: _SampledEdges,
    edge_index: Tensor,
    edge_weight: Tensor | None,
    num_nodes: int,
    fill: float,
    add_self_loops: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return the edges ``[2, e']`` and D^-1/2 (A + I) D^-1/2 of each, ``[e']``; A is scaled, D of the whole graph."""
    degrees = edges.degrees.first(num_nodes)
    weights = degrees.edges.new_ones(()).expand(edge_index.size(1)) if edge_weight is None else edge_weight
    if not edges.exact:
        weights = weights * _scale(edges, degrees, edge_index[1])
    total = degrees.edges if edge_weight is None else degrees.weight
    assert total is not None
    if add_self_loops:
        # PyG replaces the self-loops of a node by one with the weight of the last of them, or ``fill`` without any
        if edge_weight is None:
            loop, replaced = torch.ones_like(degrees.edges), degrees.loops
        else:
            assert degrees.last_loop is not None and degrees.loop_weights is not None
            loop, replaced = degrees.last_loop.masked_fill(degrees.loops == 0, fill), degrees.loop_weights
        total = total - replaced + loop
        nodes = torch.arange(num_nodes, device=edge_index.device).expand(2, -1)
        others, other_weights = _without_loops(edge_index, weights, remove=not edge_index.is_cuda)
        edge_index, weights = torch.cat([others, nodes], 1), torch.cat([other_weights, loop])
    root = total.pow(-0.5)
    root = root.masked_fill(root == float("inf"), 0)
    normalised = root[edge_index[0]] * weights * root[edge_index[1]]
    return edge_index, normalised.to(edge_weight.dtype if edge_weight is not None else dtype)


def _without_loops(edge_index: Tensor, weights: Tensor, *, remove: bool) -> tuple[Tensor, Tensor]:
    """Return edges and their weights without self-loops, or with a weight of 0 for these.

    To remove edges on a GPU, the CPU would have to wait for the number of the others.
    """
    others = edge_index[0] != edge_index[1]
    return (edge_index[:, others], weights[others]) if remove else (edge_index, weights * others)


def _scale(edges: _SampledEdges, degrees: Degrees, target: Tensor) -> Tensor:
    """Return how many edges of the graph each sampled edge stands for, ``[e]``."""
    drawn = torch.bincount(target, minlength=len(degrees.edges)).to(degrees.edges)
    if degrees.drawable is None or degrees.drawable_weight is None or edges.drawn_by is None:
        return (degrees.edges / drawn)[target]
    scale = (degrees.drawable_weight / drawn)[target] / edges.drawn_by[: len(target)].to(degrees.edges)
    complete = drawn == degrees.drawable if edges.took_all is None else edges.took_all[: len(drawn)]
    complete = complete.to(target.device)[target]
    return scale.masked_fill(complete, 1) if edges.replace else scale.clamp(min=1).masked_fill(complete, 1)
