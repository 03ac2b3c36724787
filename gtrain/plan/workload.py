"""What is trained: sizes of the data and of the model, as the formulas of backends read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import GATConv, GCNConv, GraphConv, MessagePassing, RGCNConv, SAGEConv

from gtrain.data.batches.loader import target_edge_type
from gtrain.data.module import GraphDataModule
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import NODE_TYPE
from gtrain.nn import Table, tables
from gtrain.nn.relational import IdRGCNConv
from gtrain.plan.counts import (
    Parts,
    Uses,
    assume_parts,
    assume_parts_by_type,
    count_columns,
    count_ends,
    count_parts,
    count_parts_by_type,
    count_queries,
    count_ranges,
    count_sources,
    distinct,
)
from gtrain.plan.typed import TypedLayer, typed_layers

LINEAR = "linear"
"""A weighted sum of source rows, before or after a product with a weight, whichever is narrower."""
SUM = "sum"
"""A weighted sum of the layer's inputs."""
ATTENTION = "attention"
"""Source rows weighted by attention (GAT)."""
RELATIONAL = "relational"
"""The sums of the source rows of each relation, each multiplied by the relation's matrix (R-GCN)."""
IDS = "ids"
"""A learned row for each pair of relation and source (R-GCN over ids), summed."""
OTHER = "other"
_KINDS: dict[type[nn.Module], str] = {
    **{SAGEConv: LINEAR, GraphConv: LINEAR, GCNConv: LINEAR, GATConv: ATTENTION},
    **{RGCNConv: RELATIONAL, IdRGCNConv: IDS},
}


@dataclass(frozen=True)
class Layer:
    """A message-passing layer.

    Attributes:
        name: of its class.
        kind: :data:`LINEAR`, :data:`SUM`, :data:`ATTENTION`, :data:`RELATIONAL`, :data:`IDS` or :data:`OTHER`.
        inputs: columns of its input.
        outputs: columns of its result.
        heads: of attention, else 1.
        weights: numbers in its matrices; each row is multiplied by all of them.
        constant: whether its input is the same in every step, so that its aggregate is cached.
        trained_input: whether its input needs a gradient.
        pair_weights: numbers in the matrix of a relation, by which the sum of each pair of relation and target is
            multiplied; else 0.
        entries: of a row of its input, if that is in CSR form; None: it is dense. Such rows are multiplied first.
        sparse_columns: columns of the products of these rows, which ``weights`` leaves out; else 0.
    """

    name: str
    kind: str
    inputs: int
    outputs: int
    heads: int
    weights: int
    constant: bool
    trained_input: bool
    pair_weights: int = 0
    entries: float | None = None
    sparse_columns: int = 0

    @property
    def transforms_first(self) -> bool:
        """Whether rows are multiplied by the weight before they are summed: the narrower side is summed, and sent."""
        if self.entries is not None and self.kind in (LINEAR, SUM):
            return True
        if self.kind != LINEAR:
            return self.kind == ATTENTION
        equal = self.trained_input or self.name == "GCNConv"
        return self.outputs < self.inputs or (self.outputs == self.inputs and equal)

    @property
    def width(self) -> int:
        """Numbers of a source row that an edge reads."""
        if self.kind in (ATTENTION, IDS):
            return self.outputs
        if self.kind == SUM and self.entries is not None:
            return self.sparse_columns
        return self.outputs if self.transforms_first else self.inputs

    @property
    def sums_forward(self) -> bool:
        """Whether the forward pass of a step sums rows, which a cached aggregate saves."""
        return self.transforms_first or not self.constant

    @property
    def sums_backward(self) -> bool:
        """Whether gradients go back to the source rows."""
        return self.transforms_first or self.trained_input


@dataclass(frozen=True)
class WideTable:
    """A table of :mod:`gtrain.nn`: a row per node or feature.

    Attributes:
        name: of its rows.
        rows: their number.
        dim: columns.
        by_node: whether rows belong to nodes; else to features.
    """

    name: str
    rows: float
    dim: int
    by_node: bool


@dataclass(frozen=True)
class Ends:
    """The ends of the edges that a link task predicts.

    Attributes:
        sources: nodes of their type, of which only those are read at which such an edge starts.
        targets: nodes of their type.
        one_type: whether both types are the same.
    """

    sources: Parts
    targets: Parts
    one_type: bool


@dataclass
class Workload:
    """The data and the model of a run.

    Attributes:
        num_nodes: graph nodes, or rows of a table of features.
        num_edges: directed edges that carry messages; in a link task those that train.
        num_seeds: training nodes, or training edges.
        num_features: columns of the features; 0 without features.
        entries: entries of a row of the features that are not 0, of sparse features; None: dense.
        unit_entries: whether all of these entries are 1.
        num_classes: classes, or 1 for a number to predict; 0 in a link task.
        num_relations: relations of a knowledge graph; 0 without.
        num_held_out: validation or test edges, whichever are more, of a link task; 0 if they are unknown.
        num_queries: distinct queries of training edges for both ends, with ``model.by_query``; None: unknown.
        task: ``node`` or ``link``.
        kind: of the model, see :mod:`gtrain.model.kinds`.
        layers: its message-passing layers, in order; none of a network over several types.
        typed: the layers of a network over several types, in order.
        dense: numbers in the matrices of its other layers, which each node (or seed) is multiplied by.
        dense_widths: columns of their results, in order.
        parameters: numbers in all parameters but those of tables.
        states: numbers that the optimizer keeps for each parameter.
        table_states: the same of the optimizer of tables.
        row_states: numbers that the optimizer of tables keeps for each row besides.
        tables: its tables.
        dropout: whether layers drop elements.
        heterogeneous: whether the graph has several types.
        item: bytes of a number.
        store: the store that was counted; None: the data were given by counts.
        stores: all stores of the data that exist, in any number of parts.
        cut_share: the assumed share of the edges that are cut, where none can be counted.
    """

    num_nodes: float
    num_edges: float
    num_seeds: float
    num_features: int = 0
    entries: float | None = None
    unit_entries: bool = False
    num_classes: int = 0
    num_relations: int = 0
    num_held_out: float = 0
    num_queries: float | None = None
    task: str = "node"
    kind: str | None = None
    layers: tuple[Layer, ...] = ()
    typed: tuple[TypedLayer, ...] = ()
    dense: int = 0
    dense_widths: tuple[int, ...] = ()
    parameters: int = 0
    states: int = 2
    table_states: int = 2
    row_states: int = 0
    tables: tuple[WideTable, ...] = ()
    dropout: bool = True
    heterogeneous: bool = False
    item: int = 4
    store: Store | None = None
    cut_share: float = 0.25
    stores: Sequence[Store] = ()
    _parts: dict[int, Parts] = field(default_factory=dict)
    _parts_by_type: dict[int, dict[str, Parts]] = field(default_factory=dict)

    def parts(self, count: int) -> Parts:
        """Return the graph in a number of parts, counted if the store has them."""
        if count not in self._parts:
            self._parts[count] = self._count(count)
        return self._parts[count]

    def parts_by_type(self, count: int) -> dict[str, Parts]:
        """Return the nodes of each type of a stored graph in a number of parts, counted if a store has them."""
        assert self.store is not None
        if count not in self._parts_by_type:
            exact = self.store_of(count)
            counted = (
                assume_parts_by_type(self.store, count, self.cut_share) if exact is None else count_parts_by_type(exact)
            )
            self._parts_by_type[count] = counted
        return self._parts_by_type[count]

    def store_of(self, count: int) -> Store | None:
        """Return a store with a number of parts; None if none exists."""
        stores = (self.store, *self.stores)
        return next((store for store in stores if store is not None and store.num_parts == count), None)

    def _count(self, count: int) -> Parts:
        if self.store is None or self.store.is_hetero:
            return assume_parts(self.num_nodes, self.num_edges, self.num_seeds, count, self.cut_share)
        exact = self.store_of(count)
        return count_ranges(self.store, count) if exact is None else count_parts(exact)

    @property
    def embedding_width(self) -> int:
        """Columns of the last layer's result, by which a link task scores edges."""
        return (self.typed or self.layers)[-1].outputs

    def ends(self, count: int) -> Ends:
        """Return the nodes at which the edges to predict start and end, in a number of parts."""
        if not self.heterogeneous:
            return Ends(self.parts(count), self.parts(count), True)
        assert self.store is not None
        edge_type = source, _, target = target_edge_type(self.store)
        by_type, exact = self.parts_by_type(count), self.store_of(count)
        if exact is not None:
            reads = count_sources(exact, edge_type)
        else:
            sizes = self.store.num_nodes_of(source), self.store.num_edges_of(edge_type)
            reads = assume_parts(*sizes, 0, count, self.cut_share).reads
        return Ends(replace(by_type[source], reads=reads), by_type[target], source == target)

    def columns_read(self, rows: float) -> float:
        """Return the expected number of columns that the sparse features of nodes drawn at random have entries in."""
        if self.store is None:
            entries = rows * (self.entries or self.num_features)
            return distinct(entries, self.num_features)
        return sum(uses.distinct(rows / max(self.num_nodes, 1) * uses.total) for uses in self._columns)

    def nodes_read(self, table: WideTable, edges: float, others: float) -> float:
        """Return the expected number of rows of a table that edges drawn at random read.

        Args:
            table: by node; of several node types each is taken to be read as often as it has rows.
            edges: of which both ends are read.
            others: further nodes, each drawn at random.
        """
        if self._ends is not None:
            return self._ends.distinct(edges, others)
        share = table.rows / max(sum(each.rows for each in self.tables), 1)
        return distinct((2 * edges + others) * share, table.rows)

    @cached_property
    def _columns(self) -> list[Uses]:
        return count_columns(self.store) if self.store is not None else []

    @cached_property
    def _ends(self) -> Uses | None:
        one_type = self.store is not None and not self.store.is_hetero and len(self.tables) == 1
        return count_ends(self.store) if self.store is not None and one_type else None

    @property
    def feature_bytes(self) -> float:
        """Bytes of a node's stored features, of 4 bytes at least; entries that are not 0 have a column number."""
        item = max(self.item, 4)
        return self.num_features * item if self.entries is None else self.entries * (item + 4)


def number_bytes(precision: str) -> int:
    """Return the bytes of a parameter with a ``trainer.precision``."""
    return {"64": 8, "64-true": 8, "bf16-true": 2}.get(precision, 4)


def describe(
    config: Mapping[str, Any], data: GraphDataModule, model: pl.LightningModule | None, kind: str | None, cut: float
) -> Workload:
    """Return the workload of a composed configuration.

    Args:
        config: the resolved configuration.
        data: the DataModule. Its store is counted if it exists; else its outline must have the true numbers.
        model: the sketch of the model; None if it cannot be built without the graph.
        kind: of the model.
        cut: see :attr:`Workload.cut_share`.
    """
    store = data.open_store() if data.can_open_store else None
    facts = dict(store.facts if store is not None else data.outline or {})
    nodes, features = facts["num_nodes"], facts["num_features"]
    num_nodes = sum(nodes.values()) if isinstance(nodes, dict) else nodes
    num_edges = store.num_edges if store is not None else facts["num_edges"]
    precision = str(config["trainer"]["precision"])
    width = max((count or 0 for count in features.values()), default=0) if isinstance(features, dict) else features or 0
    heterogeneous = store.is_hetero if store is not None else isinstance(nodes, dict)
    reads_features, entries = bool(features) and not facts.get("sparse_features"), _entries(store, facts)
    sketched = _layers(model, config, reads_features, entries) if model is not None and not heterogeneous else ()
    inner = {id(p) for layer in _convolutions(model) for p in layer.parameters()}
    named_tables = tuple(tables(model)) if model is not None else ()
    wide = {id(p) for _, table in named_tables for p in table.parameters()}
    plain = [p for p in model.parameters() if id(p) not in wide] if model is not None else []
    matrices = [p for p in plain if p.dim() >= 2 and id(p) not in inner]
    rows = _rows_by_type(nodes, facts)
    return Workload(
        num_nodes=num_nodes,
        num_edges=num_edges,
        num_seeds=data.num_seeds("train") if store is not None else facts["num_seeds"],
        num_features=width,
        entries=entries,
        unit_entries=_unit_entries(store),
        num_classes=facts.get("num_classes") or int(facts.get("label_scale") is not None),
        num_relations=facts.get("num_relations") or 0,
        num_held_out=max(map(data.num_seeds, ("val", "test"))) if store is not None and data.task == "link" else 0,
        num_queries=count_queries(store) if store is not None and config["model"].get("by_query") else None,
        task=data.task,
        kind=kind,
        layers=sketched,
        typed=typed_layers(model) if model is not None and heterogeneous else (),
        dense=sum(p.numel() for p in matrices),
        dense_widths=tuple(p.size(0) for p in matrices),
        parameters=sum(p.numel() for p in plain if not isinstance(p, nn.UninitializedParameter))
        + _rows_beyond_sketch(model, num_nodes),
        states=_states(config["model"].get("optimizer")),
        table_states=table_states(config),
        row_states=row_states(config),
        tables=tuple(_table(table, rows, width) for _, table in named_tables),
        dropout=float(config["model"].get("dropout") or 0) > 0,
        heterogeneous=heterogeneous,
        item=number_bytes(precision),
        store=store,
        cut_share=cut,
    )


def _convolutions(model: nn.Module | None) -> list[MessagePassing]:
    return [] if model is None else [layer for layer in model.modules() if isinstance(layer, MessagePassing)]


def _layers(model: nn.Module, config: Mapping[str, Any], reads: bool, entries: float | None) -> tuple[Layer, ...]:
    """Return the model's convolutions.

    Args:
        model: the sketch.
        config: the configuration.
        reads: whether the network reads features of the data directly.
        entries: of a row of features in CSR form; None: they are dense.
    """
    layers = []
    for number, conv in enumerate(_convolutions(model)):
        matrices = [p for p in conv.parameters() if not isinstance(p, nn.UninitializedParameter) and p.dim() == 2]
        inputs, outputs, heads = _widths(conv, matrices)
        reads_data, kind = number == 0 and reads, _kind(conv)
        compressed = entries if reads_data and kind in (LINEAR, SUM, ATTENTION) else None
        by_input = [p.size(0) for p in matrices if p.size(1) == inputs]
        columns = 0 if compressed is None else by_input[0] if kind == SUM else sum(by_input)
        layers.append(
            Layer(
                type(conv).__name__,
                kind,
                inputs,
                outputs,
                heads,
                0 if isinstance(conv, IdRGCNConv) else sum(p.numel() for p in matrices) - columns * inputs,
                reads_data and not config["model"].get("input_dropout"),
                not reads_data,
                inputs * outputs if isinstance(conv, RGCNConv) else 0,
                compressed,
                columns,
            )
        )
    return tuple(layers)


def _widths(conv: MessagePassing, matrices: Sequence[Tensor]) -> tuple[int, int, int]:
    """Return the columns of a convolution's input and result, and its heads."""
    if isinstance(conv, IdRGCNConv):
        return 1, int(conv.weight.size(-1)), 1
    heads = int(getattr(conv, "heads", 1))
    inputs = getattr(conv, "in_channels", None)
    if inputs is None:  # GIN has a network of its own
        return (int(matrices[0].size(1)), int(matrices[-1].size(0)), heads) if matrices else (0, 0, heads)
    return int(inputs[0] if isinstance(inputs, tuple) else inputs), int(conv.out_channels) * heads, heads


def _kind(conv: MessagePassing) -> str:
    reduce = getattr(conv.aggr_module, "__class__", type(None)).__name__
    if reduce not in ("SumAggregation", "MeanAggregation"):
        return OTHER
    return _KINDS.get(type(conv), SUM if type(conv).__name__ == "GINConv" else OTHER)


def table_states(config: Mapping[str, Any]) -> int:
    """Return the numbers that the optimizer of tables keeps for each parameter."""
    return _states(_of_tables(config))


def row_states(config: Mapping[str, Any]) -> int:
    """Return the numbers that the optimizer of tables keeps for each row, besides those for each parameter."""
    return int(_name(_of_tables(config)) in ("RowwiseAdagrad", "LazyAdam"))


def _of_tables(config: Mapping[str, Any]) -> Any:
    own = config["model"].get("sparse_optimizer") or {}
    return own if own.get("_target_") else config["model"].get("optimizer")


def _states(optimizer: Any) -> int:
    """Return the numbers that an optimizer keeps for each parameter."""
    more = sum(bool((optimizer or {}).get(setting)) for setting in ("momentum", "centered", "amsgrad"))
    return {"SGD": 0, "ASGD": 1, "RMSprop": 1, "Adagrad": 1, "RowwiseAdagrad": 0}.get(_name(optimizer), 2) + more


def _name(optimizer: Any) -> str:
    return str((optimizer or {}).get("_target_")).rpartition(".")[2]


def _rows_by_type(nodes: float | Mapping[str, float], facts: Mapping[str, Any]) -> dict[str, float]:
    """Return the rows of tables by node or entity type; a sketch of a large graph has fewer."""
    of_nodes = dict(nodes) if isinstance(nodes, Mapping) else {NODE_TYPE: nodes}
    counted = {name: count for name, count in (facts.get("entity_types") or {}).items() if count is not None}
    return of_nodes | counted | dict(facts.get("features") or {})


def _table(table: Table, rows: Mapping[str, float], num_features: int) -> WideTable:
    """Describe a table, given the rows of those by node or entity type."""
    spec, by_node = table.table, table.table.ids != "feature"
    count = rows.get(spec.name, spec.rows) if by_node else max(spec.rows, num_features)
    return WideTable(spec.name, count, spec.dim, by_node)


def _rows_beyond_sketch(model: nn.Module | None, num_nodes: float) -> int:
    """Return the numbers that convolutions over ids have for the nodes that a sketch of a large graph lacks."""
    numbers = 0
    for conv in _convolutions(model):
        if isinstance(conv, IdRGCNConv):
            by_node = [conv.weight, *([] if conv.root is None else [conv.root])]
            numbers += sum(p.numel() // conv.num_nodes for p in by_node) * (int(num_nodes) - conv.num_nodes)
    return numbers


def _entries(store: Store | None, facts: Mapping[str, Any]) -> float | None:
    """Return the mean number of entries of a row of sparse or compressed features; None for dense features."""
    if store is None:
        return facts.get("features_per_row") if facts.get("sparse_features") else None
    specs = [spec.tensors["x"] for spec in store.manifest.node_types.values() if "x" in spec.tensors]
    if not specs or any(spec.nnz is None for spec in specs):
        return None
    return sum(spec.nnz or 0 for spec in specs) / max(sum(spec.shape[0] for spec in specs), 1)


def _unit_entries(store: Store | None) -> bool:
    """Return whether all entries of sparse features are 1, by those of the first part; for counts they are."""
    if store is None:
        return True
    if store.is_hetero or "x" not in store.node_tensors():
        return False
    x = store.node("x", 0)
    return x.layout == torch.sparse_csr and bool((x.values() == 1).all())
