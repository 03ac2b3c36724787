"""gtrain.strategy.preparation: a store is made in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_graphs import messy_graph
from torch_geometric.data import Data

from gtrain.data.module import GraphDataModule
from gtrain.data.planted import PlantedData
from gtrain.errors import ConfigError, DataError, StoreError
from gtrain.graph.shard import load_whole
from gtrain.launch import environment
from gtrain.strategy import preparation
from gtrain.strategy.counters import anonymous_bytes
from gtrain.strategy.preparation import call_in_fork, call_in_interpreter

MIB = 1 << 20


class Large(GraphDataModule):
    """A source that takes 200 MiB until the process ends, which no sample can miss, and remembers that it was read."""

    name = "large"
    read_here = False

    def identity(self) -> dict[str, Any]:
        return {}

    def read(self) -> Data:
        self.read_here = True
        self.scratch = np.ones(200 * MIB, dtype=np.uint8)
        graph = messy_graph()
        graph.y[0] = int(self.scratch[0])
        return graph


def apart(function: Callable[[], Any]) -> dict[str, int]:
    return call_in_fork(function, "the process that prepares the store of large")


def test_what_reading_takes_is_memory_of_another_process(tmp_path: Path) -> None:
    data = Large(store=str(tmp_path), num_parts=2)
    data.run_in_child = apart
    before = anonymous_bytes()
    data.prepare_data()
    assert not data.read_here and anonymous_bytes() - before < 20 * MIB
    assert (memory := data.preparation_memory) is not None
    # Less than the 200 MiB of the array: a forked process may use memory that its parent has freed.
    assert memory["peak_anonymous_bytes"] - memory["baseline_anonymous_bytes"] >= 100 * MIB
    here = Large(store=str(tmp_path / "here"), num_parts=2)
    here.prepare_data()
    assert here.read_here and here.preparation_memory is None
    made, wanted = (load_whole(module.open_store()).node_data for module in (data, here))
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)


def test_a_graph_is_generated_checked_and_stored_in_little_more_than_its_own_size(tmp_path: Path) -> None:
    """Beside the 128 MiB of features one part of them and buffers of 32 MiB; three copies before. 257 MiB were read."""
    size = {"num_nodes": 32768, "num_features": 1024, "num_edges": 70000}
    data = PlantedData(**size, partitioner="random", store=str(tmp_path), num_parts=2)  # type: ignore[arg-type]
    data.run_in_child = apart
    data.prepare_data()
    assert (memory := data.preparation_memory) is not None
    assert memory["peak_anonymous_bytes"] - memory["baseline_anonymous_bytes"] < 2.25 * 128 * MIB


@pytest.mark.slow
def test_a_process_with_threads_has_a_clean_interpreter_do_it(tmp_path: Path) -> None:
    """The class is one of this file, which no installed package has."""

    class Here(Large):
        pass

    def interpreted(function: Callable[[], Any]) -> dict[str, int]:
        return call_in_interpreter(function, "the process", "it has 2 threads")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        data = Here(store=str(tmp_path / "s"), num_parts=2)
        data.run_in_child = interpreted
        data.prepare_data()
        assert not data.read_here and data.open_store().num_parts == 2
        assert data.preparation_memory is not None and data.preparation_memory["peak_anonymous_bytes"] >= 200 * MIB
        spoilt = Here(store=str(tmp_path / "n"), num_parts=41)
        spoilt.run_in_child = interpreted
        with pytest.raises(DataError, match="more parts than nodes: 41 parts"):
            spoilt.prepare_data()


@pytest.mark.parametrize(
    ("raised", "wanted", "text"),
    [
        (DataError("row 3 has a NaN", hint="drop it"), DataError, "row 3 has a NaN\nHINT: drop it"),
        (ConfigError("no such label"), ConfigError, "no such label"),
        (PermissionError(13, "Permission denied", "/x"), PermissionError, "[Errno 13] Permission denied: '/x'"),
        (ValueError("not a number"), ValueError, "not a number"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), RuntimeError, "UnicodeDecodeError: 'utf-8' codec"),
    ],
)
def test_an_error_is_raised_as_it_was(raised: Exception, wanted: type[Exception], text: str) -> None:
    def fail() -> None:
        raise raised

    with pytest.raises(wanted) as found:
        apart(fail)
    assert type(found.value) is wanted and str(found.value).startswith(text)
    assert any("in fail" in note for note in found.value.__notes__)


def test_a_killed_process_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    class Killed(Large):
        def names(self) -> dict[str, Any]:
            os.kill(os.getpid(), signal.SIGKILL)
            return {}

    data = Killed(store=str(tmp_path / "s"))
    data.run_in_child = apart
    with pytest.raises(DataError, match="store of large was killed by SIGKILL") as found:
        data.prepare_data()
    assert "memory runs out" in str(found.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="is not a store"):
        data.open_store()


def test_an_interrupted_process_removes_what_it_wrote(tmp_path: Path) -> None:
    """Ctrl-C interrupts the parent, which ends the process."""
    file, process, parent = tmp_path / "scratch", tmp_path / "process", os.getpid()

    def slow() -> None:
        try:
            process.write_text(str(os.getpid()))
            file.touch()
            os.kill(parent, signal.SIGINT)
            signal.pause()
        finally:
            file.unlink()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            apart(slow)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not file.exists()
    with pytest.raises(ChildProcessError):
        os.waitpid(int(process.read_text()), os.WNOHANG)  # it has been waited for


def test_a_stopped_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A long preparation is not: it may take hours."""

    class Report(environment.WaitReport):
        def __call__(self) -> float:
            waited = super().__call__()
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)
            return waited

    def stop() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(environment, "SAY_SECONDS", 0.0)
    monkeypatch.setattr(preparation, "WaitReport", Report)
    apart(lambda: None)
    assert capfd.readouterr().err == ""
    apart(stop)
    assert capfd.readouterr().err == "gtrain: waiting for the process that prepares the store of large, 0 s\n"
