"""Where the rows of a batch lie, and what is allocated once for all batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.nn.recipe import EdgeRecipe

Floats = NDArray[Any]


@dataclass(frozen=True)
class BatchLayout:
    """A batch of B edges in chunks of ``places`` edges and ``uniform`` drawn nodes.

    Attributes:
        edges: B.
        places: m.
        uniform: u.
    """

    edges: int
    places: int
    uniform: int

    @property
    def chunks(self) -> int:
        """C; the last may have fewer edges."""
        return -(-self.edges // self.places)

    @property
    def full(self) -> int:
        """Chunks with m edges."""
        return self.edges // self.places

    @property
    def rows(self) -> int:
        """Z, the rows of a side."""
        return self.edges + self.chunks * self.uniform

    @cached_property
    def spots(self) -> Tensor:
        """int64 ``[B]``, the row of each edge."""
        edge = torch.arange(self.edges)
        return edge + edge // self.places * self.uniform

    def of_edges(self, tensor: Tensor, begin: int, end: int, *, spread: bool) -> Tensor:
        """View the edges of chunks ``begin`` to ``end`` as ``[G, m, D]``.

        Args:
            tensor: ``[Z, D]``, a row for each row of a side, if ``spread``; else ``[B, D]``.
            begin: first chunk.
            end: behind the last; the incomplete one is viewed alone.
            spread: which of the two.
        """
        m, stride = self.places, self.places + self.uniform * spread
        if begin == self.full:
            return tensor[begin * stride : begin * stride + self.edges - begin * m].unsqueeze(0)
        return tensor[begin * stride : end * stride].view(end - begin, stride, -1)[:, :m]

    def of_rows(self, tensor: Tensor, begin: int, end: int, skip: bool) -> Tensor:
        """View the rows of chunks, ``[G, K, D]``: m + u, or u if the edges are to be skipped."""
        m, stride = self.places, self.places + self.uniform
        if begin == self.full:
            m = self.edges - begin * m
            found = tensor[begin * stride : begin * stride + m + self.uniform].unsqueeze(0)
        else:
            found = tensor[begin * stride : end * stride].view(end - begin, stride, -1)
        return found[:, m:] if skip else found


def bits(tensor: Tensor) -> Floats:
    """A tensor's memory as kernels take it: bfloat16 as 16 bits."""
    if tensor.dtype == torch.bfloat16:
        found: Floats = tensor.view(torch.int16).numpy().view(np.uint16)
        return found
    return tensor.numpy()


@dataclass
class Operand:
    """What is compared with others: queries or candidates.

    Attributes:
        rows: ``[n, D]``, in the form in which they are compared (of length 1 for ``cos``).
        low: the same in bfloat16, if products of matrices are.
        spread: whether there is a row for each row of a side; else for each edge. All below is by edge for queries.
        norm: ``[n]``, squared norms, for distances.
        bias: ``[n]``, if there is a bias.
        gradient: ``[n, D]``, what products of matrices give.
        sums: ``[n]``, what distances subtract from that; see ``kernels.rows.from_distances``.
        by_bias: ``[n]``, gradient by the bias.
    """

    rows: Tensor
    low: Tensor | None
    spread: bool
    norm: Tensor
    bias: Tensor
    gradient: Tensor
    sums: Tensor
    by_bias: Tensor

    @property
    def factor(self) -> Tensor:
        """What products of matrices take."""
        return self.rows if self.low is None else self.low


class Workspace:
    """Buffers by name, made when they are first needed and used again while they are large enough.

    Args:
        dtype: of numbers.
        matmul: one of :data:`gtrain_pbg.step.arithmetic.FORMATS`; products of float64 are in float64.

    Attributes:
        low: whether products of matrices are in bfloat16.
        rounded: whether those of large chunks are in 8 bits.
    """

    def __init__(self, dtype: torch.dtype, matmul: str) -> None:
        self.dtype = dtype
        self.low = matmul in ("bfloat16", "int8") and dtype == torch.float32
        self.rounded = matmul == "int8" and self.low
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer of that shape, with whatever it held."""
        count, kind = math.prod(shape), dtype or self.dtype
        found = self._buffers.get(name)
        if found is None or found.numel() < count:
            found = self._buffers[name] = torch.empty(count, dtype=kind)
        return found[:count].view(shape)

    def product(self, name: str, *shape: int) -> Tensor:
        """A buffer for the result of a product of matrices."""
        return self.take(name, *shape, dtype=torch.bfloat16 if self.low else self.dtype)

    def lowered(self, name: str, *shape: int) -> Tensor | None:
        """A buffer for rows in bfloat16; None where products are not."""
        return self.take(name, *shape, dtype=torch.bfloat16) if self.low else None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


def layout_of(recipe: EdgeRecipe, edges: int, nodes: int) -> BatchLayout:
    """How a batch lies.

    Args:
        recipe: the model.
        edges: B.
        nodes: candidates where all nodes are negatives.
    """
    return (
        BatchLayout(edges, edges, nodes)
        if recipe.all_negs
        else BatchLayout(edges, recipe.places, recipe.num_uniform_negs)
    )
