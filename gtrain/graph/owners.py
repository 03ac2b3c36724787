"""Owner look-up: each part owns a contiguous range of global ids, so P + 1 offsets define the owners."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def owner_of(ids: Any, offsets: Any) -> Any:
    """Return the part that owns each global id, int64 of the same shape.

    Args:
        ids: integers of any shape, a tensor or an array.
        offsets: int64 ``[P + 1]``, tensor or array like ``ids``; part p owns ``offsets[p] .. offsets[p+1]-1``.
    """
    if isinstance(ids, Tensor):
        return torch.searchsorted(offsets, ids.contiguous(), right=True) - 1
    return np.searchsorted(offsets, ids, side="right") - 1


def count_by_owner(ids: Tensor, offsets: Tensor) -> list[int]:
    """Return the number of global ids, which must ascend, that each part owns; a list of P."""
    counts: list[int] = torch.searchsorted(ids, offsets).diff().tolist()
    return counts
