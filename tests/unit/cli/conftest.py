"""What tests of the command's configuration share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins

from gtrain import config
from gtrain.cli import entry


@pytest.fixture
def composed_by_hydra() -> Iterator[None]:
    """``hydra.compose`` finds gtrain's configuration."""
    Plugins.instance().register(entry.BackendConfigs)
    config.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("gtrain.conf", **config.VERSION_BASE):
        yield
