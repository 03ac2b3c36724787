"""``cluster=auto``: who starts the processes. Imports the standard library only; reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gtrain.errors import ConfigError

LOCAL = "local"
KINDS = ("auto", LOCAL, "torchrun", "slurm")
_INTERACTIVE = ("bash", "interactive")


def resolve(kind: str, environ: Mapping[str, str] = os.environ) -> str:
    """The launcher of this process: ``local`` (our agent forks the ranks), ``torchrun`` or ``slurm``.

    Args:
        kind: ``cluster.kind`` of the configuration.
        environ: the environment variables.

    Raises:
        ConfigError: the kind is unknown, or names a launcher that did not start this process.
    """
    found = detect(environ)
    if kind == "auto":
        return found
    if kind not in KINDS:
        raise ConfigError(f"cluster={kind} was set.", hint=f"the launchers are {', '.join(KINDS)}.")
    if kind not in (LOCAL, found):
        raise ConfigError(
            f"cluster={kind} was set, but {kind} did not start this process: its environment variables are absent.",
            hint=f"start the command with {kind}, or leave cluster=auto.",
        )
    return kind


def detect(environ: Mapping[str, str] = os.environ) -> str:
    """Tell the launcher from its environment variables."""
    if "TORCHELASTIC_RUN_ID" in environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return "torchrun"
    interactive = environ.get("SLURM_JOB_NAME") in _INTERACTIVE
    if "SLURM_NTASKS" in environ and "SLURM_PROCID" in environ and not interactive:
        return "slurm"
    return LOCAL


def external_rank_and_size(kind: str, environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Rank and world size that another launcher gave this process."""
    names = ("RANK", "WORLD_SIZE") if kind == "torchrun" else ("SLURM_PROCID", "SLURM_NTASKS")
    return int(environ[names[0]]), int(environ[names[1]])
