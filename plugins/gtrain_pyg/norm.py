r"""Symmetric normalisation on sampled subgraphs: the whole graph's, estimated without bias.

``gcn_norm`` (Kipf and Welling 2017, equation 2) divides the message of edge (j, i) by sqrt(d_i d_j). PyG counts these
degrees in the edges that it is given, and in a sampled subgraph they are too few: a node whose neighbours were not
sampled has none. Here degrees are the whole graph's, and of the d in-neighbours of a node of which k were drawn, each
message counts d / k times (Horvitz and Thompson 1952), so that its expectation is the sum over all of them; a self-loop
that the layer adds is exact. With k = d nothing is estimated, and layers compute what they compute on the whole graph.

Drawn in proportion to weights w with replacement, a message counts sum(w) / (k w_j) times, which is without bias too.
Without replacement that is an approximation, never below 1; it is exact where all are taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data import Data, HeteroData

from gtrain.errors import ConfigError
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE, EdgeType
from gtrain.nn.patching import namespaces, patch_function
from gtrain_pyg.structure.degrees import NAME, WEIGHT, Degrees, degree_rows

_FUNCTION = "gcn_norm"
Key = tuple[int, int]


@dataclass
class _Edges:
    """The sampled edges of one type of one batch, with e edges between n nodes.

    Attributes:
        edge_index: int64 ``[2, e]``, as the batch has it; held weakly.
        num_nodes: n.
        weight: ``[e]``, the graph's weights; None without.
        drawn_by: ``[e]``, what neighbours were drawn in proportion to; None: nothing.
        degrees: of the n nodes.
        exact: all edges of the degrees are here: messages are not scaled.
        replace: neighbours were drawn with replacement.
        took_all: bool ``[n]``, nodes all of whose in-edges were asked for; None: as many as there are tells it.
        results: of calls that were made already.
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


class SampledNorm:
    """Lets a module's layers normalise sampled subgraphs by the whole graph's degrees, while it is installed.

    Layers look ``gcn_norm`` up in their own Python modules when they are called; it is exchanged there. Edges of a
    batch that was shown to :meth:`see` (or its first hops, where layers are trimmed) are normalised here; any others,
    such as those that a network made itself, as PyG does.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._known: dict[Key, _Edges] = {}
        self._seen: Any = WeakIdKeyDictionary()

    @staticmethod
    def wanted(module: nn.Module) -> bool:
        """Whether a layer of the module may normalise by degrees."""
        return any(True for _ in namespaces(module.modules(), _FUNCTION))

    @staticmethod
    def names(edge_types: Iterable[EdgeType]) -> dict[EdgeType, str]:
        """The node tensor that holds the degrees of each edge type from a node type to itself."""
        return {kind: NAME if kind == EDGE_TYPE else f"{NAME}:{kind[1]}" for kind in edge_types if kind[0] == kind[2]}

    @classmethod
    def tensors(
        cls, store: Store, parts: Iterable[int], drawn_by: str | None, dtype: torch.dtype
    ) -> dict[str | EdgeType, dict[str, dict[int, Tensor]]]:
        """The node tensors that batches must carry, by node type, name and part.

        Args:
            store: the graph.
            parts: whose to compute.
            drawn_by: the edge tensor that neighbours are drawn in proportion to; None: they are equally likely.
            dtype: precision of the run.
        """
        found: dict[str | EdgeType, dict[str, dict[int, Tensor]]] = {}
        precision = torch.float64 if dtype == torch.float64 else torch.float32
        parts = list(parts)
        for kind, name in cls.names(store.edge_types).items():
            rows = {part: degree_rows(store, kind, part, drawn_by, precision) for part in parts}
            found.setdefault(kind[2], {})[name] = rows
        return found

    # ------------------------------------------------------------------------------------------------- taking over

    def install(self, module: nn.Module) -> None:
        """Exchange the function in the Python modules of the module's layers.

        Raises:
            ConfigError: a layer keeps the first batch's edges.
        """
        check_uncached(module)
        self._undo += patch_function(module.modules(), _FUNCTION, self._gcn_norm)

    def uninstall(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
        self._known.clear()

    # ------------------------------------------------------------------------------------------------ batches

    def see(self, batch: Data | HeteroData, options: SamplingOptions) -> None:
        """Note a batch that layers will be given; it is forgotten with its edges.

        Without the tensors of :meth:`tensors` (the degrees up to a seed's time are not known) its own edges are
        counted, as PyG does, and all of them in every layer.
        """
        if not self._undo:
            return
        self._seen[batch] = options
        if isinstance(batch, Data):
            self._note(batch, batch, EDGE_TYPE, options)
        elif isinstance(batch, HeteroData):
            for kind in batch.edge_types:
                if kind[0] == kind[2]:
                    self._note(batch[kind[2]], batch[kind], kind, options)

    def moved(self, batch: Any) -> None:
        """Note a batch again that was moved to another device."""
        options = self._seen.get(batch) if isinstance(batch, (Data, HeteroData)) else None
        if options is not None:
            self.see(batch, options)

    def _note(self, nodes: Any, edges: Any, kind: EdgeType, options: SamplingOptions) -> None:
        edge_index, count = edges.edge_index, int(nodes.num_nodes)
        weight = edges[WEIGHT] if WEIGHT in edges else None
        name = self.names([kind])[kind]
        drawn_by = edges[options.weight] if options.weight is not None and options.weight in edges else None
        if name in nodes:
            degrees = Degrees.unpacked(nodes[name], weight is not None, options.weight is not None)
        else:
            precision = torch.get_default_dtype() if weight is None else weight.dtype
            degrees = Degrees.counted(edge_index, weight, count, precision)
        key = _key(edge_index)
        self._known[key] = _Edges(
            weakref.ref(edge_index, partial(self._forget, key)),
            count,
            weight,
            drawn_by,
            degrees,
            name not in nodes,
            options.replace,
            _took_all(nodes, kind, options, count) if drawn_by is not None and options.replace else None,
        )

    def _forget(self, key: Key, reference: Any) -> None:
        known = self._known.get(key)
        if known is not None and known.edge_index is reference:
            del self._known[key]

    # -------------------------------------------------------------------------------------------- what runs instead

    def _gcn_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``gcn_norm`` as a layer's Python module sees it: ours for the edges of a batch, PyG's for others."""
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
        """What ``gcn_norm`` returns: edges and weights; None: these are not a batch's edges. Arguments as PyG's."""
        known = self._find(edge_index, edge_weight, num_nodes, flow)
        if known is None:
            return None
        assert num_nodes is not None  # _find has looked
        call = (edge_index.size(1), edge_weight is None, num_nodes, improved, add_self_loops, dtype)
        if call not in known.results:
            with torch.no_grad():
                fill = 2.0 if improved and edge_weight is not None else 1.0  # PyG fills in ones where none has a weight
                known.results[call] = _normalise(known, edge_index, edge_weight, num_nodes, fill, add_self_loops, dtype)
        return known.results[call]

    def _find(self, edge_index: Any, edge_weight: Tensor | None, num_nodes: int | None, flow: str) -> _Edges | None:
        if type(edge_index) is not Tensor or edge_index.is_sparse or edge_index.layout != torch.strided:
            return None
        known = self._known.get(_key(edge_index))
        whole = None if known is None else known.edge_index()
        if known is None or whole is None or num_nodes is None or flow != "source_to_target":
            return None
        fits = edge_index.stride() == whole.stride() and edge_index.size(1) <= whole.size(1)
        if not fits or num_nodes > known.num_nodes:
            return None
        if edge_weight is None:
            return known
        same = known.weight is not None and _key(edge_weight) == _key(known.weight) and edge_weight.dim() == 1
        return known if same and edge_weight.size(0) == edge_index.size(1) else None


def check_uncached(module: nn.Module) -> None:
    """Refuse layers that keep the edges of the first batch for all others.

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
    """What a tensor and its first rows or columns have in common."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def _took_all(nodes: Any, kind: EdgeType, options: SamplingOptions, count: int) -> Tensor:
    """Which nodes were expanded with a fan-out of -1: those of a hop, in the order of the hops."""
    per_hop = torch.tensor(list(nodes.num_sampled_nodes))
    everything = [number == -1 for number in options.fan_out([kind])[kind]]
    everything += [True] * (len(per_hop) - len(everything))  # never expanded
    return torch.tensor(everything[: len(per_hop)]).repeat_interleave(per_hop, output_size=count)


def _normalise(
    known: _Edges,
    edge_index: Tensor,
    edge_weight: Tensor | None,
    num_nodes: int,
    fill: float,
    add_self_loops: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    degrees = known.degrees.of(num_nodes)
    weights = degrees.edges.new_ones(()).expand(edge_index.size(1)) if edge_weight is None else edge_weight
    if not known.exact:
        weights = weights * _scale(known, degrees, edge_index[1])
    total = degrees.edges if edge_weight is None else degrees.weight
    assert total is not None
    if add_self_loops:
        loop, dropped = _loops(degrees, edge_weight is not None, fill)
        total = total - dropped + loop
        others = edge_index[0] != edge_index[1]
        nodes = torch.arange(num_nodes, device=edge_index.device).expand(2, -1)
        edge_index = torch.cat([edge_index[:, others], nodes], 1)
        weights = torch.cat([weights[others], loop])
    root = total.pow(-0.5)
    root = root.masked_fill(root == float("inf"), 0)
    normalised = root[edge_index[0]] * weights * root[edge_index[1]]
    return edge_index, normalised.to(edge_weight.dtype if edge_weight is not None else dtype)


def _loops(degrees: Degrees, weighted: bool, fill: float) -> tuple[Tensor, Tensor]:
    """The weight of the one self-loop that each node is to have, and that of those that it replaces."""
    if not weighted:
        return torch.ones_like(degrees.edges), degrees.loops
    assert degrees.last_loop is not None and degrees.loop_weights is not None
    return degrees.last_loop.masked_fill(degrees.loops == 0, fill), degrees.loop_weights


def _scale(known: _Edges, degrees: Degrees, target: Tensor) -> Tensor:
    """How many edges of the graph each sampled edge stands for, ``[e]``."""
    drawn = torch.bincount(target, minlength=len(degrees.edges)).to(degrees.edges)
    if degrees.drawable is None or degrees.drawable_weight is None or known.drawn_by is None:
        return (degrees.edges / drawn)[target]
    each = (degrees.drawable_weight / drawn)[target] / known.drawn_by[: len(target)].to(degrees.edges)
    whole = drawn == degrees.drawable if known.took_all is None else known.took_all[: len(drawn)]
    whole = whole.to(target.device)[target]
    return each.masked_fill(whole, 1) if known.replace else each.clamp(min=1).masked_fill(whole, 1)
