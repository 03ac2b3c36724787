"""Taking over a module's message passing while a run lasts, and leaving the module as it was found.

An instance attribute ``propagate`` or ``edge_updater`` shadows the class's method; ``gcn_norm`` is looked up in the
convolution's own module at call time, so it is exchanged there, for calls made inside a taken-over convolution only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing

from gtrain.errors import ConfigError
from gtrain_sar.blocks import aggregate_kept, aggregate_recomputed
from gtrain_sar.call import BlockIndex, PropagateCall, reduction
from gtrain_sar.halo import HaloExchange, HaloRows
from gtrain_sar.normalize import GcnNorm, synchronised_batch_norm


class Takeover:
    """Runs a module's convolutions over shards.

    Args:
        exchange: this rank's halo.
        mode: see :data:`gtrain_sar.config.MODES`.
        prefetch: remote blocks in flight beside the one being computed.
    """

    def __init__(self, exchange: HaloExchange, mode: int, prefetch: int) -> None:
        self.exchange, self.mode, self.prefetch = exchange, mode, prefetch
        self._blocks = BlockIndex(exchange.shard)
        self._gcn_norm = GcnNorm(exchange)
        self._inside = 0
        self._undo: list[Callable[[], Any]] = []

    def install(self, module: nn.Module) -> None:
        """Shadow the methods of every convolution and batch norm in ``module``."""
        for layer in module.modules():
            if isinstance(layer, MessagePassing):
                self._shadow(layer, "propagate", partial(self.propagate, layer))
                self._shadow(layer, "edge_updater", partial(self.edge_updater, layer))
                self._mark_calls(layer)
                self._exchange_gcn_norm(layer)
            elif isinstance(layer, nn.BatchNorm1d):
                self._shadow(layer, "forward", partial(synchronised_batch_norm, layer, self.exchange.group))

    def uninstall(self) -> None:
        """Undo everything, last first."""
        while self._undo:
            self._undo.pop()()

    def _shadow(self, layer: nn.Module, name: str, function: Callable[..., Any]) -> None:
        setattr(layer, name, function)
        self._undo.append(partial(layer.__dict__.pop, name))

    def _mark_calls(self, conv: MessagePassing) -> None:
        enter = conv.register_forward_pre_hook(lambda *_: self._count(1))
        leave = conv.register_forward_hook(lambda *_: self._count(-1), always_call=True)
        self._undo += [enter.remove, leave.remove]

    def _count(self, by: int) -> None:
        self._inside += by

    def _exchange_gcn_norm(self, conv: MessagePassing) -> None:
        for cls in type(conv).__mro__:
            home = sys.modules[cls.__module__].__dict__
            original = home.get("gcn_norm")
            if original is None or isinstance(original, _Switch):
                continue
            home["gcn_norm"] = _Switch(self, original)
            self._undo.append(partial(home.__setitem__, "gcn_norm", original))

    # ------------------------------------------------------------------------ what runs instead

    def propagate(self, conv: MessagePassing, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        """``conv.propagate`` over the shard; ``size`` is the shard's own."""
        _check_ids(conv, kwargs)
        reduce = reduction(conv) if self.mode != 3 else None
        if reduce is None:
            return self._at_once(conv, type(conv).propagate, conv._user_args, edge_index, kwargs)
        call = PropagateCall.of(conv, self._blocks(edge_index), reduce, self.exchange.shard.num_local, kwargs)
        aggregate = aggregate_recomputed if self.mode == 1 else aggregate_kept
        return conv.update(aggregate(self.exchange, call, self.prefetch))

    def edge_updater(self, conv: MessagePassing, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        """``conv.edge_updater`` over the shard: its softmax needs all in-edges of a node at once, so one exchange."""
        return self._at_once(conv, type(conv).edge_updater, conv._edge_user_args, edge_index, kwargs)

    def _at_once(
        self, conv: MessagePassing, method: Any, wanted: Any, edge_index: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Fetch the whole halo of what the method reads at sources, then run PyG's own method."""
        shard, arguments = self.exchange.shard, dict(kwargs)
        for name, value in kwargs.items():
            if f"{name}_j" in wanted:
                source, target = value if isinstance(value, (tuple, list)) else (value, value)
                if isinstance(source, Tensor):
                    source = HaloRows.apply(self.exchange, source)
                arguments[name] = (source, target if f"{name}_i" in wanted else None)
        size = (shard.num_local + shard.num_halo, shard.num_local)
        out: Tensor = method(conv, edge_index, size=size, **arguments)
        return out


def _check_ids(conv: MessagePassing, kwargs: dict[str, Any]) -> None:
    """Refuse a convolution that takes the number of a node in ``edge_index`` for its id (``FastRGCNConv`` over ids)."""
    ids = any(
        isinstance(value, Tensor) and name == "x" and not value.is_floating_point() for name, value in kwargs.items()
    )
    if ids and "edge_index_j" in conv._user_args:
        raise ConfigError(
            f"{type(conv).__name__} was given ids in place of features, and looks them up by the nodes' places in "
            "edge_index, which differ from part to part.",
            hint="use gtrain.model.relational.IdRGCNConv, give the nodes features, or set strategy=single.",
        )


class _Switch:
    """``gcn_norm`` as a convolution's module sees it: the shard's inside a taken-over call, PyG's elsewhere."""

    def __init__(self, takeover: Takeover, original: Callable[..., Any]) -> None:
        self._takeover, self._original = takeover, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inside = self._takeover._inside > 0
        return self._takeover._gcn_norm(*args, **kwargs) if inside else self._original(*args, **kwargs)
