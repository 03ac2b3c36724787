"""Reading PyTorch-BigGraph's folders: counts and names of entities and relations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import DataError

Ints = NDArray[np.int64]

_COUNT = re.compile(r"entity_count_(.+)_(\d+)\.txt")


def read_counts(folder: Path) -> dict[str, Ints]:
    """Return the number of entities in each partition of each entity type, from ``entity_count_<type>_<part>.txt``.

    Raises:
        DataError: there are no such files, one is missing or malformed, or the numbers of partitions do not agree.
    """
    found: dict[str, dict[int, int]] = {}
    for path in sorted(folder.iterdir()):
        if match := _COUNT.fullmatch(path.name):
            found.setdefault(match[1], {})[int(match[2])] = _read_count(path)
    if not found:
        raise DataError(
            f"{folder} has no entity_count_<type>_<part>.txt",
            hint="set data.path to the folder that PyTorch-BigGraph's configuration calls entity_path",
        )
    for entity, counts in found.items():
        missing = sorted(set(range(max(counts) + 1)) - set(counts))
        if missing:
            raise DataError(
                f"{folder} has no entity_count_{entity}_{missing[0]}.txt, and has partition {max(counts)} of {entity}",
                hint="copy all files of the folder, or write it anew with PyTorch-BigGraph's importer",
            )
    numbers = {entity: len(counts) for entity, counts in found.items()}
    partitioned = {entity: number for entity, number in numbers.items() if number > 1}
    if len(set(partitioned.values())) > 1:
        told = ", ".join(f"{entity} in {number}" for entity, number in partitioned.items())
        raise DataError(
            f"{folder}: entity types are in different numbers of partitions: {told}",
            hint="partition all types alike, or leave a type in one partition, as PyTorch-BigGraph demands too",
        )
    return {entity: np.array([counts[part] for part in range(len(counts))]) for entity, counts in found.items()}


def read_relation_count(folder: Path) -> int | None:
    """Return the number of dynamic relations, from ``dynamic_rel_count.txt``; None where there is no such file."""
    path = folder / "dynamic_rel_count.txt"
    return _read_count(path) if path.is_file() else None


def read_entity_names(folder: Path, entity: str, counts: Ints) -> list[str] | None:
    """Return the names of the entities of a type, in the order of partitions; None where there are no such files."""
    paths = [folder / f"entity_names_{entity}_{part}.json" for part in range(counts.size)]
    there = [path.is_file() for path in paths]
    if not any(there):
        return None
    if not all(there):
        raise DataError(
            f"{folder} has no {paths[there.index(False)].name}, and has {paths[there.index(True)].name}",
            hint="copy all files of the folder, or delete all entity_names files to go without names",
        )
    return [name for path, count in zip(paths, counts.tolist(), strict=True) for name in read_names(path, count)]


def read_names(path: Path, count: int) -> list[str]:
    """Return the names in a file, which has to hold ``count`` of them."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as err:  # of JSON, or of UTF-8
        raise DataError(
            f"{path} is no JSON: {err}", hint="copy the file again, or delete all names files to go without names"
        ) from err
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        found = f"{len(names)} names" if isinstance(names, list) else f"a {type(names).__name__}"
        raise DataError(
            f"{path} has {found}, and a list of {count} strings is expected",
            hint="copy the counts and the names of the same import, or delete all names files to go without names",
        )
    return names


def _read_count(path: Path) -> int:
    text = path.read_text(errors="replace").strip()
    if re.fullmatch(r"\d{1,18}", text) is None:
        raise DataError(f"{path} holds {text[:30]!r}, and one count is expected", hint="write the number alone")
    return int(text)
