"""Partitions that are written behind the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gtrain.errors import DataError
from gtrain_pbg.partition_store import PendingWrite, WriteBehind


class Full:
    """A file on a full disk."""

    def add(self, rows: Tensor, written: Callable[[int], None] | None = None) -> None:
        raise DataError("no space")

    def done(self) -> None:
        raise AssertionError("an incomplete file was given its name")


def test_who_waits_for_the_memory_of_any_array_learns_that_one_could_not_be_written() -> None:
    files: list[Any] = [Full(), Full()]
    first, second = (PendingWrite(file, torch.zeros(4)) for file in files)
    writing = WriteBehind()
    writing.begin("entity 0", [first, second])
    for write in (first, second):
        with pytest.raises(DataError, match="no space"):
            write.wait(8)
    with pytest.raises(DataError, match="no space"):
        writing.settle()
