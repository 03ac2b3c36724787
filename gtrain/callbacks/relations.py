"""``gtrain export``: what scores edges, beside the embeddings: relation parameters by name, biases, a description."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from gtrain.engine.precision import sum_dtype
from gtrain.graph.store import Store
from gtrain.nn.recipe import EdgeRecipe, ModelRecipe

FORMAT = 1
Numbers = NDArray[np.floating]


@dataclass(frozen=True)
class RelationGroup:
    """Relations that join the same two entity types by the same operator, with their parameters.

    Attributes:
        heads, tails: names of the entity types.
        operator: as ``model.operator``.
        dimension: columns of an embedding, D.
        all_negs: whether all entities were negatives.
        ids: R ids of the data.
        relations: their names.
        weights: factor of each relation's loss, R numbers; None: all 1.
        parameters: by direction (``forwards``; ``backwards`` only with ``model.reciprocal``) and name, ``[R, ...]``:
            ``vector`` ``[R, D]``, ``matrix`` ``[R, D, D]``, ``real``, ``imaginary`` and ``angle`` ``[R, D / 2]``.
    """

    heads: str
    tails: str
    operator: str
    dimension: int
    all_negs: bool
    ids: tuple[int, ...]
    relations: tuple[str, ...]
    weights: tuple[float, ...] | None
    parameters: dict[str, dict[str, Numbers]]


@dataclass(frozen=True)
class ScoringModel:
    """How edges are scored from embeddings: what a reader of the exported files needs besides the embeddings.

    Attributes:
        comparator: as ``model.comparator``.
        loss: as ``model.loss``.
        margin: of the ranking loss.
        reciprocal: whether each direction has its parameters.
        bias: whether entities have biases.
        entities: number of entities by type, in the order of their ids.
        groups: each relation is in exactly one.
    """

    comparator: str
    loss: str
    margin: float
    reciprocal: bool
    bias: bool
    entities: dict[str, int]
    groups: tuple[RelationGroup, ...]

    @classmethod
    def of(cls, recipe: ModelRecipe, store: Store) -> ScoringModel:
        """Return the parameters of a model, with the names of its relations; without names, their numbers."""
        types, names = list(recipe.tables), store.names("relation")
        first = recipe.groups[0]
        counts = store.facts.get("entity_types") or {types[0]: store.num_nodes_of(store.node_types[0])}

        def group(part: EdgeRecipe) -> RelationGroup:
            heads, tails = (types[end] for end in part.types)
            relations = [str(number) for number in part.relations] if names is None else names.decode(part.relations)
            parameters = {"forwards": _numbers(part.forwards), "backwards": _numbers(part.backwards)}
            return RelationGroup(
                heads,
                tails,
                part.operator,
                part.dimension,
                part.all_negs,
                part.relations,
                tuple(relations),
                part.relation_weight,
                {direction: values for direction, values in parameters.items() if values},
            )

        return cls(
            first.comparator,
            first.loss,
            first.margin,
            first.reciprocal,
            first.bias,
            {name: int(counts[name]) for name in types},
            tuple(map(group, recipe.groups)),
        )

    @property
    def description(self) -> str:
        """The text of ``NAME.model.json``."""
        groups = [{name: vars(group)[name] for name in _DESCRIBED} for group in self.groups]
        settings = {name: value for name, value in vars(self).items() if name not in ("groups", "loss", "margin")}
        return json.dumps({"format": FORMAT, **settings, "groups": groups}, indent=1) + "\n"

    def rows(self) -> Iterator[tuple[str, str, str, str, Numbers]]:
        """Yield relation, direction, operator, parameter and its numbers, for each parameter of each relation."""
        for group in self.groups:
            for row, relation in enumerate(group.relations):
                for direction, parameters in group.parameters.items():
                    for name, values in parameters.items():
                        yield relation, direction, group.operator, name, values[row]


_DESCRIBED = ("heads", "tails", "operator", "dimension", "relations")


def _numbers(parameters: dict[str, torch.nn.Parameter]) -> dict[str, Numbers]:
    # numpy has no bfloat16
    arrays = {name: value.detach().cpu() for name, value in parameters.items()}
    return {name: x.to(sum_dtype(x.dtype)).numpy() for name, x in arrays.items()}


def files_beside(path: Path, fmt: str) -> dict[str, Path]:
    """Return the files beside an export by what they hold: ``model``, ``relations`` and ``biases``.

    Args:
        path: file or folder of the embeddings.
        fmt: its format; ``pbg_hdf5`` has none of them.
    """
    if fmt == "pbg_hdf5":
        return {}
    endings = {
        "model": "model.json",
        "relations": f"relations.{'npz' if fmt == 'npy' else fmt}",
        "biases": "biases.npy",
    }
    return {content: path.with_name(f"{path.name}.{ending}") for content, ending in endings.items()}


def write_beside(path: Path, fmt: str, model: ScoringModel, biases: Numbers | None) -> list[Path]:
    """Write the files of :func:`files_beside` that the model needs, and return them.

    Args:
        path: file or folder of the embeddings.
        fmt: ``npy``, ``parquet`` or ``tsv``.
        model: the parameters.
        biases: of all entities, by their ids, ``[N]``; None: the model has none.
    """
    files = files_beside(path, fmt)
    files["model"].write_text(model.description, encoding="utf-8")
    written = [files["model"]]
    if any(group.parameters for group in model.groups):
        _WRITERS[fmt](files["relations"], model)
        written.append(files["relations"])
    if biases is not None:
        np.save(files["biases"], biases)
        written.append(files["biases"])
    return written


def _write_npz(path: Path, model: ScoringModel) -> None:
    """Write an array for each parameter of each group; its rows are the group's relations."""
    arrays = {
        f"{number}.{direction}.{name}": values
        for number, group in enumerate(model.groups)
        for direction, parameters in group.parameters.items()
        for name, values in parameters.items()
    }
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _write_parquet(path: Path, model: ScoringModel) -> None:
    columns: Sequence[tuple[object, ...]] = list(
        zip(*((*row[:4], list(row[4].shape), row[4].ravel()) for row in model.rows()), strict=True)
    )
    names = ("relation", "direction", "operator", "parameter", "shape", "values")
    pq.write_table(pa.table(dict(zip(names, map(list, columns), strict=True))), path)


def _write_tsv(path: Path, model: ScoringModel) -> None:
    """Write relation, direction, operator, parameter, shape (such as ``4x4``), then the numbers, separated by tabs."""
    with open(path, "w", encoding="utf-8") as file:
        for *words, values in model.rows():
            digits = 9 if values.dtype == np.float32 else 17
            numbers = (f"{number:.{digits}g}" for number in values.ravel().tolist())
            file.write("\t".join([*words, "x".join(map(str, values.shape)), *numbers]) + "\n")


_WRITERS = {"npy": _write_npz, "parquet": _write_parquet, "tsv": _write_tsv}
