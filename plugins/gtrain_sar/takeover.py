"""Taking over a module's message passing while a run lasts, and leaving the module as it was found.

An instance attribute ``propagate`` or ``edge_updater`` shadows the class's method. Functions such as ``gcn_norm`` are
looked up in the convolution's own module at call time, so they are exchanged there, for calls made inside a taken-over
convolution only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import GATConv, MessagePassing, RGCNConv

from gtrain.errors import ConfigError
from gtrain.nn import DglGraph
from gtrain_sar.config import Schedule
from gtrain_sar.constants import Constants
from gtrain_sar.edges import BlockIndex, EdgeBlock
from gtrain_sar.functions import FunctionSwitches
from gtrain_sar.halo import HaloExchange
from gtrain_sar.kernels import load_attention, load_sums
from gtrain_sar.normalize import synchronised_batch_norm
from gtrain_sar.propagate import Propagation
from gtrain_sar.relational import RelationalConv
from gtrain_sar.whole_layers import WholeLayers

_CACHES = ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h")
"""What convolutions with ``cached=True`` keep of a graph: a shard's is not for use outside of the run."""


class Takeover:
    """Runs a module's convolutions over shards.

    Args:
        exchange: this rank's halo.
        schedule: how blocks are worked off.
    """

    typed: ClassVar[bool] = False
    """Whether the graph has several types; layers then share exchanges, so that none is computed as a whole."""

    def __init__(self, exchange: HaloExchange, schedule: Schedule) -> None:
        self.exchange, self.schedule = exchange, schedule
        self.constants = Constants(schedule)
        exchange.constants = self.constants
        self.propagation = Propagation(schedule, self.constants, self._shadow)
        self._whole_layers = WholeLayers(schedule, self.constants, self.edges)
        self._functions = FunctionSwitches(exchange, self.constants)
        self._edges = BlockIndex(exchange, exchange.shard.num_local)
        self._undo: list[Callable[[], Any]] = []

    def constant(self, tensors: Iterable[Tensor]) -> None:
        """Say that these tensors are the same in every epoch."""
        self.constants.add(tensors)

    def install(self, module: nn.Module) -> None:
        """Shadow the methods of every convolution and batch norm in ``module``."""
        for layer in module.modules():
            if isinstance(layer, MessagePassing):
                self._take(layer)
            elif isinstance(layer, DglGraph):
                self._give_shard(layer)
            elif isinstance(layer, nn.BatchNorm1d):
                self._shadow(layer, "forward", partial(synchronised_batch_norm, layer, self.exchange.group))

    def uninstall(self) -> None:
        """Undo everything, last first."""
        while self._undo:
            self._undo.pop()()

    def _take(self, conv: MessagePassing) -> None:
        self._set_aside_caches(conv)
        if "return_attention_weights" in inspect.signature(type(conv).forward).parameters:
            asks = conv.register_forward_pre_hook(self._note_weights, with_kwargs=True)
            self._undo.append(asks.remove)
        propagate: Callable[..., Tensor] = partial(self.propagate, conv)
        if type(conv).forward is RGCNConv.forward:
            relational = RelationalConv(conv, self.edges, self.schedule, propagate)
            self._undo += relational.watch()
            propagate = relational.propagate
        self._shadow(conv, "propagate", propagate)
        self._shadow(conv, "edge_updater", partial(self.edge_updater, conv))
        self.propagation.install(conv)
        whole = None if self.typed or "forward" in conv.__dict__ else self._whole_layers.of(conv)
        if whole is not None:
            self._shadow(conv, "forward", whole)
        self._undo += self._functions.install(conv)

    def _give_shard(self, layer: DglGraph) -> None:
        from gtrain_sar.dgl.graph import DglShards  # loads DGL, which the model has done already

        shards = DglShards(self._edges, self.schedule)
        self._undo.append(shards.close)
        self._shadow(layer, "forward", partial(shards.graph, layer))

    def _note_weights(self, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(type(conv).forward).bind_partial(conv, *args, **kwargs).arguments
        asked = given.get("return_attention_weights") is not None
        self.propagation.returns_weights(conv, asked)  # type: ignore[arg-type]

    def _set_aside_caches(self, conv: MessagePassing) -> None:
        for name in _CACHES:
            if name in conv.__dict__:
                self._undo.append(partial(conv.__dict__.__setitem__, name, conv.__dict__[name]))
                conv.__dict__[name] = None

    def _shadow(self, layer: nn.Module, name: str, function: Callable[..., Any]) -> None:
        undo = partial(layer.__dict__.__setitem__, name, layer.__dict__[name]) if name in layer.__dict__ else None
        layer.__dict__[name] = function
        self._undo.append(undo or partial(layer.__dict__.pop, name))

    # ------------------------------------------------------------------------ what runs instead

    def propagate(self, conv: MessagePassing, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        """``conv.propagate`` over the shard; ``size`` is the shard's own."""
        _check_ids(conv, kwargs)
        return self.propagation.propagate(conv, edge_index, self.edges(), kwargs)

    def edge_updater(self, conv: MessagePassing, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Any:
        """``conv.edge_updater`` over the shard."""
        return self.propagation.edge_updater(conv, edge_index, self.edges(), kwargs)

    def edges(self) -> BlockIndex:
        """The blocks of edges between the nodes that the running convolution works on."""
        return self._edges


def load_kernels(module: nn.Module, dtype: torch.dtype) -> None:
    """Load the kernels that the module's convolutions are likely to need: it takes a moment, and memory."""
    if dtype not in (torch.float32, torch.float64):
        return
    zero = torch.zeros(1, dtype=torch.int64)
    edge = EdgeBlock(zero, zero, zero, 1, 1).by_target
    load_sums(edge, dtype)
    if any(isinstance(layer, GATConv) for layer in module.modules()):
        load_attention(edge, dtype)


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
