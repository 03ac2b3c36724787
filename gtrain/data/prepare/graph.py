"""Prepare a graph for the store: check it, split nodes or edges, scale features, partition."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.prepare.split import MASKS, SplitOptions, split_nodes
from gtrain.data.prepare.split_edges import drop_held_out, split_edges
from gtrain.data.prepare.validate import check_distinct, labelled_nodes, validate_graph
from gtrain.errors import ConfigError
from gtrain.graph import partition as partitions
from gtrain.graph.partition.adjacency import Adjacency
from gtrain.graph.store.files import chunks
from gtrain.graph.store.manifest import HELD_OUT, NODE_TYPE, edge_key
from gtrain.graph.store.tables import EdgeArrays, Graph, csr_tensor
from gtrain.kernels.splitmix import GOLDEN, key, mix
from gtrain.nn.compressed import is_compressed
from gtrain.nn.csr import Csr

log = logging.getLogger("gtrain")
TIME = "edge_time"
APPLIED = SplitOptions("random", train_fraction=1.0, val_fraction=0.0)
"""The split of edges to which a trained model is applied: messages pass along all of them."""


def warn_unsorted(graph: Graph, origin: str) -> None:
    """Log each edge type whose edges are not sorted by time; the store sorts them.

    Args:
        graph: the graph in the order of the source data; its times ``[E]`` may be a memory map, read piece by piece.
        origin: the file or data set, for the message.
    """
    for suffix, times in _times(graph):
        if _descends(times):
            log.info("%s: the times of edges%s are not in order; each node's edges are sorted by time", origin, suffix)


def _times(graph: Graph) -> Iterator[tuple[str, Any]]:
    if isinstance(graph, EdgeArrays):
        if TIME in graph.edge_tensors:
            yield "", graph.edge_tensors[TIME]
        return
    for edge_type, edges in graph.edge_items() if isinstance(graph, HeteroData) else [(None, graph.stores[0])]:
        if TIME in edges:
            yield "" if edge_type is None else f" of {','.join(edge_type)}", edges[TIME]


def _descends(times: Any) -> bool:
    """Return whether a time is earlier than its predecessor.

    An undirected edge list, whose second half has the reverse edges with the same times, counts as one half.
    """
    half, odd = divmod(len(times), 2)
    if not odd and all(
        np.array_equal(times[rows], times[half + rows.start : half + rows.stop]) for rows in chunks(0, half)
    ):
        times = times[:half]
    # One time more than the piece, to compare across its end.
    pieces = (np.asarray(times[rows.start : rows.stop + 1]) for rows in chunks(0, len(times)))
    return any((piece[1:] < piece[:-1]).any() for piece in pieces)


def num_relations(arrays: EdgeArrays) -> int | None:
    """Return the largest ``edge_type`` + 1, or None without relations."""
    tables = (arrays.edge_tensors, *arrays.held_out.values())
    types = [table["edge_type"] for table in tables if "edge_type" in table]
    largest = [int(values[rows].max()) for values in types for rows in chunks(0, len(values))]
    return max(largest) + 1 if largest else None


def split_arrays(arrays: EdgeArrays, options: SplitOptions) -> dict[str, int]:
    """Move a fraction of the edges into ``held_out``, in place. All edges between two nodes, in both directions, have
    the same split unless their times differ with ``time``.

    ``random`` draws the split of each pair of nodes independently, so that sizes match the fractions only on average;
    ``time`` splits at the quantiles of the times.

    Returns:
        Number of edges of train, val and test.

    Raises:
        ConfigError: the kind of split does not suit an edge list.
    """
    if options.kind == "public" and arrays.held_out:
        held = {split: len(edges["source"]) for split, edges in arrays.held_out.items()}
        return {"train": arrays.num_edges, **held}
    side = _sides(arrays, options)
    columns = {"source": arrays.source, "target": arrays.target, **arrays.edge_tensors}
    train, val, test = (
        {name: np.asarray(values)[side == number] for name, values in columns.items()} for number in range(3)
    )
    arrays.held_out = {"val": val, "test": test}
    arrays.source, arrays.target = train.pop("source"), train.pop("target")
    arrays.edge_tensors = train
    return {"train": arrays.num_edges, **{split: len(edges["source"]) for split, edges in arrays.held_out.items()}}


def _sides(arrays: EdgeArrays, options: SplitOptions) -> NDArray[np.uint8]:
    """Return 0 (train), 1 (val) or 2 (test) for each edge."""
    limits = np.cumsum([options.train_fraction, options.val_fraction])
    if options.kind == "random":
        start, sides = np.uint64(key(options.seed)), np.empty(arrays.num_edges, dtype=np.uint8)
        for rows in chunks(0, arrays.num_edges):
            ends = np.asarray(arrays.source[rows]), np.asarray(arrays.target[rows])
            low, high = np.minimum(*ends).astype(np.uint64), np.maximum(*ends).astype(np.uint64)
            # The top 53 bits of a hash of the pair, as a number in [0, 1).
            drawn = (mix(mix(start + low * GOLDEN) + high * GOLDEN) >> np.uint64(11)) * 2.0**-53
            sides[rows] = np.searchsorted(limits, drawn, side="right").clip(max=2)
        return sides
    if options.kind != "time" or "edge_time" not in arrays.edge_tensors:
        raise ConfigError(
            f"data.task=link with data.split={options.kind}, and the edge list has no "
            f"{'times' if options.kind == 'time' else 'such split'}",
            hint="set data.split=random, or data.split=time where edges have times",
        )
    times = np.asarray(arrays.edge_tensors["edge_time"])
    # Edges with equal times get the same split, even if the sizes then differ from the fractions.
    cuts = np.quantile(times, np.minimum(limits, 1.0), method="higher")
    return np.searchsorted(cuts, times, side="left").clip(max=2).astype(np.uint8)


Names = Sequence[str]


@dataclass(frozen=True)
class Preparation:
    """The options of :class:`~gtrain.data.module.GraphDataModule` that affect the preparation of a graph."""

    task: str
    target: str | None
    split: SplitOptions
    unlabelled: int | None
    num_classes: int | None
    normalize_features: bool
    origin: str
    applied: bool = False
    """Whether a trained model is applied: the graph needs no labels, and all labelled nodes are the test split."""
    number_labels: frozenset[str] = frozenset()
    """The node types (``node`` in a homogeneous graph) whose labels are numbers to predict, NaN for none."""
    label_values: Sequence[Any] | None = None
    """The label that each class stands for, for messages; None: the class itself."""

    def no_label(self, node_type: str) -> float | None:
        """Return the value of ``y`` that means no label; None: every node of the type has one."""
        return math.nan if node_type in self.number_labels else self.unlabelled


def prepare_graph(graph: Graph, options: Preparation) -> dict[str, Any]:
    """Check a graph, split its nodes or edges and scale its features, in place.

    The readers have already checked the edges of :class:`EdgeArrays`.

    Returns:
        The facts that a model needs; see :func:`~gtrain.data.prepare.validate.validate_graph`. In addition ``split``,
        the options and sizes of the split (None without labels), ``target_edge``, the edge type to predict,
        ``train_classes``, the training labels of each class, and ``label_scale``, the mean and the standard
        deviation of training labels that are numbers to predict.

    Raises:
        ConfigError: an option does not suit the data.
        DataError: the data is invalid; the message names the position.
    """
    if isinstance(graph, EdgeArrays):
        warn_unsorted(graph, options.origin)
        return _prepare_arrays(graph, options)
    if options.task == "node":
        drop_held_out(graph)
    facts = _prepare_nodes(graph, options)
    warn_unsorted(graph, options.origin)
    if options.task == "link":
        edge_type = _target_edge(graph, options.target)
        edges = graph.stores[0] if edge_type is None else graph[edge_type]
        split = APPLIED if options.applied and "train_edge_index" not in edges else options.split
        facts["split"] = {**split.identity(), "sizes": split_edges(graph, edge_type, split)}
        facts |= {} if edge_type is None else {"target_edge": list(edge_type)}
    return facts


def _prepare_arrays(arrays: EdgeArrays, options: Preparation) -> dict[str, Any]:
    # The nodes are checked and split as a graph without edges.
    tensors = {name: torch.as_tensor(value) for name, value in arrays.node_tensors.items()}
    nodes = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=arrays.num_nodes, **tensors)
    facts = {**_prepare_nodes(nodes, options), "num_relations": num_relations(arrays)}
    results = {name: value for name, value in nodes.to_dict().items() if isinstance(value, Tensor)}
    arrays.node_tensors = {name: value for name, value in results.items() if name != "edge_index"}
    if options.task == "node":
        arrays.held_out = {}
        return facts
    split = APPLIED if options.applied else options.split
    return {**facts, "split": {**split.identity(), "sizes": split_arrays(arrays, split)}}


def _prepare_nodes(graph: Data | HeteroData, options: Preparation) -> dict[str, Any]:
    """Check the graph, add the masks of a node task, and scale its features."""
    if options.task == "node":
        _choose_labels(graph, options.target)
    if options.applied:
        _drop_empty_labels(graph, options)
    facts = validate_graph(
        graph,
        unlabelled=options.unlabelled,
        num_classes=options.num_classes,
        number_labels=options.number_labels,
        origin=options.origin,
    )
    labelled = _labelled(graph, facts) if options.task == "node" else None
    target = facts.get("target") or NODE_TYPE
    if labelled is not None and not options.applied:
        check_distinct(labelled.y, options.no_label(target), options.origin, options.label_values)
    for store in graph.node_stores:
        if store is not labelled:
            # Masks are only for the labelled nodes of a node task.
            for name in MASKS:
                store.pop(name, None)
        if options.normalize_features and isinstance(store.get("x"), Tensor):
            store["x"] = _rows_to_one(store["x"])
    facts["split"] = None if labelled is None else _split_labels(labelled, target, options)
    if labelled is not None and target in options.number_labels and not options.applied:
        facts["label_scale"] = _scale(labelled.y[labelled.train_mask])
    if labelled is not None and facts["num_classes"] and not (facts["multilabel"] or options.applied):
        facts["train_classes"] = labelled.y[labelled.train_mask].bincount(minlength=facts["num_classes"]).tolist()
    return facts


def cut(
    graph: Graph, num_parts: int, method: str, seed: int, path: str | None, adjacency: Adjacency | None = None
) -> Tensor | dict[str, Tensor]:
    """Assign each node to a part, by node type in a heterogeneous graph; see :mod:`gtrain.graph.partition`."""
    if isinstance(graph, HeteroData):
        if path is not None:
            raise ConfigError(
                f"data.partition_path={path} assigns the nodes of one type, and the graph has several",
                hint="choose another data.partitioner",
            )
        return partitions.partition_hetero(graph, num_parts, method, seed=seed, adjacency=adjacency)
    return partitions.partition_nodes(
        partitions.edges_of(graph),
        int(graph.num_nodes or 0),
        num_parts,
        method,
        seed=seed,
        train_mask=_train_mask(graph),
        assignment=partitions.read_assignment(path) if path is not None else None,
        origin=f"data.partition_path={path}",
        adjacency=adjacency,
    )


def group(
    graph: Graph,
    assignment: Tensor | Mapping[str, Tensor],
    num_parts: int,
    seed: int,
    adjacency: Adjacency | None = None,
) -> dict[str, NDArray[Any]] | None:
    """Order the nodes of each part so that neighbours are near; see :func:`gtrain.graph.partition.group_nodes`."""
    by_type = {NODE_TYPE: assignment} if isinstance(assignment, Tensor) else assignment
    return partitions.group_nodes(graph, by_type, num_parts, seed=seed, adjacency=adjacency)


def _train_mask(graph: Data | EdgeArrays) -> Tensor | None:
    if isinstance(graph, EdgeArrays):
        mask = graph.node_tensors.get("train_mask")
        return None if mask is None else torch.as_tensor(mask)
    return graph.train_mask if "train_mask" in graph else None


def describe(graph: Graph) -> str:
    """Return ``N nodes and E edges``."""
    return f"{graph.num_nodes} nodes and {graph.num_edges} edges"


def _choose_labels(graph: Data | HeteroData, target: str | None) -> None:
    """Keep the labels of the target node type alone."""
    if target is None:
        return
    if not isinstance(graph, HeteroData) or target not in graph.node_types:
        types = ", ".join(graph.node_types) if isinstance(graph, HeteroData) else "one, which needs no name"
        raise ConfigError(f"data.target={target} is not a node type", hint=f"the node types are {types}")
    labelled = [node_type for node_type in graph.node_types if isinstance(graph[node_type].get("y"), Tensor)]
    if labelled and target not in labelled:
        raise ConfigError(
            f"data.target={target}, and nodes of that type have no labels",
            hint=f"set data.target to {' or '.join(labelled)}",
        )
    for node_type in graph.node_types:
        if node_type != target:
            graph[node_type].pop("y", None)


def _labelled(graph: Data | HeteroData, facts: dict[str, Any]) -> Any:
    """Return the storage of the nodes that have labels, or None."""
    if isinstance(graph, HeteroData):
        return None if facts["target"] is None else graph[facts["target"]]
    return graph.stores[0] if isinstance(graph.y, Tensor) else None


def _drop_empty_labels(graph: Data | HeteroData, options: Preparation) -> None:
    """Remove ``y`` where no node has a label."""
    items = graph.node_items() if isinstance(graph, HeteroData) else [(NODE_TYPE, graph.stores[0])]
    for node_type, nodes in items:
        y = nodes.get("y")
        if isinstance(y, Tensor) and not labelled_nodes(y, options.no_label(node_type)).any():
            nodes.pop("y")


def _split_labels(nodes: Any, node_type: str, options: Preparation) -> dict[str, Any]:
    """Add the masks to the storage of the labelled nodes; return the options and sizes of the split."""
    split = options.split
    if nodes.y.dim() == 2 and nodes.y.size(1) == 1:
        nodes.y = nodes.y.flatten()
    nodes.y = nodes.y.float() if nodes.y.dim() == 2 or node_type in options.number_labels else nodes.y.long()
    labelled = labelled_nodes(nodes.y, options.no_label(node_type))
    if options.applied:
        masks = {name: labelled if name == "test_mask" else torch.zeros_like(labelled) for name in MASKS}
    else:
        masks = split_nodes(nodes, labelled, split)
    for name, mask in masks.items():
        nodes[name] = mask
    return {**split.identity(), "sizes": {name[:-5]: int(mask.sum()) for name, mask in masks.items()}}


def _scale(labels: Tensor) -> dict[str, float]:
    """Return the mean and the standard deviation of numbers, 1 if all are equal, for a model to standardise them."""
    values = labels.double()
    return {"mean": float(values.mean()), "deviation": float(values.std(correction=0)) or 1.0}


def _target_edge(graph: Data | HeteroData, target: str | None) -> tuple[str, str, str] | None:
    """Return the edge type to predict; None in a homogeneous graph."""
    if not isinstance(graph, HeteroData):
        if target is not None:
            raise ConfigError(f"data.target={target}, and the graph has one type of edges", hint="remove data.target")
        return None
    held_out = [t for t in graph.edge_types if any(f"{split}_edge_index" in graph[t] for split in HELD_OUT)]
    # Commas separate the values of a sweep on the command line.
    choices = {edge_key(edge_type): edge_type for edge_type in graph.edge_types}
    if target is None and len(held_out or choices) == 1:
        return (held_out or list(graph.edge_types))[0]
    by_commas = {",".join(edge_type): edge_type for edge_type in graph.edge_types}
    chosen = choices.get(target or "") or by_commas.get(target or "")
    if chosen is None:
        raise ConfigError(
            f"data.target={target} is not an edge type of the graph"
            if target is not None
            else f"the graph has {len(choices)} edge types, and data.target does not select the one to predict",
            hint=f"set data.target to one of: {'; '.join(choices)}",
        )
    return chosen


def _rows_to_one(x: Tensor) -> Tensor:
    """Scale each row to the sum 1, as is customary for citation graphs; rows with the sum 0 are unchanged."""
    if is_compressed(x):
        return x.with_values(_entries_to_one(x.rows, x.dtype), x.dtype)
    if x.layout == torch.sparse_csr:
        values = _entries_to_one(Csr(x.col_indices(), x.values(), x.crow_indices()), x.dtype)
        return csr_tensor(x.crow_indices(), x.col_indices(), values, (x.size(0), x.size(1)))
    total = x.sum(dim=1, keepdim=True, dtype=torch.float32)
    return x / torch.where(total == 0, torch.ones_like(total), total)


def _entries_to_one(x: Csr, dtype: torch.dtype) -> Tensor:
    """Return the scaled values of sparse rows; see :func:`_rows_to_one`."""
    rows = x.row_of_entry()
    values = torch.ones(len(rows), dtype=dtype) if x.values is None else x.values
    total = torch.zeros(x.num_rows).index_add_(0, rows, values.float())
    return values / torch.where(total == 0, torch.ones_like(total), total)[rows]
