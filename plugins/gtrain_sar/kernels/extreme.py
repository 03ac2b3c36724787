"""Running maxima and minima over blocks of edges, with the number of messages that attain them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from gtrain_sar.kernels import compiled_extreme, plain
from gtrain_sar.kernels.threads import array, arrays, compiled, over_rows

if TYPE_CHECKING:
    from gtrain_sar.edges import Compressed


class ExtremeState(NamedTuple):
    """What the blocks so far come to.

    Attributes:
        out: ``[T, C]``, the largest (smallest) message; -inf (inf) where none was seen, NaN where one was.
        ties: ``[T, C]``, messages that equal ``out``.
    """

    out: Tensor
    ties: Tensor


def extreme_state(num_targets: int, x: Tensor, largest: bool) -> ExtremeState:
    """The state before the first block, for sources like ``x`` ``[S, C]``."""
    shape = (num_targets, *x.shape[1:])
    return ExtremeState(x.new_full(shape, float("-inf") if largest else float("inf")), x.new_zeros(shape))


def extreme_forward(block: Compressed, x: Tensor, largest: bool, state: ExtremeState) -> None:
    """Merge a block into ``state``.

    Args:
        block: edges by target.
        x: ``[S, C]``, source rows.
        largest: maximum, not minimum.
        state: changed in place.
    """
    if not compiled([x], [*state]):
        return plain.extreme_forward(block, x, largest, state)
    rows, ptr, columns, _ = arrays(block)
    a, out, ties = array(x), array(state.out), array(state.ties)

    def work(first: int, last: int) -> None:
        compiled_extreme.forward(rows, ptr, columns, a, largest, out, ties, first, last)

    return over_rows(block, work)


def extreme_backward(block: Compressed, x: Tensor, out: Tensor, share: Tensor, dx: Tensor) -> None:
    """Add ``share[target]`` to the gradient of each message that equals ``out[target]``.

    Args:
        block: edges by source.
        x: ``[S, C]``, source rows.
        out: ``[T, C]``, the extremes over all blocks.
        share: ``[T, C]``, what each of the messages that attain it gets of the gradient.
        dx: ``[S, C]``, added to in place.
    """
    if not compiled([x, out, share], [dx]):
        return plain.extreme_backward(block, x, out, share, dx)
    rows, ptr, columns, _ = arrays(block)
    a, b, c, d = array(x), array(out), array(share), array(dx)

    def work(first: int, last: int) -> None:
        compiled_extreme.backward(rows, ptr, columns, a, b, c, d, first, last)

    return over_rows(block, work)
