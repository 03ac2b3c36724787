"""Running PyG's data set classes without letting them write beside the user's raw files."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from torch_geometric.data import Dataset

from gtrain.data.readers.unpickling import plain_pickles
from gtrain.errors import ConfigError, DataError, GtrainError

_INSTALL = {
    "sklearn": "pip install scikit-learn",
    "sentence_transformers": "pip install sentence-transformers; it downloads a language model, and data.name="
    "MovieLens100K and MovieLens1M do without",
}
"""What to do about a missing package whose name pip spells otherwise."""


class Missing(Exception):
    """Raw files are missing.

    Args:
        files: where they were looked for.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        super().__init__(", ".join(str(file) for file in files))


class _Complete(Exception):
    """All raw files are there, at ``paths``."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths


def probe(cls: type[Dataset], root: Path, options: dict[str, Any], *, skip: Path) -> list[Path]:
    """Return the raw files of a data set under ``root``, without downloading or processing anything.

    Args:
        cls: the data set class.
        root: the folder that PyG would be given.
        options: the class's arguments other than ``root``.
        skip: a folder below ``root`` that holds no raw files.

    Raises:
        Missing: names the files that are not there.
    """
    if cls.download is Dataset.download:
        return []  # generated or built in: the class reads no files
    with tempfile.TemporaryDirectory(prefix="gtrain-") as scratch:
        mirror(root, Path(scratch), skip=skip)
        try:
            construct(_without_work(cls), scratch, options)
        except Missing as missing:
            wanted = [file for file in missing.files if not file.exists()]
            raise Missing([root / file.relative_to(scratch) for file in wanted]) from None
        except _Complete as found:
            return [Path(path).resolve() for path in found.paths]
    return []


def download(cls: type[Dataset], root: Path, options: dict[str, Any]) -> None:
    """Let a data set class download its raw files below ``root``, and do nothing with them."""
    with contextlib.suppress(_Complete):
        construct(_without_work(cls, download=True), root, options)


def construct(cls: type[Dataset], root: str | Path, options: dict[str, Any]) -> Dataset:
    """Construct a data set quietly, its root at ``root`` where it takes one; of its pickles only plain ones are read.

    Raises:
        ConfigError: an option is not one of the class's, or has a value that it does not know.
        DataError: the class needs a package that is not installed.
    """
    parameters = inspect.signature(cls).parameters
    unknown = [name for name in options if name not in parameters]
    if unknown:
        known = ", ".join(name for name in parameters if name not in ("self", "root"))
        raise ConfigError(f"data.options.{unknown[0]} is not an option of {cls.__name__}", hint=f"it takes {known}")
    place = {"root": str(root)} if "root" in parameters else {}
    try:
        # PyG reports each step to stderr, and warns that it is about to unpickle what plain_pickles then refuses
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(), plain_pickles(root):
            warnings.filterwarnings("ignore", message="Weights only load failed")
            return cls(**place, **options)
    except (Missing, _Complete, GtrainError, OSError):
        raise
    except ImportError as err:
        package = err.name or str(err)
        raise DataError(
            f"{cls.__name__} needs the package {package!r}, which is not installed",
            hint=_INSTALL.get(package, f"pip install {package}"),
        ) from err
    except (AssertionError, TypeError) as err:  # how PyG's classes refuse an option's value
        raise ConfigError(
            f"{cls.__name__} does not accept data.options={options}: {err}",
            hint="correct data.options, such as data.options={name: Cora}; the documentation of "
            f"torch_geometric.datasets.{cls.__name__} lists what it takes",
        ) from err


def mirror(source: Path, target: Path, *, skip: Path) -> None:
    """Make the folders of ``source`` in ``target``, and a link for each file, without PyG's ``processed`` folders."""
    stores = skip.resolve()
    for folder, names, files in os.walk(source.resolve()):
        names[:] = [name for name in names if name != "processed" and Path(folder, name) != stores]
        place = target / Path(folder).relative_to(source.resolve())
        place.mkdir(parents=True, exist_ok=True)
        for file in files:
            (place / file).symlink_to(Path(folder, file))


def _without_work(cls: type[Dataset], *, download: bool = False) -> type[Dataset]:
    """Return a subclass that reports its raw files in place of processing, and of downloading if that is not wanted."""

    def report_missing(self: Dataset) -> None:
        raise Missing([Path(path) for path in self.raw_paths])

    def process(self: Dataset) -> None:
        raise _Complete(self.raw_paths)

    methods: dict[str, Any] = {"process": process, "__init__": cls.__init__}
    if not download:
        methods["download"] = report_missing
    return type(cls.__name__, (cls,), methods)
