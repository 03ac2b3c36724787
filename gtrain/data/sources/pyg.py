"""Graphs from PyTorch Geometric's data sets."""

from __future__ import annotations

import contextlib
import difflib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch_geometric.datasets
from torch_geometric.data import Data, Dataset, HeteroData

from gtrain.data.config import AmazonConfig, CoauthorConfig, DataConfig, HeterophilousConfig, PlanetoidConfig, PyGConfig
from gtrain.data.module import OUTLINE, GraphDataModule, file_stamp, log
from gtrain.data.prepare.components import largest_component
from gtrain.data.readers.pyg import Missing, construct, download, mirror, probe, tidy_graph
from gtrain.data.readers.unpickling import plain_pickles
from gtrain.errors import ConfigError, DataError, GtrainError
from gtrain.graph.store.lock import file_lock


class PyGData(GraphDataModule):
    """The single graph of any class of ``torch_geometric.datasets``, heterogeneous and temporal ones included.

    Edges that a data set keeps apart for validation and test become held-out edges, for ``task=link``; see
    :func:`~gtrain.data.readers.pyg.tidy_graph`.

    Raw files are looked for in ``<root>/<preset>`` (such as ``planetoid``), ``<root>/<class name>`` and ``root``
    itself, laid out as PyG lays them out (``Cora/raw/...``). These folders stay clean: PyG works in a temporary mirror.
    Files that have to be downloaded go to the first of them that exists, and otherwise to ``<root>/<class name>``.
    Of pickles among the raw files, as Planetoid's are, only arrays, sparse matrices and plain containers are read.

    Its settings are those of :class:`~gtrain.data.config.PyGConfig`.
    """

    preset: str | None = None

    settings_type: ClassVar[type[DataConfig]] = PyGConfig

    def __init__(self, settings: DataConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        name, self.options = self.dataset()
        self._class = dataset_class(name)
        self._raw: tuple[Path, list[Path]] | None = None
        self.name = "-".join([name, *(str(v) for k, v in self.options.items() if k == "name")])

    def dataset(self) -> tuple[str, dict[str, Any]]:
        """Return the class of PyG's data set, and its arguments other than ``root``."""
        assert isinstance(self.settings, PyGConfig)
        options = self.settings.options
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"data.options={options!r} is no mapping", hint="set it like data.options={name: Cora}")
        return self.settings.name, dict(options or {})

    def identity(self) -> dict[str, Any]:
        """Return the class, its options, and the stamps of its raw files."""
        if self._raw is None:
            with contextlib.suppress(Missing):
                self._raw = self._find_raw()
        files = self._raw[1] if self._raw else []
        stamps = [file_stamp(file) for file in files]
        return {"dataset": self._class.__name__, "options": self.options, "files": stamps}

    def fetch(self) -> None:
        """Download the raw files where they are missing.

        Raises:
            DataError: they are missing and cannot be downloaded; says which, and where to put them.
        """
        try:
            self._raw = self._find_raw()
        except Missing:
            with file_lock(self.store / f"{self.name}.raw.lock", log.info):
                self._raw = self._download()

    def read(self) -> Data | HeteroData:
        """Construct the data set in a temporary mirror of the raw files, and return its graph."""
        if self._raw is None:
            self.fetch()
        assert self._raw is not None  # found or fetched
        place = self._raw[0]
        with tempfile.TemporaryDirectory(prefix="gtrain-") as scratch:
            mirror(place, Path(scratch), skip=self.store)
            try:
                with plain_pickles(scratch):
                    return _single_graph(construct(self._class, scratch, self.options), self.name)
            except GtrainError:
                raise
            except Exception as err:  # a damaged file shows in whatever its reader trips over
                raise DataError(
                    f"{self.name}: {self._class.__name__} could not read the files under {place}: "
                    f"{type(err).__name__}: {err}",
                    hint="if the files are damaged, delete them, and they are downloaded again",
                ) from err

    @property
    def places(self) -> list[Path]:
        """The folders that may be what PyG calls root, the preferred one first."""
        own = [self.root / name for name in (self.preset, self._class.__name__) if name]
        return [*(folder for folder in own if folder.is_dir()), self.root]

    def raw_files(self) -> list[Path]:
        """Return the raw files, in PyG's order; downloads them where they are missing.

        Raises:
            DataError: they are missing and cannot be downloaded.
        """
        if self._raw is None:
            self.fetch()
        assert self._raw is not None  # found or fetched
        return self._raw[1]

    def _find_raw(self) -> tuple[Path, list[Path]]:
        """Return the folder that has all raw files, and these files.

        Raises:
            Missing: no folder has all of them; names those that the preferred one lacks.
        """
        missing: Missing | None = None
        for place in self.places:
            try:
                return place, probe(self._class, place, self.options, skip=self.store)
            except Missing as err:
                missing = missing or err
        assert missing is not None  # there is always one place, the root
        raise missing

    def _download(self) -> tuple[Path, list[Path]]:
        """Let PyG download into an empty folder, and move what came to the user's root."""
        try:
            return self._find_raw()  # another process was faster
        except Missing as missing:
            wanted = missing.files
        with tempfile.TemporaryDirectory(prefix="gtrain-") as scratch:
            try:
                download(self._class, Path(scratch), self.options)
            except GtrainError:
                raise
            except Exception as err:  # anything at all: each class downloads in a way of its own
                raise self._missing(wanted, err) from err
            preferred = self.places[0]
            _move_new(Path(scratch), self.root / self._class.__name__ if preferred == self.root else preferred)
        return self._find_raw()

    def _missing(self, wanted: list[Path], err: Exception) -> DataError:
        place = self.places[0]
        files = ", ".join(str(file.relative_to(place)) for file in wanted)
        return DataError(
            f"data.root={self.root}: {place} lacks {files}, and {self._class.__name__} could not download: "
            f"{type(err).__name__}: {err}",
            hint=f"put the files under {place}, or set data.root to the folder that has them",
        )


class PlanetoidData(PyGData):
    """Cora, CiteSeer or PubMed with their public split and normalised features (Yang et al. 2016)."""

    preset = "planetoid"

    outline = OUTLINE

    settings_type = PlanetoidConfig
    settings: PlanetoidConfig

    def dataset(self) -> tuple[str, dict[str, Any]]:
        return "Planetoid", {"name": known_name("Planetoid", self.settings.name, ("Cora", "CiteSeer", "PubMed"))}


class _SplitByClass(PyGData):
    """A graph of Shchur et al. 2018, whose figures are of the largest connected component.

    Those that stay of its nodes keep their order, and their ids in the data set are their names.
    """

    outline = OUTLINE

    settings: AmazonConfig | CoauthorConfig

    def __init__(self, settings: DataConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        self.largest_component = self.settings.largest_component
        self._facts: dict[str, Any] = {}
        self._names: dict[str, list[str]] = {}

    def identity(self) -> dict[str, Any]:
        identity = {**super().identity(), "largest_component": self.largest_component}
        return {**identity, "names": "ids of the data set"} if self.largest_component else identity

    def read(self) -> Data | HeteroData:
        graph = super().read()
        if not self.largest_component:
            return graph
        assert isinstance(graph, Data)
        component, ids = largest_component(graph)
        self._facts = {"source_nodes": graph.num_nodes}
        self._names = {"node": [str(node) for node in ids.tolist()]}
        return component

    def extra_facts(self) -> dict[str, Any]:
        """Return how many nodes the data set has, where some are left out."""
        return self._facts

    def names(self) -> dict[str, Any]:
        """Return the ids of the nodes in the data set, where some are left out."""
        return self._names


class AmazonData(_SplitByClass):
    """The co-purchase graphs Computers and Photo, split by class (Shchur et al. 2018)."""

    preset = "amazon"

    settings_type = AmazonConfig

    def dataset(self) -> tuple[str, dict[str, Any]]:
        return "Amazon", {"name": known_name("Amazon", self.settings.name, ("Computers", "Photo"))}


class CoauthorData(_SplitByClass):
    """The co-authorship graphs CS and Physics, split by class (Shchur et al. 2018)."""

    preset = "coauthor"

    settings_type = CoauthorConfig

    def dataset(self) -> tuple[str, dict[str, Any]]:
        return "Coauthor", {"name": known_name("Coauthor", self.settings.name, ("CS", "Physics"))}


class HeterophilousData(PyGData):
    """The heterophilous graphs of Platonov et al. 2023, each with ten published splits."""

    preset = "heterophilous"

    outline = OUTLINE

    settings_type = HeterophilousConfig
    settings: HeterophilousConfig

    def dataset(self) -> tuple[str, dict[str, Any]]:
        options = ("Roman-empire", "Amazon-ratings", "Minesweeper", "Tolokers", "Questions")
        name = known_name("HeterophilousGraphDataset", self.settings.name, options)
        return "HeterophilousGraphDataset", {"name": name}


def dataset_class(name: str) -> type[Dataset]:
    """Return a class of ``torch_geometric.datasets``.

    Raises:
        ConfigError: there is none of that name; suggests the nearest.
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
    found: type[Dataset] = getattr(torch_geometric.datasets, name)
    return found


_EVALUATING = ("CornellTemporalHyperGraphDataset",)
"""Data sets whose reader calls ``eval`` on what the files hold."""


def known_name(family: str, name: str, options: tuple[str, ...]) -> str:
    """Return the option that ``name`` spells, whatever its case."""
    lower = {option.lower().replace("_", "-"): option for option in options}
    key = name.lower().replace("_", "-")
    if key in lower:
        return lower[key]
    near = difflib.get_close_matches(key, lower, n=1)
    hint = f"choose one of {', '.join(options)}" + (f"; did you mean {lower[near[0]]}?" if near else "")
    raise ConfigError(f"data.name={name!r} is not a data set of {family}", hint=hint)


def _single_graph(dataset: Dataset, name: str) -> Data | HeteroData:
    if len(dataset) != 1:
        raise DataError(
            f"{name} holds {len(dataset)} graphs, and only data sets of a single graph are served",
            hint="set data.name to a data set of one graph, or write one of its graphs to files and use data=edges",
        )
    return tidy_graph(dataset[0], name)


def _move_new(scratch: Path, target: Path) -> None:
    """Move what PyG downloaded, but not what it processed."""
    for file in sorted(scratch.rglob("*")):
        relative = file.relative_to(scratch)
        if file.is_file() and "processed" not in relative.parts:
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(file, target / relative)
