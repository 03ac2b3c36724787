"""Ranks that send rows and sums as between GPUs, by gloo in place of NCCL."""

from __future__ import annotations

import datetime

import sar_conv_bench
import torch.distributed as dist

from gtrain.graph.store import Store
from gtrain.launch.environment import find_environment
from gtrain.launch.job_store import job_store
from gtrain.strategy.device_group import DeviceGroup, StoreOfJob
from gtrain.strategy.group import Group


class Bench(sar_conv_bench.Bench):
    """Connects the ranks once more."""

    def __init__(self, group: Group, store: Store) -> None:
        if group.devices is None:
            keys = StoreOfJob(job_store(find_environment()).prefixed("devices"), 60.0)
            backend = dist.ProcessGroupGloo(keys, group.rank, group.size, datetime.timedelta(seconds=60))
            group.devices = DeviceGroup(backend, group.size, "cpu")
        super().__init__(group, store)
