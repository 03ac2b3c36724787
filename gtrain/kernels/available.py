"""Whether kernels for GPUs can be compiled here. Imports no Triton."""

from __future__ import annotations

import functools
import importlib.util
import logging

_log = logging.getLogger(__name__)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, as torch for GPUs installs it on Linux; else a warning says so once."""
    if importlib.util.find_spec("triton") is not None:
        return True
    _log.warning(
        "Triton is not installed: on the GPU, layers and dropout run as many operations of torch, which is slow."
    )
    return False
