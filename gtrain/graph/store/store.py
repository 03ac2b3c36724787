"""The partitioned store: the on-disk form of a graph that every strategy opens (specification: docs/formats.md).

Everything is keyed by node type and edge type; a homogeneous graph has the types ``node`` and ``node__to__node``::

    <store>/manifest.json
    <store>/names/<node type or "relation">/{offsets,bytes,hashes,order}.npy
    <store>/part-<p>/nodes/<node type>/<tensor>.npy
    <store>/part-<p>/nodes/<node type>/<sparse tensor>.{indptr,indices,values}.npy
    <store>/part-<p>/edges/<src>__<rel>__<dst>/{indptr,indices,edge_id,<tensor>}.npy
    <store>/part-<p>/edges/<src>__<rel>__<dst>/{train,val,test}/{source,target,edge_id,<tensor>}.npy
    <store>/part-<p>/buckets/<src>__<rel>__<dst>/{source,target,<tensor>}.npy

Each node type has *global ids*, which are contiguous per part; within a part, nodes are in locality groups or in the
order of the source data. ``orig_id`` maps them back to the source data's numbering. A part stores the edges that point
at its nodes in CSC form: the in-edges of the part's node ``i`` have the sources ``indices[indptr[i]:indptr[i+1]]``,
global ids that ascend, or that are ordered by ``edge_time`` and then source if edges have times. ``edge_id`` is the
edge's position in the source data; all other edge tensors have the same order. Parallel edges and self-loops are
preserved.

*Held-out* edges (the validation and test edges of a link task, and training edges along which no message passes) are
not in that graph. They are stored with the part of their target, in the order of the source data, with global ids.

*Buckets* are an optional second copy of the edges: bucket (i, j) holds the edges from part i to part j in the order of
the source data, with offsets within the parts as ids. The buckets into one part share its files, bucket (0, j) first.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import StoreError
from gtrain.graph.store.files import bucket_file, edge_file, file_crc, held_out_file, names_file, node_file
from gtrain.graph.store.manifest import (
    COMPRESSED,
    EDGE_TYPE,
    HELD_OUT,
    NODE_TYPE,
    REBUILD,
    EdgeType,
    EdgeTypeSpec,
    Manifest,
    NodeTypeSpec,
    TensorSpec,
    edge_key,
)
from gtrain.graph.store.names import FIELDS, Names
from gtrain.graph.store.tables import compressed_matrix, csr_tensor
from gtrain.memory.files import map_array

_OPENING = threading.Lock()
"""numpy parses a file's header with ``ast``, which is not thread-safe in CPython 3.11 (gh-106905)."""


class Store:
    """A complete store on disk, opened for reading.

    Where a method takes a ``node_type`` or an ``edge_type``, None means the graph's only one.

    Attributes:
        path: the store's folder.
        manifest: its manifest.
        node_types: names of the node types.
        edge_types: the edge types, each (type of the sources, relation, type of the targets).
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.node_types = tuple(manifest.node_types)
        self.edge_types: tuple[EdgeType, ...] = tuple(spec.edge_type for spec in manifest.edge_types.values())
        self._names: dict[str, Names] = {}

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Open the store at ``path`` and check that its files are complete; :meth:`verify` checks their contents.

        Raises:
            StoreError: the store does not exist or has an unknown format, or a file is missing or of the wrong size.
        """
        path = Path(path)
        if not (path / "manifest.json").is_file():
            raise StoreError(
                f"{path} is not a store: it has no manifest.json",
                hint="prepare the store with `gtrain partition`, or delete the folder if it is an incomplete store",
            )
        store = cls(path, Manifest.from_json((path / "manifest.json").read_bytes(), path))
        for name, size in store.manifest.sizes.items():
            file = path / name
            actual = file.stat().st_size if file.is_file() else None
            if actual != size:
                state = "is missing" if actual is None else f"has {actual} bytes, and the manifest says {size}"
                raise StoreError(f"{file} {state}", hint=REBUILD.format(path=path))
        return store._with_all_facts()

    @property
    def is_hetero(self) -> bool:
        """Whether the graph is heterogeneous, that is, has other types than those of a homogeneous graph."""
        return self.node_types != (NODE_TYPE,) or self.edge_types != (EDGE_TYPE,)

    @property
    def num_parts(self) -> int:
        """P, the number of parts."""
        return self.manifest.num_parts

    @property
    def num_nodes(self) -> int:
        """Number of nodes over all parts and types."""
        return sum(spec.offsets[-1] for spec in self.manifest.node_types.values())

    @property
    def num_edges(self) -> int:
        """Number of directed edges over all parts and types; held-out edges are not counted."""
        return sum(spec.num_edges for spec in self.manifest.edge_types.values())

    def num_nodes_of(self, node_type: str | None = None) -> int:
        """Return the number of nodes of one type over all parts."""
        return self._nodes(node_type)[1].offsets[-1]

    def num_edges_of(self, edge_type: EdgeType | None = None) -> int:
        """Return the number of directed edges of one type over all parts; held-out edges are not counted."""
        return self._edges(edge_type).num_edges

    @property
    def offsets(self) -> Tensor:
        """int64 ``[P + 1]``; part p owns the global ids ``offsets[p] .. offsets[p+1]-1``. For one node type only."""
        return self.offsets_of()

    def offsets_of(self, node_type: str | None = None) -> Tensor:
        """Return int64 ``[P + 1]``; part p owns the global ids ``offsets[p] .. offsets[p+1]-1`` of the type."""
        return torch.tensor(self._nodes(node_type)[1].offsets, dtype=torch.int64)

    def split_size(self, split: str, node_type: str | None = None) -> int:
        """Return the number of nodes in ``train``, ``val`` or ``test`` over all parts; 0 without such a split.

        In a heterogeneous graph, ``node_type`` None means the type with labels (``facts["target"]``).
        """
        name, node_type = f"{split}_mask", node_type or self.facts.get("target")
        if name not in self.node_tensors(node_type):
            return 0
        return sum(int(self.node(name, part, node_type).sum()) for part in range(self.num_parts))

    @property
    def facts(self) -> dict[str, Any]:
        """Properties of the data that a model needs; see :class:`~gtrain.graph.store.manifest.Manifest`."""
        return self.manifest.facts

    def node_tensors(self, node_type: str | None = None) -> tuple[str, ...]:
        """Return the names of the node tensors, such as ``x`` and ``orig_id``."""
        return tuple(self._nodes(node_type)[1].tensors)

    def edge_tensors(self, edge_type: EdgeType | None = None) -> tuple[str, ...]:
        """Return the names of the tensors with one row per edge: ``indices``, ``edge_id`` and the data's tensors."""
        return tuple(name for name in self._edges(edge_type).tensors if name != "indptr")

    def node(self, name: str, part: int, node_type: str | None = None) -> Tensor:
        """Memory-map a node tensor of one part, ``[n_p, ...]``, copy-on-write: writes do not reach the disk.

        A tensor stored with the layout ``csr`` is a ``torch.sparse_csr`` tensor over memory-mapped arrays. Dense
        features that are stored in CSR form are a :class:`~gtrain.nn.compressed.CompressedMatrix` over such arrays.
        """
        node_type, spec = self._nodes(node_type)
        tensor = self._spec(spec.tensors, name, f"node tensor of {node_type}")
        if tensor.layout == "dense":
            return self._map(node_file(part, name, node_type))
        indptr, indices = (self._map(node_file(part, f"{name}.{array}", node_type)) for array in ("indptr", "indices"))
        file = node_file(part, f"{name}.values", node_type)
        if tensor.layout == COMPRESSED:
            entries = self._map(file) if file in self.manifest.sizes else None
            return compressed_matrix(indptr, indices, entries, tensor.shape[1], tensor.dtype)
        values = self._map(file)
        return csr_tensor(indptr, indices, values, (indptr.numel() - 1, tensor.shape[1]))

    def edge(self, name: str, part: int, edge_type: EdgeType | None = None) -> Tensor:
        """Memory-map an edge tensor of one part, ``[E_p, ...]``; ``indptr`` is ``[n_p + 1]``."""
        spec = self._edges(edge_type)
        self._spec(spec.tensors, name, f"edge tensor of {edge_key(spec.edge_type)}")
        return self._map(edge_file(part, name, spec.edge_type))

    def held_out(self, name: str, part: int, split: str, edge_type: EdgeType | None = None) -> Tensor:
        """Memory-map a tensor of the held-out edges that point at one part's nodes, ``[e, ...]``.

        Args:
            name: ``source`` or ``target`` (global ids, int64), ``edge_id`` (position among the held-out edges of the
                source data), or a tensor of the data without the split's prefix: ``edge_type``, ``edge_time``...
            part: the part.
            split: ``train``, ``val`` or ``test``.
            edge_type: the edge type.
        """
        spec = self._edges(edge_type)
        if split not in spec.held_out:
            raise StoreError(
                f"the store {self.path} has no {split} edges of the type {edge_key(spec.edge_type)}",
                hint=f"add {split}_edge_index to the source data, or set data.task=link and data.split",
            )
        self._spec(spec.held_out[split].tensors, name, f"tensor of {split} edges")
        return self._map(held_out_file(part, name, split, spec.edge_type))

    def held_out_tensors(self, split: str, edge_type: EdgeType | None = None) -> tuple[str, ...]:
        """Return the names that :meth:`held_out` accepts; empty if the split holds out no edges."""
        spec = self._edges(edge_type).held_out.get(split)
        return tuple(spec.tensors) if spec is not None else ()

    def held_out_size(self, split: str, edge_type: EdgeType | None = None) -> int:
        """Return the number of held-out edges of one type over all parts."""
        spec = self._edges(edge_type).held_out.get(split)
        return sum(spec.num_edges) if spec is not None else 0

    def num_split_edges(self, split: str, edge_type: EdgeType | None = None) -> int:
        """Return the number of edges that a split predicts, over all parts; see :meth:`holds_out`."""
        if self.holds_out(split, edge_type):
            return self.held_out_size(split, edge_type)
        return self.num_edges_of(edge_type) if split == "train" else 0

    def holds_out(self, split: str, edge_type: EdgeType | None = None) -> bool:
        """Return whether no message passes along the edges of one type that a split predicts.

        False for ``train`` where training edges are those of the graph, and for a split without edges.
        """
        return split in self._edges(edge_type).held_out

    @property
    def has_buckets(self) -> bool:
        """Whether the store was written with edge buckets."""
        return any(spec.buckets is not None for spec in self.manifest.edge_types.values())

    def bucket(self, source_part: int, target_part: int, edge_type: EdgeType | None = None) -> dict[str, Tensor]:
        """Memory-map the edges from one part to another, in the order of the source data.

        Returns:
            ``source`` and ``target``, ``[e]`` offsets within their parts (int32 if they fit, else int64), and the
            data's edge tensors, ``[e, ...]``.

        Raises:
            StoreError: the store was written without buckets.
        """
        spec = self._edges(edge_type)
        if spec.buckets is None:
            raise StoreError(
                f"the store {self.path} has no edge buckets",
                hint=f"prepare it for a strategy that needs buckets; {REBUILD.format(path=self.path)}",
            )
        # The buckets into one part lie one behind another in its files.
        start = sum(spec.buckets[part][target_part] for part in range(source_part))
        rows = slice(start, start + spec.buckets[source_part][target_part])
        return {name: self._map(bucket_file(target_part, name, spec.edge_type))[rows] for name in spec.bucket_tensors}

    def names(self, key: str) -> Names | None:
        """Verify and open the string dictionary of a node type or of ``relation``; None if the store has none.

        Raises:
            StoreError: a file of the dictionary is damaged.
        """
        if key in self.manifest.names and key not in self._names:
            self._verify(f"{Path(names_file(key, 'order')).parent.as_posix()}/")
            self._names[key] = Names(*(self._load(names_file(key, field)) for field in FIELDS))
        return self._names.get(key)

    def verify(self, part: int) -> None:
        """Check the checksum of each file of one part.

        The files are read in chunks, not mapped, so that resident memory does not grow.

        Raises:
            StoreError: a file differs from what was written; the message names the first such file.
        """
        self._verify(f"part-{part}/")

    def _verify(self, prefix: str) -> None:
        for name, crc in self.manifest.checksums.items():
            if name.startswith(prefix) and file_crc(self._file(name)) != crc:
                raise StoreError(
                    f"{self.path / name} is damaged: its checksum differs from the manifest's",
                    hint=REBUILD.format(path=self.path),
                )

    def _nodes(self, node_type: str | None) -> tuple[str, NodeTypeSpec]:
        name = self._named(self.manifest.node_types, "node type", node_type)
        return name, self.manifest.node_types[name]

    def _edges(self, edge_type: EdgeType | None) -> EdgeTypeSpec:
        key = None if edge_type is None else edge_key(edge_type)
        return self.manifest.edge_types[self._named(self.manifest.edge_types, "edge type", key)]

    def _named(self, types: Mapping[str, object], what: str, name: str | None) -> str:
        """Return the name of one of these types; None means the only one."""
        if name is None and len(types) != 1:
            raise StoreError(
                f"the store {self.path} has {len(types)} {what}s, and none was named",
                hint=f"name one of {', '.join(types)}, or choose a strategy and a model for heterogeneous graphs",
            )
        name = next(iter(types)) if name is None else name
        if name not in types:
            raise StoreError(f"the store {self.path} has no {what} {name!r}", hint=f"choose one of {', '.join(types)}")
        return name

    def _spec(self, tensors: dict[str, TensorSpec], name: str, what: str) -> TensorSpec:
        if name not in tensors:
            raise StoreError(
                f"the store {self.path} has no {what} called {name!r}; it has {', '.join(tensors)}",
                hint="add this tensor to the source data, or choose another one",
            )
        return tensors[name]

    def _weight_facts(self) -> dict[str, Any]:
        """Compute the facts ``edge_weights`` and ``negative_weight``, which stores of format 2 lack."""
        weights = []
        for edge_type in self.edge_types:
            for part in range(self.num_parts):
                if "edge_weight" in self.edge_tensors(edge_type):
                    weights.append(self.edge("edge_weight", part, edge_type))
                for split in HELD_OUT:
                    if "edge_weight" in self.held_out_tensors(split, edge_type):
                        weights.append(self.held_out("edge_weight", part, split, edge_type))
        limits = [float(limit) for values in weights if values.numel() for limit in values.aminmax()]
        if not limits:
            return {}
        lowest = min(limits)
        facts: dict[str, Any] = {"edge_weights": [lowest, max(limits)]}
        return facts if lowest >= 0 else {**facts, "negative_weight": f"{self.path}: the weight is {lowest:g}"}

    def _with_all_facts(self) -> Self:
        """Add the facts that a store of an earlier format lacks."""
        if self.manifest.format < 3:
            self.facts.update(self._weight_facts())
        return self

    def _file(self, name: str) -> Path:
        """Return the path of a file by its name in the manifest."""
        return self.path / name

    def _map(self, name: str) -> Tensor:
        return torch.from_numpy(self._load(name))

    def _load(self, name: str) -> NDArray[Any]:
        """Map one file copy-on-write: torch warns about read-only arrays."""
        file = self._file(name)
        try:
            with _OPENING:
                return map_array(file)
        except FileNotFoundError:
            raise StoreError(f"{file} is missing", hint=REBUILD.format(path=self.path)) from None
        except ValueError as err:
            raise StoreError(f"{file} is damaged: {err}", hint=REBUILD.format(path=self.path)) from err
