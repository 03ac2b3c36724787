"""The DataModule that all node-level sources share: read, check, split, partition, store, open."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.loader import SeedLoader
from gtrain.data.split import MASKS, SplitOptions, split_nodes
from gtrain.data.validate import labelled_nodes, validate_graph
from gtrain.errors import ConfigError
from gtrain.graph.lock import ensure_store
from gtrain.graph.manifest import FORMAT
from gtrain.graph.partition import METHODS, partition_nodes, read_assignment
from gtrain.graph.store import Store
from gtrain.graph.writer import write_store

log = logging.getLogger("gtrain")


class SharedOptions(TypedDict):
    """Keyword arguments that every source hands on as they are; see :class:`GraphDataModule`."""

    root: NotRequired[str]
    store: NotRequired[str]
    num_parts: NotRequired[int | None]
    partitioner: NotRequired[str]
    partition_path: NotRequired[str | None]
    split: NotRequired[str]
    split_index: NotRequired[int]
    train_fraction: NotRequired[float]
    val_fraction: NotRequired[float]
    train_per_class: NotRequired[int]
    val_per_class: NotRequired[int]
    normalize_features: NotRequired[bool]
    seed: NotRequired[int]
    batch_size: NotRequired[int | None]
    num_neighbors: NotRequired[Sequence[int] | None]
    unlabelled: NotRequired[int | None]


class CommonOptions(SharedOptions):
    """The same, for sources that do not set the number of classes themselves."""

    num_classes: NotRequired[int | None]


class GraphDataModule(pl.LightningDataModule):
    """A graph with a task on its nodes, kept as a partitioned store.

    A source overrides :meth:`identity` and :meth:`read`, and sets ``name``. Everything else is done here: the first
    process that needs the graph reads it, checks it, splits it, partitions it and writes the store; all others open it.

    Args:
        root: folder of the raw files.
        store: folder that the stores are kept in.
        num_parts: parts to cut the graph into; None means one for each rank.
        partitioner: ``metis``, ``random`` or ``file``.
        partition_path: the part of each node, for ``partitioner="file"``.
        split: ``public``, ``random`` or ``per_class``; see :class:`~gtrain.data.split.SplitOptions`, which explains the
            next five too.
        split_index: which of several published splits.
        train_fraction: share of the labelled nodes that train, for ``random``.
        val_fraction: share that validates, for ``random``.
        train_per_class: nodes of each class that train, for ``per_class``.
        val_per_class: nodes of each class that validate, for ``per_class``.
        normalize_features: whether to scale each row of ``x`` to the sum 1.
        seed: seed of generated graphs, of the split, of the partitioner and of the batches' order.
        batch_size: seeds of one optimizer step over all ranks; None means full batch.
        num_neighbors: neighbours to draw for each hop, for strategies that sample.
        unlabelled: the label that means no label; such nodes are in no split.
        num_classes: number of classes, where it is not the largest label + 1.
    """

    name: str = "graph"

    def __init__(
        self,
        *,
        root: str = "data",
        store: str = "data/stores",
        num_parts: int | None = None,
        partitioner: str = "metis",
        partition_path: str | None = None,
        split: str = "public",
        split_index: int = 0,
        train_fraction: float = 0.6,
        val_fraction: float = 0.2,
        train_per_class: int = 20,
        val_per_class: int = 30,
        normalize_features: bool = False,
        seed: int = 0,
        batch_size: int | None = None,
        num_neighbors: Sequence[int] | None = None,
        unlabelled: int | None = None,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        self.root = Path(root).expanduser()
        self.store = Path(store).expanduser()
        self.partitioner = partitioner
        self.partition_path = partition_path
        self.split = SplitOptions(
            split, split_index, train_fraction, val_fraction, train_per_class, val_per_class, seed
        )
        self.normalize_features = normalize_features
        self.seed = seed
        self.batch_size = batch_size
        self.num_neighbors = num_neighbors
        self.unlabelled = unlabelled
        self.num_classes = num_classes
        self._num_parts = num_parts
        self._opened: Store | None = None
        self._prepared = False
        self._check_options()

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the options and the stamps of the input files that identify the graph, as JSON."""

    @abstractmethod
    def read(self) -> Data:
        """Read or generate the graph: ``edge_index``, and ``x``, ``y``, masks and edge tensors where there are any."""

    def fetch(self) -> None:
        """Download raw files that are missing, before the graph is identified; sources that do, override this."""

    def extra_facts(self) -> dict[str, Any]:
        """Return facts of the source's own for the manifest; called after :meth:`read`."""
        return {}

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        return self.name

    @property
    def num_parts(self) -> int:
        """Parts of the store: what was set, or else one for each rank of the attached trainer, or else 1."""
        if self._num_parts is not None:
            return self._num_parts
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def store_path(self) -> Path:
        """Folder of this graph's store; other options have another folder."""
        text = json.dumps(self._source(), sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self.store / f"{self.name}-{self.num_parts}parts-{digest}"

    @property
    def facts(self) -> dict[str, Any]:
        """What a model needs to know: ``num_features``, ``num_classes``, ``multilabel``, ``split``, ``best_acc``..."""
        return dict(self.open_store().facts)

    def prepare_data(self) -> None:
        """Make the store where there is none; safe to call from any number of processes at once."""
        self.fetch()
        ensure_store(self.store_path, self._build, log.debug if self._prepared else log.info)  # said once
        self._prepared = True

    def setup(self, stage: str | None = None) -> None:
        """Open the store."""
        self.open_store()

    def open_store(self) -> Store:
        """Return the store, opened.

        Raises:
            StoreError: it was not prepared, or is damaged.
        """
        if self._opened is None or self._opened.path != self.store_path:
            self._opened = Store.open(self.store_path)
        return self._opened

    def train_dataloader(self) -> SeedLoader:
        """Describe the training batches."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> SeedLoader:
        """Describe the validation batches."""
        return self._loader("val")

    def test_dataloader(self) -> SeedLoader:
        """Describe the test batches."""
        return self._loader("test")

    def predict_dataloader(self) -> SeedLoader:
        """Describe batches over all nodes."""
        return self._loader("predict")

    def _loader(self, split: str, *, shuffle: bool = False) -> SeedLoader:
        return SeedLoader(self.open_store(), split, self.batch_size, self.num_neighbors, shuffle, self.seed)

    def _check_options(self) -> None:
        if self.partitioner not in METHODS:
            raise ConfigError(
                f"data.partitioner={self.partitioner!r} is not a partitioner",
                hint=f"choose one of {', '.join(METHODS)}",
            )
        if (self.partitioner == "file") != (self.partition_path is not None):
            raise ConfigError(
                f"data.partitioner={self.partitioner} with data.partition_path={self.partition_path}",
                hint="set both data.partitioner=file and data.partition_path=FILE, or neither",
            )
        for key in ("_num_parts", "batch_size"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"data.{key.lstrip('_')}={value} is too small", hint="set 1 or more, or null")

    def _source(self) -> dict[str, Any]:
        """Return everything that the contents of the store depend on."""
        partition: dict[str, Any] = {"num_parts": self.num_parts, "partitioner": self.partitioner}
        if self.partition_path is not None:
            partition["file"] = file_stamp(Path(self.partition_path))
        else:
            partition["seed"] = self.seed
        return {
            "format": FORMAT,
            "name": self.name,
            "graph": self.identity(),
            "normalize_features": self.normalize_features,
            "unlabelled": self.unlabelled,
            "num_classes": self.num_classes,
            "split": self.split.identity(),
            "partition": partition,
        }

    def _build(self) -> Store:
        path, num_parts = self.store_path, self.num_parts
        log.info("reading %s", self.name)
        data = self.read()
        facts = validate_graph(data, unlabelled=self.unlabelled, num_classes=self.num_classes, origin=self.origin)
        facts |= {"split": self._apply_split(data), **self.extra_facts()}
        if self.normalize_features and data.x is not None:
            data.x = _rows_to_one(data.x)
        log.info("partitioning %d nodes and %d edges into %d (%s)", *_size(data), num_parts, self.partitioner)
        assignment = self._partition(data, num_parts)
        store = write_store(
            path,
            data,
            assignment,
            num_parts,
            source=self._source(),
            facts=facts,
            partitioner=self.partitioner,
            seed=self.seed,
        )
        log.info("written: the store %s, %d bytes", path, sum(store.manifest.nbytes))
        return store

    def _apply_split(self, data: Data) -> dict[str, Any] | None:
        """Put the masks into ``data``, and return how they were made; None without labels."""
        if not isinstance(data.y, Tensor):
            for name in MASKS:
                data.pop(name, None)
            return None
        if data.y.dim() == 2 and data.y.size(1) == 1:
            data.y = data.y.flatten()
        data.y = data.y.float() if data.y.dim() == 2 else data.y.long()
        masks = split_nodes(data, labelled_nodes(data.y, self.unlabelled), self.split)
        data.update(masks)
        return {**self.split.identity(), "sizes": {name[:-5]: int(mask.sum()) for name, mask in masks.items()}}

    def _partition(self, data: Data, num_parts: int) -> Tensor:
        num_nodes, _ = _size(data)
        assert data.edge_index is not None  # validated
        return partition_nodes(
            data.edge_index,
            num_nodes,
            num_parts,
            self.partitioner,
            seed=self.seed,
            train_mask=data.train_mask if "train_mask" in data else None,
            assignment=read_assignment(self.partition_path) if self.partition_path is not None else None,
            origin=f"data.partition_path={self.partition_path}",
        )


def file_stamp(path: Path) -> list[Any]:
    """Return the name, size in bytes and time of change (ns) of a file; nulls where there is none.

    The folder is left out, so that a file keeps its stamp, and a graph its store, however the path is spelled.
    """
    status = path.stat() if path.is_file() else None
    return [path.name, status and status.st_size, status and status.st_mtime_ns]


def _rows_to_one(x: Tensor) -> Tensor:
    """Scale each row to the sum 1, as the citation graphs' features are by custom; rows of sum 0 stay."""
    total = x.sum(dim=1, keepdim=True, dtype=torch.float32)
    return x / torch.where(total == 0, torch.ones_like(total), total)


def _size(data: Data) -> tuple[int, int]:
    return int(data.num_nodes or 0), int(data.num_edges)
