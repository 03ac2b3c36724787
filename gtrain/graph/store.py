"""The partitioned store: the on-disk form of a graph that every strategy opens.

Layout, everything keyed by node type and edge type (a homogeneous graph has one of each, ``node`` and
``node__to__node``)::

    <store>/manifest.json
    <store>/part-<p>/nodes/<node type>/<tensor>.npy
    <store>/part-<p>/edges/<src>__<rel>__<dst>/{indptr,indices,edge_id,<tensor>}.npy

Nodes are renumbered so that each part's nodes are contiguous; inside a part they keep the order of the source data.
These are the *global ids*; ``orig_id`` leads back to the source data's numbering. A part stores the edges that point at
its nodes, by column (CSC): the in-edges of the part's node ``i`` are ``indices[indptr[i]:indptr[i+1]]``, global ids
of the sources in ascending order; ``edge_id`` is the edge's position in the source data, and every other edge tensor
lies in the same order. Parallel edges and self-loops are kept as they are.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.errors import StoreError
from gtrain.graph.manifest import EDGE_TYPE, NODE_TYPE, REBUILD, EdgeTypeSpec, Manifest, NodeTypeSpec, edge_key


class Store:
    """A complete store on disk, opened for reading.

    Attributes:
        path: the store's folder.
        manifest: its manifest.
        offsets: int64 ``[P + 1]``; part p owns the global ids ``offsets[p] .. offsets[p+1]-1``.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.offsets = torch.tensor(self._nodes.offsets, dtype=torch.int64)

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Open the store at ``path``, checking that it is complete; :meth:`verify` checks what the files hold.

        Raises:
            StoreError: there is no store, it is of another format, or a file is missing or of the wrong size.
        """
        path = Path(path)
        if not (path / "manifest.json").is_file():
            raise StoreError(
                f"there is no store at {path}: it has no manifest.json",
                hint="prepare it first with `gtrain partition`, or delete the folder if it is the rest of one",
            )
        store = cls(path, Manifest.from_json((path / "manifest.json").read_bytes(), path))
        store._check_sizes()
        return store

    @property
    def num_parts(self) -> int:
        """P, the number of parts."""
        return self.manifest.num_parts

    @property
    def num_nodes(self) -> int:
        """N, the number of nodes over all parts."""
        return self._nodes.offsets[-1]

    @property
    def num_edges(self) -> int:
        """E, the number of directed edges over all parts."""
        return self._edges.num_edges

    def split_size(self, split: str) -> int:
        """Return the nodes in ``train``, ``val`` or ``test`` over all parts; 0 where there is no such split."""
        name = f"{split}_mask"
        if name not in self.node_names:
            return 0
        return sum(int(self.node(name, part).sum()) for part in range(self.num_parts))

    @property
    def facts(self) -> dict[str, Any]:
        """What a model needs to know of the data; see :class:`~gtrain.graph.manifest.Manifest`."""
        return self.manifest.facts

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the node tensors, such as ``x`` and ``orig_id``."""
        return tuple(self._nodes.tensors)

    @property
    def edge_names(self) -> tuple[str, ...]:
        """Names of the edge tensors that have one row for each edge: ``indices``, ``edge_id`` and the data's own."""
        return tuple(name for name in self._edges.tensors if name != "indptr")

    def node(self, name: str, part: int) -> Tensor:
        """Memory-map a node tensor of one part, ``[n_p, ...]``; writing to it does not reach the disk."""
        return self._map(self.path / node_file(part, name))

    def edge(self, name: str, part: int) -> Tensor:
        """Memory-map an edge tensor of one part, ``[E_p, ...]``; ``indptr`` is ``[n_p + 1]``."""
        return self._map(self.path / edge_file(part, name))

    def verify(self, part: int) -> None:
        """Compare the checksum of each file of one part.

        The files are read in chunks and not mapped, so that resident memory stays what it was.

        Raises:
            StoreError: names the first file that differs from what was written.
        """
        for name, crc in self.manifest.checksums.items():
            if name.startswith(f"part-{part}/") and file_crc(self.path / name) != crc:
                raise StoreError(
                    f"{self.path / name} is damaged: its checksum is not that of the manifest",
                    hint=REBUILD.format(path=self.path),
                )

    @property
    def _nodes(self) -> NodeTypeSpec:
        return self.manifest.node_types[NODE_TYPE]

    @property
    def _edges(self) -> EdgeTypeSpec:
        return self.manifest.edge_types[edge_key(EDGE_TYPE)]

    def _check_sizes(self) -> None:
        for name, size in self.manifest.sizes.items():
            file = self.path / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes and the manifest says {size}"
                raise StoreError(f"{file} {state}", hint=REBUILD.format(path=self.path))

    def _map(self, file: Path) -> Tensor:
        """Open one file copy-on-write: torch takes no read-only array without a warning."""
        try:
            array = np.load(file, mmap_mode="c")
        except FileNotFoundError:
            raise StoreError(
                f"the store {self.path} has no {file.relative_to(self.path)}",
                hint=f"add such a tensor to the source data if it has none; {REBUILD.format(path=self.path)}",
            ) from None
        except ValueError as err:
            raise StoreError(f"{file} is damaged: {err}", hint=REBUILD.format(path=self.path)) from err
        return torch.from_numpy(array) if math.prod(array.shape) else torch.from_numpy(np.array(array))


def node_file(part: int, name: str, node_type: str = NODE_TYPE) -> str:
    """Return the path of a node tensor relative to the store."""
    return f"part-{part}/nodes/{node_type}/{name}.npy"


def edge_file(part: int, name: str, edge_type: tuple[str, str, str] = EDGE_TYPE) -> str:
    """Return the path of an edge tensor relative to the store."""
    return f"part-{part}/edges/{edge_key(edge_type)}/{name}.npy"


def file_crc(path: Path, chunk: int = 1 << 22) -> int:
    """Return the crc32 of a file, holding ``chunk`` bytes of it in memory at a time."""
    crc, buffer = 0, bytearray(chunk)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
    return crc
