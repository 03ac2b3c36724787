"""The message for a rank whose device has no memory left, with CPU tensors in the part of the device's."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
import torch
from torch import nn
from torch_geometric.data import Data, HeteroData

from gtrain import backends
from gtrain.config import TrainerConfig
from gtrain.data.config import DataConfig
from gtrain.memory.limits import usable_memory
from gtrain.model.config import NetworkConfig
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.nn import Csr
from gtrain.nn.compressed import CompressedMatrix
from gtrain.strategy.device_memory import DeviceMemory, gibibytes, holdings, is_out_of_memory, out_of_memory

CPU = torch.device("cpu")
MIB, GIB = 2**20, 2**30


def raised(exception: BaseException, size: int) -> BaseException:
    """The exception with the traceback of a step that has a batch of ``size`` numbers."""

    def step() -> None:
        batch = torch.zeros(size // 8, 2)
        raise exception from (RuntimeError(str(batch.shape)))

    try:
        step()
    except type(exception) as error:
        return error
    raise AssertionError


def test_the_message_has_the_parts_of_the_memory_and_the_settings_that_reduce_it() -> None:
    module = nn.Linear(1024, 1024, bias=False)  # 4 MiB
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    error = out_of_memory(
        raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 64 * MIB),
        rank="rank 1 of 2",
        device=CPU,
        module=module,
        optimizers=[optimizer],
        hints=["lower data.batch_size", "start more ranks"],
        memory=DeviceMemory(total=80 * GIB, free=GIB, allocated=70 * GIB, reserved=75 * GIB),
    )
    assert error is not None
    assert error.message.startswith(
        "rank 1 of 2 ran out of memory on cpu (80.00 GiB). It had allocated 70.00 GiB and reserved 75.00 GiB; 1.00 GiB "
        "were free, and other processes and the driver had 4.00 GiB. Allocated: parameters and buffers 4.0 MiB, "
        "gradients 4.0 MiB, optimizer state 8.0 MiB, batches, graph and results "
    )
    assert "the largest: " in error.message and "float32 [8388608, 2] 64.0 MiB" in error.message
    rest = re.search(r"results that the backward pass needs ([\d.]+) GiB\.$", error.message)
    assert rest is not None and 69 < float(rest[1]) < 69.95
    assert error.hint == "lower data.batch_size; or start more ranks."


def test_without_figures_of_the_device_the_message_has_the_known_parts() -> None:
    module = nn.Linear(1024, 1024, bias=False)
    error = out_of_memory(
        torch.OutOfMemoryError("x"), rank="rank 0 of 1", device=CPU, module=module, optimizers=[], hints=[]
    )
    assert error is not None and error.hint is not None
    assert error.message.startswith("rank 0 of 1 ran out of memory on cpu. Allocated: parameters and buffers 4.0 MiB")
    assert "data.batch_size" in error.hint


def test_the_host_has_the_bytes_of_the_process_and_what_it_could_not_allocate() -> None:
    module = nn.Linear(1024, 1024, bias=False)
    torchs = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 3221225472 bytes. Error code 12 (Cannot allocate memory)"
    )
    numpys = MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64")
    for exception, wanted in ((torchs, "3.00 GiB"), (numpys, "7.45 GiB")):
        error = out_of_memory(
            exception, rank="rank 1 of 2", device=CPU, module=module, optimizers=[], hints=["set mode=1"]
        )
        assert error is not None and error.hint == "set mode=1."
        assert f"rank 1 of 2 ran out of memory on its machine ({gibibytes(usable_memory())}). It held " in error.message
        assert f" when it needed {wanted} more; " in error.message
        assert "Allocated: parameters and buffers 4.0 MiB" in error.message
    empty = out_of_memory(MemoryError(), rank="rank 0 of 1", device=CPU, module=None, optimizers=[], hints=[])
    assert empty is not None and "when it needed" not in empty.message


def test_what_a_rank_holds_in_its_first_step() -> None:
    batch = HeteroData()
    batch["paper"].x, batch["author"].x = torch.zeros(1024, 512), torch.zeros(1024, 256)
    batch["paper", "cites", "paper"].edge_index = torch.zeros(2, 1 << 15, dtype=torch.int64)
    held = "parameters and buffers 1.0 MiB, x 3.0 MiB, edge_index 0.5 MiB"
    assert holdings(nn.Linear(512, 512, bias=False), batch) == held
    assert holdings(None, [batch]) == "parameters and buffers 0.0 MiB"
    rows = Csr(torch.zeros(1 << 18, dtype=torch.int32), None, torch.zeros(2, dtype=torch.int32))
    entries = Data(x=CompressedMatrix(rows, 1 << 20, torch.float32))
    assert holdings(None, entries) == "parameters and buffers 0.0 MiB, x 1.0 MiB"
    count = 1 << 16  # 20 bytes each
    unit = torch.sparse_csr_tensor(torch.arange(count + 1), torch.arange(count), torch.ones(count), (count, count))
    assert holdings(None, Data(x=unit)) == "parameters and buffers 0.0 MiB, x 1.3 MiB"


def test_only_exceptions_of_memory_are_recognised() -> None:
    wrapped = RuntimeError("a hook failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    driver = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
    assert all(map(is_out_of_memory, [torch.OutOfMemoryError("x"), wrapped, driver, MemoryError()]))
    assert not any(
        map(is_out_of_memory, [None, OSError(12, "x"), RuntimeError("CUDA error: an illegal memory access")])
    )
    other = dict(rank="rank 0 of 1", device=CPU, module=None, optimizers=[], hints=[])
    assert out_of_memory(ValueError("x"), **other) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["single", "sar", "pyg", "ps", "pbg"])
def test_hints_name_settings_that_exist(name: str) -> None:
    backend = backends.get(name)
    fields = {
        "strategy": {field.name for field in dataclasses.fields(backend.load_config())},
        "data": {field.name for field in dataclasses.fields(DataConfig)},
        "trainer": {field.name for field in dataclasses.fields(TrainerConfig)},
        "model": {
            *(field.name for field in dataclasses.fields(NetworkConfig)),
            *inspect.signature(KGEmbedding.__init__).parameters,
        },
    }
    named = re.findall(r"\b(strategy|data|trainer|model)\.(\w+)", " ".join(backend.less_memory))
    assert len(named) >= 3
    assert [f"{group}.{key}" for group, key in named if key not in fields[group]] == []
