"""gtrain.kernel_cache: kernels are kept by the version of the code, and compile where nothing can be kept."""

from __future__ import annotations

import os
from pathlib import Path

import numba
import pytest

import gtrain
from gtrain import kernel_cache


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    kernel_cache.cache_folder.cache_clear()


def test_kernels_are_kept_below_the_users_cache(tmp_path: Path) -> None:
    folder = kernel_cache.find_cache(tmp_path)
    assert folder is not None and folder == numba.config.CACHE_DIR and Path(folder).parents[2] == tmp_path
    assert os.stat(folder).st_mode & 0o077 == 0
    assert kernel_cache.find_cache(tmp_path) is None, "there is one now"


@pytest.mark.parametrize("hole", ["writable", "of another"])
def test_a_folder_that_others_may_write_to_is_not_used(
    hole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba unpickles what it finds there."""
    folder = kernel_cache.user_cache_folder(tmp_path)
    assert folder is not None
    if hole == "writable":
        os.chmod(folder, 0o777)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert kernel_cache.user_cache_folder(tmp_path) is None


def test_processes_that_begin_at_the_same_time_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "version_of", lambda packages: "now")
    folder = kernel_cache.user_cache_folder(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda _: False)  # as the other one saw it, just before
    assert folder is not None and kernel_cache.user_cache_folder(tmp_path) == folder


def test_a_change_of_any_file_is_another_version(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    for name in ("caller", "callee"):
        (tmp_path / "kernels" / f"{name}.py").write_text("one = 1\n")
    before = kernel_cache.version_of([tmp_path])
    assert kernel_cache.version_of([tmp_path]) == before
    os.utime(tmp_path / "kernels" / "callee.py", (1, 1))
    assert kernel_cache.version_of([tmp_path]) == before, "only checked out anew"
    (tmp_path / "kernels" / "callee.py").write_text("one = 2\n")
    assert kernel_cache.version_of([tmp_path]) != before


def test_what_was_long_unused_is_removed(tmp_path: Path) -> None:
    old, young = (tmp_path / "gtrain" / "kernels" / name for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    assert kernel_cache.find_cache(tmp_path)
    assert young.exists() and not old.exists()


@pytest.mark.parametrize("without", ["a home", "the right to write"])
def test_a_process_compiles_for_itself_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if without == "a home":
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        monkeypatch.setattr(os, "access", lambda *_: False)
    folder = kernel_cache.find_cache(None if without == "a home" else tmp_path)
    assert folder is not None and tmp_path not in Path(folder).parents and os.stat(folder).st_mode & 0o077 == 0


def test_where_nothing_can_be_kept_ranks_have_their_agents_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    folder = kernel_cache.cache_folder(None)
    child = os.fork()
    if child == 0:
        os._exit(kernel_cache.find_cache() != folder)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Path(folder).name.startswith("gtrain-kernels-")


@pytest.mark.parametrize("name", ["SarStrategy", "PlantedData", "GraphStrategy"])
def test_what_programs_import_says_where_kernels_are_kept_before_there_are_any(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(kernel_cache, "find_cache", lambda: said.append(name))
    getattr(gtrain, name)
    assert said == [name]
    assert gtrain.GtrainError and said == [name], "what has no kernels starts as fast as before"
