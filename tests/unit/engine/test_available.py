"""What Triton needs in order to compile here."""

from __future__ import annotations

import logging
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gtrain.kernels import available


@pytest.fixture(autouse=True)
def complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    available.has_triton.cache_clear()
    yield
    available.has_triton.cache_clear()


def test_nothing_is_lacking() -> None:
    assert available.triton_lacks() is None and available.has_triton()


@pytest.mark.parametrize("lacking", ["triton", "compiler", "headers"])
def test_a_warning_says_what_is_lacking(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if lacking == "triton":
        monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: None)
    elif lacking == "compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        (tmp_path / "Python.h").unlink()
    words: Any = {"triton": "not installed", "compiler": "C compiler", "headers": "python3-dev"}
    with caplog.at_level(logging.WARNING, "gtrain"):
        assert not available.has_triton() and not available.has_triton()
    assert caplog.text.count(words[lacking]) == 1


def test_the_user_names_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CC", "mycc")
    assert available.triton_lacks() is None


@pytest.mark.parametrize("name", ["CPATH", "C_INCLUDE_PATH"])
def test_headers_may_be_elsewhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Python.h").unlink()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "Python.h").touch()
    monkeypatch.setenv(name, f":{tmp_path / 'more'}")
    assert available.triton_lacks() is None
