"""A machine as the formulas see it: cores, memory, and the rates of its arithmetic, memory, disk and network."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf

from gtrain.errors import ConfigError
from gtrain.files import replace_text, user_cache
from gtrain.memory.limits import usable_memory
from gtrain.settings import Settings, setting

CALIBRATION = "machine.json"
_CUDA_IMPORTS = 6e8  # bytes; torch 2.15 with CUDA 13.2 takes 0.16 GB more than without, before it uses a device


@dataclass
class Machine(Settings):
    """One of the machines of a job; ``plan.machine`` names a YAML or JSON file with these keys.

    A key that a file leaves out has the default, which is that of a core of a server of 2021.
    """

    group: ClassVar[str] = "plan.machine"
    name: str = setting("assumed", "name in the table")
    count: int | None = setting(None, "machines; null: `trainer.num_nodes`", least=1)
    cores: int = setting(1, "cores that the job may use", least=1)
    memory: float = setting(16e9, "memory that the job may use on the machine", above=0, unit="bytes")
    flops: float = setting(
        6e10, "float32 operations of dense products, of one core", above=0, unit="operations per second"
    )
    flops_bfloat16: float = setting(1.2e11, "the same in bfloat16", above=0, unit="operations per second")
    gather: float = setting(1e10, "rows of 1 KiB at random places that one core sums", above=0, unit="bytes per second")
    stream: float = setting(8e9, "bytes that one core reads and writes in order", above=0, unit="bytes per second")
    bandwidth: float = setting(1e11, "memory bandwidth of all cores", above=0, unit="bytes per second")
    attention: float = setting(
        3e9, "bytes of rows that one core weights by attention and sums", above=0, unit="bytes per second"
    )
    logit: float = setting(
        1e-8, "the coefficient of one head of one edge, with dropout, on one core", above=0, unit="seconds"
    )
    sampling: float = setting(
        1.5e7, "edges that one core samples, with the numbering of their nodes", above=0, unit="edges per second"
    )
    fresh: float = setting(
        5e9, "bytes of newly allocated memory that one core writes", above=0, unit="bytes per second"
    )
    together: float = setting(
        1.0, "speed of a core while all others compute too, in parts of its speed alone", above=0, most=1
    )
    threads: float = setting(1.0, "what each further core of a rank adds, in parts of the first one", least=0, most=1)
    step: float = setting(
        3e-3, "a training step without its layers: Lightning, the loss, the optimizer", least=0, unit="seconds"
    )
    layer: float = setting(
        1e-3, "starting the operations of a layer in a step, forward and backward", least=0, unit="seconds"
    )
    dispatch: float = setting(1e-5, "an operation of torch on a tensor of one number", above=0, unit="seconds")
    disk: float = setting(1e9, "bytes read from or written to the disk of the stores", above=0, unit="bytes per second")
    link: float = setting(2e9, "bytes between two ranks of the machine", above=0, unit="bytes per second")
    wake: float = setting(5e-5, "a message without content between two ranks of the machine", above=0, unit="seconds")
    network: float = setting(1.25e9, "bytes that the machine sends to others", above=0, unit="bytes per second")
    latency: float = setting(5e-5, "a message without content between two machines", above=0, unit="seconds")
    imports: float = setting(4e8, "anonymous memory of a process after its imports", above=0, unit="bytes")
    devices: int = setting(0, "GPUs", least=0)

    def as_dict(self) -> dict[str, Any]:
        """Return the values by key."""
        return dataclasses.asdict(self)


def load(path: str) -> Machine:
    """Read a machine from a YAML or JSON file.

    Raises:
        ConfigError: the file does not exist, has an unknown key, or a value that is not allowed.
    """
    if not Path(path).is_file():
        raise ConfigError(
            f"plan.machine={path} was set; no such file exists.",
            hint="name a YAML file with the keys of docs/plan.md, or leave out plan.machine for this machine.",
        )
    try:
        values = OmegaConf.merge(OmegaConf.structured(Machine), OmegaConf.load(path))
        machine = OmegaConf.to_object(values)
    except Exception as error:  # of OmegaConf, or of the parser of YAML, which has no types
        names = ", ".join(field.name for field in dataclasses.fields(Machine))
        raise ConfigError(
            f"plan.machine={path}: {str(error).splitlines()[0]}", hint=f"the keys are {names}."
        ) from error
    assert isinstance(machine, Machine)
    return machine


def this_machine() -> Machine:
    """Return this machine, with the constants that ``gtrain doctor`` measured, or else defaults."""
    measured = calibration()
    build = {"imports": _CUDA_IMPORTS} if _torch_has_cuda() else {}
    return Machine(
        **{
            **build,
            **measured,
            "name": socket.gethostname() + ("" if measured else ", not calibrated"),
            "cores": _cores(),
            "memory": usable_memory(),
        }
    )


def _cores() -> int:
    """Return the cores that the job may use, at most those that the control group allows."""
    usable, limit = len(os.sched_getaffinity(0)), cpu_limit()
    return usable if limit is None else max(min(usable, int(limit)), 1)


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return the cores that the control group allows, such as 1.5; None without a limit."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _torch_has_cuda() -> bool:
    """Return whether the installed torch is a build for CUDA, without importing it."""
    spec = find_spec("torch")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any(Path(folder, "lib", "libtorch_cuda.so").exists() for folder in folders)


def calibration() -> dict[str, Any]:
    """Return the constants that ``gtrain doctor`` measured on this machine, by key; empty if it never ran here."""
    file = calibration_file()
    try:
        content = json.loads(file.read_text()) if file is not None else {}
    except (OSError, ValueError):
        return {}
    known = {field.name for field in dataclasses.fields(Machine)}
    # A home on a shared disk has the constants of several machines.
    constants = content.get(socket.gethostname(), {})
    return {key: value for key, value in constants.items() if key in known}


def keep(constants: dict[str, Any]) -> Path | None:
    """Write measured constants to the user's cache, and return the file; None if the cache is not writable."""
    file = calibration_file()
    if file is None:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = json.loads(file.read_text()) if file.is_file() else {}
        replace_text(file, json.dumps({**content, socket.gethostname(): constants}, indent=1) + "\n")
    except (OSError, ValueError):
        return None
    return file


def calibration_file() -> Path | None:
    """Return the file of the constants in the user's cache; None if the user has no home."""
    try:
        return user_cache() / CALIBRATION
    except RuntimeError:
        return None
