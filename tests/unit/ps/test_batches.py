"""A worker's batches: by a thread or between steps they are the same, and sent ahead of their step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.batches.loader import SeedLoader
from gtrain_ps.worker.batches import WorkerBatches


class Seeds:
    """Ten seeds, of which the last cannot be read if it is said to be bad."""

    def __init__(self, bad: bool = False) -> None:
        self.bad, self.threads = bad, set[str]()

    def seeds(self, loader: Any) -> Tensor:
        return torch.arange(10)

    def batch(self, seeds: Tensor, chosen: Tensor, epoch: int, step: int) -> Data:
        self.threads.add(threading.current_thread().name)
        if self.bad and 9 in chosen:
            raise ValueError("seed 9")
        return Data(seeds=seeds[chosen], place=(epoch, step))


class Loader:
    """What a loader says of its steps: three seeds each."""

    batch_size, shuffle, seed = 3, True, 5
    step_positions = SeedLoader.step_positions

    def __init__(self) -> None:
        self.epoch = 0

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch - 1

    def __len__(self) -> int:
        return 4


def read(shares: WorkerBatches, sent: list[int]) -> list[tuple[list[int], tuple[int, int], int]]:
    """An epoch's batches, each with the number of those that were sent by the time that its step is sent."""
    found = []
    for batch in shares:
        shares.build_ahead()
        found.append((batch.seeds.tolist(), batch.place, len(sent)))
    return found


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_batches_made_between_steps_are_those_of_a_thread(prefetch: int) -> None:
    epochs, sources = {}, {}
    for inline in (True, False):
        sent: list[int] = []
        sources[inline] = Seeds()
        shares = WorkerBatches(
            Loader(),
            sources[inline],
            (1, 2),
            prefetch,
            lambda batch, number, sent=sent: sent.append(number),
            lambda: None,
            inline,
        )
        epochs[inline] = [read(shares, sent) for _ in range(2)]
        assert sent == [0, 1, 2, 3] * 2
        assert shares.state_dict() == {"epoch": 1, "done": 4}
    plain = {inline: [[row[:2] for row in epoch] for epoch in found] for inline, found in epochs.items()}
    assert plain[True] == plain[False]
    assert [[ahead for *_, ahead in epoch] for epoch in epochs[True]] == [
        [min(4, step + 1 + prefetch) + 4 * epoch for step in range(4)] for epoch in range(2)
    ]
    assert sources[True].threads == {"MainThread"}
    assert sources[False].threads == ({"gtrain-input_0"} if prefetch else {"MainThread"})


@pytest.mark.parametrize("inline", [True, False])
def test_what_cannot_be_read_is_raised(inline: bool) -> None:
    shares = WorkerBatches(Loader(), Seeds(bad=True), (0, 1), 2, lambda batch, number: None, lambda: None, inline)
    with pytest.raises(ValueError, match="seed 9"):
        read(shares, [])
