"""Waiting for descriptors."""

from __future__ import annotations

import fcntl
import os
import resource
import time

import pytest

from gtrain.launch.sockets import wait_readable


def test_descriptors_that_select_cannot_wait_for_are_awaited() -> None:
    """A process with many connections has descriptors above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1100:
        pytest.skip(f"a process may have {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    read_end, write_end = os.pipe()
    high = fcntl.fcntl(read_end, fcntl.F_DUPFD, 1050)
    try:
        start = time.monotonic()
        assert wait_readable([high], 0.01) == set() and time.monotonic() - start >= 0.01
        os.write(write_end, b"x")
        assert wait_readable([high, write_end], 60) == {high}
        assert wait_readable([], 0) == set()
    finally:
        for descriptor in (high, read_end, write_end):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_of_a_process_is_awaited() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    process = os.pidfd_open(pid)
    try:
        assert wait_readable([process], 60) == {process}
    finally:
        os.close(process)
        os.waitpid(pid, 0)
