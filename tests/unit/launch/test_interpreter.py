"""Which processes may fork ranks, and what of a program is copied by value where they may not."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from gtrain.launch import interpreter, shipping


@pytest.fixture
def no_python_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest's time limits have one."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def test_a_thread_of_python_is_an_obstacle() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert "Python threads" in (interpreter.fork_obstacle() or "")
    finally:
        end.set()
        thread.join()


@pytest.mark.usefixtures("no_python_threads")
def test_a_thread_of_compiled_code_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_threads", lambda: 3)
    assert interpreter.fork_obstacle() == "it has 3 threads"


@pytest.mark.usefixtures("no_python_threads")
def test_numbas_threads_are_an_obstacle_also_where_it_has_none_but_this(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its OpenMP layer ends a forked child that calls a kernel, however many threads the parent had."""
    monkeypatch.setitem(sys.modules, "numba.np.ufunc.parallel", types.SimpleNamespace(_is_initialized=True))
    assert interpreter.fork_obstacle() == "numba has started its threads"


@pytest.mark.usefixtures("no_python_threads")
def test_the_pool_of_openblas_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before any fork; numpy goes on as before."""
    counted = [4]
    monkeypatch.setattr(interpreter, "_threads", lambda: counted[0])
    monkeypatch.setattr(interpreter, "_end_openblas", lambda: counted.__setitem__(0, 1))
    monkeypatch.setitem(sys.modules, "numba.np.ufunc.parallel", None)
    assert interpreter.fork_obstacle() is None
    monkeypatch.undo()
    interpreter._end_openblas()
    matrix = np.random.default_rng(0).random((300, 300))
    assert np.allclose(matrix @ np.linalg.inv(matrix), np.eye(300), atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "json",
        "os.path",
        "torch.nn.functional",
        "gtrain.errors",
        "numpy.linalg",
        "builtins",
        "_frozen_importlib_external",
    ],
)
def test_installed_modules_go_by_their_names(name: str) -> None:
    module = sys.modules.get(name) or importlib.import_module(name)
    assert shipping._is_importable(module, name)


def test_what_is_on_no_path_goes_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_module.py").write_text("def one():\n    return 1\n")
    spec = importlib.util.spec_from_file_location("some_module", tmp_path / "some_module.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert not shipping._is_importable(module, "some_module")
    monkeypatch.syspath_prepend(tmp_path)
    assert shipping._is_importable(module, "some_module")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "some_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "first")
    assert not shipping._is_importable(module, "some_module"), "another module of that name"
    assert not shipping._is_importable(types.ModuleType("made_by_hand"), "made_by_hand")


@pytest.mark.parametrize("value", [(1, {2: "x"}), torch.arange(3), np.ones(2), None, {"f": len}])
def test_results_come_back_as_they_are(value: object) -> None:
    with shipping.result_file() as file:
        shipping.write_result(file, "of a rank that was here before, and longer" * 100)
        shipping.write_result(file, value)
        found = shipping.read_result(file)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_a_result_that_cannot_be_pickled_is_none_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    with shipping.result_file() as file:
        shipping.write_result(file, (x for x in ()))
        assert shipping.read_result(file) is None
        shipping.write_result(file, lambda: os.getpid())
        assert shipping.read_result(file)() == os.getpid()
    assert "rank 0 returned a generator, which cannot be pickled" in capsys.readouterr().err
