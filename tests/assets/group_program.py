"""Three workers whose group is formed again: two die at the same time and come back, then one leaves for good."""

from __future__ import annotations

import json
import os
import signal

import torch

from gtrain import run_local
from gtrain.backends import RolePlan
from gtrain.errors import PeerLostError
from gtrain.launch import slot
from gtrain.launch.environment import find_environment
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group, form_group


def total(group: Group, value: float) -> float:
    """The sum over whoever belongs to the group; tried again in a new group if someone is gone."""
    while True:
        try:
            if group.incarnation < 0:
                group.reform()
            return float(group.all_reduce(torch.tensor([value], dtype=torch.float64)))
        except PeerLostError:
            group.reform()


def task() -> dict[str, object]:
    rank, life = slot.current().slot.rank, slot.restarts()
    group = form_group(find_environment(), rank, 3, 60.0, Counters(), again=True)
    sums = [] if life else [total(group, 10.0**rank)]
    if rank > 0 and life == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    sums.append(total(group, 10.0 ** (rank + 3)))
    gathered = group.all_gather_object((rank, life))
    word = group.broadcast_object("said by 0" if rank == 0 else None)
    group.barrier()
    if rank == 1:
        group.leave()
        alone = group.all_gather(torch.tensor([rank]))
        return {"alone": len(alone)}
    sums.append(total(group, 10.0 ** (rank + 6)))
    return {"sums": sums, "gathered": gathered, "word": word, "place": [group.rank, group.size]}


if __name__ == "__main__":
    print("RESULT", json.dumps(run_local(task, num_nodes=3, roles=[RolePlan("worker", restarts=1)], log_dir="logs")))
