"""Keep forked ranks able to use CUDA: a process cannot use the driver if its parent initialised it before the fork.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

_DRIVER = "libcuda.so.1"
_COMPILER_CACHE = "torchinductor_"
"""Start of the name of the compiler's cache folder; the user's name follows."""


def import_torch_geometric() -> None:
    """Import torch_geometric without initialising the CUDA driver and without leaving a cache folder.

    On import, torch_geometric calls ``torch.__config__.show()`` to ask for MKL; a CUDA build of torch initialises the
    driver in that call. It also imports torch's compiler, which creates its cache folder below the temporary folder,
    where a process that is killed would leave it; here only compiling creates that folder.
    """
    if "torch_geometric" in sys.modules:
        return
    import torch

    show = torch.__config__.show
    torch.__config__.show = lambda: f"USE_MKL={'ON' if torch.backends.mkl.is_available() else 'OFF'}"
    try:
        with warnings.catch_warnings(), _without_cache_folder():
            # PyG compiles with torch.jit, which torch 2.15 deprecates
            warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
            importlib.import_module("torch_geometric")
    finally:
        torch.__config__.show = show


@contextlib.contextmanager
def _without_cache_folder() -> Iterator[None]:
    """Make all folders but the cache of torch's compiler."""
    make = os.makedirs

    def make_others(name: Any, *args: Any, **kwargs: Any) -> None:
        if not os.path.basename(name).startswith(_COMPILER_CACHE):
            make(name, *args, **kwargs)

    os.makedirs = make_others
    try:
        yield
    finally:
        os.makedirs = make


def in_use() -> bool:
    """Whether this process has initialised the CUDA driver."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # not loaded
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)
