"""Read and download the raw files of the Open Graph Benchmark."""

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
from gtrain.data.readers.files import first_true, load_tensors
from gtrain.data.readers.number_table import read_table
from gtrain.data.readers.unpickling import NUMPY_GLOBALS
from gtrain.errors import DataError
from gtrain.graph.store.lock import made_folder

_BLOCK_BYTES = 1 << 24
DOWNLOAD_HINT = "download the data set again"


def missing_file(path: Path) -> DataError:
    """Return the error for a missing file."""
    return DataError(f"{path} is missing", hint="unpack the whole archive of the data set again")


def read_csv(path: Path, dtype: type[np.generic]) -> NDArray[Any]:
    """Read a ``.csv.gz`` of numbers without column names.

    Returns:
        ``[rows, columns]``.

    Raises:
        DataError: names the file and the malformed line.
    """
    integers = np.issubdtype(dtype, np.integer)
    try:
        with gzip.open(path) as file:
            width = file.readline().count(b",") + 1
        names = [str(column) for column in range(width)]
        arrow_type = pa.int64() if integers else pa.from_numpy_dtype(dtype)
        with pa.csv.open_csv(
            pa.input_stream(str(path), compression="gzip"),
            read_options=pa.csv.ReadOptions(column_names=names, block_size=_BLOCK_BYTES),
            convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(names, arrow_type), null_values=[]),
        ) as reader:
            blocks = [np.stack([column.to_numpy() for column in batch.columns], axis=1) for batch in reader]
    except FileNotFoundError as err:
        raise missing_file(path) from err
    except pa.ArrowInvalid:
        table = read_table(path, integers=None if integers else 0, header=False)  # its errors name the line
        return np.stack(table.columns, axis=1).astype(dtype)
    except (OSError, EOFError, zlib.error) as err:
        raise DataError(f"{path} cannot be unpacked: {err}", hint=DOWNLOAD_HINT) from err
    return np.concatenate(blocks).astype(dtype, copy=False) if blocks else np.empty((0, width), dtype)


def read_lines(path: Path, limit: int = -1) -> list[str]:
    """Return the lines of a ``.gz``, of its first ``limit`` bytes.

    Raises:
        DataError: the file is missing, or cannot be decompressed.
    """
    try:
        with gzip.open(path) as file:
            return file.read(limit).decode().split()
    except FileNotFoundError as err:
        raise missing_file(path) from err
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as err:
        raise DataError(f"{path} cannot be unpacked: {err}", hint=DOWNLOAD_HINT) from err


def first_width(path: Path) -> int:
    """Return the number of columns in the first line of a ``.csv.gz``; 0 for an empty file."""
    lines = read_lines(path, 1 << 20)
    return lines[0].count(",") + 1 if lines else 0


def read_optional(path: Path, dtype: type[np.generic]) -> NDArray[Any] | None:
    """Read a ``.csv.gz``; None if the data set lacks it."""
    return read_csv(path, dtype) if path.is_file() else None


def read_edges(path: Path, sizes: tuple[int, int]) -> Tensor:
    """Read ``source,target`` lines.

    Args:
        path: the file.
        sizes: number of source nodes and of target nodes.

    Returns:
        int64 ``[2, E]``.

    Raises:
        DataError: names the file, and the line with an unknown id.
    """
    edges = read_csv(path, np.int64)
    if edges.shape[1] != 2:
        raise DataError(f"{path}, line 1: {edges.shape[1]} columns, and 2 were expected", hint=DOWNLOAD_HINT)
    if (row := first_true(((edges < 0) | (edges >= np.array(sizes))).any(axis=1))) is not None:
        raise DataError(
            f"{path}, line {row + 1}: the edge {edges[row, 0]} -> {edges[row, 1]}; there are "
            f"{sizes[0]} source nodes and {sizes[1]} target nodes",
            hint=f"ids start at 0; {DOWNLOAD_HINT}",
        )
    return torch.from_numpy(np.ascontiguousarray(edges.T))


def read_masks(folder: Path, num_nodes: int) -> dict[str, Tensor]:
    """Read the nodes of each split from ``train``, ``valid`` and ``test.csv.gz``.

    Returns:
        ``train_mask``, ``val_mask`` and ``test_mask``, ``[N]`` bool.
    """
    masks = {}
    for split, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        path = folder / f"{name}.csv.gz"
        nodes = read_csv(path, np.int64)[:, 0]
        if (row := first_true((nodes < 0) | (nodes >= num_nodes))) is not None:
            raise DataError(
                f"{path}, line {row + 1}: the node {nodes[row]}; there are {num_nodes} nodes", hint=DOWNLOAD_HINT
            )
        masks[f"{split}_mask"] = torch.zeros(num_nodes, dtype=torch.bool)
        masks[f"{split}_mask"][torch.from_numpy(nodes)] = True
    return masks


def read_split(path: Path) -> dict[str, Any]:
    """Read ``valid.pt`` or ``test.pt`` of a link data set: arrays and lists by name. Nothing else is unpickled.

    Raises:
        DataError: the file is missing or damaged, or holds other objects.
    """
    if not path.is_file():
        raise missing_file(path)
    with torch.serialization.safe_globals(NUMPY_GLOBALS):
        loaded = load_tensors(path, f"{DOWNLOAD_HINT} from ogb.stanford.edu")
    if not isinstance(loaded, dict):
        raise DataError(f"{path} holds a {type(loaded).__name__}", hint=DOWNLOAD_HINT)
    return loaded


def download(url: str, target: Path) -> None:
    """Download a ``.zip`` and move the folder in it to ``target``.

    Raises:
        DataError: the download failed, or the archive is damaged; tells how to install the data by hand.
    """
    log.info("downloading %s", url)
    with made_folder(target.parent), tempfile.TemporaryDirectory(prefix=".gtrain-", dir=target.parent) as scratch:
        archive = Path(scratch) / "archive.zip"
        try:
            with urllib.request.urlopen(url, timeout=60) as response, archive.open("wb") as file:
                shutil.copyfileobj(response, file, 1 << 20)
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(Path(scratch) / "unpacked")
        except (urllib.error.URLError, OSError, zipfile.BadZipFile) as err:
            raise DataError(
                f"{target} is missing, and {url} could not be downloaded: {err}",
                hint=f"download it on a machine with a network, unpack it, and move the folder with raw and split to "
                f"{target}",
            ) from err
        folders = sorted(raw.parent for raw in (Path(scratch) / "unpacked").rglob("raw") if raw.is_dir())
        if not folders:
            raise DataError(f"{url} holds no folder with raw data", hint=f"move the data set's folder to {target}")
        shutil.move(folders[0], target)
