"""Run a module as on a machine: ``in_namespace.py NAMESPACE[:DISK] MODULE ARGS``.

The machine has the network of a namespace. With DISK, a folder, it has a name and a disk of its own: the current folder
has the contents of DISK.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import sys

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_LIBC = ctypes.CDLL(None, use_errno=True)


def call(function: str, *arguments: object) -> None:
    """Call a function of the C library, which returns 0."""
    if getattr(_LIBC, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def own_disk(disk: str) -> None:
    """Give this process a host name, and a current folder with the contents of ``disk``."""
    call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
    socket.sethostname(os.path.basename(disk))
    here = os.getcwd()
    call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    call("mount", os.fsencode(disk), os.fsencode(here), None, ctypes.c_ulong(_MS_BIND), None)
    os.chdir(here)  # the folder that is mounted now


if __name__ == "__main__":
    _, machine, module, *arguments = sys.argv
    namespace, _, disk = machine.partition(":")
    with open(f"/run/netns/{namespace}") as file:
        call("setns", file.fileno(), _CLONE_NEWNET)
    if disk:
        own_disk(disk)
    sys.argv[:] = [module, *arguments]
    sys.path[0] = os.getcwd()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
