"""Launchers start the processes of a job: one class each, registered in :data:`LAUNCHERS`.

A new launcher is a module of this package with one class, its entry in the registry, and a test; the entry makes the
option ``cluster=NAME``. Most are an :class:`~gtrain.launch.launchers.external.ExternalLauncher`, which names the
environment variables that hold the number of a rank.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from gtrain.errors import ConfigError
from gtrain.launch.launchers.base import Launcher
from gtrain.launch.launchers.kubernetes import Kubernetes
from gtrain.launch.launchers.local import Local
from gtrain.launch.launchers.manual import Manual
from gtrain.launch.launchers.mpi import Mpi
from gtrain.launch.launchers.ray import Ray
from gtrain.launch.launchers.slurm import Slurm
from gtrain.launch.launchers.torchrun import Torchrun

LAUNCHERS: Mapping[str, Launcher] = {
    launcher.name: launcher for launcher in (Local(), Torchrun(), Mpi(), Slurm(), Kubernetes(), Manual(), Ray())
}
"""Launchers by name, in the order in which :func:`detect` tries them."""


def options() -> dict[str, str]:
    """Return the YAML of each ``cluster=OPTION`` except ``auto``, with the class's docstring as its comment."""
    text = "# {0}\ndefaults: [/schema/cluster/{1}@_here_, _self_]\nkind: {2}\n"
    return {name: text.format(inspect.getdoc(each), each.schema, name) for name, each in LAUNCHERS.items()}


def register() -> None:
    """Register the options of ``cluster`` in Hydra's store."""
    for name, text in options().items():
        ConfigStore.instance().store(group="cluster", name=name, node=OmegaConf.create(text))


def resolve(kind: str, environ: Mapping[str, str] = os.environ) -> Launcher:
    """Return the launcher of this process.

    Args:
        kind: ``cluster.kind`` of the configuration: ``auto`` or a launcher's name.
        environ: the environment variables.

    Raises:
        ConfigError: the kind is unknown, or names a launcher that did not start this process.
    """
    detected = detect(environ)
    if kind == "auto":
        return detected
    if kind not in LAUNCHERS:
        raise ConfigError(f"cluster={kind} was set.", hint=f"the launchers are {', '.join(('auto', *LAUNCHERS))}.")
    launcher = LAUNCHERS[kind]
    if launcher is not detected and not launcher.starts_ranks:
        raise ConfigError(
            f"cluster={kind} was set, but {kind} did not start this process: its environment variables are absent.",
            hint=f"start the command with {kind}, or leave cluster=auto.",
        )
    return launcher


def detect(environ: Mapping[str, str] = os.environ) -> Launcher:
    """The launcher whose environment variables this process has; :class:`Local` for a process of none."""
    return next((launcher for launcher in LAUNCHERS.values() if launcher.detect(environ)), LAUNCHERS[Local.name])


def is_first() -> bool:
    """Whether this process speaks for the job: the command itself, or rank 0 of those that another launcher started."""
    rank_info = detect().rank_info()
    return rank_info is None or rank_info.rank == 0
