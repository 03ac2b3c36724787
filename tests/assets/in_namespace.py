"""Run a module in a network namespace: ``in_namespace.py NAMESPACE MODULE ARGS``."""

from __future__ import annotations

import ctypes
import os
import runpy
import sys

_CLONE_NEWNET = 0x40000000

if __name__ == "__main__":
    _, namespace, module, *arguments = sys.argv
    with open(f"/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    sys.argv[:] = [module, *arguments]
    sys.path[0] = os.getcwd()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
