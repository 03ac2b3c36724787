"""The GPUs of this machine, and what torch, Triton and NCCL can do with them. Runs in the process of the probe."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from gtrain.kernels.available import triton_lacks

_DRIVER = "libcuda.so.1"
_BFLOAT16 = (8, 0)
"""Least compute capability with matrix products in bfloat16."""


def facts() -> dict[str, Any]:
    """Return what torch was built for, the driver, and the devices that torch can use; sizes in bytes."""
    import torch

    devices = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            free, total = torch.cuda.mem_get_info(number)
            capability = (properties.major, properties.minor)
            devices.append(
                {
                    "name": properties.name,
                    "memory": total,
                    "free": free,
                    "capability": f"{properties.major}.{properties.minor}",
                    "bfloat16": capability >= _BFLOAT16,
                }
            )
    return {
        "built_for": torch.version.cuda,
        "driver": driver_version() if torch.version.cuda else None,
        "devices": devices,
        "nccl": nccl_version() if devices else None,
    }


def driver_version() -> str | None:
    """Return the newest CUDA version that the driver supports, such as ``13.0``; None without a driver."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def nccl_version() -> str | None:
    """Return the version of NCCL in torch; None if torch was built without it."""
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def triton_facts(devices: int) -> dict[str, Any]:
    """Import Triton, and compile and run a small kernel on each device.

    Args:
        devices: their number; 0 compiles nothing.

    Raises:
        ImportError: Triton is not installed, or cannot be imported.
        RuntimeError: Triton lacks something here, or a kernel returned a wrong result.
    """
    triton = importlib.import_module("triton")
    compiled = 0
    if devices:
        if (lacking := triton_lacks()) is not None:
            raise RuntimeError(lacking)
        kernel = importlib.import_module("gtrain.doctor.device_kernel")
        for number in range(devices):
            kernel.check(number)
            compiled += 1
    return {"version": triton.__version__, "compiled": compiled}
