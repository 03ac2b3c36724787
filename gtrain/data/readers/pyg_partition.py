"""Read the folders of PyG's Partitioner and restore the original order of nodes and edges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtrain.data.readers.files import load_tensors
from gtrain.errors import DataError

EdgeType = tuple[str, str, str]

NODE = "node"
EDGE: EdgeType = (NODE, "to", NODE)
"""The types of a homogeneous folder."""

HINT = "copy all files of the folder again, or partition the data again with torch_geometric.distributed.Partitioner"


@dataclass(frozen=True)
class PartitionMeta:
    """The contents of ``META.json``.

    Attributes:
        folder: the folder of the file.
        num_parts: number of parts.
        node_types: node types, ``node`` in a homogeneous folder.
        edge_types: edge types, ``node, to, node`` in a homogeneous folder.
        is_hetero: whether the folder has types.
    """

    folder: Path
    num_parts: int
    node_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]
    is_hetero: bool

    def map_paths(self) -> dict[str | EdgeType, Path]:
        """Return the files with the part of each node and of each edge, by type."""
        if not self.is_hetero:
            return {NODE: self.folder / "node_map.pt", EDGE: self.folder / "edge_map.pt"}
        return {name: self.folder / "node_map" / f"{name}.pt" for name in self.node_types} | {
            name: self.folder / "edge_map" / f"{'__'.join(name)}.pt" for name in self.edge_types
        }


def read_meta(folder: Path) -> PartitionMeta:
    """Read and check ``META.json``.

    Raises:
        DataError: it is missing or malformed, or a part is missing.
    """
    path = folder / "META.json"
    if not path.is_file():
        raise DataError(
            f"{folder} has no META.json", hint="set data.path to the root folder of PyG's Partitioner, not to a part"
        )
    try:
        content = json.loads(path.read_text())
        hetero = bool(content["is_hetero"])
        nodes = tuple(str(name) for name in content["node_types"]) if hetero else (NODE,)
        edges = tuple((str(s), str(r), str(t)) for s, r, t in content["edge_types"]) if hetero else (EDGE,)
        meta = PartitionMeta(folder, int(content["num_parts"]), nodes, edges, hetero)
    except (ValueError, KeyError, TypeError) as err:
        reason = f"no {err.args[0]!r}" if isinstance(err, KeyError) else str(err)
        raise DataError(f"{path} cannot be read as PyG's Partitioner writes it: {reason}", hint=HINT) from err
    for part in range(meta.num_parts):
        if not (folder / f"part_{part}" / "graph.pt").is_file():
            raise DataError(
                f"{folder} has no part_{part}/graph.pt, and META.json says that there are {meta.num_parts} parts",
                hint=HINT,
            )
    return meta


def read_maps(meta: PartitionMeta) -> tuple[dict[str, Tensor], dict[EdgeType, Tensor]]:
    """Return the part of each node and of each edge, int64, by type."""
    of_nodes: dict[str, Tensor] = {}
    of_edges: dict[EdgeType, Tensor] = {}
    for name, path in meta.map_paths().items():
        parts = _load(path)
        if not isinstance(parts, Tensor) or parts.dim() != 1 or parts.is_floating_point():
            raise DataError(f"{path} is not a row of part numbers", hint=HINT)
        outside = parts[(parts < 0) | (parts >= meta.num_parts)]
        if outside.numel():
            raise DataError(f"{path} names part {int(outside[0])}; there are {meta.num_parts} parts", hint=HINT)
        if isinstance(name, str):
            of_nodes[name] = parts.long()
        else:
            of_edges[name] = parts.long()
    return of_nodes, of_edges


def read_part(meta: PartitionMeta, part: int, stem: str, *, mapped: bool = False) -> dict[Any, dict[str, Any]]:
    """Return the contents of a part's file by type; empty if the file is missing.

    Args:
        meta: the folder.
        part: the part's number.
        stem: ``graph``, ``node_feats`` or ``edge_feats``.
        mapped: whether to memory-map the tensors instead of reading them.

    Raises:
        DataError: the file is damaged or holds other objects, or ``graph`` is missing.
    """
    path = meta.folder / f"part_{part}" / f"{stem}.pt"
    if stem != "graph" and not path.is_file():
        return {}
    content = _load(path, mapped=mapped)
    if not isinstance(content, dict) or (meta.is_hetero and not all(isinstance(v, dict) for v in content.values())):
        raise DataError(f"{path} holds no dictionary of tensors", hint=HINT)
    if meta.is_hetero:
        return content
    return {NODE if stem == "node_feats" else EDGE: content}


def _load(path: Path, *, mapped: bool = False) -> Any:
    if not path.is_file():
        raise DataError(f"{path} is missing", hint=HINT)
    with _containers_only():
        return load_tensors(path, HINT, mapped=mapped)


class PartitionedRows:
    """Tensors with one row per node or edge of a type, assembled from the rows of each part.

    Args:
        parts: the part of each row, ``[rows]``.
        elements: ``nodes`` or ``edges`` and their type, for messages.
    """

    def __init__(self, parts: Tensor, elements: str) -> None:
        self.parts, self.total, self.elements = parts, parts.numel(), elements
        self._tensors: dict[str, Tensor] = {}
        self._filled: dict[str, int] = {}

    def check(self, ids: Tensor, part: int, path: Path) -> None:
        """Check that the ids in a part's file are in range, distinct, and owned by the part."""
        wrong = (ids < 0) | (ids >= self.total)
        if wrong.any():
            raise DataError(f"{path}: id {int(ids[wrong][0])}; there are {self.total} {self.elements}", hint=HINT)
        foreign = ids[self.parts[ids] != part]
        if foreign.numel():
            owner = int(self.parts[foreign[0]])
            raise DataError(
                f"{path} has id {int(foreign[0])} of {self.elements}, which the map assigns to part {owner}", hint=HINT
            )
        if ids.unique().numel() != ids.numel():
            raise DataError(f"{path} has an id of {self.elements} twice", hint=HINT)

    def put(self, name: str, ids: Tensor, value: object, path: Path) -> None:
        """Write the rows ``ids`` of a tensor."""
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.dim() == 0:
            content = f"a {value.layout} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise DataError(f"{path}: {name} is {content}; a dense tensor is expected", hint=HINT)
        if value.size(0) != ids.numel():
            raise DataError(
                f"{path}: {name} has {value.size(0)} rows, and the part has {ids.numel()} {self.elements}", hint=HINT
            )
        whole = self._tensors.setdefault(name, value.new_zeros((self.total, *value.shape[1:])))
        if (whole.dtype, whole.shape[1:]) != (value.dtype, value.shape[1:]):
            raise DataError(
                f"{path}: a row of {name} is {value.dtype} {list(value.shape[1:])}, and in another part {whole.dtype} "
                f"{list(whole.shape[1:])}",
                hint=HINT,
            )
        whole[ids] = value
        self._filled[name] = self._filled.get(name, 0) + ids.numel()

    def complete(self, folder: Path) -> dict[str, Tensor]:
        """Return the tensors after checking that the parts filled all rows."""
        for name, filled in self._filled.items():
            if filled != self.total:
                raise DataError(
                    f"{folder}: the parts have {name} of {filled} {self.elements}; there are {self.total}", hint=HINT
                )
        return self._tensors


@contextmanager
def _containers_only() -> Iterator[None]:
    """Restrict ``torch.load`` to tensors and plain containers.

    The Partitioner saves a ``defaultdict``, which torch's safe loader constructs but cannot fill, so a plain dictionary
    replaces it. PyG registers safe classes that would take precedence, so the list is cleared first.
    """
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals([(_plain_dict, "collections.defaultdict"), (dict, "builtins.dict")]):
            yield
    finally:
        torch.serialization.add_safe_globals(allowed)


def _plain_dict(*_: object) -> dict[Any, Any]:
    return {}
