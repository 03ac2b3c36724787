"""Sources whose data comes in parts already: the parts of the data become the parts of the store."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from gtrain.data.module import GraphDataModule
from gtrain.errors import ConfigError, DataError
from gtrain.graph.partition import AUTO

Assignment = Tensor | dict[str, Tensor]


class GivenPartsData(GraphDataModule):
    """A graph that another program has cut into parts.

    A source overrides :meth:`given_parts`, and sets ``given`` in :meth:`read`. As many ranks are needed as there are
    parts, or one, which joins them.
    """

    given: Assignment | None = None
    """The part of each node (by node type), once the graph was read."""

    @abstractmethod
    def given_parts(self) -> int:
        """Return the number of parts that the data comes in."""

    @property
    def num_parts(self) -> int:
        """Parts of the store: those of the data, or one.

        Raises:
            DataError: another number is wanted.
        """
        given = self.given_parts()
        if self._num_parts is None and self.trainer is None:
            return given
        wanted = GraphDataModule.num_parts.__get__(self)
        if wanted not in (1, given):
            raise DataError(
                f"{self.origin} comes in {given} parts, and {wanted} ranks want one each: {given} != {wanted}",
                hint=f"run on {given} ranks, or on one, which joins the parts; or cut the graph into {wanted} anew",
            )
        return int(wanted)

    def assignment(self) -> Assignment | None:
        """Return the part of each node; all in one where one part is wanted."""
        if self.given is None or self.num_parts == self.given_parts():
            return self.given
        if isinstance(self.given, dict):
            return {name: torch.zeros_like(parts) for name, parts in self.given.items()}
        return torch.zeros_like(self.given)

    def _check_partitioner(self) -> None:
        """Refuse a partitioner: there is nothing left to cut. The default is taken for none."""
        if self.partitioner != AUTO:
            raise ConfigError(
                f"data.partitioner={self.partitioner}, and {self.name} keeps the parts that the data comes in",
                hint="leave data.partitioner and data.partition_path alone",
            )
        self.partitioner = "given"  # for the store's manifest
