"""The base of all data sources: a DataModule that reads, checks, splits, partitions, stores and opens a graph."""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args

import lightning.pytorch as pl
from torch import Tensor

from gtrain.data.batches.loader import SeedLoader, has_split, num_link_seeds
from gtrain.data.batches.sampling import Sampling
from gtrain.data.config import DataConfig
from gtrain.data.prepare import Graph, Names, Preparation, cut, describe, group, prepare_graph
from gtrain.data.prepare.layout import expected_facts, lay_out
from gtrain.data.prepare.split import SplitOptions
from gtrain.data.prepare.validate import weight_facts
from gtrain.data.schema import DataSchema, move_unpartitioned
from gtrain.errors import ConfigError, DataError, GtrainError, negative_weight, zero_weights
from gtrain.graph.partition import (
    AUTO,
    ORDERING,
    adjacency_of,
    check_installed,
    choose_method,
    explain_choice,
    needs_adjacency,
    possible_methods,
)
from gtrain.graph.partition.metis import GROUP_NODES
from gtrain.graph.sampling.options import checked_fan_out
from gtrain.graph.store import Store
from gtrain.graph.store.lock import ensure_store
from gtrain.graph.store.manifest import FORMAT, READABLE
from gtrain.graph.store.replica import RemoteFolder, Replica
from gtrain.graph.store.tables import tables_of
from gtrain.graph.store.writer import write_store
from gtrain.settings import as_typed, build_settings, parameters, part, signature_of

log = logging.getLogger("gtrain")


OUTLINE: dict[str, Any] = {
    **{"num_nodes": 16, "num_features": 16, "sparse_features": False, "num_relations": None},
    **{"num_classes": 2, "multilabel": False},
}
"""The outline of a graph with dense features and labels; see :attr:`GraphDataModule.outline`."""
SPARSE_OUTLINE = {**OUTLINE, "sparse_features": True}
BAGS = {"features": "bags"}
"""In the identity of sources whose sparse features earlier releases stored for a first layer of their own."""
TRIPLES_OUTLINE = {**OUTLINE, "num_features": None, "num_classes": None, "num_relations": 2}
EVENTS_OUTLINE = {**TRIPLES_OUTLINE, "num_relations": None}
_SCALARS = (bool, int, float, str)
_STAMPED: ContextVar[set[Path] | None] = ContextVar("stamped", default=None)
"""Collects the files that :func:`file_stamp` is called with; None: they are not collected."""
CHECKED_WHOLE, CHECKED_BLOCK = 1 << 22, 1 << 16
"""Bytes: of larger files than the first, a checksum covers blocks of the second size, as many as fit in the first."""


if TYPE_CHECKING:
    # The same as typing.TypeVar from Python 3.13.
    from typing_extensions import TypeVar as DefaultTypeVar

    S = DefaultTypeVar("S", bound=DataConfig, covariant=True, default=DataConfig)
else:
    S = TypeVar("S")


@dataclass(frozen=True)
class ColumnFact:
    """What becomes of a column: its table, name and role (``key``, ``label``, ``number``...), and details in words."""

    table: str
    name: str
    role: str
    detail: str


class GraphDataModule(pl.LightningDataModule, Generic[S]):
    """A graph with a task on its nodes or its edges, saved as a partitioned store.

    A source overrides :meth:`identity` and :meth:`read`, and sets ``name``. This class does the rest: the first process
    that needs the graph reads, checks, splits and partitions it and writes the store; all other processes open the
    store. Rows of sparse features are nodes of a graph without edges. A source that adds settings inherits from
    ``GraphDataModule[ITS_CONFIG]``.

    Args:
        settings: an object of :attr:`settings_type`; None: constructed from the keywords.
        keywords: settings by name; they override those of ``settings``.

    Attributes:
        settings: all settings.

    Raises:
        ConfigError: a setting is unknown, missing, or has a value that is not allowed.
    """

    settings_type: ClassVar[type[DataConfig]] = DataConfig
    """The dataclass that declares the settings, which are the constructor's keywords: the argument in brackets."""
    settings: S
    name: str = "graph"
    schema: DataSchema = DataSchema(None, None)
    """Entity types and relations, for sources that support them."""
    outline: Mapping[str, Any] | None = None
    """Facts that determine the shape of a model, if the source knows them before it reads the graph. Sizes may be
    placeholders."""
    sparse_rows: ClassVar[bool] = False
    """Whether the data are rows of sparse features without edges, which are sparse whatever ``feature_layout`` is."""
    edge_buckets: bool = False
    """Whether the store also holds the edges grouped by pairs of parts, for strategies that train in buckets."""
    parts_key: str = "data.num_parts"
    """The setting that gives the number of parts, for messages; a backend may use another one."""
    weight_demand: str | Callable[[GraphDataModule], str | None] | None = None
    """The reason why edge weights must be 0 or more, from :func:`~gtrain.model.inputs.weight_demand`; None: weights may
    be negative. The reader refuses the first negative weight with this reason. A function is called with this
    DataModule at the first negative weight. Strategies set it for the model that they train."""
    zero_demand: str | Callable[[GraphDataModule], str | None] | None = None
    """The reason why edge weights must not all be 0, from :func:`~gtrain.model.inputs.zero_demand`; such a graph is
    refused before it is partitioned."""
    trained: Mapping[str, Any] | None = None
    """The facts of the data that a model was trained on, if these data are others; see :meth:`follow`."""
    applied: bool = False
    """Whether such a model is applied to these data, and not trained further on them."""
    predict_type: str | None = None
    """The type of the nodes of :meth:`predict_dataloader`; None: that of the labels."""
    run_in_child: Callable[[Callable[[], Store]], dict[str, int]] | None = None
    """Calls a function in a child process and returns the child's peak memory in bytes: ranks prepare the store there.
    None: this process prepares the store."""
    preparation_memory: dict[str, int] | None = None
    """The return value of :attr:`run_in_child`, if this process prepared the store that way."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give the constructor a signature that lists the settings."""
        super().__init_subclass__(**kwargs)
        arguments = [argument for base in vars(cls).get("__orig_bases__", ()) for argument in get_args(base)]
        for config in arguments:
            if isinstance(config, type) and issubclass(config, DataConfig):
                cls.settings_type = config
        cls.__signature__ = signature_of(  # type: ignore[attr-defined]
            cls, lambda: parameters(cls.settings_type, hidden=("_target_",)), own="settings_type" in vars(cls)
        )

    def __init__(self, settings: S | None = None, **keywords: Any) -> None:
        super().__init__()
        made: Any = build_settings(self.settings_type, type(self).__name__, settings, keywords)  # type: ignore[type-var]
        self.settings = given = made
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
        self._names: Mapping[str, Names] = {}
        self._facts: dict[str, Any] = {}
        self._opened: Store | None = None
        self._given: Store | None = None
        self._prepared = False

    if not TYPE_CHECKING:  # attributes stay checked

        def __getattr__(self, name: str) -> Any:
            """Return a setting: each is an attribute, such as ``data.path``."""
            if name.startswith("_") or name not in vars(vars(self).get("settings", object)):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self.settings, name)

    @staticmethod
    def from_frames(nodes: Any = None, edges: Any = None, **settings: Any) -> GraphDataModule[Any]:
        """Return a data module of data frames: pandas, Polars or pyarrow.

        Args:
            nodes: a frame, or the entry of a table with a frame in place of a path, such as ``{"frame": frame, "label":
                "price", "label_kind": "number"}``, or frames or entries by node type.
            edges: likewise, by relation.
            settings: those of :class:`~gtrain.data.config.TablesConfig`.

        Raises:
            ConfigError: an entry has an unknown key, or a setting is not allowed.
        """
        return _source("tables").of_frames(nodes, edges, settings)

    @staticmethod
    def from_pyg(data: Any, **settings: Any) -> GraphDataModule[Any]:
        """Return a data module of a ``Data`` or ``HeteroData`` of PyG, with tensors as :meth:`read` returns them.

        Args:
            data: the graph; it is not changed. Labels ``y`` that are floats ``[N]`` with a fraction are numbers to
                predict. NaN in ``y`` means no label.
            settings: those of :class:`~gtrain.data.config.MemoryConfig`, such as ``label_kind``, ``number`` or
                ``class``, where the labels do not tell. Without masks ``split`` is ``random``.
        """
        return _source("memory").of(data, settings)

    @staticmethod
    def from_networkx(graph: Any, label: str | None = None, **settings: Any) -> GraphDataModule[Any]:
        """Return a data module of a graph of networkx, whose attributes are columns of :meth:`from_frames`.

        Args:
            graph: directed or not; nodes may be any strings or integers. ``weight`` of edges is their weight.
            label: the attribute of nodes that is their label.
            settings: those of :class:`~gtrain.data.config.TablesConfig`.
        """
        return _source("tables").of_networkx(graph, label, settings)

    @staticmethod
    def from_scipy(adjacency: Any, x: Any = None, y: Any = None, **settings: Any) -> GraphDataModule[Any]:
        """Return a data module of a sparse matrix of scipy.

        Args:
            adjacency: ``[N, N]``; the entry (i, j) is the weight of the edge from i to j.
            x: features ``[N, F]``, an array or a sparse matrix.
            y: labels ``[N]``, or ``[N, C]`` of 0 and 1; as for :meth:`from_pyg`.
            settings: those of :class:`~gtrain.data.config.MemoryConfig`; ``split`` is ``random`` unless set.
        """
        return _source("memory").of_scipy(adjacency, x, y, settings)

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the options and the stamps of the input files that identify the graph; JSON-serialisable."""

    @abstractmethod
    def read(self) -> Graph:
        """Read or generate the graph.

        A source may also set ``self._names`` and ``self._facts`` here; :meth:`names` and :meth:`extra_facts` return
        them.

        Returns:
            A graph with those of the following tensors that the data has. Nodes: ``x`` (float [N, F], dense or sparse
            CSR), ``y`` ([N], or [N, C] for several labels), ``train_mask``, ``val_mask``, ``test_mask`` (bool [N]),
            ``time`` (int64 [N]). Edges: ``edge_index`` (int64 [2, E]), ``edge_weight``, ``edge_attr``, ``edge_type``
            (int64 [E], the relation), ``edge_time`` (int64 [E]). Edges that the data holds out for validation and test
            have the same names with the prefix ``val_`` or ``test_``; training edges along which no message passes,
            with the prefix ``train_``. In a ``HeteroData`` the tensors belong to their
            node type or edge type. An edge list too large for memory is an ``EdgeArrays``.
        """

    def fetch(self) -> None:
        """Download missing raw files; called before :meth:`identity`. Sources that can download override this."""

    def extra_facts(self) -> dict[str, Any]:
        """Return the source's additional facts for the manifest; called after :meth:`read`."""
        return self._facts

    def numbering(self) -> dict[str, Any]:
        """Return what determines the numbers of unnamed nodes and of feature columns, besides the ids in the data.

        A checkpoint with learned rows is refused for data with a different numbering. Called after :meth:`read`.
        """
        return {}

    def names(self) -> Mapping[str, Names]:
        """Return the string names by node type (``node`` in a homogeneous graph) and for ``relation``, in the order of
        the source data's ids; called after :meth:`read`."""
        return self._names

    def assignment(self) -> Tensor | dict[str, Tensor] | None:
        """Return the part of each node (by node type) if the data is already partitioned; called after :meth:`read`."""
        return None

    def columns(self) -> list[ColumnFact]:
        """Return what becomes of each column of the raw data, for ``gtrain schema``.

        Raises:
            ConfigError: the source does not read tables with named columns.
        """
        raise ConfigError(
            f"gtrain schema was given with data={self.name}, which has no columns by name.",
            hint="it is for data=tables.",
        )

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages: the settings that name files, or the source."""
        named = {key: getattr(self.settings, key, None) for key in ("path", "test_path")}
        return ", ".join(f"data.{key}={value}" for key, value in named.items() if value is not None) or self.name

    @property
    def num_parts(self) -> int:
        """Parts of the store: the setting, or else one per rank of the attached trainer, or else 1."""
        if self._num_parts is not None:
            return self._num_parts
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def store_path(self) -> Path:
        """Folder of this graph's store; its name has a digest of all options. An existing store of an earlier format
        that is still readable is used."""
        if self._given is not None:
            return self._given.path
        # One part is the same by any method.
        methods = possible_methods(self.partitioner)[: 1 if self.num_parts == 1 else None]
        paths = {method: self._path_of(method) for method in methods}
        stored = next((path for path in paths.values() if path.exists()), None)
        if len(paths) == 1 or stored is None:
            return paths[methods[0]]
        # Which of the methods is meant depends on the size of the graph, which a store of any of them knows.
        return paths[choose_method(self.partitioner, Store.open(stored).num_edges)]

    def _path_of(self, method: str) -> Path:
        """Return the folder of the store that a method makes."""
        source = self._source(method)
        texts = [json.dumps({**source, "format": number}, sort_keys=True, default=str) for number in READABLE]
        digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
        paths = [self.store / f"{self.name}-{self.num_parts}parts-{digest}" for digest in digests]
        return next((path for path in paths if path.exists()), paths[0])

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for models: ``num_features``, ``num_classes``, ``multilabel``, ``split``, ``best_acc`` and others."""
        return dict(self.open_store().facts)

    def check_inputs(self) -> None:
        """Refuse missing files and contradictory options before anything is read.

        Raises:
            ConfigError, DataError: names the setting.
        """
        if self.partition_path is not None and not Path(self.partition_path).is_file():
            raise ConfigError(
                f"data.partition_path={self.partition_path} was set; no such file exists.",
                hint="name a file with the part of each node.",
            )
        if self.edge_buckets:
            # Also for an existing store, since num_partitions may have changed.
            self.schema.check_partitions(self.num_parts, self.parts_key)
        if self.settings.remote_store is not None:
            self.use_store(self._open_remote())
            return
        if type(self).fetch is GraphDataModule.fetch:
            # Not with a fetch of its source: that may still have to download the files.
            self.identity()  # stamps each file
        self.check_files()

    def follow(self, training: Mapping[str, Any] | None, *, applied: bool = True) -> None:
        """Prepare other data than a model was trained on as the model expects them.

        Classes, relations, and the columns of features with their transformation, are those of the training data. The
        data of the training itself, whose files have the same names, sizes and contents, are prepared as they were for
        it.

        Args:
            training: of a checkpoint, see :func:`training_of`; None: unknown, and nothing changes.
            applied: whether the model is applied. Nodes then need no labels, and those that have one are the test
                split. Otherwise it is trained further, and the data are split as usual.
        """
        if training is None or self.settings.remote_store is not None:
            return
        try:
            identity = json.loads(json.dumps(self.identity(), default=str))
            # "public" has what the public split depends on, not the data.
            mine, theirs = ({**graph, "public": None} for graph in (identity, training["graph"]))
            if "checksums" not in training:  # of an earlier release, whose tables lacked how their text is read
                mine = without(mine, "reading")
            is_same = self.name == training["name"] and same_source(mine, theirs)
            if is_same and mine != theirs and "checksums" in training:
                # Other times: a copy, or other data of the same size. Files that are missing here are not compared.
                is_same = set(self._checksums()) <= set(training["checksums"])
        except (OSError, GtrainError):  # files are missing: an error that check_inputs reports, or another machine's
            return
        if is_same:
            # They may have followed an earlier training.
            self.trained, self.applied = training.get("trained"), False
        else:
            self.trained, self.applied = training["facts"], applied

    def _checksums(self) -> list[str]:
        """Return name and :func:`checksum` of each file that :meth:`identity` stamps, sorted."""
        files: set[Path] = set()
        token = _STAMPED.set(files)
        try:
            self.identity()
        finally:
            _STAMPED.reset(token)
        return sorted(f"{file.name} {checksum(file)}" for file in files)

    def check_files(self) -> None:
        """Refuse missing or malformed files before the graph is read; sources override this.

        Raises:
            ConfigError, DataError: names the setting or the file.
        """

    def check_negative(self, weight: str) -> None:
        """Refuse a negative edge weight if :attr:`weight_demand` gives a reason.

        Args:
            weight: location and value, such as ``edges.txt, line 7: the weight is -2``.

        Raises:
            DataError: names the weight and the reason.
        """
        if callable(self.weight_demand):
            self.weight_demand = self.weight_demand(self)
        if self.weight_demand is not None:
            raise negative_weight(weight, self.weight_demand)

    def prepare_data(self) -> None:
        """Create the store if it does not exist; any number of processes may call this at once.

        Raises:
            DataError: the data is invalid, or a file or folder cannot be read or written.
            ConfigError: ``remote_store`` was prepared with other options.
        """
        if self.has_store:
            return
        try:
            if self.settings.remote_store is None:
                self.fetch()
            self.check_inputs()
            if self.has_store:
                return
            # the first call logs, repeated ones do not
            path = self.store_path
            ensure_store(path, partial(self._create, path), log.debug if self._prepared else log.info)
        except OSError as err:
            name = f"{err.filename}: {err.strerror}" if err.filename else str(err).splitlines()[0]
            raise DataError(
                f"{self.origin} cannot be prepared: {name}",
                hint="correct the permissions of that file or folder, free space on its disk, or name another "
                f"(data.root={self.root}, data.store={self.store})",
            ) from err
        self._prepared, self._names = True, {}  # the store has the names

    @property
    def has_store(self) -> bool:
        """Whether this data module reads a store that it did not prepare; see :meth:`use_store`."""
        return self._given is not None

    @property
    def can_open_store(self) -> bool:
        """Whether :meth:`open_store` needs no preparation: a store was given, or exists."""
        return self.has_store or (self.store_path / "manifest.json").is_file()

    def use_store(self, store: Store) -> None:
        """Read a store that another machine prepared, or a replica of it, instead of the raw files."""
        self._given = self._opened = store

    def _open_remote(self) -> Store:
        """Open the store at ``remote_store``, and refuse one that was prepared with other options.

        Raises:
            StoreError: the store does not exist or cannot be read.
            ConfigError: its options differ; the message has the first key and both values.
        """
        address = self.settings.remote_store
        assert address is not None
        origin = RemoteFolder(address)
        store = Replica.of(origin, self.store, origin.name)
        theirs = store.manifest.source
        options = json.loads(json.dumps(self._options(), default=str))
        if theirs.get("name") == options["name"]:  # else the entries of identity are those of another source
            for key, mine, stored in self._known_identity(theirs.get("graph", {})):
                if not same_source(mine, stored):
                    raise self._other_options(address, f"data.{key}", stored, mine)
        for key, mine in options.items():
            if theirs.get(key) != mine:
                raise self._other_options(address, f"data.{key}", theirs.get(key), mine)
        if store.num_parts != self.num_parts:
            raise self._other_options(address, self.parts_key, store.num_parts, self.num_parts)
        return store

    def _known_identity(self, stored: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        """Yield the entries of a store's ``identity`` that this machine knows, which may lack the raw files.

        Args:
            stored: the identity of the data that the store was made from.

        Yields:
            The key, the value here, and the stored value.
        """
        try:
            known = json.loads(json.dumps(self.identity(), default=str))
        except (OSError, GtrainError):  # files are missing here: settings of the same name are compared if both are set
            for key, theirs in stored.items():
                mine = getattr(self.settings, key, None)
                if isinstance(mine, str) and _is_stamp(theirs):
                    yield key, [Path(mine).name, None, None], theirs
                elif isinstance(mine, _SCALARS) and isinstance(theirs, _SCALARS):
                    yield key, theirs if str(mine) == str(theirs) else mine, theirs
            return
        for key, mine in known.items():
            yield key, mine, stored.get(key)

    def _other_options(self, address: str, key: str, theirs: Any, mine: Any) -> ConfigError:
        return ConfigError(
            f"data.remote_store={address} was prepared with {key}={_described(theirs)}, and this job has "
            f"{key}={_described(mine)}.",
            hint="set the same value, or write another store with gtrain partition.",
        )

    def setup(self, stage: str | None = None) -> None:
        """Open the store."""
        self.open_store()

    def open_store(self) -> Store:
        """Open the store if necessary, and return it.

        Raises:
            StoreError: the store was not prepared, or is damaged.
        """
        if self._opened is None or self._opened.path != self.store_path:
            self._opened = Store.open(self.store_path)
        return self._opened

    def num_seeds(self, split: str) -> int:
        """Return the number of nodes of a split, or of edges for ``task=link``; 0 without such a split."""
        store = self.open_store()
        if self.task == "link":
            return num_link_seeds(store, split)
        return store.split_size(split) if has_split(store, split) else 0

    @property
    def edge_data_read(self) -> set[str]:
        """Edge tensors, and ``time`` of nodes, that the split and the sampling read, regardless of the model."""
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
        """Number of items that one training epoch processes, and the unit of its rate: ``nodes/s`` in full batch,
        ``seeds/s`` in mini-batches, ``edges/s`` for ``task=link``."""
        if self.task == "link":
            return self.num_seeds("train"), "edges/s"
        if self.batch_size is None and self.num_neighbors is None:
            return self.open_store().num_nodes, "nodes/s"
        return self.num_seeds("train"), "seeds/s"

    def train_dataloader(self) -> SeedLoader:
        """Return the loader of the training batches."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> SeedLoader:
        """Return the loader of the validation batches."""
        return self._loader("val")

    def test_dataloader(self) -> SeedLoader:
        """Return the loader of the test batches."""
        return self._loader("test")

    def predict_dataloader(self) -> SeedLoader:
        """Return the loader of batches over all nodes, of the type :attr:`predict_type`."""
        return replace(self._loader("predict"), node_type=self.predict_type)

    def _loader(self, split: str, *, shuffle: bool = False) -> SeedLoader:
        store = self.open_store()
        settings = (self.batch_size, self.num_neighbors, shuffle, self.seed)
        return SeedLoader(store, split, *settings, task=self.task, sampling=self.sampling)

    def _source(self, method: str) -> dict[str, Any]:
        """Return all that the contents of the store depend on, if a method partitions the graph."""
        partition: dict[str, Any] = {
            "num_parts": self.num_parts,
            "partitioner": method,
            **({"seed": self.seed} if self.partition_path is None else {"file": file_stamp(Path(self.partition_path))}),
            **({"group_nodes": GROUP_NODES} if self._groups_nodes(method) else {}),
        }
        common = {"format": FORMAT, "graph": self.identity(), "partition": partition}
        return {**self._options(), **common}

    def _options(self) -> dict[str, Any]:
        """Return the options that the store's contents depend on, besides the raw data and the partitioning."""
        layout = self.settings.feature_layout
        return {
            **({"buckets": True} if self.edge_buckets else {}),
            **({} if layout == "auto" else {"feature_layout": layout}),
            **({} if self.trained is None else {"trained": self.trained, "applied": self.applied}),
            "name": self.name,
            "normalize_features": self.normalize_features,
            "unlabelled": self.unlabelled,
            "num_classes": self.num_classes,
            "split": self.split.identity(),
            "task": self.task,
            "target": self.target,
        }

    def _groups_nodes(self, method: str) -> bool:
        """Whether neighbours get nearby numbers within a part; edge buckets need the source data's order."""
        return method in ORDERING and self.num_parts > 1 and not self.edge_buckets

    @property
    def expected_facts(self) -> dict[str, Any] | None:
        """:attr:`outline` with the layout of features that is set; None if the source knows nothing before it reads."""
        return None if self.outline is None else expected_facts(self.outline, self.settings.feature_layout)

    @property
    def _no_label(self) -> int | None:
        """The value in ``y``, as :meth:`read` returns it, of nodes without a label; None: every node has one."""
        return self.unlabelled

    @property
    def number_labels(self) -> frozenset[str]:
        """The node types (``node`` in a homogeneous graph) whose labels are numbers to predict: ``y`` of :meth:`read`
        is float ``[N]`` then, with NaN for nodes without a label."""
        return frozenset()

    def _trained_on_numbers(self, node_type: str) -> bool | None:
        """Whether the model of :attr:`trained` predicts numbers for nodes of a type.

        None: it predicts another type, or it is not known; also without such a model.
        """
        trained = self.trained or {}
        is_known = trained.get("num_classes") is not None or trained.get("label_scale") is not None
        if not is_known or trained.get("target") not in (None, node_type):
            return None
        return trained.get("label_scale") is not None

    def _create(self, path: Path) -> Store:
        """Create the store; ``path`` is :attr:`store_path` before the graph was read, whose lock this process holds."""
        if self.store_path != path and self.store_path.exists():
            return self.open_store()  # made by the process that held the lock before
        if self.run_in_child is None:
            return self._build(path)
        builder = copy.copy(self)
        # Set, since without the trainer there would be 1 part.
        builder.trainer, builder._num_parts, builder.run_in_child = None, self.num_parts, None
        self.preparation_memory = self.run_in_child(partial(builder._build, path))
        return Store.open(self.store_path)

    def _build(self, locked: Path) -> Store:
        if self.num_parts > 1:
            check_installed(self.partitioner)
        log.info("reading %s", self.name)
        graph = self.read()
        if not self.sparse_rows:
            lay_out(graph, self.settings.feature_layout)
        trained = self.trained or {}
        num_classes = trained.get("num_classes") if self.num_classes is None else self.num_classes
        options = (self._no_label, num_classes, self.normalize_features, self.origin, self.applied)
        preparation = Preparation(
            self.task,
            self.target,
            self.split,
            *options,
            number_labels=self.number_labels,
            label_values=self.extra_facts().get("label_values"),
        )
        facts = prepare_graph(graph, preparation)
        facts |= weight_facts(graph, self.origin) | self.extra_facts()
        facts |= {name: trained[name] for name in LABEL_FACTS if name in trained and facts.get(name) is None}
        if "negative_weight" in facts:
            self.check_negative(facts["negative_weight"])
        if facts.get("edge_weights") == [0, 0]:
            demand = self.zero_demand(self) if callable(self.zero_demand) else self.zero_demand
            if demand is not None:
                raise zero_weights(self.origin, demand)
        if numbering := self.numbering():
            facts["numbering"] = numbering
        num_edges = sum(table.num_edges for table in tables_of(graph).edges)
        method = choose_method(self.partitioner, num_edges if self.num_parts > 1 else 0)
        path = self._path_of(method)
        write = partial(self._write, path, graph, facts, method, num_edges)
        return write() if path == locked else ensure_store(path, write, log.info)

    def _write(self, path: Path, graph: Graph, facts: dict[str, Any], method: str, num_edges: int) -> Store:
        """Partition the graph and write the store."""
        num_parts, assignment = self.num_parts, self.assignment()
        automatic = assignment is None and num_parts > 1 and self.partitioner == AUTO
        reason = f": {explain_choice(num_edges)}" if automatic else ""
        log.info("partitioning %s into %d (%s%s)", describe(graph), num_parts, method, reason)
        adjacency = adjacency_of(graph) if num_parts > 1 and needs_adjacency(method, num_edges) else None
        if assignment is None:
            assignment = cut(graph, num_parts, method, self.seed, self.partition_path, adjacency)
        if isinstance(assignment, Tensor):
            assignment = move_unpartitioned(assignment, facts)
        groups = None
        if self._groups_nodes(method):
            groups = group(graph, assignment, num_parts, self.seed, adjacency)
        del adjacency  # as large as the edges
        store = write_store(
            path,
            graph,
            assignment,
            num_parts,
            groups=groups,
            source={**self._source(method), "checksums": self._checksums()},
            facts=facts,
            partitioner=method,
            seed=self.seed,
            names=self.names(),
            buckets=self.edge_buckets,
            dense_features=self.settings.feature_layout == "dense",
        )
        log.info("wrote the store %s, %d bytes", path, sum(store.manifest.nbytes))
        return store


def _source(name: str) -> Any:
    """Return a data module that a Python program makes; it imports this one."""
    module = importlib.import_module(f"gtrain.data.sources.{name}")
    return getattr(module, f"{name.title()}Data")


LABEL_FACTS = ("num_classes", "multilabel", "label_values", "label_scale", "train_classes", "target")
TRAINING_FACTS = (*LABEL_FACTS, "num_features", "schema", "numbering", "relation_values")
"""The facts of training data that a model's predictions on other data depend on."""


def training_of(store: Store) -> dict[str, Any]:
    """Return what a checkpoint records of the data of its training, as JSON; see :meth:`GraphDataModule.follow`."""
    source, facts = store.manifest.source, store.facts
    known = {name: facts[name] for name in TRAINING_FACTS if name in facts}
    followed = {"trained": source["trained"]} if "trained" in source else {}
    checksums = {"checksums": source["checksums"]} if "checksums" in source else {}  # not of earlier releases
    return {"name": source.get("name"), "graph": source.get("graph"), "facts": known, **followed, **checksums}


def known_name(family: str, name: str, options: Iterable[str]) -> str:
    """Return the option that ``name`` spells, ignoring case and ``_`` for ``-``.

    Raises:
        ConfigError: no option matches; lists the options and suggests the closest.
    """
    by_key = {option.lower().replace("_", "-"): option for option in options}
    key = name.lower().replace("_", "-")
    if key in by_key:
        return by_key[key]
    near = difflib.get_close_matches(key, by_key, n=1)
    hint = f"choose one of {', '.join(by_key.values())}" + (f"; did you mean {by_key[near[0]]}?" if near else "")
    raise ConfigError(f"data.name={name!r} is not a data set of {family}", hint=hint)


def same_source(mine: Any, stored: Any) -> bool:
    """Return whether an entry of ``identity`` agrees with that of a store which may be from another machine.

    Modification times, and files that are missing here, are ignored.
    """
    if isinstance(mine, list) and isinstance(stored, list):
        if _is_stamp(mine) and _is_stamp(stored):
            return mine[:-2] == stored[:-2] and (mine[-2] is None or mine[-2] == stored[-2])
        files_are_missing = not mine and all(map(_is_stamp, stored))
        return files_are_missing or (len(mine) == len(stored) and all(map(same_source, mine, stored)))
    if isinstance(mine, dict) and isinstance(stored, dict):
        return all(same_source(mine.get(key), stored.get(key)) for key in {**mine, **stored})
    return bool(mine == stored)


def without(entry: Any, key: str) -> Any:
    """Return an entry of ``identity`` without what it and the entries in it have under a key."""
    if isinstance(entry, list):
        return [without(item, key) for item in entry]
    if isinstance(entry, dict):
        return {name: without(value, key) for name, value in entry.items() if name != key}
    return entry


def _described(value: Any) -> str:
    """Return an entry of ``identity`` as a user would type it; a stamp as the file's name and bytes."""
    if _is_stamp(value):
        return "/".join(value[:-2]) + ("" if value[-2] is None else f" ({value[-2]:,} bytes)")
    if isinstance(value, list) and value and all(map(_is_stamp, value)):
        return f"[{', '.join(map(_described, value))}]"
    return as_typed(value)


def _is_stamp(value: Any) -> bool:
    """Return whether a value may be a :func:`file_stamp`, perhaps with the names of folders before the file's."""
    if not isinstance(value, list) or len(value) < 3:
        return False
    names, numbers = value[:-2], value[-2:]
    return all(isinstance(name, str) for name in names) and all(isinstance(n, int | None) for n in numbers)


def file_stamp(path: Path) -> list[Any]:
    """Return the name, size (bytes) and modification time (ns) of a file; None for the numbers of a missing file.

    The stamp omits the folder, so that different spellings of a path give the same stamp and the same store.
    """
    status = path.stat() if path.is_file() else None
    if status is not None and (files := _STAMPED.get()) is not None:
        files.add(path)
    return [path.name, status and status.st_size, status and status.st_mtime_ns]


def checksum(path: Path) -> str:
    """Return a checksum of a file's contents; of a large file, of blocks at equal distances.

    The time of compression in the header of ``.gz`` is left out.
    """
    size, digest = path.stat().st_size, hashlib.sha256()
    count = CHECKED_WHOLE // CHECKED_BLOCK
    blocks = -(-size // CHECKED_BLOCK)
    with open(path, "rb") as file:
        for number in range(min(blocks, count)):
            # The first and the last block are among them.
            file.seek(number * CHECKED_BLOCK if blocks <= count else number * (size - CHECKED_BLOCK) // (count - 1))
            block = file.read(CHECKED_BLOCK)
            digest.update(block[8:] if number == 0 and path.suffix == ".gz" else block)
    return digest.hexdigest()[:16]
