"""``cluster=auto``: who starts the processes. Imports the standard library only; reads the environment."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gtrain.errors import ConfigError

LOCAL = "local"
MANUAL = "manual"
KINDS = ("auto", LOCAL, "torchrun", "slurm", MANUAL)
_INTERACTIVE = ("bash", "interactive")
_JOB_NAMES = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "GROUP_RANK"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"),
)
_REFUSAL_SECONDS = 10.0


@dataclass(frozen=True)
class External:
    """The place in a job that another launcher gave this process.

    Attributes:
        rank: of all processes.
        size: number of all processes.
        local: number on its machine, from 0.
        local_size: processes of its machine.
        machine: number of its machine.
        machines: number of machines.
    """

    rank: int
    size: int
    local: int
    local_size: int
    machine: int
    machines: int


def resolve(kind: str, environ: Mapping[str, str] = os.environ) -> str:
    """The launcher of this process: ``local`` or ``manual`` (our agent forks the ranks), ``torchrun`` or ``slurm``.

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
    if kind not in (LOCAL, MANUAL, found):
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


def is_first(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for the job: the command itself, or rank 0 of those that another launcher started."""
    launcher = detect(environ)
    return launcher == LOCAL or external_rank_and_size(launcher, environ)[0] == 0


def external_rank_and_size(kind: str, environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Rank and world size that another launcher gave this process."""
    names = ("RANK", "WORLD_SIZE") if kind == "torchrun" else ("SLURM_PROCID", "SLURM_NTASKS")
    return int(environ[names[0]]), int(environ[names[1]])


def external_place(kind: str, environ: Mapping[str, str] = os.environ) -> External:
    """Where in its job another launcher put this process; what it does not say is taken to be one machine."""
    rank, size = external_rank_and_size(kind, environ)
    names = (
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        if kind == "torchrun"
        else ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_NODEID", "SLURM_NNODES")
    )
    machines = int(environ.get(names[3]) or 1)
    local_size = int(environ.get(names[1]) or max(1, size // machines))
    machine = int(environ.get(names[2]) or 0)
    local = int(environ.get(names[0]) or (rank if machines == 1 else rank % local_size))
    return External(rank, size, local, local_size, machine, machines)


@contextlib.contextmanager
def printing_once(environ: Mapping[str, str] = os.environ) -> Iterator[bool]:
    """Elect one of this machine's ranks to print why the job is refused; all of them find the same mistake.

    The first rank to come holds a socket without a file. The others connect to it and stay silent; it ends when all
    have, for then none comes later and prints again.

    Yields:
        Whether this process prints: a rank of another launcher that was elected, or the command itself.
    """
    try:
        launcher = detect(environ)
        others = 0 if launcher == LOCAL else external_place(launcher, environ).local_size - 1
    except (KeyError, ValueError):
        others = 0
    if others < 1:
        yield True
        return
    job = "/".join(environ.get(name, "") for name in _JOB_NAMES)
    address = f"\0gtrain-refusal/{os.getuid()}/{job}"[:100]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.bind(address)
            line.listen(others)
        except OSError:
            with contextlib.suppress(OSError):
                line.connect(address)
            yield False
            return
        yield True
        deadline = time.monotonic() + _REFUSAL_SECONDS
        with contextlib.suppress(TimeoutError):
            for _ in range(others):
                line.settimeout(max(0.001, deadline - time.monotonic()))
                line.accept()[0].close()
