"""Graphs from PyTorch Geometric's data sets."""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch_geometric.datasets
from torch_geometric.data import Data, Dataset

from gtrain.data.module import CommonOptions, GraphDataModule, file_stamp, log
from gtrain.data.raw import Missing, construct, mirror, probe
from gtrain.errors import ConfigError, DataError
from gtrain.graph.lock import file_lock


class PyGData(GraphDataModule):
    """The single graph of any class of ``torch_geometric.datasets``.

    Raw files are looked for in ``<root>/<class name>``, and where that folder is missing in ``root`` itself, each laid
    out as PyG lays it out (``Cora/raw/...``). The folder stays clean: PyG works in a temporary mirror of it. Files that
    have to be downloaded are kept under ``<root>/<class name>``. PyG's own readers of some raw formats, Planetoid's
    among them, unpickle: use files from a source that you trust.

    Args:
        name: the data set class, such as ``Planetoid`` or ``KarateClub``.
        options: its arguments other than ``root``, such as ``{"name": "Cora"}``.
        **common: see :class:`~gtrain.data.module.GraphDataModule`.
    """

    def __init__(
        self, *, name: str = "Planetoid", options: Mapping[str, Any] | None = None, **common: Unpack[CommonOptions]
    ) -> None:
        super().__init__(**common)
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"data.options={options!r} is no mapping", hint="set it like data.options={name: Cora}")
        self.options = dict(options or {})
        self._class = dataset_class(name)
        self._raw: list[Path] | None = None
        self.name = "-".join([name, *(str(v) for k, v in self.options.items() if k == "name")])

    def identity(self) -> dict[str, Any]:
        """Return the class, its options, and the stamps of its raw files."""
        if self._raw is None:
            self._raw = self._find_raw()
        return {
            "dataset": self._class.__name__,
            "options": self.options,
            "files": [file_stamp(file) for file in self._raw],
        }

    def fetch(self) -> None:
        """Download the raw files where they are missing.

        Raises:
            DataError: they are missing and cannot be downloaded; says which, and where to put them.
        """
        try:
            self._raw = self._find_raw(strict=True)
        except Missing:
            with file_lock(self.store / f"{self.name}.raw.lock", log.info):
                self._raw = self._download()

    def read(self) -> Data:
        """Construct the data set in a temporary mirror of the raw files, and return its graph."""
        with tempfile.TemporaryDirectory(prefix="gtrain-") as scratch:
            mirror(self.base, Path(scratch), skip=self.store)
            try:
                dataset = construct(self._class, scratch, self.options)
            except OSError as err:
                raise self._missing([], err) from err
            return _single_graph(dataset, self.name)

    @property
    def base(self) -> Path:
        """The folder that is given to PyG as root."""
        own = self.root / self._class.__name__
        return own if own.is_dir() else self.root

    def _find_raw(self, *, strict: bool = False) -> list[Path]:
        """Return the raw files; where some are missing, none, or :class:`Missing` with ``strict``."""
        try:
            return probe(self._class, self.base, self.options, skip=self.store)
        except Missing:
            if strict:
                raise
            return []

    def _download(self) -> list[Path]:
        """Let PyG download into an empty folder, and move what came to the user's root."""
        try:
            return self._find_raw(strict=True)  # another process was faster
        except Missing as missing:
            wanted = missing.files
        with tempfile.TemporaryDirectory(prefix="gtrain-") as scratch:
            try:
                construct(self._class, scratch, self.options)
            except Exception as err:
                raise self._missing(wanted, err) from err
            _move_new(Path(scratch), self.root / self._class.__name__)
        return self._find_raw(strict=True)

    def _missing(self, wanted: list[Path], err: Exception) -> DataError:
        files = ", ".join(str(file.relative_to(self.base)) for file in wanted) or "raw files"
        return DataError(
            f"data.root={self.root}: {self.base} lacks {files}, and {self._class.__name__} could not download: "
            f"{type(err).__name__}: {err}",
            hint=f"put the files under {self.base}, or set data.root to the folder that has them",
        )


class PlanetoidData(PyGData):
    """Cora, CiteSeer or PubMed with their public split and normalised features (Yang et al. 2016)."""

    def __init__(self, *, name: str = "Cora", **common: Unpack[CommonOptions]) -> None:
        name = _known("Planetoid", name, ("Cora", "CiteSeer", "PubMed"))
        options: CommonOptions = {"split": "public", "normalize_features": True, **common}
        super().__init__(name="Planetoid", options={"name": name}, **options)

    @property
    def base(self) -> Path:
        """The folder that is given to PyG as root."""
        return _preset_folder(self.root, "planetoid", super().base)


class AmazonData(PyGData):
    """The co-purchase graphs Computers and Photo, split by class (Shchur et al. 2018)."""

    def __init__(self, *, name: str = "Photo", **common: Unpack[CommonOptions]) -> None:
        name = _known("Amazon", name, ("Computers", "Photo"))
        options: CommonOptions = {"split": "per_class", **common}
        super().__init__(name="Amazon", options={"name": name}, **options)

    @property
    def base(self) -> Path:
        """The folder that is given to PyG as root."""
        return _preset_folder(self.root, "amazon", super().base)


class CoauthorData(PyGData):
    """The co-authorship graphs CS and Physics, split by class (Shchur et al. 2018)."""

    def __init__(self, *, name: str = "CS", **common: Unpack[CommonOptions]) -> None:
        name = _known("Coauthor", name, ("CS", "Physics"))
        options: CommonOptions = {"split": "per_class", **common}
        super().__init__(name="Coauthor", options={"name": name}, **options)

    @property
    def base(self) -> Path:
        """The folder that is given to PyG as root."""
        return _preset_folder(self.root, "coauthor", super().base)


class HeterophilousData(PyGData):
    """The heterophilous graphs of Platonov et al. 2023, each with ten published splits."""

    def __init__(self, *, name: str = "Minesweeper", **common: Unpack[CommonOptions]) -> None:
        options = ("Roman-empire", "Amazon-ratings", "Minesweeper", "Tolokers", "Questions")
        name = _known("HeterophilousGraphDataset", name, options)
        super().__init__(name="HeterophilousGraphDataset", options={"name": name}, **common)

    @property
    def base(self) -> Path:
        """The folder that is given to PyG as root."""
        return _preset_folder(self.root, "heterophilous", super().base)


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
    found: type[Dataset] = getattr(torch_geometric.datasets, name)
    return found


def _known(family: str, name: str, options: tuple[str, ...]) -> str:
    """Return the option that ``name`` spells, whatever its case."""
    lower = {option.lower().replace("_", "-"): option for option in options}
    key = name.lower().replace("_", "-")
    if key in lower:
        return lower[key]
    near = difflib.get_close_matches(key, lower, n=1)
    hint = f"choose one of {', '.join(options)}" + (f"; did you mean {lower[near[0]]}?" if near else "")
    raise ConfigError(f"data.name={name!r} is not a data set of {family}", hint=hint)


def _preset_folder(root: Path, preset: str, otherwise: Path) -> Path:
    """Presets also look into the folder that is named like their configuration option."""
    return root / preset if (root / preset).is_dir() else otherwise


def _single_graph(dataset: Dataset, name: str) -> Data:
    if len(dataset) != 1:
        raise DataError(f"{name} holds {len(dataset)} graphs, and only data sets of a single graph are served")
    data = dataset[0]
    if not isinstance(data, Data):
        raise DataError(f"{name} is a {type(data).__name__}, and only homogeneous graphs (Data) are served")
    if data.edge_index is None:
        raise DataError(f"{name} has no edge_index, and only graphs with an edge list are served")
    return data


def _move_new(scratch: Path, target: Path) -> None:
    """Move what PyG downloaded, but not what it processed."""
    for file in sorted(scratch.rglob("*")):
        relative = file.relative_to(scratch)
        if file.is_file() and "processed" not in relative.parts:
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(file, target / relative)
