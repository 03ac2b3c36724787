"""gtrain.kernel_cache: kernels compile where nothing can be kept."""

from __future__ import annotations

import os
from pathlib import Path

import numba
import pytest

from gtrain import kernel_cache


def test_a_folder_is_made_only_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    assert kernel_cache.find_cache(tmp_path, tmp_path / "none") is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    folder = kernel_cache.find_cache(tmp_path, tmp_path / "none")
    assert folder is not None and folder == numba.config.CACHE_DIR and os.stat(folder).st_mode & 0o077 == 0
    assert kernel_cache.find_cache(tmp_path, tmp_path) is None, "there is one now"
