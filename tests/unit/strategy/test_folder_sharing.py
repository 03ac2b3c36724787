"""gtrain.strategy.folder_sharing, where it has nothing to do: machines that one host simulates share its folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from gtrain.launch.job_store import JobNetwork
from gtrain.strategy import folder_sharing
from gtrain.strategy.folder_sharing import FolderSharing, agreed_path


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines of one host; opening the job's key-value store starts threads, which prevent forks."""

    def fail(*_: Any) -> None:
        raise AssertionError("the job's key-value store was opened")

    monkeypatch.setattr(folder_sharing, "job_network", lambda environment: JobNetwork(None, None, 1, 2))
    for name in ("job_store", "broadcast_text"):
        monkeypatch.setattr(folder_sharing, name, fail)


def test_machines_of_one_host_find_a_checkpoint_each_and_use_its_folder(one_host: None, tmp_path: Path) -> None:
    environment = LightningEnvironment()
    assert agreed_path(environment, lambda: tmp_path) == tmp_path
    assert agreed_path(environment, lambda: None) is None
    sharing = FolderSharing(environment)
    sharing.announce(tmp_path)
    assert sharing.target(tmp_path, "absent") == tmp_path
    sharing.offer(tmp_path)
    sharing.collect(tmp_path)
    sharing.withdraw(tmp_path)
    with sharing.readable(tmp_path / "last.ckpt", "manifest.json") as path:
        assert path == tmp_path / "last.ckpt"
    assert tmp_path.exists()
