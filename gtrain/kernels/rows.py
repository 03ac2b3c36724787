"""Questions about one row of numbers, for kernels of several packages."""

from __future__ import annotations

from typing import Any

from gtrain.kernels.options import bare


@bare
def any_nonzero(values: Any) -> bool:
    """Whether a number of a row is not 0."""
    for value in values:  # noqa: SIM110 - numba has no any(); the first value is rarely zero
        if value != 0:
            return True
    return False
