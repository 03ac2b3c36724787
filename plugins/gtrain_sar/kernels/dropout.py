"""Dropout that replays: whether an edge's head is kept is a hash of (seed, edge, head), and of nothing else.

SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): number
``edge * heads + head`` of the stream that the seed starts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 1 << 64


class Dropout(NamedTuple):
    """Dropout of attention coefficients.

    Attributes:
        p: probability that a coefficient is dropped, 0 .. 1; 0 costs nothing.
        seed: any integer; the same one gives the same mask.
    """

    p: float
    seed: int

    @staticmethod
    def drawn(p: float) -> Dropout:
        """A mask of torch's random numbers; draws none where ``p`` is 0."""
        return Dropout(p, int(torch.randint(1 << 62, ())) if p > 0 else 0)

    @property
    def threshold(self) -> int:
        """Coefficients whose 32-bit hash is below are dropped."""
        return round(self.p * (1 << 32))

    @property
    def scale(self) -> float:
        """What is kept is multiplied by this."""
        return 1.0 / (1.0 - self.p) if self.p < 1 else 0.0

    @property
    def stream(self) -> int:
        """Start of the seed's stream, 0 .. 2**64-1: seeds that follow each other must not give shifted masks."""
        x = (self.seed + 1) * _GOLDEN % _WORD
        x = (x ^ (x >> 30)) * _MIX_1 % _WORD
        x = (x ^ (x >> 27)) * _MIX_2 % _WORD
        return x ^ (x >> 31)

    def mask(self, edges: Tensor, heads: int) -> Tensor:
        """Return what edges' coefficients are multiplied by over ``scale``: bool ``[len(edges), heads]``.

        Args:
            edges: integers ``[e]``, positions in ``edge_index``.
            heads: heads of the attention.
        """
        count = edges.long().view(-1, 1) * heads + torch.arange(heads, device=edges.device)
        x = _signed(self.stream) + count * _signed(_GOLDEN)  # int64 wraps around as uint64 does
        x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
        x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
        return _shifted(x ^ _shifted(x, 31), 32) >= self.threshold


NO_DROPOUT = Dropout(0.0, 0)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD >> 1 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
