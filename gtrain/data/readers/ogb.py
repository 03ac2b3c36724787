"""The files of the Open Graph Benchmark as they lie on disk after unpacking."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.module import log
from gtrain.data.readers.files import load_tensors
from gtrain.data.readers.number_table import read_table
from gtrain.data.readers.unpickling import NUMPY_GLOBALS
from gtrain.errors import DataError
from gtrain.graph.store.lock import made_folder

_BLOCK_BYTES = 1 << 24


def read_csv(path: Path, dtype: type[np.generic]) -> NDArray[Any]:
    """Read a ``.csv.gz`` of numbers without names of columns.

    Returns:
        ``[rows, columns]``.

    Raises:
        DataError: names the file, and the line that is malformed.
    """
    integers = np.issubdtype(dtype, np.integer)
    try:
        with gzip.open(path) as file:
            width = file.readline().count(b",") + 1
        names = [str(column) for column in range(width)]
        kind = pa.int64() if integers else pa.from_numpy_dtype(dtype)
        with pa.csv.open_csv(
            pa.input_stream(str(path), compression="gzip"),
            read_options=pa.csv.ReadOptions(column_names=names, block_size=_BLOCK_BYTES),
            convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(names, kind), null_values=[]),
        ) as reader:
            blocks = [np.stack([column.to_numpy() for column in batch.columns], axis=1) for batch in reader]
    except FileNotFoundError as err:
        raise DataError(f"there is no {path}", hint="unpack the whole archive of the data set again") from err
    except pa.ArrowInvalid:
        table = read_table(path, integers=None if integers else 0, header=False)  # it knows how to name the line
        return np.stack(table.columns, axis=1).astype(dtype)
    except (OSError, EOFError, zlib.error) as err:
        raise DataError(f"{path} cannot be unpacked: {err}", hint="download the data set again") from err
    return np.concatenate(blocks).astype(dtype, copy=False) if blocks else np.empty((0, width), dtype)


def first_width(path: Path) -> int:
    """Return the number of columns of the first line of a ``.csv.gz``; 0 where it has none.

    Raises:
        DataError: it cannot be unpacked.
    """
    try:
        with gzip.open(path) as file:
            line = file.readline(1 << 20)
    except (OSError, EOFError, zlib.error) as err:
        raise DataError(f"{path} cannot be unpacked: {err}", hint="download the data set again") from err
    return line.count(b",") + 1 if line.strip() else 0


def read_optional(path: Path, dtype: type[np.generic]) -> NDArray[Any] | None:
    """Read a ``.csv.gz`` that some data sets do not have."""
    return read_csv(path, dtype) if path.is_file() else None


def read_edges(path: Path, sizes: tuple[int, int]) -> Tensor:
    """Read ``source,target`` lines.

    Args:
        path: the file.
        sizes: number of source nodes and of target nodes.

    Returns:
        int64 ``[2, E]``.

    Raises:
        DataError: names the file, and the line with an id that no node has.
    """
    edges = read_csv(path, np.int64)
    if edges.shape[1] != 2:
        raise DataError(f"{path}, line 1: {edges.shape[1]} columns, and 2 were expected", hint="download it again")
    outside = ((edges < 0) | (edges >= np.array(sizes))).any(axis=1)
    if outside.any():
        row = int(outside.argmax())
        raise DataError(
            f"{path}, line {row + 1}: the edge {edges[row, 0]} -> {edges[row, 1]}, and there are "
            f"{sizes[0]} source nodes and {sizes[1]} target nodes",
            hint="ids start at 0; download the data set again",
        )
    return torch.from_numpy(np.ascontiguousarray(edges.T))


def read_masks(folder: Path, num_nodes: int) -> dict[str, Tensor]:
    """Read ``train``, ``valid`` and ``test.csv.gz``: the nodes of each split.

    Returns:
        ``train_mask``, ``val_mask`` and ``test_mask``, ``[N]`` bool.
    """
    masks = {}
    for split, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        path = folder / f"{name}.csv.gz"
        nodes = read_csv(path, np.int64)[:, 0]
        outside = (nodes < 0) | (nodes >= num_nodes)
        if outside.any():
            row = int(outside.argmax())
            raise DataError(
                f"{path}, line {row + 1}: the node {nodes[row]}, and there are {num_nodes} nodes",
                hint="download the data set again",
            )
        masks[f"{split}_mask"] = torch.zeros(num_nodes, dtype=torch.bool)
        masks[f"{split}_mask"][torch.from_numpy(nodes)] = True
    return masks


def read_split(path: Path) -> dict[str, Any]:
    """Read ``valid.pt`` or ``test.pt`` of a link data set: arrays and lists by name. Nothing else is unpickled.

    Raises:
        DataError: it is not there, damaged, or holds other objects.
    """
    if not path.is_file():
        raise DataError(f"there is no {path}", hint="unpack the whole archive of the data set again")
    with torch.serialization.safe_globals(NUMPY_GLOBALS):
        loaded = load_tensors(path, "download the data set again from ogb.stanford.edu")
    if not isinstance(loaded, dict):
        raise DataError(f"{path} holds a {type(loaded).__name__}", hint="download the data set again")
    return loaded


def download(url: str, target: Path) -> None:
    """Download a ``.zip`` and make the folder in it ``target``.

    Raises:
        DataError: there is no network, or the archive is damaged; says what to do by hand.
    """
    log.info("downloading %s", url)
    with made_folder(target.parent), tempfile.TemporaryDirectory(prefix=".gtrain-", dir=target.parent) as scratch:
        archive = Path(scratch) / "archive.zip"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer, archive.open("wb") as file:
                shutil.copyfileobj(answer, file, 1 << 20)
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(Path(scratch) / "unpacked")
        except (urllib.error.URLError, OSError, zipfile.BadZipFile) as err:
            raise DataError(
                f"there is no {target}, and {url} could not be downloaded: {err}",
                hint=f"where a network is, download it; unpack it, and put the folder with raw and split at {target}",
            ) from err
        folders = sorted(raw.parent for raw in (Path(scratch) / "unpacked").rglob("raw") if raw.is_dir())
        if not folders:
            raise DataError(f"{url} holds no folder with raw data", hint=f"put the data set's folder at {target}")
        shutil.move(folders[0], target)
