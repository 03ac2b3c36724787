"""What a worker asks of streams and page-locked memory, on CPU tensors, with a record in place of CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from gtrain.nn import Csr
from gtrain_ps.worker.device import HOST, WorkerDevice
from gtrain_ps.worker.steps import flat_gradients, set_gradients

CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of CUDA, in order."""
    asked: list[Any] = []

    class Stream:
        def wait_event(self, event: Any) -> None:
            asked.append(("wait", event))

    class Event:
        def record(self, stream: Any) -> None:
            asked.append(("record", self, stream))

        def synchronize(self) -> None:
            asked.append(("synchronize", self))

    @contextmanager
    def stream(of: Any) -> Iterator[None]:
        asked.append(("enter", of))
        yield
        asked.append(("leave", of))

    main = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.clone())
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, of: asked.append(("used", of, len(tensor))))
    return asked


@pytest.fixture
def device(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> WorkerDevice:
    """A device whose tensors are those of the CPU and whose copies are those of a GPU."""
    worker = WorkerDevice(CPU)
    worker.is_host, worker._is_cuda = False, True
    monkeypatch.setattr(worker, "buffer", lambda *shape, dtype: torch.empty(shape, dtype=dtype))
    return worker


def test_a_batch_is_copied_beside_the_step_and_awaited_before_it_is_used(
    device: WorkerDevice, calls: list[Any]
) -> None:
    constant, y = torch.arange(7), torch.arange(3)
    rows = Csr(torch.arange(4), None, torch.tensor([0, 1, 2, 4]))
    sparse = torch.eye(3).to_sparse_csr()
    device.add_constants([constant], lambda tensors: None)
    batch = Data(x=rows, y=y, n_id=constant, sparse=sparse, step_rows=3)
    device.copy_ahead(batch)
    (_, side), (_, event, of), _ = calls
    assert [call[0] for call in calls] == ["enter", "record", "leave"] and of is side
    assert batch.y is not y and batch.n_id is constant and batch.x is rows
    del calls[:]
    moved = device.batch(batch)
    main = torch.cuda.current_stream(CPU)
    assert calls == [("wait", event), ("used", main, 3), ("used", main, 7)]
    assert moved.x is rows and moved.sparse is sparse and moved.step_rows == 3
    assert torch.equal(moved.y, y) and main is not side


def test_batches_of_several_types_are_moved(device: WorkerDevice) -> None:
    batch = HeteroData()
    batch["a"].y = torch.arange(3)
    batch["a", "to", "a"].edge_index = torch.zeros(2, 5, dtype=torch.int64)
    batch.seeds = torch.arange(2)
    moved = device.batch(batch)
    assert torch.equal(moved["a"].y, batch["a"].y) and moved.seeds.tolist() == [0, 1]
    assert moved["a", "to", "a"].edge_index.shape == (2, 5) and moved is not batch


def test_copies_to_the_host_are_recorded_before_they_are_awaited(device: WorkerDevice, calls: list[Any]) -> None:
    target = torch.empty(3)
    device.copy_to_host(torch.ones(3), target)
    device.copy_to_host(torch.ones(3), target)
    device.synchronize()
    assert [call[0] for call in calls] == ["record", "record", "synchronize"]
    assert len({id(call[1]) for call in calls}) == 1 and target.tolist() == [1, 1, 1]


def test_pieces_of_bytes_keep_their_order(device: WorkerDevice) -> None:
    pieces = [torch.tensor(values, dtype=torch.uint8) for values in ([1, 2], [], [3], [4, 5, 6])]
    assert torch.cat(device.bytes_on_host(pieces)).tolist() == [1, 2, 3, 4, 5, 6]
    assert HOST.bytes_on_host([]) == []


def test_gradients_of_the_other_layers_are_the_same_by_both_ways(device: WorkerDevice) -> None:
    parameters = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(1))]
    for parameter in (parameters[0], parameters[2]):
        parameter.grad = torch.randn_like(parameter)
    expected = flat_gradients(parameters)
    vector = flat_gradients(parameters, device)
    device.synchronize()
    assert torch.equal(vector, expected) and vector[:4].tolist() == [0, 1, 0, 1]
    grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
    set_gradients(list((2 * vector).split(5)), parameters, device)
    assert parameters[1].grad is None
    for parameter, grad in zip(parameters, grads, strict=True):
        assert grad is None or (parameter.grad is not None and torch.equal(parameter.grad, 2 * grad))


def test_a_host_copies_nothing(calls: list[Any]) -> None:
    batch, tensor = Data(y=torch.arange(3)), torch.ones(2)
    declared: list[Any] = []
    HOST.add_constants([tensor, 3], declared.extend)
    HOST.copy_ahead(batch)
    HOST.synchronize()
    assert HOST.batch(batch) is batch and HOST.to_device(tensor) is tensor is HOST.to_host(tensor)
    assert declared == [tensor, 3] and calls == []
