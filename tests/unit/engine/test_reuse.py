"""Memory of freed matrices that the next ones take over."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from gtrain.engine.precision import product
from gtrain.memory import reuse

CPU = torch.device("cpu")
LARGE = (1024, 1025)  # 4 MiB and a bit


@pytest.fixture(autouse=True)
def _keeps() -> Iterator[None]:
    reuse.keep_large()
    yield
    reuse.free_large()


def _idle() -> int:
    gc.collect()
    return reuse._FREED.idle_bytes


def test_the_next_tensor_of_equal_size_takes_the_memory() -> None:
    first = reuse.empty(LARGE, torch.float32, CPU).fill_(7)
    address = first.data_ptr()
    view = first[3]
    del first
    assert _idle() == 0, "a view still reads the memory"
    assert view[0] == 7
    del view
    assert _idle() > 0
    second = reuse.zeros((1025, 1024), torch.float32, CPU)
    assert second.data_ptr() == address
    assert not second.any(), "the former numbers are gone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_tensor_is_not_a_view_and_starts_as_zeros(dtype: torch.dtype) -> None:
    out = reuse.zeros((3, 1024, 1025), dtype, CPU)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((3, 1024, 1025), dtype, True)
    assert out._base is None
    assert not out.any()


def test_no_more_is_kept_than_the_largest_block() -> None:
    tensors = [reuse.empty((1024, 1024 * count), torch.float32, CPU) for count in (1, 3, 1, 2)]
    largest = tensors[1].nbytes
    tensors.clear()
    assert _idle() == largest, "the smallest blocks went first"
    reuse.free_large()
    assert _idle() == 0


def test_small_tensors_and_others_after_the_end_come_from_torch() -> None:
    reuse.empty((10, 10), torch.float32, CPU)
    reuse.empty(LARGE, torch.float32, torch.device("meta"))
    assert _idle() == 0
    last = reuse.empty(LARGE, torch.float32, CPU)
    reuse.free_large()
    del last
    assert _idle() == 0


def test_a_product_in_reused_memory() -> None:
    a, b = torch.randn(40000, 40), torch.randn(40, 50)
    for _ in range(2):
        out = product(a, b)
        assert torch.equal(out, a @ b)
        del out
    assert _idle() > 0
