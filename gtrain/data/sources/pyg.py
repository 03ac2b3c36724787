"""Graphs from PyTorch Geometric's data sets."""

from __future__ import annotations

import contextlib
import difflib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch_geometric.datasets
from torch import Tensor
from torch_geometric.data import Data, Dataset, HeteroData

from gtrain.data.config import AmazonConfig, CoauthorConfig, DataConfig, HeterophilousConfig, PlanetoidConfig, PyGConfig
from gtrain.data.module import OUTLINE, GraphDataModule, S, file_stamp, known_name, log
from gtrain.data.prepare.layout import lay_out
from gtrain.data.readers.pyg import MissingFiles, construct, download, mirror, probe, sparse_bags, tidy_graph
from gtrain.data.readers.unpickling import plain_pickles
from gtrain.errors import ConfigError, DataError, GtrainError
from gtrain.graph.store.lock import file_lock


class PyGData(GraphDataModule[S]):
    """The graph of any class of ``torch_geometric.datasets`` with a single graph, also heterogeneous or temporal.

    The validation and test edges of a data set become held-out edges, for ``task=link``; see
    :func:`~gtrain.data.readers.pyg.tidy_graph`.

    The class searches for raw files in ``<root>/<preset>`` (such as ``planetoid``), ``<root>/<class name>`` and
    ``root``, in PyG's layout (``Cora/raw/...``). PyG works in a temporary mirror and does not write to these folders.
    Downloads go to the first of them that exists, or else to ``<root>/<class name>``. From pickles among the raw files,
    such as Planetoid's, only arrays, sparse matrices and plain containers are read.

    Its settings are those of :class:`~gtrain.data.config.PyGConfig`.
    """

    settings_type: ClassVar[type[DataConfig]] = PyGConfig
    published: ClassVar[tuple[str, tuple[str, ...]] | None] = None
    """PyG's class and the names of its data sets; None: the settings name the class."""
    preset: str | None = None

    def __init__(self, settings: S | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        name, self.options = self.dataset()
        self._class = dataset_class(name)
        self._raw: tuple[Path, list[Path]] | None = None
        self.name = "-".join([name, *(str(v) for k, v in self.options.items() if k == "name")])

    def dataset(self) -> tuple[str, dict[str, Any]]:
        """Return the name of PyG's class, and its arguments other than ``root``."""
        settings: Any = self.settings
        if self.published is not None:
            return self.published[0], {"name": known_name(self.published[0], settings.name, self.published[1])}
        options = settings.options
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(
                f"data.options={options!r} is not a mapping", hint="set it like data.options={name: Cora}"
            )
        return settings.name, dict(options or {})

    def identity(self) -> dict[str, Any]:
        """Return the class, its options, and the stamps of its raw files."""
        if self._raw is None:
            with contextlib.suppress(MissingFiles):
                self._raw = self._find_raw()
        files = self._raw[1] if self._raw else []
        stamps = [file_stamp(file) for file in files]
        return {"dataset": self._class.__name__, "options": self.options, "files": stamps}

    def fetch(self) -> None:
        """Download missing raw files.

        Raises:
            DataError: the download failed; names the files and their folder.
        """
        try:
            self._raw = self._find_raw()
        except MissingFiles:
            with file_lock(self.store / f"{self.name}.raw.lock", log.info):
                self._raw = self._download()

    def read(self) -> Data | HeteroData:
        """Construct the data set in a temporary mirror of the raw files, and return its graph."""
        self.raw_files()
        assert self._raw is not None  # raw_files found or fetched them
        folder = self._raw[0]
        with tempfile.TemporaryDirectory(prefix="gtrain-") as scratch:
            mirror(folder, Path(scratch), skip=self.store)
            try:
                with plain_pickles(scratch), sparse_bags():
                    graph = _single_graph(construct(self._class, scratch, self.options), self.name)
                lay_out(graph, "auto")  # rows of a CompressedMatrix can be selected
                return graph
            except GtrainError:
                raise
            except Exception as err:
                # A damaged file can raise anything in its reader.
                raise DataError(
                    f"{self.name}: {self._class.__name__} could not read the files under {folder}: "
                    f"{type(err).__name__}: {err}",
                    hint="if the files are damaged, delete them, and they are downloaded again",
                ) from err

    @property
    def search_folders(self) -> list[Path]:
        """The folders that may be PyG's root, the preferred one first."""
        named = [self.root / name for name in (self.preset, self._class.__name__) if name]
        return [*(folder for folder in named if folder.is_dir()), self.root]

    def raw_files(self) -> list[Path]:
        """Return the raw files, in PyG's order; downloads missing files.

        Raises:
            DataError: the download failed.
        """
        if self._raw is None:
            self.fetch()
        assert self._raw is not None  # fetch sets it
        return self._raw[1]

    def _find_raw(self) -> tuple[Path, list[Path]]:
        """Return the folder with all raw files, and the files.

        Raises:
            MissingFiles: no folder has all files; names those that the preferred folder lacks.
        """
        missing: MissingFiles | None = None
        for folder in self.search_folders:
            try:
                return folder, probe(self._class, folder, self.options, skip=self.store)
            except MissingFiles as err:
                missing = missing or err
        # search_folders has at least the root.
        assert missing is not None
        raise missing

    def _download(self) -> tuple[Path, list[Path]]:
        """Let PyG download into an empty folder, and move the raw files to the user's root."""
        try:
            return self._find_raw()  # another process was faster
        except MissingFiles as error:
            missing = error.files
        with tempfile.TemporaryDirectory(prefix="gtrain-") as scratch:
            try:
                download(self._class, Path(scratch), self.options)
            except GtrainError:
                raise
            except Exception as err:
                # The classes' downloads raise different exceptions.
                folder = self.search_folders[0]
                files = ", ".join(str(file.relative_to(folder)) for file in missing)
                raise DataError(
                    f"data.root={self.root}: {folder} lacks {files}, and {self._class.__name__} could not download: "
                    f"{type(err).__name__}: {err}",
                    hint=f"put the files under {folder}, or set data.root to the folder that has them",
                ) from err
            preferred = self.search_folders[0]
            _move_new(Path(scratch), self.root / self._class.__name__ if preferred == self.root else preferred)
        return self._find_raw()


class PlanetoidData(PyGData[PlanetoidConfig]):
    """Cora, CiteSeer or PubMed with their public split and normalised features (Yang et al. 2016)."""

    published = "Planetoid", ("Cora", "CiteSeer", "PubMed")
    preset = "planetoid"
    outline = OUTLINE


class _SplitByClass(PyGData[AmazonConfig]):
    """A graph of Shchur et al. 2018, whose figures are of the largest connected component.

    The remaining nodes keep their order; their ids in the data set become their names.
    """

    outline = OUTLINE

    def identity(self) -> dict[str, Any]:
        component = self.settings.largest_component
        identity = {**super().identity(), "largest_component": component}
        return {**identity, "names": "ids of the data set"} if component else identity

    def read(self) -> Data | HeteroData:
        graph = super().read()
        if not self.settings.largest_component:
            return graph
        assert isinstance(graph, Data)
        component, ids = largest_component(graph)
        self._facts = {"source_nodes": graph.num_nodes}
        self._names = {"node": [str(node) for node in ids.tolist()]}
        return component


class AmazonData(_SplitByClass):
    """The co-purchase graphs Computers and Photo, split by class (Shchur et al. 2018)."""

    published = "Amazon", ("Computers", "Photo")
    preset = "amazon"


class CoauthorData(_SplitByClass):
    """The co-authorship graphs CS and Physics, split by class (Shchur et al. 2018)."""

    settings_type = CoauthorConfig
    published = "Coauthor", ("CS", "Physics")
    preset = "coauthor"


class HeterophilousData(PyGData[HeterophilousConfig]):
    """The heterophilous graphs of Platonov et al. 2023, each with ten published splits."""

    published = (
        "HeterophilousGraphDataset",
        ("Roman-empire", "Amazon-ratings", "Minesweeper", "Tolokers", "Questions"),
    )
    preset = "heterophilous"
    outline = OUTLINE


def components(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the smallest node of each node's component, int64 [N]; edges count in both directions."""
    label, before = torch.arange(num_nodes), None
    source, target = edge_index
    while before is None or not torch.equal(label, before):
        before = label
        label = label.scatter_reduce(0, target, label[source], "amin")
        label = label.scatter_reduce(0, source, label[target], "amin")
        label = label[label]  # pointer jumping halves the chains
    return label


def largest_component(graph: Data) -> tuple[Data, Tensor]:
    """Return the largest component (the first of equal ones) and the ids of its nodes in ``graph``, ascending [n].

    Node i of the component is node ``ids[i]`` of the graph.
    """
    assert graph.edge_index is not None and graph.num_nodes is not None
    label = components(graph.edge_index, graph.num_nodes)
    ids = (label == int(label.bincount().argmax())).nonzero().flatten()
    component: Data = graph.subgraph(ids)
    return component, ids


def dataset_class(name: str) -> type[Dataset]:
    """Return a class of ``torch_geometric.datasets``.

    Raises:
        ConfigError: the name is unknown; suggests the most similar names.
    """
    names = list(torch_geometric.datasets.__all__)
    if name not in names:
        lower = {known.lower(): known for known in names}
        near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(sorted(names))}"
        raise ConfigError(f"data.name={name!r} is not a data set of torch_geometric.datasets", hint=hint)
    if name in _EVALUATING:
        raise ConfigError(
            f"data.name={name}: PyG's reader evaluates text of its files as Python code, so gtrain does not run it",
            hint="convert the graph to an edge list and use data=edges",
        )
    return getattr(torch_geometric.datasets, name)


_EVALUATING = ("CornellTemporalHyperGraphDataset",)
"""Data sets whose reader calls ``eval`` on the contents of files."""


def _single_graph(dataset: Dataset, name: str) -> Data | HeteroData:
    if len(dataset) != 1:
        raise DataError(
            f"{name} holds {len(dataset)} graphs, but gtrain reads only data sets of a single graph",
            hint="set data.name to a data set of one graph, or write one of its graphs to files and use data=edges",
        )
    return tidy_graph(dataset[0], name)


def _move_new(scratch: Path, target: Path) -> None:
    """Move the files that PyG downloaded, but not those that it processed."""
    for file in sorted(scratch.rglob("*")):
        relative = file.relative_to(scratch)
        if file.is_file() and "processed" not in relative.parts:
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(file, target / relative)
