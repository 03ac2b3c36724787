"""File formats of predictions and embeddings: one row of numbers per graph node, by name or id."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from gtrain.errors import ConfigError
from gtrain.graph.store.names import Names

ROWS = 1 << 16
"""Rows written at a time."""
Rows = NDArray[np.float32]
Writer = Callable[[Path, Rows, Names | None, str], None]


def blocks(values: Rows, names: Names | None) -> Iterator[tuple[list[Any], Rows]]:
    """Yield blocks of ids (names if the nodes have names, otherwise numbers) and rows."""
    for first in range(0, len(values), ROWS):
        block = np.ascontiguousarray(values[first : first + ROWS])
        ids = np.arange(first, first + len(block))
        yield ids.tolist() if names is None else names.decode(torch.from_numpy(ids)), block


def write_parquet(path: Path, values: Rows, names: Names | None, node_type: str, *, classes: bool = False) -> None:
    """Write the columns ``id``, ``values`` (a list of D numbers) and ``prediction`` for scores of classes.

    Args:
        path: the file.
        values: ``[N, D]``, by the source data's ids.
        names: of the nodes; None if ids are numbers.
        node_type: of the nodes.
        classes: whether the numbers are scores of classes.
    """
    fields = [("id", pa.int64() if names is None else pa.string()), ("values", pa.list_(pa.float32(), values.shape[1]))]
    schema = pa.schema([*fields, ("prediction", pa.int64())] if classes else fields)
    with pq.ParquetWriter(path, schema) as writer:
        for ids, block in blocks(values, names):
            columns = {
                "id": ids,
                "values": pa.FixedSizeListArray.from_arrays(block.reshape(-1), values.shape[1]),
                "prediction": block.argmax(axis=1),
            }
            writer.write_table(pa.table({field.name: columns[field.name] for field in schema}, schema))


def write_tsv(path: Path, values: Rows, names: Names | None, node_type: str) -> None:
    """Write a line per node: its name or id, then its numbers, separated by tabs. As :func:`write_parquet`."""
    with open(path, "w", encoding="utf-8") as handle:
        for ids, block in blocks(values, names):
            for name, row in zip(ids, block, strict=True):
                numbers = "\t".join(f"{value:.9g}" for value in row.tolist())
                handle.write(f"{name}\t{numbers}\n")


def write_hdf5(path: Path, values: Rows, names: Names | None, node_type: str) -> None:
    """Write a folder in the format of PyTorch-BigGraph's checkpoints and entity paths.

    The files are ``embeddings_<type>_0.v1.h5``, ``entity_names_<type>_0.json`` and ``entity_count_<type>_0.txt``.
    Arguments as for :func:`write_parquet`.

    Raises:
        ConfigError: h5py is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise ConfigError("format=pbg_hdf5 needs h5py.", hint="pip install 'gtrain[hdf5]'") from error
    path.mkdir(exist_ok=True)
    with h5py.File(path / f"embeddings_{node_type}_0.v1.h5", "w") as file:
        file.attrs["format_version"] = 1
        target = file.create_dataset("embeddings", values.shape, dtype="f4")
        first = 0
        for _, block in blocks(values, None):
            target[first : first + len(block)] = block
            first += len(block)
    (path / f"entity_count_{node_type}_0.txt").write_text(f"{len(values)}\n")
    every = [str(name) for ids, _ in blocks(values[:, :1], names) for name in ids]
    (path / f"entity_names_{node_type}_0.json").write_text(json.dumps(every))


WRITERS: dict[str, Writer] = {"parquet": write_parquet, "tsv": write_tsv, "pbg_hdf5": write_hdf5}
