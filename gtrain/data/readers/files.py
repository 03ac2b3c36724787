"""Finding the files that a user names, and reading arrays from them."""

from __future__ import annotations

import codecs
import difflib
import glob
import gzip
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.data.readers.number_table import read_table
from gtrain.data.readers.unpickling import foreign_content
from gtrain.errors import DataError, GtrainError


def find_file(key: str, name: str, root: Path) -> Path:
    """Return the file that was named, as it is or below ``root``.

    Args:
        key: the option that names it, such as ``data.path``, for messages.
        name: what the option was set to.
        root: the folder of raw files.

    Raises:
        DataError: there is none; lists the files in that folder with the nearest names.
    """
    path = Path(name).expanduser()
    for candidate in (path, root / path):
        if candidate.is_file():
            check_encoding(candidate)
            return candidate
        if candidate.exists() and not candidate.is_dir():
            raise DataError(
                f"{key}={name}: {candidate} is a device, a pipe or a socket, not a regular file",
                hint=f"set {key} to a file on disk; files are read more than once, so write a pipe's contents to one",
            )
    if path.is_dir():
        raise DataError(f"{key}={name} is a folder", hint=f"set {key} to a file{_nearby('', path)}")
    places = f"there is no such file, nor {root / path}" if not path.is_absolute() else "there is no such file"
    folders = [folder for folder in (path.parent, (root / path).parent) if folder.is_dir()]
    near = _nearby(path.name, *folders) if folders else f"; the folder {path.parent} does not exist either"
    raise DataError(f"{key}={name}: {places}", hint=f"set {key} to a file{near}")


def find_files(key: str, names: str | Sequence[str], root: Path) -> list[Path]:
    """Return the files of a list, glob pattern or folder, as they are or below ``root``, sorted within each pattern.

    In a folder, and by a pattern, files whose names begin with ``.`` or ``_`` are left out.

    Args:
        key: the option that names them, for messages.
        names: what the option was set to.
        root: the folder of raw files.

    Raises:
        DataError: there is none.
    """
    if not isinstance(names, str):
        if not names:
            raise DataError(f"{key} is an empty list", hint=f"set {key} to at least one file")
        return [path for name in names for path in find_files(key, name, root)]
    for candidate in (Path(names).expanduser(), root / Path(names).expanduser()):
        if candidate.is_file():
            check_encoding(candidate)
            return [candidate]
        pattern = str(candidate / "*") if candidate.is_dir() else str(candidate)
        found = [Path(name) for name in sorted(glob.glob(pattern))]
        if files := [path for path in found if path.is_file() and path.name[0] not in "._"]:
            for path in files:
                check_encoding(path)
            return files
        if candidate.is_dir():
            raise DataError(f"{key}={names}: there are no files in the folder", hint=f"set {key} to a folder of files")
    if any(mark in names for mark in "*?["):
        raise DataError(f"{key}={names}: no file fits the pattern, here or in {root}", hint=f"correct {key}")
    return [find_file(key, names, root)]


def check_encoding(path: Path) -> None:
    """Refuse text in UTF-16 or UTF-32, whose bytes are not those of digits and separators.

    Raises:
        DataError: names the file and the encoding.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            head = file.read(64)
    except (OSError, EOFError, zlib.error):  # its reader says what is wrong with it
        return
    if (encoding := _wide_encoding(head)) is not None:
        raise DataError(
            f"{path} is text in {encoding}, and UTF-8 (or ASCII) is read",
            hint=f"convert it: iconv -f {encoding} -t UTF-8 {path.name} > converted.txt",
        )


def _wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32, by the mark at the beginning, or by every other byte being zero; None for other contents."""
    for mark, encoding in (
        (codecs.BOM_UTF32_LE, "UTF-32"),
        (codecs.BOM_UTF16_LE, "UTF-16"),
        (codecs.BOM_UTF16_BE, "UTF-16"),
    ):
        if head.startswith(mark):
            return encoding
    for first, encoding in ((0, "UTF-16LE"), (1, "UTF-16BE")):
        shown, zeros = head[first::2], head[1 - first :: 2]
        if len(head) >= 8 and not any(zeros) and all(byte in _TEXT for byte in shown):
            return encoding
    return None


_TEXT = frozenset(b"\t\n\r" + bytes(range(32, 127)))


def read_array(key: str, path: Path) -> Tensor:
    """Read a tensor from ``.npy``, ``.pt`` (a plain tensor) or a text table of numbers.

    Returns:
        The array; a text table is float64 ``[rows, columns]``.

    Raises:
        DataError: the file holds something else.
    """
    anew = "write it again, numbers only: numpy.save(file, array) for .npy, torch.save(tensor, file) for .pt"
    if path.suffix == ".pt":
        return _tensor(load_tensors(path, anew), key, path)
    try:
        if path.suffix == ".npy":
            return _real(torch.from_numpy(np.load(path)), key, path)
    except GtrainError:
        raise
    except Exception as err:  # numpy's reader of a garbled file may stumble in any way
        raise DataError(f"{key}={path} cannot be read as an array of numbers: {reason(err)}", hint=anew) from err
    columns = read_table(path, integers=0, header=False).columns
    return torch.from_numpy(np.stack(columns, axis=1))


def load_tensors(path: Path, anew: str, *, mapped: bool = False) -> Any:
    """Load what ``torch.save`` wrote: tensors and plain containers; nothing else is unpickled.

    Args:
        path: the file.
        anew: the hint where it is damaged or holds other things.
        mapped: whether to map the tensors' contents instead of reading them; files of torch before 1.6 are read.

    Raises:
        DataError: it cannot be loaded.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            mapped = mapped and zipfile.is_zipfile(path)
            return torch.load(path, weights_only=True, mmap=mapped)
    except OSError as err:
        raise DataError(f"{path} cannot be read: {err.strerror or err}", hint=anew) from err
    except Exception as err:  # the unpickler of a garbled file may stumble in any way
        if (found := foreign_content(path, err)) is not None:
            raise DataError(
                f"{path} holds Python objects other than tensors and plain containers, which are never unpickled, "
                f"since that would run their code: {found}",
                hint=anew,
            ) from err
        raise DataError(f"{path} cannot be loaded: it is damaged, or not written by torch.save", hint=anew) from err


def reason(err: Exception) -> str:
    """Return why numpy could not read a file, in one line and without its advice to unpickle."""
    text = str(err).splitlines()[0] if str(err) else type(err).__name__
    return "it is no .npy or .npz file" if "allow_pickle=` keyword" in text else text


def _tensor(loaded: object, key: str, path: Path) -> Tensor:
    if not isinstance(loaded, Tensor):
        raise DataError(
            f"{key}={path} holds a {type(loaded).__name__}, and a single tensor is expected",
            hint="save the tensor alone: torch.save(tensor, file)",
        )
    return _real(loaded.detach(), key, path)


def _real(found: Tensor, key: str, path: Path) -> Tensor:
    if found.layout != torch.strided or found.is_complex():
        raise DataError(
            f"{key}={path} holds a {found.layout} tensor of {found.dtype}, and a dense one of real numbers is expected",
            hint="save tensor.to_dense(), or the real part",
        )
    return found


def _nearby(name: str, *folders: Path) -> str:
    """Return the end of a hint: the files with the nearest names, or else some files of the last folder."""
    files: list[str] = []
    for folder in folders:
        files = sorted(file.name for file in folder.iterdir() if file.is_file())
        if near := difflib.get_close_matches(name, files, n=3):
            return f"; in {folder} there are {', '.join(near)}"
    return f"; in {folders[-1]} there are {', '.join(files[:5])}" if files else ""
