"""Measures the constants of a :class:`~gtrain.plan.machine.Machine` on this machine, in about a minute.

Each measurement repeats a short piece of work, and takes the fastest repetition: other programs can only slow it down.
Work of one core counts by its CPU time, in which they do not take part.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gtrain.engine.edges import CompressedEdges
from gtrain.engine.kernels import (
    AttentionInputs,
    attention_finish,
    attention_forward,
    attention_state,
    load_attention,
    load_sums,
    spmm,
)
from gtrain.graph.sampling.columns import Columns
from gtrain.graph.sampling.sampler import NeighborSampler
from gtrain.kernel_cache import find_cache
from gtrain.launch.agent import preload
from gtrain.launch.children import PRELOAD
from gtrain.memory.heap import give_back_freed
from gtrain.nn.dropout import NO_DROPOUT, Mask
from gtrain.plan import short_runs
from gtrain.strategy.counters import anonymous_bytes

_ROWS, _WIDTH, _DEGREE = 100_000, 256, 10
_LONG = 2.0  # seconds of a repetition, after which one more is enough


def constants(folder: Path | None = None) -> dict[str, float]:
    """Measure all constants of this machine but its cores, memory and network.

    Args:
        folder: a folder on the disk of the stores; None: the folder of temporary files.
    """
    find_cache()
    # What the agent of a job imports before it forks the ranks.
    preload()
    sys.modules[PRELOAD].share_compiler()
    torch.set_num_threads(1)
    imports = anonymous_bytes()
    edges = _random_edges()
    rows = torch.rand(_ROWS, 1, _WIDTH)
    return {
        "imports": imports,
        "flops": _flops(torch.float32),
        "flops_bfloat16": _flops(torch.bfloat16),
        "gather": _gather(edges, rows),
        "attention": _attention(edges, rows),
        "logit": _logit(edges),
        "sampling": _sampling(edges),
        **_streams(),
        "dispatch": _dispatch(),
        "disk": _disk(folder or Path(tempfile.gettempdir())),
        **_link(),
        "fresh": _fresh(),
        "together": _together(),
        **short_runs.constants(),
    }


def _fastest(work: Callable[[], object], *, clock: Callable[[], float] = time.process_time, repeats: int = 4) -> float:
    """Return the seconds of the fastest repetition; the first one, which may compile or fault in pages, is left out."""
    start = clock()
    work()
    if clock() - start > _LONG:
        repeats = 1
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        work()
        best = min(best, clock() - start)
    return best


def _random_edges() -> CompressedEdges:
    """Return edges from random rows to each of the rows."""
    count = _ROWS * _DEGREE
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(_ROWS, (count,), generator=generator, dtype=torch.int32)
    ptr = torch.arange(0, count + 1, _DEGREE)
    return CompressedEdges(torch.arange(_ROWS), ptr, columns, torch.arange(count, dtype=torch.int32))


def _flops(dtype: torch.dtype) -> float:
    """Return the operations per second of the product of rows with a square weight, and of a weight's gradient."""
    x, weight = torch.rand(4_000, _WIDTH).to(dtype), torch.rand(_WIDTH, _WIDTH).to(dtype)
    operations = 2 * 2 * len(x) * _WIDTH * _WIDTH
    return operations / _fastest(lambda: (x @ weight, x.t() @ x))


def _gather(edges: CompressedEdges, rows: Tensor) -> float:
    load_sums(_one_edge(), torch.float32)
    out = torch.zeros_like(rows)
    return len(edges.columns) * rows[0].nbytes / _fastest(lambda: spmm(edges, rows, out))


def _attention(edges: CompressedEdges, rows: Tensor) -> float:
    """Return the bytes of rows per second of the forward pass of attention, with 4 heads."""
    load_attention(_one_edge(), torch.float32)
    x, logits = rows.view(_ROWS, 4, -1), torch.rand(_ROWS, 4)

    def attend() -> None:
        state = attention_state(_ROWS, x)
        attention_forward(edges, AttentionInputs(x, logits, logits, 0.2, NO_DROPOUT), state)
        attention_finish(state)

    return len(edges.columns) * rows[0].nbytes / _fastest(attend)


def _logit(edges: CompressedEdges) -> float:
    """Return the seconds of one head of one edge whose row is small, with dropout of the coefficients."""
    heads, mask = 4, Mask(0.5, 1)
    x, logits = torch.rand(_ROWS, heads, 4), torch.rand(_ROWS, heads)

    def attend() -> None:
        state = attention_state(_ROWS, x)
        attention_forward(edges, AttentionInputs(x, logits, logits, 0.2, mask), state)
        attention_finish(state)

    return _fastest(attend) / (len(edges.columns) * heads)


def _one_edge() -> CompressedEdges:
    zero = torch.zeros(1, dtype=torch.int64)
    return CompressedEdges(zero, torch.tensor([0, 1]), zero.int(), zero.int())


def _sampling(edges: CompressedEdges) -> float:
    """Return the edges per second of sampled batches with the fan-out 10-5."""
    sampler = NeighborSampler(Columns(indptr=edges.ptr.numpy(), indices=edges.columns.numpy()), [_DEGREE, 5])
    seeds = torch.arange(0, _ROWS, 100).numpy()
    sampled = len(sampler.sample(seeds).row)
    return sampled / _fastest(lambda: sampler.sample(seeds))


def _streams() -> dict[str, float]:
    """Return the bytes per second that one core, and all cores, read and write with an addition."""
    x, y = (torch.rand(1 << 24) for _ in range(2))
    moved = 3 * x.nbytes
    one = moved / _fastest(lambda: torch.add(x, y, out=y))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    every = moved / _fastest(lambda: torch.add(x, y, out=y), clock=time.perf_counter)
    torch.set_num_threads(1)
    return {"stream": one, "bandwidth": max(one, every)}


def _dispatch() -> float:
    """Return the seconds of an operation on a number, with its share of the backward pass."""
    x, count = torch.ones(1, requires_grad=True), 500

    def work() -> None:
        y = x
        for _ in range(count):
            y = y * 1.0
        y.sum().backward()

    return _fastest(work) / (2 * count)


def _fresh() -> float:
    """Return the bytes per second of filling memory that the kernel hands out for it, as ranks of full batches do."""
    give_back_freed()
    count = 1 << 22
    return 4 * count / _fastest(lambda: torch.empty(count).fill_(1.0), repeats=20)


def _together() -> float:
    """Return the speed of a core while all compute, in parts of its speed alone."""
    x, weight = torch.rand(4_000, _WIDTH), torch.rand(_WIDTH, _WIDTH)

    def work() -> None:
        torch.set_num_threads(1)  # of this thread
        for _ in range(20):
            x @ weight

    def on_all_cores() -> None:
        threads = [threading.Thread(target=work) for _ in os.sched_getaffinity(0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    alone, together = (_fastest(part, clock=time.perf_counter, repeats=8) for part in (work, on_all_cores))
    return min(alone / together, 1.0)


def _disk(folder: Path) -> float:
    """Return the bytes per second of writing a file of 64 MiB to the disk and not only to the page cache."""
    content = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

        def write() -> None:
            file.seek(0)
            for _ in range(64):
                file.write(content)
            os.fsync(file.fileno())

        return 64 * len(content) / _fastest(write, clock=time.perf_counter, repeats=2)


def _link() -> dict[str, float]:
    """Return the rate and the wake-up time of a stream between two threads of this machine, as ranks have it."""
    here, there = socket.socketpair()
    size, count = 1 << 20, 64

    def echo() -> None:
        buffer = memoryview(bytearray(size))
        with there:
            while received := there.recv_into(buffer):
                if received == 1:
                    there.sendall(buffer[:1])

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    content = bytes(size)

    def ask() -> None:
        here.sendall(b"x")
        here.recv(1)

    def send() -> None:
        for _ in range(count):
            here.sendall(content)

    # Two threads share the interpreter's lock, but not while they copy.
    wake = _fastest(ask, clock=time.perf_counter, repeats=50) / 2
    link = count * size / _fastest(send, clock=time.perf_counter)
    here.close()
    thread.join()
    return {"link": link, "wake": wake}


if __name__ == "__main__":
    print(json.dumps(constants()))
