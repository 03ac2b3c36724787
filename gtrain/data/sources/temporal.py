"""A graph of events: edges with times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from gtrain.data.config import TemporalConfig
from gtrain.data.module import EVENTS_OUTLINE, GraphDataModule, file_stamp, log
from gtrain.data.readers.events import Events, check_columns, read_events
from gtrain.data.readers.files import find_file
from gtrain.errors import ConfigError, DataError

Ints = NDArray[np.int64]


class TemporalData(GraphDataModule):
    """A graph of events, one for each line: ``source target time``, perhaps with further columns.

    Ids are whole numbers from anywhere, numbered anew in their order if they are not 0..N-1, or any strings, numbered
    in the order of first mention; what they were is kept as names. Events out of order are sorted by time. CollegeMsg
    of SNAP (``u v unixtime``) is read as it is, and Wikipedia or Reddit of Kumar et al. 2019 (JODIE; ``user_id,item_id,
    timestamp,state_label,features``) with ``bipartite=True`` and, for its features, ``features="4:"``.

    Its settings are those of :class:`~gtrain.data.config.TemporalConfig`.
    """

    name = "temporal"
    outline = EVENTS_OUTLINE

    settings_type = TemporalConfig
    settings: TemporalConfig

    def __init__(self, settings: TemporalConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        given = self.settings
        if given.time_scale <= 0:
            raise ConfigError(
                f"data.time_scale={given.time_scale:g} is not positive", hint="set 1, or 1000 for thousandths"
            )
        self.path = given.path
        self.time_column = given.time_column
        self.time_scale = given.time_scale
        self.features = given.features
        self.bipartite = given.bipartite
        self._columns = _slice(given.features)
        self._names: Any = None

    def identity(self) -> dict[str, Any]:
        """Return the stamp of the file, and how it is read."""
        options = {name: getattr(self, name) for name in ("time_column", "time_scale", "features", "bipartite")}
        return {"path": file_stamp(find_file("data.path", self.path, self.root)), **options}

    def check_inputs(self) -> None:
        """Refuse a missing file, and columns that its first event does not have."""
        super().check_inputs()
        check_columns(find_file("data.path", self.path, self.root), self.time_column, self._columns)

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        return f"data.path={self.path}"

    def read(self) -> Data:
        """Read the events, number their nodes, and order them by time."""
        events = read_events(find_file("data.path", self.path, self.root), self.time_column, self._columns)
        edge_index, num_nodes = self._number(events)
        time = self._whole_times(events)
        tensors = {"edge_index": torch.from_numpy(edge_index), "edge_time": torch.from_numpy(time)}
        if events.features is not None:
            tensors["edge_attr"] = torch.from_numpy(events.features)
        if (time[1:] < time[:-1]).any():
            log.info("%s: the times are not in order; the %d events are sorted by time", events.path, len(time))
            order = torch.from_numpy(np.argsort(time, kind="stable"))
            tensors = {
                name: value[..., order] if value.dim() == 1 or name == "edge_index" else value[order]
                for name, value in tensors.items()
            }
        return Data(num_nodes=num_nodes, **tensors)

    def names(self) -> dict[str, Any]:
        """Return the ids of the file where nodes were numbered anew."""
        return {} if self._names is None else {"node": self._names}

    def _number(self, events: Events) -> tuple[Ints, int]:
        """Return the numbers of sources and targets ``[2, E]``, and how many nodes there are."""
        if not self.bipartite:
            numbers, ids = _compact(
                events, pa.chunked_array([*events.source.chunks, *events.target.chunks], pa.string())
            )
            self._names = ids
            return numbers.reshape(2, -1), int(numbers.max()) + 1
        source, source_ids = _compact(events, events.source)
        target, target_ids = _compact(events, events.target)
        count = int(source.max()) + 1
        kinds = (("source:", source_ids, source), ("target:", target_ids, target))
        names = [pc.binary_join_element_wise(kind, _or_numbers(ids, rows), "") for kind, ids, rows in kinds]
        self._names = pa.concat_arrays(names)
        return np.stack([source, target + count]), len(self._names)

    def _whole_times(self, events: Events) -> Ints:
        """Return the times as int64, scaled."""
        if events.time.dtype == np.int64 and self.time_scale == 1:
            return events.time
        scaled = events.time.astype(np.float64) * self.time_scale
        _check_range(events, scaled)
        whole = np.round(scaled)
        uneven = np.abs(scaled - whole) > 1e-6 * np.maximum(1, np.abs(scaled))
        if uneven.any():
            row = int(uneven.argmax())
            raise DataError(
                f"{events.where(row)}: the time {events.time[row]} times data.time_scale={self.time_scale:g} is no "
                "whole number",
                hint="set data.time_scale=1000 to keep thousandths, and so on",
            )
        return whole.astype(np.int64)


def _check_range(events: Events, times: NDArray[np.float64] | Ints) -> None:
    """Refuse times that int64 does not hold, and so would wrap around."""
    wrong = np.abs(times.astype(np.float64)) >= 2.0**63
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{events.where(row)}: the time {events.time[row]} is beyond 64 bits",
            hint="correct the line, or lower data.time_scale",
        )


def _compact(events: Events, column: Any) -> tuple[Ints, Any]:
    """Return the number of each id, and the id of each number; None for ids that are 0..N-1 already."""
    try:
        ids = pc.cast(column, pa.int64()).to_numpy().copy()
    except pa.ArrowInvalid:  # not all are whole numbers
        names = pc.unique(column)
        return pc.index_in(column, value_set=names).to_numpy().astype(np.int64), names
    if (ids < 0).any():
        row = int((ids < 0).argmax()) % len(events.time)
        raise DataError(
            f"{events.where(row)}: the id {ids[ids < 0][0]} is negative", hint="number nodes from 0, or give them names"
        )
    known, numbers = np.unique(ids, return_inverse=True)
    if known[-1] == len(known) - 1:
        return ids, None
    return numbers.astype(np.int64), pc.cast(pa.array(known), pa.string())


def _or_numbers(ids: Any, numbers: Ints) -> Any:
    return ids if ids is not None else pc.cast(pa.array(np.arange(int(numbers.max()) + 1)), pa.string())


def _slice(text: str | None) -> slice | None:
    """Return the columns that ``4:`` or ``3:5`` stands for."""
    if text is None:
        return None
    parts = str(text).split(":")
    if len(parts) != 2 or not all(part.strip().isdigit() or not part.strip() for part in parts):
        raise ConfigError(
            f"data.features={text!r} is no slice of columns", hint="set it like '4:' or '3:5', or to null"
        )
    first, last = (int(part) if part.strip() else None for part in parts)
    return slice(first, last)
