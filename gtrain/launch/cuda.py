"""Keep forked ranks able to use CUDA: a process cannot use the driver if its parent initialised it before the fork.

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
    """Import torch_geometric without initialising the CUDA driver and without leaving a cache folder.

    On import, torch_geometric calls ``torch.__config__.show()`` to ask for MKL; a CUDA build of torch initialises the
    driver in that call. It also imports torch's compiler, which creates its cache folder below the temporary folder;
    compiling creates it again when it is needed.
    """
    if "torch_geometric" in sys.modules:
        return
    import torch

    temporary = tempfile.gettempdir()
    present = os.listdir(temporary)
    show = torch.__config__.show
    torch.__config__.show = lambda: f"USE_MKL={'ON' if torch.backends.mkl.is_available() else 'OFF'}"
    try:
        with warnings.catch_warnings():  # PyG compiles with torch.jit, which torch 2.15 deprecates
            warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
            importlib.import_module("torch_geometric")
    finally:
        torch.__config__.show = show
    folder, name = os.path.split(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    if folder == temporary and name not in present:
        with contextlib.suppress(OSError):  # another process uses it
            os.rmdir(os.path.join(folder, name))


def in_use() -> bool:
    """Whether this process has initialised the CUDA driver."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # not loaded
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)
