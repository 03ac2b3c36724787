"""The cross-entropy of one end of edges among all nodes, with one row of scores for all edges of a query.

A query is a relation and the given end of an edge. On FB15k-237 an edge shares its query with 3 others on average, so
that the matrix product with all nodes, which is nearly all of the work, is a quarter of that of single edges.

Letters of shapes: B edges, Q queries, N nodes, D columns of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from gtrain.engine.precision import LOW, product_dtype

_ROWS_STEP = 64


class Queries:
    """The distinct queries of some edges.

    Args:
        relation: int64 ``[B]``.
        given: int64 ``[B]``, the given ends.
        answer: int64 ``[B]``, the ends that are to be found.
        num_relations: R.

    Attributes:
        relation, given: int64 ``[Q]``.
    """

    def __init__(self, relation: Tensor, given: Tensor, answer: Tensor, num_relations: int) -> None:
        keys, query = (given * num_relations + relation).unique(return_inverse=True)
        self.relation, self.given = keys % num_relations, keys // num_relations
        self._order = query.argsort(stable=True)
        self._query, self._answer = query[self._order], answer[self._order]

    def losses(self, score: Callable[[Tensor], Tensor], rows: Tensor, most: int) -> Tensor:
        """Return the cross-entropy of each edge's answer among all nodes, ``[B]``.

        Args:
            score: returns the scores ``[q, N]`` of all nodes, given rows of queries ``[q, D]``.
            rows: ``[Q, D]``, of the queries.
            most: queries whose scores are in memory at a time; if there are more, the backward pass recomputes them.
        """

        # oneDNN compiles products in bfloat16 for each number of rows, which takes longer than the product.
        step = _ROWS_STEP if product_dtype(rows) in LOW else 1

        def of_block(rows: Tensor, query: Tensor, answer: Tensor) -> Tensor:
            rows = F.pad(rows, (0, 0, 0, -len(rows) % step))
            losses: Tensor = _CrossEntropy.apply(score(rows), query, answer)  # type: ignore[no-untyped-call]
            return losses

        blocks, parts, first = rows.split(max(most, 1)), [], 0
        for block in blocks:
            begin, end = torch.searchsorted(self._query, self._query.new_tensor([first, first + len(block)])).tolist()
            arguments = block, self._query[begin:end] - first, self._answer[begin:end]
            if len(blocks) > 1 and torch.is_grad_enabled():
                parts.append(checkpoint(of_block, *arguments, use_reentrant=False))
            else:
                parts.append(of_block(*arguments))
            first += len(block)
        return torch.cat(parts)[self._order.argsort()]


class _CrossEntropy(torch.autograd.Function):
    """``logsumexp(scores[query]) - scores[query, answer]``, in single precision or in that of the scores, if higher.

    In bfloat16 the sum of thousands of exponentials would be off by several per cent. The scores' gradient is computed
    in one array, and rounded to their precision.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, query: Tensor, answer: Tensor) -> Tensor:
        exact = scores.to(torch.promote_types(scores.dtype, torch.float32))
        total = exact.logsumexp(-1)
        ctx.save_for_backward(scores, total, query, answer)
        return total[query] - exact[query, answer]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        scores, total, query, answer = ctx.saved_tensors
        factor = torch.zeros_like(total).index_add_(0, query, gradient)
        slope = scores.to(total.dtype, copy=True).sub_(total.unsqueeze(1)).exp_().mul_(factor.unsqueeze(1))
        slope.index_put_((query, answer), -gradient, accumulate=True)
        return slope.to(scores.dtype), None, None
