"""Reused memory: it comes back when nobody can reach it, never before."""

from __future__ import annotations

import doctest
import gc
import os
import threading

import numpy as np
import pytest
import torch

from gtrain.memory import pages
from gtrain.strategy.counters import rss_bytes
from gtrain_pyg import buffers
from gtrain_pyg.buffers import BufferPool

ROWS = (1000, 100)


def test_the_example() -> None:
    assert doctest.testmod(buffers).failed == 0


@pytest.mark.parametrize("nbytes", [1 << 15, (1 << 15) + 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 276_000 * 400])
def test_a_block_is_at_most_a_quarter_too_large(nbytes: int) -> None:
    size = buffers._size(nbytes)
    assert nbytes <= size <= nbytes * 1.25 + 1
    assert buffers._size(size) == size


@pytest.mark.parametrize("shape", [(0,), (3,), (0, 7), (1000, 100), (5, 4, 3), (300_000, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, np.uint8, np.float16])
def test_arrays_are_ordinary(shape: tuple[int, ...], dtype: type) -> None:
    array = BufferPool().take(shape, dtype)
    assert array.shape == shape and array.dtype == dtype
    assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
    array[...] = 1
    assert (array == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64])
def test_tensors_have_any_dtype(dtype: torch.dtype) -> None:
    tensor = BufferPool().tensor((50_000, 3), dtype)
    assert tensor.dtype == dtype and tensor.shape == (50_000, 3) and tensor.is_contiguous()
    assert bool((tensor.fill_(1) == 1).all())


def test_a_scalar_shape() -> None:
    assert BufferPool().take(5).shape == (5,)
    assert BufferPool().tensor(5).shape == (5,)


def test_an_empty_tensor() -> None:
    assert BufferPool().tensor((0, 5)).shape == (0, 5)


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[3:],
        lambda array: array[3:].T[1:],
        lambda array: array.view(np.int32)[1],
        lambda array: memoryview(array)[2:],
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_numpy(array)[3:].t(),
        lambda array: torch.from_numpy(array).numpy()[1:],
        lambda array: torch.from_numpy(array).untyped_storage(),
        lambda array: torch.frombuffer(memoryview(array), dtype=torch.int8),
        lambda array: np.asarray(array).flat,
    ],
)
def test_whatever_reaches_the_memory_keeps_it(hold) -> None:
    pool = BufferPool()
    array = pool.take(ROWS, np.float32)
    address = array.ctypes.data
    held = hold(array)
    del array
    assert pool.take(ROWS, np.float32).ctypes.data != address
    del held
    gc.collect()
    taken = [pool.take(ROWS, np.float32) for _ in range(2)]
    assert address in [array.ctypes.data for array in taken]


def test_a_graph_of_autograd_keeps_what_it_saved() -> None:
    pool = BufferPool()
    x = pool.tensor(ROWS).fill_(2.0)
    weight = torch.ones(100, 7, requires_grad=True)
    loss = (x @ weight).sum()
    address = x.data_ptr()
    del x
    others = [pool.tensor(ROWS).fill_(-1.0) for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    loss.backward()
    assert weight.grad is not None and weight.grad.unique().tolist() == [2000.0]
    del loss
    assert pool.tensor(ROWS).data_ptr() == address


def test_a_batch_that_is_held_is_not_overwritten() -> None:
    pool, held = BufferPool(), []
    for number in range(50):
        batch = pool.tensor(ROWS).fill_(float(number))
        if number % 10 == 0:
            held.append(batch[:, :3])
    assert [part.unique().tolist() for part in held] == [[0.0], [10.0], [20.0], [30.0], [40.0]]


def test_a_free_block_serves_slightly_smaller_arrays_only() -> None:
    pool = BufferPool()
    large = pool.take(8 << 20, np.uint8)
    address = large.ctypes.data
    del large
    assert pool.take(1 << 20, np.uint8).ctypes.data != address
    assert pool.take(6 << 20, np.uint8).ctypes.data == address


def test_large_blocks_begin_at_huge_pages() -> None:
    pool = BufferPool()
    assert pool.take(3 << 20, np.uint8).ctypes.data % pages.LARGE_PAGE == 0
    assert pool.take(100_000, np.uint8).ctypes.data % 4096 == 0


def test_trim_gives_free_blocks_back() -> None:
    pool = BufferPool()
    held, dropped = pool.take(1 << 20, np.uint8), pool.take(4 << 20, np.uint8)
    del dropped
    assert pool.free_bytes == 4 << 20
    pool.trim()
    assert pool.free_bytes == 0
    held[:] = 1
    del held
    assert pool.free_bytes == 1 << 20


def test_memory_outlives_the_pool() -> None:
    pool = BufferPool()
    tensor = pool.tensor(ROWS).fill_(3.0)
    del pool
    gc.collect()
    assert tensor.unique().tolist() == [3.0]


def test_threads_never_share_a_block() -> None:
    pool, wrong = BufferPool(), []

    def work(mark: int) -> None:
        held: list[np.ndarray] = []
        for turn in range(400):
            array = pool.take(10_000 + 500 * (turn % 7), np.int64)
            array[:] = mark * 1000 + turn
            held.append(array)
            if len(held) > 3:
                first = held.pop(0)
                if not (first == first[0]).all() or first[0] // 1000 != mark:
                    wrong.append(turn)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_writes_to_its_own_copy() -> None:
    pool = BufferPool()
    array = pool.take(ROWS, np.float32)
    array[:] = 1
    pid = os.fork()
    if pid == 0:
        array[:] = 2
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert np.unique(array).tolist() == [1.0]


def test_resident_memory_stays_flat() -> None:
    pool, rng = BufferPool(), np.random.default_rng(0)

    def batches(count: int) -> None:
        held: list[torch.Tensor] = []
        for rows in rng.integers(9_000, 11_000, count).tolist():
            held = [*held[-2:], pool.tensor((rows, 100)).fill_(1.0)]

    batches(50)
    before = rss_bytes()
    batches(1000)
    assert rss_bytes() - before < 12 << 20  # three blocks of 4 MiB may be of a size not met before


def test_blocks_that_nobody_needs_any_more_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two first arrays; the one that is used from time to time stays."""
    monkeypatch.setattr(buffers, "_SWEEP_INTERVAL", 8)
    pool = BufferPool()
    first = [pool.take(1 << 20, np.uint8) for _ in range(3)]
    first.clear()
    assert pool.free_bytes == 3 << 20
    for _ in range(16):
        array = pool.take(1 << 20, np.uint8)
        address = array.ctypes.data
        del array
    assert pool.free_bytes == 1 << 20
    assert pool.take(1 << 20, np.uint8).ctypes.data == address
