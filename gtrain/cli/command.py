"""Execute a verb with a composed configuration: launch a job, start a server, or create keys.

Light: only ranks and servers import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtrain.errors import ConfigError
from gtrain.launch import launchers
from gtrain.launch.launchers.manual import Manual
from gtrain.launch.request import JobRequest


def launch(cfg: DictConfig, choices: dict[str, str], overrides: list[str]) -> Any:
    """Execute the verb of the configuration.

    Args:
        cfg: the composed configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        overrides: the overrides of the command line.

    Returns:
        The result of rank 0's task, if it ran on this machine.
    """
    launcher = launchers.resolve(cfg.cluster.kind)
    request = JobRequest(cfg, choices, overrides)
    if cfg.verb == "key":
        return make_key(cfg.cluster.key_file)
    if cfg.verb == "serve":
        return Manual().serve(request)
    launcher.check(cfg)
    return launcher.launch(request)


def make_key(file: str | None) -> None:
    """Write the keys of a job into a new file: ``gtrain key``.

    Raises:
        ConfigError: ``file`` is None, or the file exists.
    """
    if file is None:
        raise ConfigError("gtrain key was given, and cluster.key_file is not set.", hint="set cluster.key_file=FILE.")
    path = Path(file).absolute()
    if path.exists():
        raise ConfigError(
            f"cluster.key_file={file} was set; the file already exists.", hint="delete it first to create new keys."
        )
    from gtrain.wire import Security  # imported here because it loads ZeroMQ

    path.parent.mkdir(parents=True, exist_ok=True)
    Security.create().save(path)
    print(f"{path} contains the keys of a job. Keep it secret; every machine of the job needs a copy.")
