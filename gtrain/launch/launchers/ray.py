"""``cluster=ray``: ranks and servers are actors of a Ray cluster, and the command watches them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
from typing import Any

from omegaconf import DictConfig

from gtrain import config as configuration
from gtrain.errors import ConfigError
from gtrain.launch.job import check_shape
from gtrain.launch.launchers.base import Launcher
from gtrain.launch.request import JobRequest

_RUN = "gtrain.launch.ray.run"


class Ray(Launcher):
    """Actors of a Ray cluster: the one that RAY_ADDRESS names, or one that the command starts on this machine."""

    name = "ray"
    schema = "ray"
    restarts_job = True

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        if cfg.cluster.standalone:
            raise ConfigError(
                f"cluster.standalone={list(cfg.cluster.standalone)} was set; with cluster=ray actors start all "
                "servers.",
                hint="leave out cluster.standalone.",
            )
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("cluster=ray was set, and Ray is not installed.", hint="pip install 'gtrain[ray]'.")

    def launch(self, request: JobRequest) -> Any:
        """Start all ranks and servers as actors, and watch them."""
        cfg = request.cfg
        configuration.validate(cfg)
        num_nodes, devices = configuration.shape_of(cfg)
        check_shape(num_nodes, devices, None)
        if cfg.cluster.address is None and "RAY_ADDRESS" not in os.environ:
            _secure_own_cluster()
        return importlib.import_module(_RUN).run(request, num_nodes, devices)


def _secure_own_cluster() -> None:
    """Give a cluster of the command's own a token, without which other users of the machine could use it.

    Ray reads these variables when it is imported; without them it would write a token into the user's home.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a thread that asks a lost cluster would start another
