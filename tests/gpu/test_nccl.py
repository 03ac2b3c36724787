"""Connections between GPUs by NCCL, as far as one GPU shows them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gtrain.strategy.device_group import DeviceGroup, shares_no_device


@pytest.fixture
def group() -> DeviceGroup:
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=60)
    torch.cuda.set_device(0)
    return DeviceGroup(dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options), 1)


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_a_group_of_one_keeps_its_tensor(group: DeviceGroup, op: str) -> None:
    tensor = torch.arange(5.0, device="cuda")
    assert torch.equal(group.all_reduce(tensor.clone(), op), tensor)


def test_a_rank_may_send_to_itself(group: DeviceGroup) -> None:
    outgoing = torch.randint(0, 256, (1000,), dtype=torch.uint8, device="cuda")
    incoming = torch.zeros_like(outgoing)
    group.swap(outgoing, 0, incoming, 0)()
    assert torch.equal(incoming, outgoing)


def test_ranks_that_share_a_gpu_have_no_such_connections() -> None:
    assert not shares_no_device([("a", "0"), ("a", "0")])
    assert not shares_no_device([("a", "0"), ("b", "1")])
    assert shares_no_device([("a", "0"), ("a", "1")])
