"""Loading compiled kernels before they are needed, so that the first epoch does not pay for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gtrain.nn.dropout import NO_DROPOUT
from gtrain_sar.kernels.attention import attention_backward, attention_finish, attention_forward, attention_state
from gtrain_sar.kernels.linear import spmm

if TYPE_CHECKING:
    from gtrain_sar.edges import Compressed


def load_sums(edge: Compressed, dtype: torch.dtype) -> None:
    """Load the sparse product for one type.

    Args:
        edge: a block of one edge, from row 0 to column 0.
        dtype: of the rows.
    """
    rows = torch.zeros(1, 1, 1, dtype=dtype)
    spmm(edge, rows, torch.zeros_like(rows))
    spmm(edge, rows, torch.zeros_like(rows), torch.zeros(1, 1, dtype=dtype))


def load_attention(edge: Compressed, dtype: torch.dtype) -> None:
    """Load both passes of attention for one type; see :func:`load_sums`."""
    rows, logits = torch.zeros(1, 1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    state = attention_state(1, rows)
    attention_forward(edge, rows, logits, logits, 0.2, state, NO_DROPOUT)
    lse, delta, grad = attention_finish(state), torch.zeros_like(logits), torch.zeros_like(rows)
    found = torch.zeros_like(rows), torch.zeros_like(logits), torch.zeros_like(logits)
    attention_backward(edge, rows, logits, logits, lse, delta, grad, 0.2, NO_DROPOUT, *found)
