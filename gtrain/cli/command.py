"""What the command does with a composed configuration: launch a job, serve, or make keys.

Light: torch is imported in ranks and servers alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtrain.errors import ConfigError
from gtrain.launch import launchers
from gtrain.launch.launchers.manual import Manual
from gtrain.launch.request import JobRequest


def launch(cfg: DictConfig, choices: dict[str, str], given: list[str]) -> Any:
    """Do what the configuration says.

    Args:
        cfg: the composed configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        given: the overrides of the command line.

    Returns:
        What rank 0's task returned, if it ran here.
    """
    launcher = launchers.resolve(cfg.cluster.kind)
    request = JobRequest(cfg, choices, given)
    if cfg.verb == "key":
        return make_key(cfg.cluster.key_file)
    if cfg.verb == "serve":
        return Manual().serve(request)
    launcher.check(cfg)
    return launcher.launch(request)


def make_key(file: str | None) -> None:
    """``gtrain key``: write the keys of a job into a new file.

    Raises:
        ConfigError: no file was named, or it exists.
    """
    if file is None:
        raise ConfigError("gtrain key was given, and cluster.key_file is not set.", hint="set cluster.key_file=FILE.")
    path = Path(file).absolute()
    if path.exists():
        raise ConfigError(f"cluster.key_file={file} is there already.", hint="delete it first to have other keys.")
    from gtrain.wire import Security  # not before it is needed: it loads ZeroMQ

    path.parent.mkdir(parents=True, exist_ok=True)
    Security.create().save(path)
    print(f"{path} holds the keys of a job. Keep it secret; every machine of the job needs a copy.")
