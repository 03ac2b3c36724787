"""``gtrain export format=pbg_hdf5``: the files of PyTorch-BigGraph's checkpoints and entity paths.

PyTorch-BigGraph keeps a bias in the first column of an embedding, and its operators transform that column too. Exported
operators keep it: they are the identity there. Its complex numbers need an even number of columns, so with biases the
first imaginary part is 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.callbacks.relations import Numbers, RelationGroup, ScoringModel
from gtrain.errors import ConfigError

ROWS = 1 << 16
"""Rows written at a time."""
_VERSION = 1
_PARAMETERS = {
    "translation": {"vector": "translation"},
    "diagonal": {"vector": "diagonal"},
    "linear": {"matrix": "linear_transformation"},
    "affine": {"matrix": "linear_transformation", "vector": "translation"},
    "complex_diagonal": {"real": "real", "imaginary": "imag"},
}
"""PyTorch-BigGraph's names of an operator's parameters; those of dynamic relations are plural (``translations``)."""


def check_installed() -> None:
    """Raise unless h5py is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        raise ConfigError("format=pbg_hdf5 needs h5py.", hint="pip install 'gtrain[hdf5]'") from error


def why_not(model: ScoringModel) -> str | None:
    """Return why PyTorch-BigGraph's model file cannot hold the parameters; None: it can."""
    if len({group.dimension for group in model.groups}) > 1:
        return "PyTorch-BigGraph has one dimension for all entity types"
    if model.reciprocal and len(model.groups) > 1:
        return "PyTorch-BigGraph's dynamic relations (model.reciprocal=true) join the same types by the same operator"
    return None


class Columns:
    """Where the numbers of an embedding are in PyTorch-BigGraph's columns.

    Args:
        dimension: columns of an embedding, D.
        bias: whether the first column is a bias.
        pairs: whether an operator reads the columns as complex numbers.

    Attributes:
        width: columns of PyTorch-BigGraph.
    """

    def __init__(self, dimension: int, bias: bool, pairs: bool) -> None:
        self._bias = bias
        before = np.arange(dimension) + bias
        if bias and pairs:
            before[dimension // 2 :] += 1  # the imaginary part of the bias
        self._columns, self.width = before, dimension + bias * (1 + pairs)

    def rows(self, values: Numbers, biases: Numbers | None) -> NDArray[np.float32]:
        """Return embeddings ``[n, D]`` and biases ``[n]`` as rows ``[n, width]``."""
        rows = np.zeros((len(values), self.width), np.float32)
        rows[:, self._columns] = values
        if biases is not None:
            rows[:, 0] = biases
        return rows

    def parameter(self, operator: str, name: str, values: Numbers) -> NDArray[np.float32]:
        """Return a parameter of R relations ``[R, ...]``, the identity in columns that embeddings do not have."""
        count = len(values)
        if name in ("real", "imaginary"):
            neutral = np.full((count, int(self._bias)), float(name == "real"))
            return np.concatenate([neutral, values], axis=1).astype(np.float32)
        if name == "matrix":
            matrices = np.tile(np.eye(self.width, dtype=np.float32), (count, 1, 1))
            matrices[:, self._columns[:, None], self._columns] = values
            return matrices
        vectors = np.full((count, self.width), float(operator == "diagonal"), np.float32)
        vectors[:, self._columns] = values
        return vectors


def columns_of(model: ScoringModel, dimension: int) -> Columns:
    """Return PyTorch-BigGraph's columns for the embeddings of a model, of D = ``dimension`` columns."""
    bias = model.bias and why_not(model) is None
    return Columns(dimension, bias, any(group.operator in ("complex_diagonal", "rotation") for group in model.groups))


def write_entities(
    folder: Path, name: str, values: Numbers, names: list[str], columns: Columns | None, biases: Numbers | None
) -> None:
    """Write embeddings, names and count of one entity type, in one partition.

    Args:
        folder: exists.
        name: of the type.
        values: ``[n, D]``.
        names: of the entities.
        columns: of PyTorch-BigGraph; None: those of ``values``.
        biases: ``[n]``; None: without biases.
    """
    import h5py

    width = values.shape[1] if columns is None else columns.width
    with h5py.File(folder / f"embeddings_{name}_0.v{_VERSION}.h5", "w") as file:
        file.attrs["format_version"] = 1
        target = file.create_dataset("embeddings", (len(values), width), dtype="f4")
        for first in range(0, len(values), ROWS):
            piece = slice(first, first + ROWS)
            rows = values[piece]
            target[piece] = rows if columns is None else columns.rows(rows, None if biases is None else biases[piece])
    (folder / f"entity_count_{name}_0.txt").write_text(f"{len(values)}\n")
    (folder / f"entity_names_{name}_0.json").write_text(json.dumps(names))


def write_model(folder: Path, final: Path, model: ScoringModel) -> None:
    """Write relation parameters, the configuration, and the version of the checkpoint.

    Args:
        folder: exists.
        final: the path that the folder is renamed to, for the configuration.
        model: the parameters, for which :func:`why_not` is None.
    """
    import h5py

    model = replace(model, groups=tuple(map(_without_rotation, model.groups)))
    columns = columns_of(model, model.groups[0].dimension)
    with h5py.File(folder / f"model.v{_VERSION}.h5", "w") as file:
        file.attrs["format_version"] = 1
        target = file.create_group("model", track_order=True)
        for group in model.groups:
            for parameter, private, values in _datasets(model, group, columns):
                target.create_dataset(parameter, data=values).attrs["state_dict_key"] = private
    names = [name for _, name, _, _ in _by_id(model)]
    (folder / "checkpoint_version.txt").write_text(f"{_VERSION}\n")
    (folder / "dynamic_rel_names.json").write_text(json.dumps(names))
    (folder / "dynamic_rel_count.txt").write_text(f"{len(names)}\n")
    (folder / "config.json").write_text(json.dumps(_config(model, columns.width, str(final.absolute())), indent=1))


def _without_rotation(group: RelationGroup) -> RelationGroup:
    """Write a rotation, which PyTorch-BigGraph lacks, as the multiplication by complex numbers that it is."""
    if group.operator != "rotation":
        return group
    angles = {direction: parameters["angle"] for direction, parameters in group.parameters.items()}
    products = {direction: {"real": np.cos(angle), "imaginary": np.sin(angle)} for direction, angle in angles.items()}
    return replace(group, operator="complex_diagonal", parameters=products)


def _datasets(
    model: ScoringModel, group: RelationGroup, columns: Columns
) -> list[tuple[str, str, NDArray[np.float32]]]:
    """Return the name in the file, the name in PyTorch-BigGraph's module, and the numbers of each parameter.

    PyTorch-BigGraph transforms heads by ``lhs`` operators and tails by ``rhs`` operators. Only dynamic relations, which
    share a dataset with a row for each, have ``lhs`` operators.
    """
    datasets = []
    for direction, parameters in group.parameters.items():
        side = "lhs" if model.reciprocal and direction == "forwards" else "rhs"
        for name, values in parameters.items():
            theirs, placed = _PARAMETERS[group.operator][name], columns.parameter(group.operator, name, values)
            if model.reciprocal:
                plural = theirs if theirs in ("real", "imag") else f"{theirs}s"
                numbered = [(0, plural, placed)]
            else:
                numbered = [(number, theirs, one) for number, one in zip(group.ids, placed, strict=True)]
            datasets += [
                (f"relations/{number}/operator/{side}/{key}", f"{side}_operators.{number}.{key}", one)
                for number, key, one in numbered
            ]
    return datasets


def _by_id(model: ScoringModel) -> list[tuple[int, str, float, RelationGroup]]:
    """Return id, name, weight and group of every relation, in the order of the ids."""
    relations = [
        (number, name, weight, group)
        for group in model.groups
        for number, name, weight in zip(
            group.ids, group.relations, group.weights or [1.0] * len(group.ids), strict=True
        )
    ]
    return sorted(relations, key=lambda relation: relation[0])


def _config(model: ScoringModel, dimension: int, folder: str) -> Mapping[str, Any]:
    """Return PyTorch-BigGraph's configuration; with dynamic relations one entry stands for all of them."""

    def entry(group: RelationGroup, name: str, weight: float) -> Mapping[str, Any]:
        settings = {"lhs": group.heads, "rhs": group.tails, "operator": group.operator, "all_negs": group.all_negs}
        # It refuses the weight 0, and in one entry there is one weight.
        return {"name": name, **settings, **({"weight": weight} if weight > 0 and not model.reciprocal else {})}

    every = [entry(group, name, weight) for _, name, weight, group in _by_id(model)]
    return {
        "entities": {name: {"num_partitions": 1} for name in model.entities},
        "relations": [{**every[0], "name": "all"}] if model.reciprocal else every,
        "dimension": dimension,
        "global_emb": False,  # embeddings have it already
        "comparator": model.comparator,
        "bias": model.bias,
        "loss_fn": model.loss,
        "margin": model.margin,
        "dynamic_relations": model.reciprocal,
        "entity_path": folder,
        "edge_paths": [],
        "checkpoint_path": folder,
    }
