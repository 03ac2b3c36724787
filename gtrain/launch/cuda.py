"""CUDA's driver and forks: a process that is forked from one that has begun to use the driver cannot use it.

Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import warnings

_DRIVER = "libcuda.so.1"


def import_torch_geometric() -> None:
    """Import it, unless it has been, without the driver.

    It asks whether torch was built with MKL, by a text that a torch for GPUs begins to use the driver for.
    """
    if "torch_geometric" in sys.modules:
        return
    import torch

    show = torch.__config__.show
    torch.__config__.show = lambda: f"USE_MKL={'ON' if torch.backends.mkl.is_available() else 'OFF'}"
    try:
        with warnings.catch_warnings():  # PyG compiles with torch.jit, which torch 2.15 tells users is deprecated
            warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
            importlib.import_module("torch_geometric")
    finally:
        torch.__config__.show = show


def in_use() -> bool:
    """Whether this process has begun to use the driver."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # not loaded
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)
