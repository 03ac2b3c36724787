"""The DataModule that all node-level sources share: read, check, split, partition, store, open."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
from torch import Tensor

from gtrain.data.batches.loader import SeedLoader, has_split, num_link_seeds
from gtrain.data.batches.sampling import Sampling
from gtrain.data.config import DataConfig
from gtrain.data.prepare import Graph, Names, Preparation, cut, describe, group, prepare_graph
from gtrain.data.prepare.split import SplitOptions
from gtrain.data.prepare.validate import weight_facts
from gtrain.data.schema import DataSchema, kept_together
from gtrain.errors import ConfigError, DataError, negative_weight, zero_weights
from gtrain.graph.partition import AUTO, installed_method, metis
from gtrain.graph.partition.metis import GROUP_NODES
from gtrain.graph.sampling.options import checked_fan_out
from gtrain.graph.store import Store
from gtrain.graph.store.lock import ensure_store
from gtrain.graph.store.manifest import FORMAT, READABLE
from gtrain.graph.store.writer import write_store
from gtrain.settings import made, parameters, part, signature_of

log = logging.getLogger("gtrain")


OUTLINE: dict[str, Any] = {
    **{"num_nodes": 16, "num_features": 16, "sparse_features": False, "num_relations": None},
    **{"num_classes": 2, "multilabel": False},
}
"""The outline of a graph with dense features and labels; see :attr:`GraphDataModule.outline`."""
SPARSE_OUTLINE = {**OUTLINE, "sparse_features": True}
TRIPLES_OUTLINE = {**OUTLINE, "num_features": None, "num_classes": None, "num_relations": 2}
EVENTS_OUTLINE = {**TRIPLES_OUTLINE, "num_relations": None}


class GraphDataModule(pl.LightningDataModule):
    """A graph with a task on its nodes or its edges, kept as a partitioned store.

    A source overrides :meth:`identity` and :meth:`read`, and sets ``name``. Everything else is done here: the first
    process that needs the graph reads it, checks it, splits it, partitions it and writes the store; all others open it.
    Rows of sparse features are nodes of a graph without edges.

    Args:
        settings: an object of :attr:`settings_type`; None: made of the keywords.
        keywords: settings by name; they replace those of ``settings``.

    Attributes:
        settings: all settings.

    Raises:
        ConfigError: a setting is unknown or missing, or has a value that is not allowed.
    """

    settings_type: ClassVar[type[DataConfig]] = DataConfig
    """The dataclass that declares the settings, which are the constructor's keywords."""
    settings: DataConfig
    name: str = "graph"
    schema: DataSchema = DataSchema(None, None)
    """Entity types and relations, of sources that can have them."""
    outline: Mapping[str, Any] | None = None
    """Facts that decide a model's form, where the source knows them before it reads the graph; any numbers will do."""
    edge_buckets: bool = False
    """Whether the store holds the edges once more by pairs of parts, for strategies that train in buckets."""
    parts_key: str = "data.num_parts"
    """The setting that the number of parts comes from, for messages; a backend may have one of its own."""
    weight_demand: str | Callable[[GraphDataModule], str | None] | None = None
    """Why edge weights have to be 0 or more, as :func:`~gtrain.model.inputs.weight_demand` says it: a negative weight
    is refused as it is read. None: weights may be negative. A function is called with this DataModule at the first
    negative weight. Strategies set it for the model that they train."""
    zero_demand: str | Callable[[GraphDataModule], str | None] | None = None
    """The same of a graph all of whose edge weights are 0, as :func:`~gtrain.model.inputs.zero_demand` says it: it is
    refused before it is partitioned."""
    make_apart: Callable[[Callable[[], Store]], dict[str, int]] | None = None
    """Calls a function in a process of its own and returns the peaks of its memory: ranks have the store made there.
    None: the store is made in the process that asks for it."""
    made: dict[str, int] | None = None
    """What :attr:`make_apart` returned where this process had the store made."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the settings as the constructor's parameters."""
        super().__init_subclass__(**kwargs)
        own = "settings_type" in vars(cls)
        cls.__signature__ = signature_of(  # type: ignore[attr-defined]
            cls, lambda: parameters(cls.settings_type, hidden=("_target_",)), own=own
        )

    def __init__(self, settings: DataConfig | None = None, **keywords: Any) -> None:
        super().__init__()
        self.settings = given = made(self.settings_type, type(self).__name__, settings, keywords)
        self.root = Path(given.root).expanduser()
        self.store = Path(given.store).expanduser()
        self.partitioner = given.partitioner
        self.partition_path = given.partition_path
        self.split = SplitOptions(
            given.split,
            given.split_index,
            given.train_fraction,
            given.val_fraction,
            given.train_per_class,
            given.val_per_class,
            given.seed,
        )
        self.normalize_features = given.normalize_features
        self.seed = given.seed
        self.batch_size = given.batch_size
        self.num_neighbors = None if given.num_neighbors is None else checked_fan_out(given.num_neighbors)
        self.sampling = part(Sampling, given)
        self.unlabelled = given.unlabelled
        self.num_classes = given.num_classes
        self.task = given.task
        self.target = given.target
        self._num_parts = given.num_parts
        self._opened: Store | None = None
        self._prepared = False

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the options and the stamps of the input files that identify the graph, as JSON."""

    @abstractmethod
    def read(self) -> Graph:
        """Read or generate the graph, with these tensors where there are any.

        Nodes: ``x`` (float [N, F], dense or sparse CSR), ``y`` ([N], or [N, C] for several labels), ``train_mask``,
        ``val_mask``, ``test_mask`` (bool), ``time`` (int64 [N]). Edges: ``edge_index`` (int64 [2, E]), ``edge_weight``,
        ``edge_attr``, ``edge_type`` (int64 [E], the relation), ``edge_time`` (int64 [E]). Edges that the data holds
        out for validation and test have the same names with ``val_`` or ``test_`` before them. In a ``HeteroData`` they
        lie with their node type or edge type. An edge list too large for memory is an ``EdgeArrays`` instead.
        """

    def fetch(self) -> None:
        """Download raw files that are missing, before the graph is identified; sources that do, override this."""

    def extra_facts(self) -> dict[str, Any]:
        """Return facts of the source's own for the manifest; called after :meth:`read`."""
        return {}

    def numbering(self) -> dict[str, Any]:
        """Return what nodes without names and columns of features are numbered by, other than the data's own ids.

        A checkpoint with learned rows is refused for data of which this differs. Called after :meth:`read`.
        """
        return {}

    def names(self) -> Mapping[str, Names]:
        """Return string names by node type (``node`` in a homogeneous graph) and of ``relation``, in the order of the
        source data's ids; called after :meth:`read`."""
        return {}

    def assignment(self) -> Tensor | dict[str, Tensor] | None:
        """Return the part of each node (by node type), where the data comes in parts; called after :meth:`read`."""
        return None

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
        """Folder of this graph's store; other options have another folder. A store of an earlier format that is there
        already is used as it is."""
        paths = [self._store_path({**self._source(), "format": version}) for version in READABLE]
        return next((path for path in paths if path.exists()), paths[0])

    def _store_path(self, source: dict[str, Any]) -> Path:
        text = json.dumps(source, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self.store / f"{self.name}-{self.num_parts}parts-{digest}"

    @property
    def facts(self) -> dict[str, Any]:
        """What a model needs to know: ``num_features``, ``num_classes``, ``multilabel``, ``split``, ``best_acc``..."""
        return dict(self.open_store().facts)

    def check_inputs(self) -> None:
        """Refuse files that are missing and options that contradict each other, before anything is read.

        Raises:
            ConfigError, DataError: names the setting.
        """
        if self.partition_path is not None and not Path(self.partition_path).is_file():
            raise ConfigError(
                f"data.partition_path={self.partition_path} was set; there is no such file.",
                hint="name a file with the part of each node.",
            )
        if self.edge_buckets:  # also where the store is there, which other numbers may have made
            self.schema.check_partitions(self.num_parts, self.parts_key)
        if type(self).fetch is GraphDataModule.fetch:  # else files may still have to be downloaded
            self.identity()  # has the stamp of each file

    def check_negative(self, weight: str) -> None:
        """Refuse a negative edge weight where :attr:`weight_demand` says so.

        Args:
            weight: where it is and what it is, such as ``edges.txt, line 7: the weight is -2``.

        Raises:
            DataError: with both.
        """
        if callable(self.weight_demand):
            self.weight_demand = self.weight_demand(self)
        if self.weight_demand is not None:
            raise negative_weight(weight, self.weight_demand)

    def prepare_data(self) -> None:
        """Make the store where there is none; safe to call from any number of processes at once.

        Raises:
            DataError: the data, or a file or folder, is not as it should be.
        """
        try:
            self.fetch()
            self.check_inputs()
            ensure_store(self.store_path, self._make, log.debug if self._prepared else log.info)  # said once
        except OSError as err:  # of any file or folder that is read or written on the way
            name = f"{err.filename}: {err.strerror}" if err.filename else str(err).splitlines()[0]
            raise DataError(
                f"{self.origin} cannot be prepared: {name}",
                hint="correct the permissions of that file or folder, free space on its disk, or name another "
                f"(data.root={self.root}, data.store={self.store})",
            ) from err
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

    def num_seeds(self, split: str) -> int:
        """Return the nodes of a split, or its edges where edges are predicted; 0 without such a split."""
        store = self.open_store()
        if self.task == "link":
            return num_link_seeds(store, split)
        return store.split_size(split) if has_split(store, split) else 0

    @property
    def edge_data_read(self) -> set[str]:
        """Edge tensors, and ``time`` of nodes, that the split and the sampling read, whatever the model does."""
        used = {self.sampling.weight_attr}
        seed_time = "edge_time" if self.task == "link" else "time"
        if self.split.kind == "time":
            used.add(seed_time)
        if self.sampling.temporal_strategy is not None:
            attr = self.sampling.time_attr
            used |= {seed_time, attr} if attr is not None else {"time", "edge_time"}
        return {name for name in used if name is not None}

    @property
    def work(self) -> tuple[int, str]:
        """What one training epoch goes through, and the unit of its rate: ``nodes/s`` in full batch, ``seeds/s`` in
        mini-batches, ``edges/s`` where edges are predicted."""
        if self.task == "link":
            return self.num_seeds("train"), "edges/s"
        if self.batch_size is None and self.num_neighbors is None:
            return self.open_store().num_nodes, "nodes/s"
        return self.num_seeds("train"), "seeds/s"

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
        store = self.open_store()
        settings = (self.batch_size, self.num_neighbors, shuffle, self.seed)
        return SeedLoader(store, split, *settings, task=self.task, sampling=self.sampling)

    def _source(self) -> dict[str, Any]:
        """Return everything that the contents of the store depend on."""
        partition: dict[str, Any] = {"num_parts": self.num_parts, "partitioner": self._method}
        if self.partition_path is not None:
            partition["file"] = file_stamp(Path(self.partition_path))
        else:
            partition["seed"] = self.seed
        if self._groups_nodes:
            partition["group_nodes"] = GROUP_NODES
        return {
            **({"buckets": True} if self.edge_buckets else {}),
            "format": FORMAT,
            "name": self.name,
            "graph": self.identity(),
            "normalize_features": self.normalize_features,
            "unlabelled": self.unlabelled,
            "num_classes": self.num_classes,
            "split": self.split.identity(),
            "task": self.task,
            "target": self.target,
            "partition": partition,
        }

    @property
    def _method(self) -> str:
        return installed_method(self.partitioner)

    @property
    def _groups_nodes(self) -> bool:
        """Whether neighbours are to be near each other within a part; edge buckets need the source data's order."""
        return self._method == "metis" and self.num_parts > 1 and not self.edge_buckets

    @property
    def _no_label(self) -> int | None:
        """What stands for no label in ``y`` as :meth:`read` returns it; None: every node has one."""
        return self.unlabelled

    def _make(self) -> Store:
        if self.make_apart is None:
            return self._build()
        maker = copy.copy(self)
        maker.trainer, maker._num_parts, maker.make_apart = None, self.num_parts, None
        self.made = self.make_apart(maker._build)
        return Store.open(self.store_path)

    def _build(self) -> Store:
        path, num_parts, method = self.store_path, self.num_parts, self._method
        if num_parts > 1 and method == "metis":
            metis.check_available()
        log.info("reading %s", self.name)
        graph = self.read()
        options = (self._no_label, self.num_classes, self.normalize_features, self.origin)
        facts = prepare_graph(graph, Preparation(self.task, self.target, self.split, *options))
        facts |= weight_facts(graph, self.origin) | self.extra_facts()
        if "negative_weight" in facts:
            self.check_negative(facts["negative_weight"])
        if facts.get("edge_weights") == [0, 0]:
            demand = self.zero_demand(self) if callable(self.zero_demand) else self.zero_demand
            if demand is not None:
                raise zero_weights(self.origin, demand)
        log.info("partitioning %s into %d (%s)", describe(graph), num_parts, method)
        if numbering := self.numbering():
            facts["numbering"] = numbering
        assignment = self.assignment()
        if assignment is None:
            if num_parts > 1 and self.partitioner == AUTO and method != "metis":
                log.warning("pymetis is not installed: data.partitioner=%s instead, which may cut more edges", method)
            assignment = cut(graph, num_parts, method, self.seed, self.partition_path)
        if isinstance(assignment, Tensor):
            assignment = kept_together(assignment, facts)
        store = write_store(
            path,
            graph,
            assignment,
            num_parts,
            groups=group(graph, assignment, num_parts, self.seed) if self._groups_nodes else None,
            source=self._source(),
            facts=facts,
            partitioner=method,
            seed=self.seed,
            names=self.names(),
            buckets=self.edge_buckets,
        )
        log.info("written: the store %s, %d bytes", path, sum(store.manifest.nbytes))
        return store


def file_stamp(path: Path) -> list[Any]:
    """Return the name, size in bytes and time of change (ns) of a file; nulls where there is none.

    The folder is left out, so that a file keeps its stamp, and a graph its store, however the path is spelled.
    """
    status = path.stat() if path.is_file() else None
    return [path.name, status and status.st_size, status and status.st_mtime_ns]
