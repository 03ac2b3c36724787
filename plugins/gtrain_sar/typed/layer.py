"""One layer of convolutions over a graph with types: each source row crosses the wire once for all relations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing

from gtrain_sar.blocks import random_state, replayed_random
from gtrain_sar.call import PropagateCall, reduction
from gtrain_sar.linear import LinearCall, aggregate
from gtrain_sar.linear_form import linear_call
from gtrain_sar.typed.calls import LayerCall, SeveralHops
from gtrain_sar.typed.extended import ExtendedRun

if TYPE_CHECKING:
    from gtrain_sar.typed.takeover import TypedTakeover


class TypedLayer:
    """Runs the convolutions of a layer together, whichever way is exact for them.

    Where every convolution sums or averages weighted source rows, their sums are one packed aggregation. Else the layer
    runs over own and halo rows (:class:`ExtendedRun`). A convolution that passes messages several times, or has a batch
    norm inside that would count halo rows among its own, makes exchanges of its own.

    Args:
        takeover: runs the network.
    """

    def __init__(self, takeover: TypedTakeover) -> None:
        self._takeover = takeover
        self._alone: set[nn.Module] = set()
        self._not_linear: set[tuple[Any, ...]] = set()

    def run(self, calls: Sequence[LayerCall]) -> list[Any]:
        """What each call returns, for own nodes."""
        state = torch.get_rng_state()
        while True:
            try:
                return self._run(calls, state)
            except SeveralHops as found:  # in the first pass only, and on all ranks
                self._alone.add(found.conv)
                torch.set_rng_state(state)  # what was drawn does not count

    def whole(self, call: LayerCall) -> Any:
        """What a convolution over all types returns, for own nodes."""
        return ExtendedRun([call], self._takeover).results()[0]

    def _run(self, calls: Sequence[LayerCall], state: Tensor) -> list[Any]:
        packed = [call for call in calls if call.conv not in self._alone]
        if self._takeover.exchange.group.size == 1 or len(packed) == 1:
            packed = []
        found = self._linear(packed)
        if found is None:
            torch.set_rng_state(state)
            packed = [call for call in packed if not _has_batch_norm(call.conv)]
            found = ExtendedRun(packed, self._takeover).results() if packed else []
        by_call = {id(call): result for call, result in zip(packed, found, strict=True)}
        return [by_call[id(call)] if id(call) in by_call else self._by_itself(call) for call in calls]

    def _by_itself(self, call: LayerCall) -> Any:
        with self._takeover.relations.inside(call.relation):
            return call.run_as_given()

    def _linear(self, calls: Sequence[LayerCall]) -> list[Any] | None:
        key = tuple((id(call.conv), call.conv.training) for call in calls)
        if not calls or key in self._not_linear:
            return None if calls else []
        works = []
        for call in calls:
            works.append(capture(call, self._takeover))
            if works[-1] is None:
                self._not_linear.add(key)
                return None
        sums = self._aggregate([work.linear for work in works if work is not None])
        return [work.finish(out) for work, out in zip(works, sums, strict=True) if work is not None]

    def _aggregate(self, calls: Sequence[LinearCall]) -> list[Tensor]:
        """Sums of constant inputs are looked up, or made together; all others share one exchange."""
        constants = self._takeover.constants
        kept = [i for i, call in enumerate(calls) if constants.keeps(call.x, call.weight)]
        rest = [i for i in range(len(calls)) if i not in kept]
        found: dict[int, Tensor] = {}

        def make(wanted: Sequence[int], i: int) -> Tensor:
            if i not in found:
                outs = aggregate([calls[k] for k in wanted], self._takeover.schedule)
                found.update(zip(wanted, outs, strict=True))
            return found[i]

        results = {}
        for i in kept:
            call = calls[i]
            settings = ("linear of a relation", call.mean, id(call.blocks))
            results[i] = constants.result((call.x, call.weight), settings, partial(make, kept, i))
        return [results[i] if i in results else make(rest, i) for i in range(len(calls))]


class LinearWork:
    """A convolution broken off at ``propagate``, whose aggregation is linear.

    Args:
        call: the call of the convolution.
        takeover: runs the network.
        linear: what is to be aggregated.
        random: state of the generators before the call, if it drew from them; else None.
    """

    def __init__(self, call: LayerCall, takeover: TypedTakeover, linear: LinearCall, random: Any) -> None:
        self.linear = linear
        self._call, self._takeover, self._random = call, takeover, random

    def finish(self, out: Tensor) -> Tensor:
        """The convolution's result, given what was aggregated.

        Raises:
            SeveralHops: it passes messages again.
        """
        results = [out]

        def propagate(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
            if not results:
                raise SeveralHops(self._call.conv)
            return conv.update(results.pop())

        if self._random is None:
            return self._again(propagate)
        with replayed_random(self._random):
            return self._again(propagate)

    def _again(self, propagate: Any) -> Tensor:
        call = self._call
        with self._takeover.plain(call.conv, propagate=propagate), self._takeover.relations.inside(call.relation):
            result: Tensor = call.cut(call.run_as_given())
            return result


class _Captured(Exception):
    """Breaks a convolution off where it passes messages."""

    def __init__(self, edge_index: Tensor | None = None, arguments: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.edge_index, self.arguments = edge_index, arguments


def capture(call: LayerCall, takeover: TypedTakeover) -> LinearWork | None:
    """Run a convolution up to ``propagate``; None where its aggregation is not linear."""
    conv, relation = call.conv, call.relation
    if not isinstance(conv, MessagePassing) or relation is None or len(call.convs) > 1:
        return None
    reduce = reduction(conv)
    if reduce not in ("sum", "mean"):
        return None
    before = random_state(relation.edges.exchange.send_rows[0].device)
    found = _captured(call, takeover)
    if found is None or found.edge_index is None or found.arguments is None:
        return None
    linear = linear_call(PropagateCall(conv, relation.edges(found.edge_index), reduce, found.arguments))
    after = random_state(relation.edges.exchange.send_rows[0].device)
    drew = any(a is not None and b is not None and not a.equal(b) for a, b in zip(before, after, strict=True))
    return None if linear is None else LinearWork(call, takeover, linear, before if drew else None)


def _captured(call: LayerCall, takeover: TypedTakeover) -> _Captured | None:
    def propagate(conv: MessagePassing, edge_index: Tensor, size: Any = None, **arguments: Any) -> Any:
        raise _Captured(edge_index, arguments)

    def edge_updater(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
        raise _Captured

    shadows = {"propagate": propagate, "edge_updater": edge_updater}
    with takeover.plain(call.conv, **shadows), takeover.relations.inside(call.relation):
        try:
            call.run_as_given()
        except _Captured as captured:
            return captured
    return None


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())
