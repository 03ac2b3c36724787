"""Several lists of edges, which ``strategy=pbg`` trains one after the other in each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gtrain.data.readers.files import find_files

Named = str | Sequence[str]
"""The files of one set: a name, a glob pattern, a folder, or a list of them."""


def find_sets(key: str, sets: Sequence[Named], root: Path) -> tuple[list[Path], list[int] | None]:
    """Return all files, and for each the number of its edge set, None where there is one set.

    Args:
        key: the option that names them, for messages.
        sets: the files of each set, as they are or below ``root``.
        root: a folder.

    Raises:
        DataError: a set has no file.
    """
    by_set = [find_files(key, names, root) for names in sets]
    paths = [path for found in by_set for path in found]
    numbers = [number for number, found in enumerate(by_set) for _ in found]
    return paths, numbers if len(by_set) > 1 else None


def facts_of_sets(sets: Sequence[Any]) -> dict[str, int]:
    """Return what a store says of edge sets: their number, where there are several."""
    return {"edge_sets": len(sets)} if len(sets) > 1 else {}
