"""The manifest of a store: the description of the stored graph, without the tensors (see docs/formats.md)."""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gtrain.errors import StoreError

FORMAT = 4
"""Version of the on-disk layout and of the facts in new stores; part of a store's folder name."""

READABLE = (4, 3, 2)
"""Format versions that can be read, the newest first. Formats 3 and 2 lack the layout :data:`COMPRESSED`, and
their training edges are not held out. Format 2 also lacks the facts ``train_classes``, ``numbering``,
``edge_weights`` and ``negative_weight``; :meth:`~gtrain.graph.store.Store.open` computes the last two."""

COMPRESSED = "compressed"
"""The layout of a dense matrix that is stored in CSR form."""

REBUILD = "delete the store's folder ({path}) and run again: it is rebuilt from the source data"
"""Hint for a store that is damaged or of an unknown format version."""

EdgeType = tuple[str, str, str]
"""Type of the sources, relation, type of the targets."""

NODE_TYPE = "node"
EDGE_TYPE: EdgeType = ("node", "to", "node")
"""The node type and the edge type of a homogeneous graph."""

HELD_OUT = ("train", "val", "test")
"""The splits whose edges may be held out of the graph: no message passes along them. Training edges are held out where
edges are predicted that are not part of the graph."""


def edge_key(edge_type: EdgeType) -> str:
    """Return the name of an edge type in the manifest and on disk, ``src__rel__dst``; the names are unique."""
    return "__".join(_unambiguous(word) for word in edge_type)


def safe_name(name: str) -> str:
    """Return a name as one component of a path; identifiers are unchanged, other characters percent-encoded."""
    quoted = quote(name, safe=" ")
    return quoted.replace(".", "%2E") if not quoted.strip(".") else quoted


def _unambiguous(word: str) -> str:
    joins = "__" in word or word.startswith("_") or word.endswith("_") or not word
    return safe_name(word).replace("_", "%5F") if joins else safe_name(word)


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape of a tensor, concatenated over all parts.

    Attributes:
        dtype: numpy's name of the element type, such as ``float32``.
        shape: shape of the concatenation over parts: ``[N, ...]`` for node tensors, ``[E, ...]`` for edge tensors,
            ``[N + P]`` for ``indptr`` (each part has one entry more than it has nodes).
        layout: ``dense``, one file ``<tensor>.npy``; ``csr``, a sparse matrix in the three files
            ``<tensor>.indptr.npy``, ``<tensor>.indices.npy`` and ``<tensor>.values.npy``; or ``compressed``, a dense
            matrix in the same three files, of which ``values`` is missing if every entry is 1.
        nnz: stored entries of the layouts ``csr`` and ``compressed``; None for ``dense``.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str = "dense"
    nnz: int | None = None


@dataclass(frozen=True)
class NodeTypeSpec:
    """One node type.

    Attributes:
        offsets: ``P + 1`` numbers; part ``p`` owns the global ids ``offsets[p] .. offsets[p+1]-1`` of this type.
        tensors: the stored node tensors by name; ``orig_id`` is always among them.
    """

    offsets: tuple[int, ...]
    tensors: dict[str, TensorSpec]


@dataclass(frozen=True)
class HeldOutSpec:
    """The edges of one type that one split holds out.

    Attributes:
        num_edges: for each part, the edges that point at its nodes.
        tensors: their tensors by name; ``source``, ``target`` and ``edge_id`` are always among them.
    """

    num_edges: tuple[int, ...]
    tensors: dict[str, TensorSpec]


@dataclass(frozen=True)
class EdgeTypeSpec:
    """One edge type.

    Attributes:
        edge_type: type of the sources, relation, type of the targets.
        num_edges: directed edges over all parts, held-out ones not counted.
        tensors: the stored edge tensors by name; ``indptr``, ``indices`` and ``edge_id`` are always among them.
        held_out: the held-out edges, by split; empty if no edges are held out.
        buckets: ``buckets[i][j]`` is the number of edges from part i to part j; None if the store has no buckets.
        bucket_tensors: the tensors of the buckets by name; ``source`` and ``target`` are among them.
    """

    edge_type: EdgeType
    num_edges: int
    tensors: dict[str, TensorSpec]
    held_out: dict[str, HeldOutSpec] = field(default_factory=dict)
    buckets: tuple[tuple[int, ...], ...] | None = None
    bucket_tensors: dict[str, TensorSpec] = field(default_factory=dict)


@dataclass(frozen=True)
class PartitionReport:
    """The partitioning method and the quality of its cut. Tuples have one entry per part, summed over all types.

    Attributes:
        partitioner: name of the method, such as ``metis`` or ``file``.
        seed: seed of the partitioner.
        edge_cut: directed edges between different parts.
        halo: distinct remote source nodes that the part's edges read.
        nodes: nodes that the part owns.
        edges: edges that the part stores: those that point at its nodes.
        train_nodes: nodes of the train split that the part owns; zeros without a split.
        imbalance: largest part over mean part, for ``nodes``, ``edges`` and ``train_nodes``; 1.0 is perfect, 0.0 means
            nothing to balance.
        nodes_by_type: ``nodes`` of each node type.
        edges_by_type: ``edges`` of each edge type, by :func:`edge_key`.
        edge_cut_by_type: ``edge_cut`` of each edge type, by :func:`edge_key`.
    """

    partitioner: str
    seed: int
    edge_cut: int
    halo: tuple[int, ...]
    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    train_nodes: tuple[int, ...]
    imbalance: dict[str, float]
    nodes_by_type: dict[str, tuple[int, ...]]
    edges_by_type: dict[str, tuple[int, ...]]
    edge_cut_by_type: dict[str, int]


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``.

    Attributes:
        format: version of the on-disk layout, one of :data:`READABLE`.
        gtrain: version of gtrain that wrote the store, for information only.
        num_parts: P, the number of parts.
        node_types: node types by name; ``{"node": ...}`` for a homogeneous graph.
        edge_types: edge types by :func:`edge_key`; ``{"node__to__node": ...}`` for a homogeneous graph.
        names: number of entries of each string dictionary, by node type or ``relation``.
        partition: the partitioning and its quality.
        source: the options that identify the graph, as JSON: stores with equal ``source`` hold the same data.
        facts: properties of the data that a model needs: ``num_features``, ``num_classes`` and ``multilabel`` (both
            None without labels), ``split`` (method, seed, sizes), ``target`` (the node type with labels; None in a
            homogeneous graph), ``train_classes`` (training nodes of each class; earlier, of two classes alone),
            ``label_scale`` (``mean`` and ``deviation`` of the training labels, if they are numbers to predict; there
            are no classes then), ``best_acc`` if the best possible accuracy is known, ``edge_weights`` and
            ``negative_weight`` (see :func:`~gtrain.data.prepare.validate.weight_facts`), and ``numbering`` (the options
            that determine the ids of nodes or feature columns without names).
        checksums: crc32 of each file, by its path relative to the store, with ``/`` between folders.
        sizes: bytes of each file, by the same paths.
        nbytes: bytes on disk of each part.
    """

    format: int
    gtrain: str
    num_parts: int
    node_types: dict[str, NodeTypeSpec]
    edge_types: dict[str, EdgeTypeSpec]
    names: dict[str, int]
    partition: PartitionReport
    source: dict[str, Any]
    facts: dict[str, Any]
    checksums: dict[str, int]
    sizes: dict[str, int]
    nbytes: tuple[int, ...]

    def to_json(self) -> str:
        """Return the manifest as JSON text, with the checksum of its contents under ``crc32``."""
        body = dataclasses.asdict(self)
        return json.dumps({**body, "crc32": _crc(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, path: str | Path = "store") -> Manifest:
        """Parse the output of :meth:`to_json`.

        Args:
            text: the JSON text.
            path: the store's folder, for messages.

        Raises:
            StoreError: the text is not a manifest, has an unknown format version, or does not match its checksum.
        """
        hint = REBUILD.format(path=path)
        try:
            body = json.loads(text)
            crc, version = body.pop("crc32"), body["format"]
        except (ValueError, KeyError, AttributeError, TypeError) as err:
            raise StoreError(f"{path}: manifest.json is not a manifest ({err})", hint=hint) from err
        if version not in READABLE:
            *others, newest = map(str, sorted(READABLE))
            formats = f"{', '.join(others)} and {newest}"
            raise StoreError(
                f"{path}: the store has format {version}, and this gtrain reads formats {formats}", hint=hint
            )
        if crc != _crc(body):
            raise StoreError(f"{path}: manifest.json does not match its own checksum", hint=hint)
        nodes = {k: NodeTypeSpec(tuple(v["offsets"]), _specs(v["tensors"])) for k, v in body["node_types"].items()}
        typed = {
            "node_types": nodes,
            "edge_types": {k: _edge_spec(v) for k, v in body["edge_types"].items()},
            "partition": PartitionReport(**{k: _tuples(v) for k, v in body["partition"].items()}),
            "nbytes": tuple(body["nbytes"]),
        }
        return cls(**{**body, **typed})


def _crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _edge_spec(body: dict[str, Any]) -> EdgeTypeSpec:
    held_out = {k: HeldOutSpec(tuple(v["num_edges"]), _specs(v["tensors"])) for k, v in body["held_out"].items()}
    return EdgeTypeSpec(
        edge_type=_tuples(body["edge_type"]),
        num_edges=body["num_edges"],
        tensors=_specs(body["tensors"]),
        held_out=held_out,
        buckets=_tuples(body["buckets"]),
        bucket_tensors=_specs(body["bucket_tensors"]),
    )


def _specs(tensors: dict[str, Any]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for name, spec in tensors.items()}


def _tuples(value: Any) -> Any:
    """Convert the lists in a JSON value to tuples, at any depth."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return {key: _tuples(item) for key, item in value.items()} if isinstance(value, dict) else value
