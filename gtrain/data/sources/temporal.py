"""A graph of events: edges with times."""

from __future__ import annotations

from pathlib import Path
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
from gtrain.data.readers.files import find_file, first_true
from gtrain.errors import ConfigError, DataError

Ints = NDArray[np.int64]


class TemporalData(GraphDataModule):
    """A graph of events, one per line: ``source target time``, optionally with further columns.

    Ids are integers, renumbered in ascending order unless they are 0..N-1, or strings, numbered in the order of first
    mention; renumbered ids become names. Events are sorted by time. The class reads CollegeMsg of SNAP (``u v
    unixtime``) as it is, and Wikipedia and Reddit of Kumar et al. 2019 (JODIE; ``user_id,item_id,timestamp,state_label,
    features``) with ``bipartite=True`` and, for the features, ``features="4:"``.

    Its settings are those of :class:`~gtrain.data.config.TemporalConfig`.
    """

    name = "temporal"
    outline = EVENTS_OUTLINE

    settings_type = TemporalConfig
    settings: TemporalConfig

    def __init__(self, settings: TemporalConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        if self.settings.time_scale <= 0:
            raise ConfigError(
                f"data.time_scale={self.settings.time_scale:g} is not positive", hint="set 1, or 1000 for thousandths"
            )
        self._columns = _slice(self.settings.features)

    def identity(self) -> dict[str, Any]:
        """Return the stamp of the file and the options that control how it is read."""
        keys = ("time_column", "time_scale", "features", "bipartite")
        return {"path": file_stamp(self._file), **{key: getattr(self.settings, key) for key in keys}}

    def check_inputs(self) -> None:
        """Refuse a missing file, and columns that its first event lacks."""
        super().check_inputs()
        check_columns(self._file, self.settings.time_column, self._columns)

    def read(self) -> Data:
        """Read the events, number their nodes and sort the events by time."""
        events = read_events(self._file, self.settings.time_column, self._columns)
        edge_index, num_nodes = self._number(events)
        time = self._integer_times(events)
        tensors = {"edge_index": torch.from_numpy(edge_index), "edge_time": torch.from_numpy(time)}
        if events.features is not None:
            tensors["edge_attr"] = torch.from_numpy(events.features)
        if (time[1:] < time[:-1]).any():
            log.info("%s: the events are not in the order of their times; sorting %d events", events.path, len(time))
            order = torch.from_numpy(np.argsort(time, kind="stable"))
            tensors = {
                name: value[:, order] if name == "edge_index" else value[order] for name, value in tensors.items()
            }
        return Data(num_nodes=num_nodes, **tensors)

    @property
    def _file(self) -> Path:
        return find_file("data.path", self.settings.path, self.root)

    def _number(self, events: Events) -> tuple[Ints, int]:
        """Return the numbers of sources and targets ``[2, E]``, and the number of nodes; set the names."""
        if not self.settings.bipartite:
            ends = pa.chunked_array([*events.source.chunks, *events.target.chunks], pa.string())
            numbers, names = _compact(events, ends)
            self._names = {} if names is None else {"node": names}
            return numbers.reshape(2, -1), int(numbers.max()) + 1
        sides: list[Ints] = []
        names_of_sides: list[Any] = []
        for prefix, column in (("source:", events.source), ("target:", events.target)):
            numbers, names = _compact(events, column)
            if names is None:
                names = pc.cast(pa.array(np.arange(int(numbers.max()) + 1)), pa.string())
            sides.append(numbers + (len(names_of_sides[0]) if names_of_sides else 0))
            names_of_sides.append(pc.binary_join_element_wise(prefix, names, ""))
        self._names = {"node": (names := pa.concat_arrays(names_of_sides))}
        return np.stack(sides), len(names)

    def _integer_times(self, events: Events) -> Ints:
        """Return the times as int64, multiplied by ``time_scale``."""
        scale = self.settings.time_scale
        if events.time.dtype == np.int64 and scale == 1:
            return events.time
        scaled = events.time.astype(np.float64) * scale
        if (row := first_true(np.abs(scaled) >= 2.0**63)) is not None:  # would wrap around
            raise DataError(
                f"{events.where(row)}: the time {events.time[row]} exceeds 64 bits",
                hint="correct the line, or lower data.time_scale",
            )
        whole = np.round(scaled)
        if (row := first_true(np.abs(scaled - whole) > 1e-6 * np.maximum(1, np.abs(scaled)))) is not None:
            raise DataError(
                f"{events.where(row)}: the time {events.time[row]} times data.time_scale={scale:g} is not a whole "
                "number",
                hint="set data.time_scale=1000 to keep thousandths, and so on",
            )
        return whole.astype(np.int64)


def _compact(events: Events, column: Any) -> tuple[Ints, Any]:
    """Return the number of each id, and the names of the numbers; None if the ids are 0..N-1 already."""
    try:
        ids = pc.cast(column, pa.int64()).to_numpy().copy()
    except pa.ArrowInvalid:  # not all are integers
        names = pc.unique(column)
        return pc.index_in(column, value_set=names).to_numpy().astype(np.int64), names
    if (position := first_true(ids < 0)) is not None:
        raise DataError(
            f"{events.where(position % len(events.time))}: the id {ids[position]} is negative",
            hint="number nodes from 0, or give them names",
        )
    distinct, numbers = np.unique(ids, return_inverse=True)
    if distinct[-1] == len(distinct) - 1:
        return ids, None
    return numbers.astype(np.int64), pc.cast(pa.array(distinct), pa.string())


def _slice(text: str | None) -> slice | None:
    """Return the columns that ``4:`` or ``3:5`` selects."""
    if text is None:
        return None
    parts = str(text).split(":")
    if len(parts) != 2 or not all(part.strip().isdigit() or not part.strip() for part in parts):
        raise ConfigError(
            f"data.features={text!r} is not a slice of columns", hint="set it like '4:' or '3:5', or to null"
        )
    return slice(*(int(part) if part.strip() else None for part in parts))
