"""Arrays of a training step: edges, rows of tables, the order of rows in a batch, and buffers that are reused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.nn import Csr, mean_rows
from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.kernels.rows import SideLayout

Array = NDArray[Any]


@dataclass
class PartitionRows:
    """The rows that one end of the edges refers to: a partition of a table.

    Attributes:
        value: ``[n, D]``, or ``[n, D + 1]`` with the bias last; may be shared with other processes.
        state: ``[n, s]``, of the optimizer.
        head: int32 ``[n]``, all -1 between steps; of this process.
        bags: rows of the table whose mean is an entity's embedding, for each entity; None: an entity has a row.
    """

    value: Tensor
    state: Tensor
    head: Tensor
    bags: Csr | None = None

    @property
    def count(self) -> int:
        """Number of entities."""
        return len(self.value) if self.bags is None else self.bags.num_rows

    def read(self, ids: Tensor) -> Tensor:
        """Return the rows of entities."""
        if self.bags is None:
            return self.value[ids]
        return mean_rows(self.bags, ids, lambda features: self.value[features])


@dataclass
class EdgeList:
    """B edges of one bucket.

    Attributes:
        heads, tails: int64 ``[B]``, rows of their partitions.
        relation: int64 ``[B]``.
        weight: float ``[B]``; None: all 1.
    """

    heads: Tensor
    relation: Tensor
    tails: Tensor
    weight: Tensor | None

    def __len__(self) -> int:
        return self.heads.numel()

    def select(self, rows: Tensor | slice) -> EdgeList:
        """Return some of the edges."""
        weight = None if self.weight is None else self.weight[rows]
        return EdgeList(self.heads[rows], self.relation[rows], self.tails[rows], weight)


@dataclass
class EdgeBatch(EdgeList):
    """Edges of one group of relations, of one relation if relations are static, and their negatives.

    Attributes:
        drawn: int64 ``[C * u]`` for heads and for tails: rows drawn as negatives; unused if all nodes are negatives.
    """

    drawn: tuple[Tensor, Tensor]


class BatchLayout(SideLayout):
    """A batch of B ``edges`` in C chunks of m edges (``chunk_size``) and u drawn nodes (``uniform``)."""

    @property
    def chunks(self) -> int:
        """C; the last chunk may have fewer edges."""
        return -(-self.edges // self.chunk_size)

    @property
    def full(self) -> int:
        """Chunks with m edges."""
        return self.edges // self.chunk_size

    @property
    def rows(self) -> int:
        """Z, the rows of a side."""
        return self.edges + self.chunks * self.uniform

    @cached_property
    def spots(self) -> Tensor:
        """int64 ``[B]``, the row of each edge."""
        edge = torch.arange(self.edges)
        return edge + edge // self.chunk_size * self.uniform

    def of_edges(self, tensor: Tensor, begin: int, end: int, *, spread: bool) -> Tensor:
        """View the edges of chunks ``begin`` to ``end`` as ``[G, m, D]``.

        Args:
            tensor: ``[Z, D]``, a row for each row of a side, if ``spread``; else ``[B, D]``.
            begin: first chunk.
            end: chunk behind the last; an incomplete chunk is viewed alone.
            spread: which of the two.
        """
        m, stride = self.chunk_size, self.chunk_size + self.uniform * spread
        # The incomplete chunk cannot be part of a view with a fixed stride.
        if begin == self.full:
            return tensor[begin * stride : begin * stride + self.edges - begin * m].unsqueeze(0)
        return tensor[begin * stride : end * stride].view(end - begin, stride, -1)[:, :m]

    def of_rows(self, tensor: Tensor, begin: int, end: int, skip: bool) -> Tensor:
        """View the rows of chunks as ``[G, K, D]``: K is m + u, or u if ``skip`` leaves out the edges' rows."""
        m, stride = self.chunk_size, self.chunk_size + self.uniform
        if begin == self.full:
            m = self.edges - begin * m
            view = tensor[begin * stride : begin * stride + m + self.uniform].unsqueeze(0)
        else:
            view = tensor[begin * stride : end * stride].view(end - begin, stride, -1)
        return view[:, m:] if skip else view


# Few sizes occur: each computes its spots once.
@lru_cache(maxsize=256)
def _layout(edges: int, chunk_size: int, uniform: int) -> BatchLayout:
    return BatchLayout(chunk_size, uniform, edges)


def layout_of(recipe: EdgeRecipe, edges: int, nodes: int) -> BatchLayout:
    """Return the layout of a side.

    Args:
        recipe: of the group of relations.
        edges: B.
        nodes: candidates if all nodes are negatives: the batch is then one chunk.
    """
    return (
        _layout(edges, edges, nodes) if recipe.all_negs else _layout(edges, recipe.chunk_size, recipe.num_uniform_negs)
    )


def bits(tensor: Tensor) -> Array:
    """Return a tensor's memory for kernels, which take bfloat16 as uint16."""
    # numpy has no bfloat16.
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


@dataclass
class Operand:
    """Rows that are compared with others: queries or candidates.

    Attributes:
        rows: ``[n, D]``, in the form in which they are compared (of length 1 for ``cos``).
        low: the same in bfloat16, if matrix products are.
        spread: whether there is a row for each row of a side; else for each edge. All below is by edge for queries.
        norm: ``[n]``, squared norms for distances, inverse norms for ``cos``.
        bias: ``[n]``, if there is a bias.
        gradient: ``[n, D]``, the results of matrix products.
        sums: ``[n]``, what distances subtract from that; see ``kernels.rows.distances_backward``.
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
        """The rows that matrix products read."""
        return self.rows if self.low is None else self.low


class Workspace:
    """Named buffers, allocated when first taken and reused while they are large enough.

    Args:
        dtype: of numbers.
        matmul: one of :data:`gtrain_pbg.step.matmul_format.FORMATS`; products of float64 are in float64.

    Attributes:
        low: whether matrix products are in bfloat16.
        rounded: whether those of large chunks are in 8 bits.
    """

    def __init__(self, dtype: torch.dtype, matmul: str) -> None:
        self.dtype = dtype
        self.low = matmul in ("bfloat16", "int8") and dtype == torch.float32
        self.rounded = matmul == "int8" and self.low
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialized buffer of this shape; it is the same memory for the same name."""
        count, buffer = math.prod(shape), self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[name] = torch.empty(count, dtype=dtype or self.dtype)
        return buffer[:count].view(shape)

    def product(self, name: str, *shape: int) -> Tensor:
        """Return a buffer for the result of a matrix product."""
        return self.take(name, *shape, dtype=torch.bfloat16 if self.low else self.dtype)

    def lowered(self, name: str, *shape: int) -> Tensor | None:
        """Return a buffer for rows in bfloat16; None unless products are."""
        return self.take(name, *shape, dtype=torch.bfloat16) if self.low else None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


def compact(work: Workspace, layout: BatchLayout, operand: Operand, name: str = "compact") -> Tensor:
    """Return the rows of an operand by edge, ``[B, D]``."""
    if not operand.spread:
        return operand.rows
    out = work.take(name, layout.edges, operand.rows.size(1))
    return torch.index_select(operand.rows, 0, layout.spots, out=out)
