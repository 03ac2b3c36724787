"""CUDA's driver and forks: a process that is forked from one that has begun to use the driver cannot use it.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import tempfile
import warnings

_DRIVER = "libcuda.so.1"


def import_torch_geometric() -> None:
    """Import it, unless it has been, without the driver, and without a folder that is left.

    It asks whether torch was built with MKL, by a text that a torch for GPUs begins to use the driver for. It imports
    torch's compiler, which makes its cache folder below the temporary folder; compiling makes it again.
    """
    if "torch_geometric" in sys.modules:
        return
    import torch

    temporary = tempfile.gettempdir()
    before = os.listdir(temporary)
    show = torch.__config__.show
    torch.__config__.show = lambda: f"USE_MKL={'ON' if torch.backends.mkl.is_available() else 'OFF'}"
    try:
        with warnings.catch_warnings():  # PyG compiles with torch.jit, which torch 2.15 tells users is deprecated
            warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
            importlib.import_module("torch_geometric")
    finally:
        torch.__config__.show = show
    folder, name = os.path.split(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    if folder == temporary and name not in before:
        with contextlib.suppress(OSError):  # another process compiles into it
            os.rmdir(os.path.join(folder, name))


def in_use() -> bool:
    """Whether this process has begun to use the driver."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # not loaded
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)
