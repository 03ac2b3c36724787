"""Approximate nearest neighbors by an inverted file of faiss: rows are grouped, a query scans the nearest groups.

How many groups a query must scan depends on the vectors. It is measured when the index is built, on a sample of the
rows against the exact search.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.query.neighbors import METRICS, exact_neighbors
from gtrain.query.scoring import Blocks

FORMAT = 1
_SAMPLED = 64
"""Rows per group that the centers are computed from."""
_ITERATIONS = 6
RECALL = 0.97
"""Share of the 10 nearest entities that the sample's queries must find, on average."""
_TESTED, _NEAREST = 200, 10
_FEWEST = 16  # groups


class NeighborIndex:
    """An approximate index of the vectors of one entity type.

    Args:
        index: of faiss.
        metric: ``cos``, ``l2`` or ``dot``.
        source: what the vectors are: checkpoint and entity type.
        probes: groups that a query scans.

    Attributes:
        metric, probes: as given.
    """

    def __init__(self, index: Any, metric: str, source: str, probes: int) -> None:
        self._index, self.metric, self._source, self.probes = index, metric, source, probes

    @classmethod
    def build(
        cls, blocks: Callable[[], Blocks], shape: tuple[int, int], *, metric: str, source: str, path: Path | None = None
    ) -> NeighborIndex:
        """Build the index, and save it.

        Args:
            blocks: iterates over ids and vectors of all entities; it is read four times.
            shape: of all vectors, ``(n, D)``.
            metric: see the class.
            source: see the class.
            path: the file to write, and one with the ending ``.json`` beside it; None: none.

        Raises:
            ConfigError: faiss is not installed, the metric is unknown, or the file exists.
        """
        faiss = _faiss()
        if metric not in METRICS:
            raise ConfigError(f"metric={metric} was set.", hint=f"the metrics are {', '.join(METRICS)}.")
        if path is not None and path.exists():
            raise ConfigError(f"index={path} exists already.", hint="delete it first, or name another file.")
        count, dimension = shape
        groups = num_groups(count)
        kind = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
        index = faiss.IndexIVFFlat(faiss.IndexFlat(dimension, kind), dimension, groups, kind)
        index.cp.niter, index.cp.min_points_per_centroid = _ITERATIONS, 1
        index.train(_sample(blocks(), count, min(count, groups * _SAMPLED), metric))
        for ids, rows in blocks():
            index.add_with_ids(_vectors(rows, metric), np.ascontiguousarray(ids.numpy()))
        made = cls(index, metric, source, 1)
        made._tune(blocks, count)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            faiss.write_index(index, str(path))
            described = {"format": FORMAT, "metric": metric, "source": source, "probes": made.probes}
            _description(path).write_text(json.dumps(described) + "\n")
        return made

    @classmethod
    def load(cls, path: Path, source: str) -> NeighborIndex:
        """Load an index of these vectors.

        Raises:
            ConfigError: the file is missing or not an index, or it is of other vectors.
        """
        faiss = _faiss()
        try:
            described = json.loads(_description(path).read_text())
            index = faiss.read_index(str(path))
            made = cls(index, described["metric"], described["source"], int(described["probes"]))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"index={path} was set; it cannot be read: {reason}.", hint="delete it to build it again."
            ) from error
        made.check(source)
        return made

    def check(self, source: str, metric: str | None = None) -> None:
        """Check that the index is of these vectors, and measures in this metric (None: in any).

        Raises:
            ConfigError: it is not.
        """
        if source != self._source:
            raise ConfigError(
                f"the index is of checkpoint and type {self._source}, and the model is {source}.",
                hint="build the index again, in another file.",
            )
        if metric not in (None, self.metric):
            raise ConfigError(
                f"metric={metric} was set; the index measures {self.metric}.", hint="build another index."
            )

    def search(self, queries: Tensor, k: int, *, probes: int | None = None) -> Tensor:
        """Return ids of the k nearest entities of each query, the nearest first; -1 where fewer are found.

        Args:
            queries: ``[Q, D]``.
            k: how many.
            probes: groups that are scanned; None: :attr:`probes`. More are more accurate and slower.

        Returns:
            int64 ``[Q, k]``.
        """
        self._index.nprobe = self.probes if probes is None else probes
        _, ids = self._index.search(_vectors(queries, self.metric), k)
        return torch.from_numpy(ids)

    def _tune(self, blocks: Callable[[], Blocks], count: int) -> None:
        """Set the number of groups that a query scans: doubled until the recall of a sample is :data:`RECALL`."""
        chosen = _chosen(count, _TESTED, seed=1)
        picked = [(ids[chosen[ids]], rows[chosen[ids]]) for ids, rows in blocks()]
        ids, queries = (torch.cat(pieces) for pieces in zip(*picked, strict=True))
        exact, _ = exact_neighbors(blocks(), queries, _NEAREST, self.metric, list(ids.split(1)))
        self.probes, groups = min(_FEWEST, self._index.nlist), self._index.nlist
        while self.probes < groups:
            nearest = self.search(queries, _NEAREST + 1)  # with the query itself
            hits = (nearest.unsqueeze(2) == exact.unsqueeze(1)).sum()
            if hits >= RECALL * exact.numel():
                break
            self.probes = min(2 * self.probes, groups)


def num_groups(count: int) -> int:
    """Return the number of groups of n rows: 4 times the square root, a power of two; each has 39 rows or more."""
    return 1 << max(0, min(round(math.log2(4 * math.sqrt(max(count, 1)))), int(math.log2(max(count / 39, 1)))))


def _faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "an index was requested; an approximate search needs faiss.",
            hint="pip install 'gtrain[index]', or leave out index: the search is then exact.",
        ) from error
    module: ModuleType = faiss
    return module


def _sample(blocks: Blocks, count: int, size: int, metric: str) -> NDArray[np.float32]:
    """Return a random sample of the rows."""
    chosen = _chosen(count, size, seed=0)
    return np.concatenate([_vectors(rows[chosen[ids]], metric) for ids, rows in blocks])


def _chosen(count: int, size: int, seed: int) -> Tensor:
    """Return which rows are in a random sample, bool ``[n]``."""
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size]] = True
    return chosen


def _vectors(rows: Tensor, metric: str) -> NDArray[np.float32]:
    """Return rows as faiss reads them: of length 1 for cosines."""
    rows = torch.nn.functional.normalize(rows, dim=1) if metric == "cos" else rows
    return np.ascontiguousarray(rows.float().numpy())


def _description(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
