"""The GPU of each rank, and the message for ranks that share one."""

from __future__ import annotations

import pytest
import torch

from gtrain.strategy.rank_devices import device_of, sharing


def gpus(*numbers: int) -> list[torch.device]:
    return [torch.device("cuda", number) for number in numbers]


@pytest.mark.parametrize(
    ("devices", "available", "expected"),
    [
        ([torch.device("cpu")], None, ["cpu"] * 4),
        (gpus(0, 1), None, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),  # two machines of two ranks
        (gpus(2, 3), None, ["cuda:2", "cuda:3", "cuda:2", "cuda:3"]),
        (gpus(0), 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),  # four simulated machines of one rank
        (gpus(0), 1, ["cuda:0"] * 4),
        (gpus(0, 1), 3, ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]),
        (gpus(1), 4, ["cuda:1"] * 4),  # a program named it
    ],
)
def test_a_rank_has_a_device_of_its_own_if_there_are_enough(
    devices: list[torch.device], available: int | None, expected: list[str]
) -> None:
    found = [str(device_of(devices, rank, rank % len(devices), available)) for rank in range(4)]
    assert found == expected


def test_ranks_that_share_are_counted() -> None:
    assert sharing(2, 2) is None and sharing(1, 8) is None
    assert (sharing(3, 1) or "").startswith("3 ranks share 1 GPU: ")
    assert (sharing(3, 2) or "").startswith("3 ranks share 2 GPUs: ")
