"""Partitions on disk: rows and optimizer state of each, as files of :mod:`gtrain.strategy.tensor_files`."""

from __future__ import annotations

import re
from pathlib import Path

from gtrain.errors import CheckpointError
from gtrain.graph.store.manifest import safe_name
from gtrain.strategy.tensor_files import Writing, announce, keep, mapped, read, write

__all__ = [
    "KINDS",
    "PIECE",
    "ROWS",
    "STATE",
    "Writing",
    "announce",
    "check_count",
    "file_name",
    "keep",
    "mapped",
    "partition_key",
    "read",
    "write",
]

ROWS, STATE = KINDS = ("rows", "state")
PIECE = 1 << 18
"""Ids that are worked on at a time."""


def file_name(kind: str, partition: int, table: str = "table") -> str:
    """Name of the file of a table's partition."""
    return f"{partition_key(safe_name(table), partition)}.{kind}.npy"


def partition_key(table: str, partition: int) -> str:
    """What a partition is called in a store, and its lease on the wire."""
    return f"{table}-{partition}"


def check_count(folder: Path, table: str, partitions: int) -> None:
    """Check that a checkpoint has as many partitions of a table as the table.

    Raises:
        CheckpointError: it has others.
    """
    names = re.compile(rf"{re.escape(safe_name(table))}-\d+\.{ROWS}\.npy")
    found = sum(names.fullmatch(path.name) is not None for path in folder.iterdir())
    if found != partitions:
        raise CheckpointError(
            f"{folder} has {found} partitions of a table that is cut into {partitions} here: "
            f"strategy.num_partitions={partitions} was set.",
            hint=f"set strategy.num_partitions={found} (or the type's in data.entities), or begin a run with "
            "strategy.warm_start.",
        )
