"""Locate the files that a user names, and read arrays from them."""

from __future__ import annotations

import codecs
import difflib
import glob
import gzip
import importlib
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.readers.number_table import COMMENTS, read_table
from gtrain.data.readers.unpickling import foreign_content
from gtrain.errors import ConfigError, DataError

Ints = NDArray[np.int64]
FileNames = str | Sequence[str]
"""A file name, a glob pattern, a folder, or a list of them."""


def candidates(name: str, root: Path) -> tuple[Path, Path]:
    """Return the two paths that a name may stand for: as it is, and below ``root``."""
    path = Path(name).expanduser()
    return path, root / path


def find_file(key: str, name: str, root: Path) -> Path:
    """Return the path of a file that is named as it is or relative to ``root``.

    Args:
        key: the option that names the file, such as ``data.path``, for messages.
        name: the value of the option.
        root: the folder of raw files.

    Raises:
        DataError: the file does not exist; lists the files with the most similar names.
    """
    paths = path, below = candidates(name, root)
    for candidate in paths:
        if candidate.is_file():
            check_encoding(candidate)
            return candidate
        if candidate.exists() and not candidate.is_dir():
            raise DataError(
                f"{key}={name}: {candidate} is a device, a pipe or a socket, not a regular file",
                hint=f"set {key} to a file on disk; files are read more than once, so write a pipe's contents to one",
            )
    if path.is_dir():
        raise DataError(f"{key}={name} is a folder", hint=f"set {key} to a file{similar('', [path])}")
    tried = "no such file" if path.is_absolute() else f"no such file, nor {below}"
    folders = [folder for folder in (path.parent, below.parent) if folder.is_dir()]
    near = similar(path.name, folders) if folders else f"; the folder {path.parent} does not exist either"
    raise DataError(f"{key}={name}: {tried}", hint=f"set {key} to a file{near}")


def find_folder(key: str, name: str, root: Path, hint: str) -> Path:
    """Return the path of a folder that is named as it is or relative to ``root``.

    Raises:
        DataError: the folder does not exist.
    """
    paths = candidates(name, root)
    for folder in paths:
        if folder.is_dir():
            return folder
    raise no_folder(f"{key}={name}", paths, hint)


def no_folder(setting: str, paths: tuple[Path, Path], hint: str) -> DataError:
    """Return the error for a setting whose :func:`candidates` are no folders; an absolute path is one candidate."""
    below = "" if paths[0].is_absolute() else f", nor {paths[1]}"
    return DataError(f"{setting}: no such folder{below}", hint=hint)


def find_files(key: str, names: FileNames, root: Path) -> list[Path]:
    """Return the files of a list, glob pattern or folder, as they are or below ``root``; each pattern's files sorted.

    Patterns and folders exclude files whose names start with ``.`` or ``_``.

    Args:
        key: the option that names the files, for messages.
        names: the value of the option.
        root: the folder of raw files.

    Raises:
        DataError: no file matches.
    """
    if not isinstance(names, str):
        if not names:
            raise DataError(f"{key} is an empty list", hint=f"set {key} to at least one file")
        return [path for name in names for path in find_files(key, name, root)]
    patterns = candidates(names, Path(glob.escape(str(root))))
    for candidate, pattern in zip(candidates(names, root), patterns, strict=True):
        if candidate.is_file():
            return [find_file(key, str(candidate), root)]
        pattern = Path(glob.escape(str(candidate))) / "*" if candidate.is_dir() else pattern
        matches = [Path(name) for name in sorted(glob.glob(str(pattern)))]
        if files := [path for path in matches if path.is_file() and path.name[0] not in "._"]:
            for path in files:
                check_encoding(path)
            return files
        if candidate.is_dir():
            inner = next((path for path in matches if path.is_dir()), None)
            also = "" if inner is None else f"; for the folders in it, such as {inner.name}: {names}/*/*"
            raise DataError(f"{key}={names}: the folder has no files", hint=f"set {key} to a folder of files{also}")
    if any(mark in names for mark in "*?["):
        raise DataError(f"{key}={names}: no file matches the pattern, here or in {root}", hint=f"correct {key}")
    return [find_file(key, names, root)]


def find_edge_sets(key: str, edge_sets: Sequence[FileNames], root: Path) -> tuple[list[Path], list[int] | None]:
    """Return the files of all edge sets, which ``strategy=pbg`` trains one after the other in each epoch.

    Args:
        key: the option that names them, for messages.
        edge_sets: the files of each set, as they are or below ``root``.
        root: the folder of raw files.

    Returns:
        The files, and the number of each file's edge set; None for a single set.

    Raises:
        DataError: a set has no file.
    """
    by_set = [find_files(key, names, root) for names in edge_sets]
    numbers = [number for number, files in enumerate(by_set) for _ in files]
    return [path for files in by_set for path in files], numbers if len(by_set) > 1 else None


def edge_set_facts(edge_sets: Sequence[Any]) -> dict[str, int]:
    """Return the store's fact about edge sets: their number, if there are several."""
    return {"edge_sets": len(edge_sets)} if len(edge_sets) > 1 else {}


def check_encoding(path: Path) -> None:
    """Refuse text in UTF-16 or UTF-32; all readers expect UTF-8.

    Raises:
        DataError: names the file and the encoding.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            head = file.read(64)
    except (OSError, EOFError, zlib.error):  # the file's reader reports the error
        return
    if (encoding := _wide_encoding(head)) is not None:
        raise DataError(
            f"{path} is text in {encoding}; gtrain reads UTF-8 (or ASCII)",
            hint=f"convert it: iconv -f {encoding} -t UTF-8 {path.name} > converted.txt",
        )


_TEXT = frozenset(b"\t\n\r" + bytes(range(32, 127)))


def _wide_encoding(head: bytes) -> str | None:
    """Return UTF-16 or UTF-32 if a byte order mark, or a zero in every other byte of text, indicates it; else None."""
    for mark, encoding in (
        (codecs.BOM_UTF32_LE, "UTF-32"),
        (codecs.BOM_UTF16_LE, "UTF-16"),
        (codecs.BOM_UTF16_BE, "UTF-16"),
    ):
        if head.startswith(mark):
            return encoding
    for first, encoding in ((0, "UTF-16LE"), (1, "UTF-16BE")):
        characters, zeros = head[first::2], head[1 - first :: 2]
        if len(head) >= 8 and not any(zeros) and all(byte in _TEXT for byte in characters):
            return encoding
    return None


def read_array(key: str, path: Path, comments: str = COMMENTS) -> Tensor:
    """Read a tensor from ``.npy``, ``.pt`` (a plain tensor) or a text table of numbers.

    Args:
        key: the option that names the file, for messages.
        path: the file.
        comments: of text, see :func:`~gtrain.data.readers.number_table.read_table`.

    Returns:
        The array; a text table is float64 ``[rows, columns]``.

    Raises:
        DataError: the file holds anything else.
    """
    advice = "write it again, numbers only: numpy.save(file, array) for .npy, torch.save(tensor, file) for .pt"
    if path.suffix not in (".pt", ".npy"):
        return torch.from_numpy(np.stack(read_table(path, integers=0, header=False, comments=comments).columns, axis=1))
    if path.suffix == ".pt":
        array = load_tensors(path, advice)
    else:
        try:
            array = torch.from_numpy(np.load(path))
        except Exception as err:
            # A garbled file can raise anything in numpy's reader.
            message = f"{key}={path} cannot be read as an array of numbers: {numpy_reason(err)}"
            raise DataError(message, hint=advice) from err
    if not isinstance(array, Tensor):
        raise DataError(
            f"{key}={path} holds a {type(array).__name__}; a single tensor is expected",
            hint="save the tensor alone: torch.save(tensor, file)",
        )
    if array.layout != torch.strided or array.is_complex():
        raise DataError(
            f"{key}={path} holds a {array.layout} tensor of {array.dtype}; a dense tensor of real numbers is expected",
            hint="save tensor.to_dense(), or the real part",
        )
    return array.detach()


def load_tensors(path: Path, hint: str, *, mapped: bool = False) -> Any:
    """Load a file that ``torch.save`` wrote; only tensors and plain containers are unpickled.

    Args:
        path: the file.
        hint: the error's hint if the file is damaged or holds other objects.
        mapped: whether to memory-map the tensors; files written by torch before 1.6 are read into memory.

    Raises:
        DataError: the file cannot be loaded.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, weights_only=True, mmap=mapped and zipfile.is_zipfile(path))
    except OSError as err:
        raise DataError(f"{path} cannot be read: {err.strerror or err}", hint=hint) from err
    except Exception as err:
        # A garbled file can raise anything in the unpickler.
        if (content := foreign_content(path, err)) is not None:
            raise DataError(
                f"{path} holds Python objects other than tensors and plain containers, which are never unpickled, "
                f"since that would run their code: {content}",
                hint=hint,
            ) from err
        raise DataError(f"{path} cannot be loaded: it is damaged, or not written by torch.save", hint=hint) from err


def numpy_reason(err: Exception) -> str:
    """Return why numpy could not read a file, in one line and without numpy's advice to unpickle."""
    text = str(err).splitlines()[0] if str(err) else type(err).__name__
    return "it is not an .npy or .npz file" if "allow_pickle=` keyword" in text else text


def first_true(mask: NDArray[np.bool_] | np.bool_) -> int | None:
    """Return the position of the first True in a mask, for messages; None if all are False."""
    return int(mask.argmax()) if mask.any() else None


def similar(name: str, folders: Iterable[Path]) -> str:
    """Return the end of a hint that lists the files with the most similar names, or else some files of a folder."""
    files: list[str] = []
    folder = Path()
    for folder in folders:
        files = sorted(file.name for file in folder.iterdir() if file.is_file())
        if near := difflib.get_close_matches(name, files, n=3):
            return f"; in {folder} there are {', '.join(near)}"
    return f"; in {folder} there are {', '.join(files[:5])}" if files else ""


def require(package: str, source: str, *, module: str | None = None, extra: str | None = None) -> ModuleType:
    """Import a package that is not among gtrain's requirements.

    Args:
        package: its name for pip.
        source: the source that needs it, for messages, such as ``data=entities``.
        module: the module to import; None: the package.
        extra: the extra of gtrain that installs it.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        return importlib.import_module(module or package)
    except ImportError as err:
        hint = f"pip install {package}" + (f", or pip install 'gtrain[{extra}]'" if extra else "")
        raise ConfigError(f"{source} needs the package {package!r}, which is not installed ({err})", hint=hint) from err
