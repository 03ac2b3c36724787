"""Reading the folders of PyG's Partitioner: parts of a graph, put back into the order of its ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
"""What the types of a homogeneous folder are called here."""

ANEW = "copy all files of the folder again, or partition the data anew with torch_geometric.distributed.Partitioner"


@dataclass(frozen=True)
class Meta:
    """What ``META.json`` says.

    Attributes:
        folder: where it lies.
        num_parts: parts.
        node_types: node types, ``node`` in a homogeneous folder.
        edge_types: edge types, ``node, to, node`` in a homogeneous folder.
        is_hetero: whether the folder has types.
    """

    folder: Path
    num_parts: int
    node_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]
    is_hetero: bool


def read_meta(folder: Path) -> Meta:
    """Read and check ``META.json``."""
    path = folder / "META.json"
    if not path.is_file():
        raise DataError(
            f"{folder} has no META.json", hint="set data.path to the root folder of PyG's Partitioner, not to a part"
        )
    try:
        found = json.loads(path.read_text())
        hetero = bool(found["is_hetero"])
        nodes = tuple(str(name) for name in found["node_types"]) if hetero else (NODE,)
        edges = tuple((str(s), str(r), str(t)) for s, r, t in found["edge_types"]) if hetero else (EDGE,)
        meta = Meta(folder, int(found["num_parts"]), nodes, edges, hetero)
    except (ValueError, KeyError, TypeError) as err:
        reason = f"no {err.args[0]!r}" if isinstance(err, KeyError) else str(err)
        raise DataError(f"{path} cannot be read as PyG's Partitioner writes it: {reason}", hint=ANEW) from err
    for part in range(meta.num_parts):
        if not (folder / f"part_{part}" / "graph.pt").is_file():
            raise DataError(
                f"{folder} has no part_{part}/graph.pt, and META.json says that there are {meta.num_parts} parts",
                hint=ANEW,
            )
    return meta


def node_maps(meta: Meta) -> dict[str, Tensor]:
    """Return the part of each node, by type."""
    if not meta.is_hetero:
        return {NODE: _map(meta, meta.folder / "node_map.pt")}
    return {name: _map(meta, meta.folder / "node_map" / f"{name}.pt") for name in meta.node_types}


def edge_maps(meta: Meta) -> dict[EdgeType, Tensor]:
    """Return the part of each edge, by type."""
    if not meta.is_hetero:
        return {EDGE: _map(meta, meta.folder / "edge_map.pt")}
    return {name: _map(meta, meta.folder / "edge_map" / f"{'__'.join(name)}.pt") for name in meta.edge_types}


def map_files(meta: Meta) -> list[Path]:
    """Return the files that say the part of each node and of each edge."""
    if not meta.is_hetero:
        return [meta.folder / "node_map.pt", meta.folder / "edge_map.pt"]
    names = [("node_map", name) for name in meta.node_types] + [("edge_map", "__".join(e)) for e in meta.edge_types]
    return [meta.folder / kind / f"{name}.pt" for kind, name in names]


def read_part(meta: Meta, part: int, kind: str, *, mapped: bool = False) -> dict[Any, dict[str, Any]]:
    """Return a file of a part by type; nothing where it is missing.

    Args:
        meta: the folder.
        part: which part.
        kind: ``graph``, ``node_feats`` or ``edge_feats``.
        mapped: whether to map the tensors instead of reading them.
    """
    path = meta.folder / f"part_{part}" / f"{kind}.pt"
    if kind != "graph" and not path.is_file():
        return {}
    found = load(path, mapped=mapped)
    if not isinstance(found, dict) or (meta.is_hetero and not all(isinstance(v, dict) for v in found.values())):
        raise DataError(f"{path} holds no dictionary of tensors", hint=ANEW)
    if meta.is_hetero:
        return found
    return {NODE if kind == "node_feats" else EDGE: found}


def load(path: Path, *, mapped: bool = False) -> Any:
    """Load a file that holds tensors in dictionaries and lists, and refuse all else."""
    if not path.is_file():
        raise no_file(path)
    with _containers_only():
        return load_tensors(path, ANEW, mapped=mapped)


def no_file(path: Path) -> DataError:
    """Return the error for a file that is missing."""
    return DataError(f"there is no {path}", hint=ANEW)


class Rows:
    """Tensors with a row for each node or edge, filled part by part.

    Args:
        total: rows.
        parts: the part of each row, ``[total]``.
        what: ``nodes`` or ``edges`` and their type, for messages.
    """

    def __init__(self, total: int, parts: Tensor, what: str) -> None:
        self.total = total
        self.parts = parts
        self.what = what
        self.tensors: dict[str, Tensor] = {}
        self.filled: dict[str, int] = {}

    def check(self, ids: Tensor, part: int, path: Path) -> None:
        """Check that ids are in range, and of that part."""
        wrong = (ids < 0) | (ids >= self.total)
        if wrong.any():
            found = int(ids[wrong][0])
            raise DataError(f"{path}: id {found}, and there are {self.total} {self.what}", hint=ANEW)
        strange = self.parts[ids] != part
        if strange.any():
            found = int(ids[strange][0])
            owner = int(self.parts[found])
            raise DataError(f"{path} has id {found} of {self.what}, and the map gives it to part {owner}", hint=ANEW)
        if ids.unique().numel() != ids.numel():
            raise DataError(f"{path} has an id of {self.what} twice", hint=ANEW)

    def put(self, name: str, ids: Tensor, value: object, path: Path) -> None:
        """Put the rows ``ids`` of a tensor into their places."""
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.dim() == 0:
            found = f"a {value.layout} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise DataError(f"{path}: {name} is {found}, and a dense tensor is expected", hint=ANEW)
        if value.size(0) != ids.numel():
            raise DataError(
                f"{path}: {name} has {value.size(0)} rows, and the part has {ids.numel()} {self.what}", hint=ANEW
            )
        whole = self.tensors.setdefault(name, value.new_zeros((self.total, *value.shape[1:])))
        if (whole.dtype, whole.shape[1:]) != (value.dtype, value.shape[1:]):
            raise DataError(
                f"{path}: a row of {name} is {value.dtype} {list(value.shape[1:])}, and in another part {whole.dtype} "
                f"{list(whole.shape[1:])}",
                hint=ANEW,
            )
        whole[ids] = value
        self.filled[name] = self.filled.get(name, 0) + ids.numel()

    def complete(self, folder: Path) -> Mapping[str, Tensor]:
        """Return the tensors, all rows of which the parts must have filled."""
        for name, filled in self.filled.items():
            if filled != self.total:
                raise DataError(
                    f"{folder}: the parts have {name} of {filled} {self.what}, and there are {self.total}", hint=ANEW
                )
        return self.tensors


@contextmanager
def _containers_only() -> Iterator[None]:
    """Let nothing but tensors and plain containers be loaded.

    The Partitioner saves a ``defaultdict``, which torch's safe loader constructs but cannot fill, so that a plain
    dictionary has to stand in for it; and PyG's own entries in torch's list of safe classes would come before ours.
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


def _map(meta: Meta, path: Path) -> Tensor:
    parts = load(path)
    if not isinstance(parts, Tensor) or parts.dim() != 1 or parts.is_floating_point():
        raise DataError(f"{path} is no row of part numbers", hint=ANEW)
    if parts.numel() and not 0 <= int(parts.min()) <= int(parts.max()) < meta.num_parts:
        wrong = int(parts.max()) if int(parts.max()) >= meta.num_parts else int(parts.min())
        raise DataError(f"{path} names part {wrong}, and there are {meta.num_parts} parts", hint=ANEW)
    return parts.long()
