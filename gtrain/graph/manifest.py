"""The manifest of a store: everything about the stored graph except the tensors themselves."""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtrain.errors import StoreError

FORMAT = 1
"""Version of the on-disk layout; it takes part in a store's name, so a new layout never meets an old store."""

REBUILD = "delete the store's folder ({path}) and run again: it is built anew from the source data"
"""What to do about a store that is damaged or of another format."""

NODE_TYPE = "node"
EDGE_TYPE = ("node", "to", "node")
"""The one node type and the one edge type of a homogeneous graph."""


def edge_key(edge_type: tuple[str, str, str]) -> str:
    """Return the name of an edge type in the manifest and on disk, ``src__rel__dst``."""
    return "__".join(edge_type)


@dataclass(frozen=True)
class TensorSpec:
    """What the parts' arrays of one tensor look like when they are laid end to end.

    Attributes:
        dtype: numpy's name of the element type, such as ``float32``.
        shape: shape of the concatenation over parts: ``[N, ...]`` for node tensors, ``[E, ...]`` for edge tensors,
            ``[N + P]`` for ``indptr`` (each part has one entry more than it has nodes).
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class NodeTypeSpec:
    """One node type.

    Attributes:
        offsets: ``P + 1`` numbers; part ``p`` owns the global ids ``offsets[p] .. offsets[p+1]-1``.
        tensors: the stored node tensors by name; ``orig_id`` is always among them.
    """

    offsets: tuple[int, ...]
    tensors: dict[str, TensorSpec]


@dataclass(frozen=True)
class EdgeTypeSpec:
    """One edge type.

    Attributes:
        num_edges: directed edges over all parts.
        tensors: the stored edge tensors by name; ``indptr``, ``indices`` and ``edge_id`` are always among them.
    """

    num_edges: int
    tensors: dict[str, TensorSpec]


@dataclass(frozen=True)
class PartitionReport:
    """How the graph was cut, and how well. Lists have one entry for each part.

    Attributes:
        partitioner: ``metis``, ``random`` or ``file``.
        seed: seed of the partitioner.
        edge_cut: directed edges whose two ends lie in different parts.
        halo: distinct remote source nodes that the part's edges read.
        nodes: nodes that the part owns.
        edges: edges that the part stores, which are those that point at its nodes.
        train_nodes: nodes of the train split that the part owns; zeros when there is no split.
        imbalance: largest part over mean part, for ``nodes``, ``edges`` and ``train_nodes``; 1.0 is perfect, and
            0.0 stands where there is nothing to balance.
    """

    partitioner: str
    seed: int
    edge_cut: int
    halo: tuple[int, ...]
    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    train_nodes: tuple[int, ...]
    imbalance: dict[str, float]


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``.

    Attributes:
        format: version of the on-disk layout, :data:`FORMAT` when it was written.
        gtrain: version of gtrain that wrote the store, for people; it is not compared.
        num_parts: P, the number of parts.
        node_types: node types by name; ``{"node": ...}`` for a homogeneous graph.
        edge_types: edge types by ``src__rel__dst``; ``{"node__to__node": ...}`` for a homogeneous graph.
        partition: the cut and its quality.
        source: the options that identify the graph, as JSON: two stores with equal source hold the same data.
        facts: what a model needs to know: ``num_features``, ``num_classes`` and ``multilabel`` (both None without
            labels), ``split`` (kind, seed, sizes), and ``best_acc`` where the best possible accuracy is known.
        checksums: crc32 of each file, by its path relative to the store, with ``/`` between folders.
        sizes: bytes of each file, by the same paths.
        nbytes: bytes on disk of each part.
    """

    format: int
    gtrain: str
    num_parts: int
    node_types: dict[str, NodeTypeSpec]
    edge_types: dict[str, EdgeTypeSpec]
    partition: PartitionReport
    source: dict[str, Any]
    facts: dict[str, Any]
    checksums: dict[str, int]
    sizes: dict[str, int]
    nbytes: tuple[int, ...]

    def to_json(self) -> str:
        """Return the manifest as JSON text, with a checksum of itself under ``crc32``."""
        body = dataclasses.asdict(self)
        return json.dumps({**body, "crc32": _crc(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, path: str | Path = "store") -> Manifest:
        """Read what :meth:`to_json` wrote.

        Args:
            text: the JSON text.
            path: the store's folder, for messages.

        Raises:
            StoreError: the text is not JSON, is of another format version, or was changed after it was written.
        """
        hint = REBUILD.format(path=path)
        try:
            body = json.loads(text)
            crc, version = body.pop("crc32"), body["format"]
        except (ValueError, KeyError, AttributeError, TypeError) as err:
            raise StoreError(f"{path}: manifest.json is not a manifest ({err})", hint=hint) from err
        if version != FORMAT:
            raise StoreError(
                f"{path}: the store has format {version}, and this gtrain reads format {FORMAT}", hint=hint
            )
        if crc != _crc(body):
            raise StoreError(f"{path}: manifest.json does not match its own checksum", hint=hint)
        return cls(**{**body, **_typed(body)})


def _crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _typed(body: dict[str, Any]) -> dict[str, Any]:
    """Turn the plain dictionaries of the JSON text back into the manifest's classes."""
    nodes = {k: NodeTypeSpec(tuple(v["offsets"]), _specs(v["tensors"])) for k, v in body["node_types"].items()}
    edges = {k: EdgeTypeSpec(v["num_edges"], _specs(v["tensors"])) for k, v in body["edge_types"].items()}
    report: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in body["partition"].items()}
    return {
        "node_types": nodes,
        "edge_types": edges,
        "partition": PartitionReport(**report),
        "nbytes": tuple(body["nbytes"]),
    }


def _specs(tensors: dict[str, Any]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(spec["dtype"], tuple(spec["shape"])) for name, spec in tensors.items()}
