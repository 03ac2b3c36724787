"""Communication between GPUs of one machine without the host: NCCL, by torch's process group for it.

Only sums, and the exchange of rows in rounds, go this way: they are large, and all ranks make them in the same order.
Everything else goes through the connections of :class:`~gtrain.strategy.group.Group`, and so does all communication
of ranks that share a GPU, which NCCL refuses, or that are on several machines, where NCCL would send unencrypted.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gtrain.launch.key_value import KeyValueStore

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class DeviceGroup:
    """The same ranks as a group, connected by one of torch's communication libraries.

    Args:
        backend: of torch: ``ProcessGroupNCCL``, or in tests ``ProcessGroupGloo``.
        size: number of ranks.
        kind: type of the devices whose tensors it takes.
    """

    def __init__(self, backend: Any, size: int, kind: str = "cuda") -> None:
        self._backend, self._size, self._kind = backend, size, kind

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device of this group."""
        return tensor.device.type == self._kind

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Reduce a contiguous tensor over the ranks in place; see :meth:`.Group.all_reduce`."""
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]  # type: ignore[assignment]
        self._backend.allreduce([tensor], options).wait()
        return tensor.div_(self._size) if op in ("mean", "avg") else tensor

    def swap(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Callable[[], object]:
        """Start to send bytes to one rank and to receive bytes from another; all ranks take part at once.

        Args:
            outgoing, incoming: uint8 [n], contiguous.
            to, source: ranks; everyone's ``to`` has this rank as its ``source``.

        Returns:
            A function that waits until both are complete; on a GPU, its current stream waits and not the host.
        """
        sizes = [[0] * self._size for _ in range(2)]
        sizes[0][source], sizes[1][to] = len(incoming), len(outgoing)
        work = self._backend.alltoall_base(incoming, outgoing, *sizes)
        return lambda: work.wait()


def connect_devices(group: Any, store: KeyValueStore, device: torch.device, timeout_seconds: float) -> None:
    """Connect the GPUs of a group's ranks by NCCL, if each rank has one of its own and all are on one machine.

    Args:
        group: the group; all of its ranks call this.
        store: part of the job's key-value store, for this call alone.
        device: this rank's.
        timeout_seconds: of a communication.
    """
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    places = group.all_gather_object([socket.gethostname(), own, dist.is_nccl_available()])
    if all(uuid and able for _, uuid, able in places) and shares_no_device([(host, own) for host, own, _ in places]):
        torch.cuda.set_device(device)
        group.devices = nccl(store, group.rank, group.size, timeout_seconds)


def shares_no_device(places: Sequence[tuple[str, str]]) -> bool:
    """Whether ranks on these hosts and devices can form a group: on one host, each with a device of its own."""
    return len({host for host, _ in places}) == 1 and len({device for _, device in places}) == len(places)


def nccl(store: KeyValueStore, rank: int, size: int, timeout_seconds: float) -> DeviceGroup:
    """Connect the current GPUs of all ranks."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    backend = dist.ProcessGroupNCCL(StoreOfJob(store, timeout_seconds), rank, size, options)
    group = DeviceGroup(backend, size)
    group.all_reduce(torch.zeros(1, device="cuda"), "sum")  # connects, while all ranks are here
    return group


class StoreOfJob(dist.Store):
    """The job's key-value store as torch's."""

    def __init__(self, store: KeyValueStore, timeout_seconds: float) -> None:
        super().__init__()
        self._store, self._timeout = store, timeout_seconds

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, bytes(value) if not isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._store.get(key, self._timeout)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Any) -> bool:
        return self._store.check(list(keys))

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        for key in keys:
            self._store.get(key, self._timeout if timeout is None else timeout.total_seconds())
