"""The kernels in Triton equal the plain ones on a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from device_kernel_cases import *  # noqa: E402, F403
