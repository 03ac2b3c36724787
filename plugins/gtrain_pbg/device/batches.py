"""Batches of a training step as tensors of fixed shapes, several batches at a time.

A batch has C chunks of m slots for edges; the last chunk may have empty slots, which repeat the batch's first edge with
weight 0. Each chunk has K = m + u rows on either side: those of its edges' ends, then u drawn nodes. The side of the
tails comes first: it has the candidates of the first direction, in which heads are given. Row numbers count over all
partitions on the device.

A CUDA graph needs fixed shapes, so a graph exists for each number of chunks, and not for each size of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.device.lanes import Device, Event
from gtrain_pbg.edges import EdgeList

ALIGNED = 16
"""Bytes of which each tensor begins at a multiple: a GPU loads that many at a time."""
LEAST_SLOTS = 16
"""Least slots of a batch that is one incomplete chunk; their number is a power of two, so that few shapes occur."""


@dataclass(frozen=True)
class BatchShape:
    """C ``chunks`` of m ``slots`` for edges and u drawn nodes (``uniform``)."""

    chunks: int
    slots: int
    uniform: int

    @property
    def edges(self) -> int:
        """C m, the slots of a batch."""
        return self.chunks * self.slots

    @property
    def columns(self) -> int:
        """K, the rows of a chunk on one side."""
        return self.slots + self.uniform

    @property
    def rows(self) -> int:
        """Rows of a batch on both sides, 2 C K."""
        return 2 * self.chunks * self.columns


def shape_of(recipe: EdgeRecipe, edges: int) -> BatchShape:
    """Return the shape of a batch of this many edges."""
    if recipe.all_negs:
        return BatchShape(1, edges, 0)
    size = recipe.chunk_size
    if edges >= size:
        return BatchShape(-(-edges // size), size, recipe.num_uniform_negs)
    slots = LEAST_SLOTS
    while slots < edges:
        slots *= 2
    return BatchShape(1, min(slots, size), recipe.num_uniform_negs)


@dataclass(frozen=True)
class InputLayout:
    """Where the inputs of a step are in one piece of memory, so that one copy moves them.

    Attributes:
        entries: name, shape, dtype and first byte of each tensor of :class:`BatchTensors`.
        nbytes: of all.
    """

    entries: tuple[tuple[str, tuple[int, ...], torch.dtype, int], ...]
    nbytes: int

    @classmethod
    def of(cls, shape: BatchShape, tables: int, rows: int, relations: int, dtype: torch.dtype) -> InputLayout:
        """Lay out the inputs of a batch.

        Args:
            shape: of the batch.
            tables: T, distinct tables.
            rows: of the largest table.
            relations: R.
            dtype: of weights.
        """
        of_rows, of_relations = min(shape.rows // tables, rows), min(shape.edges, relations)
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "ids": ((shape.rows,), torch.int32),
            "order": ((shape.rows,), torch.int32),
            "starts": ((tables, of_rows + 1), torch.int32),
            "distinct": ((tables,), torch.int32),
            "relation": ((shape.edges,), torch.int32),
            "relation_order": ((shape.edges,), torch.int32),
            "relation_starts": ((of_relations + 1,), torch.int32),
            "relation_distinct": ((1,), torch.int32),
            "edges": ((1,), torch.int32),
            "weight": ((shape.edges,), dtype),
            "total": ((1,), torch.float64),
        }
        entries, end = [], 0
        for name, (size, kind) in sizes.items():
            entries.append((name, size, kind, end))
            end += -(-math.prod(size) * kind.itemsize // ALIGNED) * ALIGNED
        return cls(tuple(entries), end)

    def tensors(self, memory: Tensor) -> BatchTensors:
        """View memory, uint8 ``[nbytes]`` or ``[n, nbytes]``, as the inputs of one batch or of n."""
        views = {
            name: memory[..., first : first + math.prod(size) * kind.itemsize]
            .view(kind)
            .view(*memory.shape[:-1], *size)
            for name, size, kind, first in self.entries
        }
        return BatchTensors(**views, memory=memory, layout=self)


@dataclass
class BatchTensors:
    """The inputs of a training step; with one more dimension in front for several batches.

    Attributes:
        ids: int32 ``[2 C K]``, rows of the tables of tails, then of heads.
        order: int32 ``[2 C K]``, positions in ``ids`` sorted by row: of the one table that both sides are of, or of
            tails and of heads apart.
        starts: int32 ``[T, U + 1]``, for each of T tables where the positions of a distinct row start in ``order``.
        distinct: int32 ``[T]``, how many distinct rows there are.
        relation: int32 ``[C m]``.
        relation_order, relation_starts, relation_distinct: the same as above for relations.
        edges: int32 ``[1]``, B: the other slots are empty.
        weight: ``[C m]``, of each edge's loss in the batch's mean; 0 for empty slots.
        total: float64 ``[1]``, sum of the weights before they were divided by it.
        memory: that all of these are views of.
        layout: of this memory.
    """

    ids: Tensor
    order: Tensor
    starts: Tensor
    distinct: Tensor
    relation: Tensor
    relation_order: Tensor
    relation_starts: Tensor
    relation_distinct: Tensor
    edges: Tensor
    weight: Tensor
    total: Tensor
    memory: Tensor
    layout: InputLayout

    def batch(self, number: int) -> BatchTensors:
        """Return one of several batches."""
        return self.layout.tensors(self.memory[number])

    def like(self) -> BatchTensors:
        """Return uninitialized inputs of the same shapes."""
        return self.layout.tensors(torch.empty_like(self.memory))


@dataclass(frozen=True)
class Ends:
    """Where the rows of a bucket's heads or tails are on the device.

    Attributes:
        first: row of the first entity of the partition.
        count: entities of the partition.
        rows: rows of the whole table.
    """

    first: int
    count: int
    rows: int


@dataclass
class Piece:
    """Batches of one shape that were prepared together.

    Attributes:
        shape: of each batch.
        batches: their number.
        tensors: their inputs on the device.
        ready: event after which these can be read.
        relations: the relation of each edge on the host, ``[n, C m]``.
        weight: sum of the edges' weights.
        done: event after which they are not needed any more.
    """

    shape: BatchShape
    batches: int
    tensors: BatchTensors
    ready: Event
    relations: Tensor
    weight: float
    done: Event = None


class BatchPreparation:
    """Prepares batches of one group of relations.

    Args:
        recipe: of the group.
        dtype: of weights.
        device: that trains.
    """

    def __init__(self, recipe: EdgeRecipe, dtype: torch.dtype, device: Device) -> None:
        self._recipe, self._dtype, self._device = recipe, dtype, device
        by_relation = recipe.relation_weight
        self._relation_weight = None if by_relation is None else torch.tensor(by_relation, dtype=dtype)

    def __call__(
        self, batches: Sequence[EdgeList], shape: BatchShape, heads: Ends, tails: Ends, drawn: Tensor
    ) -> Piece:
        """Prepare batches of one shape.

        Args:
            batches: numbered by the group's relations and by the entities of the partitions.
            shape: of each.
            heads, tails: where the rows are.
            drawn: their negatives, from :meth:`draw`.
        """
        device, n = self._device, len(batches)
        tables, rows = 1 + (self._recipe.types[0] != self._recipe.types[1]), max(heads.rows, tails.rows)
        layout = InputLayout.of(shape, tables, rows, self._recipe.num_relations, self._dtype)
        host = device.pinned(3, n, shape.edges, dtype=torch.int32)
        # numpy has less overhead per assignment.
        for target, name in zip(host.numpy(), ("heads", "tails", "relation"), strict=True):
            for row, batch in zip(target, batches, strict=True):
                column = vars(batch)[name].numpy()
                row[: len(batch)] = column
                row[len(batch) :] = column[0]
        counts = device.pinned(n, 1, dtype=torch.int32)
        counts.copy_(torch.tensor([[len(batch)] for batch in batches], dtype=torch.int32))
        weight, total = self._weights(batches, host[2], shape)
        with device.prepare():
            ends, negatives = device.moved(host), device.moved(drawn)
            ids = torch.empty(n, 2, shape.chunks, shape.columns, dtype=torch.int32, device=device.name)
            for side, (end, first) in enumerate(((1, tails.first), (0, heads.first))):
                torch.add(ends[end].view(n, shape.chunks, -1), first, out=ids[:, side, :, : shape.slots])
                torch.add(negatives[:, end], first, out=ids[:, side, :, shape.slots :])
            by_table = ids.view(n, tables, -1)
            sorted_rows = sort_by_row(by_table, rows)
            sorted_relations = sort_by_row(ends[2].unsqueeze(1), self._recipe.num_relations)
            tensors = layout.tensors(device.empty(n, layout.nbytes, dtype=torch.uint8))
            moved = {"edges": counts, "weight": weight, "total": total}
            values = {"ids": ids, "relation": ends[2], **{name: device.moved(value) for name, value in moved.items()}}
            values |= dict(zip(("order", "starts", "distinct"), sorted_rows, strict=True))
            values |= dict(
                zip(("relation_order", "relation_starts", "relation_distinct"), sorted_relations, strict=True)
            )
            for name, value in values.items():
                target = getattr(tensors, name)
                target.copy_(value.view(target.shape))
            ready = device.prepare.record()
        return Piece(shape, n, tensors, ready, host[2], float(total.sum()))

    def draw(self, n: int, shape: BatchShape, heads: Ends, tails: Ends, generator: torch.Generator) -> Tensor:
        """Draw nodes for the heads and tails of n batches, int32 ``[n, 2, C, u]``, in the order of the CPU's step."""
        drawn = self._device.pinned(n, 2, shape.chunks, shape.uniform, dtype=torch.int32)
        if not drawn.numel():
            return drawn
        if heads.count == tails.count:
            # One call draws the same numbers as one for each end of each batch.
            torch.randint(heads.count, drawn.shape, generator=generator, out=drawn)
        else:
            for batch in drawn:
                for nodes, ends in zip(batch, (heads, tails), strict=True):
                    torch.randint(ends.count, nodes.shape, generator=generator, out=nodes)
        return drawn

    def _weights(self, batches: Sequence[EdgeList], relation: Tensor, shape: BatchShape) -> tuple[Tensor, Tensor]:
        """Return the edges' weights ``[n, C m]``, which sum to 1 in each batch, and their sums before, ``[n, 1]``."""
        weight = self._device.pinned(len(batches), shape.edges, dtype=self._dtype).zero_()
        for row, batch in zip(weight, batches, strict=True):
            row[: len(batch)] = 1.0 if batch.weight is None else batch.weight
        if self._relation_weight is not None:
            weight *= self._relation_weight[relation.long()]
        total = self._device.pinned(len(batches), 1, dtype=torch.float64)
        torch.sum(weight, dim=1, keepdim=True, dtype=torch.float64, out=total)
        weight /= total.clamp(min=torch.finfo(self._dtype).tiny).to(self._dtype)
        return weight, total


def sort_by_row(rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the positions of each list by the row that they refer to.

    Args:
        rows: int32 ``[n, T, P]``, n * T lists.
        count: rows are less than this.

    Returns:
        int32: positions sorted by row ``[n, T, P]``; where those of each distinct row start, and the end,
        ``[n, T, U + 1]`` with U the least of P and ``count``; and how many distinct rows there are, ``[n, T]``.
    """
    n, tables, positions = rows.shape
    lists, device = n * tables, rows.device
    # One sort of all lists: the number of the list comes first.
    dtype = torch.int32 if lists * count < 2**31 else torch.int64
    first = torch.arange(lists, device=device, dtype=dtype).view(n, tables, 1) * count
    ordered, order = (rows + first).flatten().sort(stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=begins[1:])
    begins = begins.view(lists, positions)
    begins[:, :1] = True
    number = begins.cumsum(1, dtype=torch.int64)  # of the row, from 1
    most = min(positions, count)
    starts = torch.full((lists, most + 2), positions, dtype=torch.int32, device=device)
    position = torch.arange(positions, device=device, dtype=torch.int32).expand(lists, -1)
    # Positions that begin no row are written behind the end, where nobody reads.
    starts.scatter_(1, torch.where(begins, number - 1, most + 1), position)
    local = (order.view(lists, positions) - torch.arange(lists, device=device).unsqueeze(1) * positions).int()
    return (
        local.view(n, tables, positions),
        starts[:, : most + 1].reshape(n, tables, -1),
        number[:, -1].int().view(n, tables),
    )


def runs(
    batches: Sequence[EdgeList], key: Callable[[EdgeList], tuple[int, BatchShape]], first: int, most: int
) -> Iterator[tuple[int, BatchShape, list[EdgeList]]]:
    """Yield consecutive batches of one group and one shape, without empty ones.

    Args:
        batches: in their order.
        key: returns group and shape.
        first: most batches of the first run; each later one may have twice as many.
        most: most batches of any.
    """
    run: list[EdgeList] = []
    size = min(first, most)
    last: tuple[int, BatchShape] | None = None
    for batch in batches:
        if not len(batch):
            continue
        current = key(batch)
        if run and (current != last or len(run) == size):
            assert last is not None
            yield (*last, run)
            run, size = [], min(2 * size, most)
        run.append(batch)
        last = current
    if run and last is not None:
        yield (*last, run)
