"""What numba has no word for: an order of writes that the compiler keeps."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def _fence(typingctx: Any) -> Any:
    """Let no write below come before a write above; no instruction on x86."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), generate


fence: Any = intrinsic(_fence)
