"""A worker's device: copies between it and the host's memory, in which messages of the servers are sent and received.

On a GPU the copies go through page-locked memory and do not stop the device. Those of a batch run on a stream of their
own while an earlier batch trains. Products and gradients are copied on the stream that computes: the next operation
needs the product, and the gradient is the last result of the backward pass, so that a second stream would have nothing
to run beside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

B = TypeVar("B", Data, HeteroData)
_COPIED = "copied"  # attribute of a batch: the event after which its tensors are on the device


class WorkerDevice:
    """Copies tensors between the host and a worker's device; on a CPU every method returns its argument.

    Args:
        device: of the layers that the worker holds.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_host = device, device.type == "cpu"
        self._is_cuda = device.type == "cuda"
        self._stream: Any = None  # copies batches
        self._copied: Any = None  # event after the last copy to the host
        # host tensor and copy on the device, None before its first use; by the identity of each
        self._constants: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._hosts: dict[int, tuple[Tensor, Tensor]] = {}
        self._on_copy: Callable[[Iterable[Tensor]], None] = lambda tensors: None

    # ------------------------------------------------------------------------------------------------ messages

    def buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised host tensor, page-locked if the device is a GPU."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._is_cuda)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a host tensor on the device; one from :meth:`buffer` is copied while the host goes on."""
        return tensor if self.is_host else tensor.to(self.device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host; on a GPU it is complete after :meth:`synchronize`."""
        if tensor.device.type == "cpu":
            return tensor
        return self.copy_to_host(tensor, self.buffer(*tensor.shape, dtype=tensor.dtype))

    def copy_to_host(self, tensor: Tensor, target: Tensor) -> Tensor:
        """Copy a tensor into one of :meth:`buffer`, which is complete after :meth:`synchronize`, and return that."""
        target.copy_(tensor, non_blocking=True)
        if self._is_cuda:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.device))
        return target

    def bytes_on_host(self, pieces: list[Tensor]) -> list[Tensor]:
        """Copy pieces of bytes, uint8 [n] each, to the host; complete after :meth:`synchronize`.

        Those of the device are copied by one transfer.

        Returns:
            one or several tensors, which have the bytes in the order of the pieces.
        """
        pieces = [piece for piece in pieces if len(piece)]
        there = [piece for piece in pieces if piece.device.type != "cpu"]
        if not there:
            return [torch.cat(pieces)] if pieces else []
        if len(there) == len(pieces):
            return [self.to_host(torch.cat(there))]
        copied = iter(self.to_host(torch.cat(there)).split([len(piece) for piece in there]))
        return [piece.clone() if piece.device.type == "cpu" else next(copied) for piece in pieces]

    def synchronize(self) -> None:
        """Wait for all copies to the host."""
        if self._copied is not None:
            self._copied.synchronize()

    def ids_on_host(self, ids: Tensor) -> Tensor:
        """Return ids on the host; those of :meth:`add_constants` are not copied again."""
        known = self._hosts.get(id(ids))
        return ids.cpu() if known is None or known[0] is not ids else known[1]

    # ------------------------------------------------------------------------------------------------ batches

    def add_constants(self, tensors: Sequence[Any], on_copy: Callable[[Iterable[Tensor]], None]) -> None:
        """Declare host tensors of many batches, which are copied to the device once, when a batch first has them.

        Args:
            tensors: the tensors; other values are ignored.
            on_copy: called with the tensors as batches on the device have them.
        """
        if self.is_host:
            on_copy(tensors)
            return
        self._constants |= {id(tensor): (tensor, None) for tensor in tensors if _moves(tensor)}
        self._on_copy = on_copy

    def copy_ahead(self, batch: B) -> None:
        """Start to copy the tensors of a batch, in place, while the device computes; any thread may call this."""
        if not self._is_cuda:
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            for store in batch.stores:
                for name, value in store.items():
                    if type(value) is Tensor and _moves(value) and id(value) not in self._constants:
                        store[name] = value.pin_memory().to(self.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        batch.__dict__[_COPIED] = event

    def batch(self, batch: B) -> B:
        """Return a batch with its tensors on the device, but for the sparse rows that servers multiply."""
        if self.is_host:
            return batch
        moved = copy.copy(batch)
        copied = moved.__dict__.pop(_COPIED, None)
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
        for store in moved.stores:
            for name, value in store.items():
                if _moves(value):
                    store[name] = self._moved(value, copied is not None)
        return moved

    def _moved(self, tensor: Tensor, was_copied: bool) -> Tensor:
        if tensor.device == self.device:
            if was_copied:  # its memory must not be reused while this stream reads it
                tensor.record_stream(torch.cuda.current_stream(self.device))
            return tensor
        known = self._constants.get(id(tensor))
        if known is None:
            return tensor.to(self.device)
        host, there = known
        if there is None:
            there = host.to(self.device)
            self._constants[id(host)] = host, there
            self._hosts[id(there)] = there, host
            self._on_copy([there])
        return there


def _moves(value: Any) -> bool:
    """Whether a batch's value is moved to the device: a tensor, unless it has sparse rows, in torch's CSR form."""
    return isinstance(value, Tensor) and value.layout == torch.strided


HOST = WorkerDevice(torch.device("cpu"))
"""Of a worker without a GPU."""
