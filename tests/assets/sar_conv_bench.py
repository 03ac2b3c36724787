"""One case beside PyG on the whole graph: outputs, gradients, and what is left in the module afterwards."""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sar_conv_cases import Case
from sar_conv_graphs import NODES, view
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from gtrain.engine.halo import HaloExchange
from gtrain.errors import PeerLostError
from gtrain.graph.shard import GraphShard, load_shard, load_whole
from gtrain.graph.store import Store
from gtrain.strategy.group import Group, flatten, unflatten_into
from gtrain_sar import unsupported
from gtrain_sar.patching import Patcher


def patcher(exchange: HaloExchange, mode: int, **settings: Any) -> Patcher:
    """The engine; the one place here that knows how it is made."""
    try:
        from gtrain.engine.schedule import Schedule
    except ImportError:
        return Patcher(exchange, mode, settings.get("prefetch", 1))
    return Patcher(exchange, Schedule(mode=mode, **settings))


def weights(rows: int, like: Tensor, seed: int) -> Tensor:
    """What each entry of an output counts in the loss; the same for a row wherever it is."""
    shape = (rows, *like.shape[1:])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)


class Bench:
    """A graph, whole and sharded, on which cases run.

    Args:
        group: the ranks.
        store: the graph; one part for each rank.
    """

    def __init__(self, group: Group, store: Store) -> None:
        self.group = group
        self.whole, self.shard = load_whole(store), load_shard(store, group.rank)
        self.exchange = HaloExchange(group, self.shard)

    def passes(self, case: Case, net: nn.Module, shard: GraphShard, engine: Patcher | None = None) -> dict[str, Tensor]:
        """Outputs and gradients of one pass over a shard, and the output without autograd.

        Args:
            engine: is told what is constant: the edges, and all where no leaf is asked for.
        """
        here = view(shard)
        if engine is not None:
            engine.constants.add([here.index])
            if not case.leaves:
                engine.constants.add([here.x, here.weight, here.attr])
        for name in case.leaves:
            getattr(here, name).requires_grad_()
        result = dict(zip(("out", "edge out"), self._tuple(case.call(net, here)), strict=False))
        self.loss(shard, result).backward()
        found = {name: tensor.detach() for name, tensor in result.items()}
        found |= {f"grad of {name}": gradient_of(getattr(here, name)) for name in case.leaves}
        for name, parameter in net.named_parameters():
            found[name] = gradient_of(parameter).clone()
        found |= {name: b.detach().clone() for name, b in net.named_buffers() if b.is_floating_point()}
        with torch.no_grad():
            found["out without autograd"] = self._tuple(case.call(net, view(shard)))[0]
        return found

    def loss(self, shard: GraphShard, result: dict[str, Tensor]) -> Tensor:
        first = int(shard.offsets[shard.part])
        seeds = shard.node_data["train_mask"].nonzero().view(-1)
        out = result["out"]
        loss = (out[seeds] * weights(NODES, out, 1)[first + seeds]).sum()
        if "edge out" in result:
            ids, edges = shard.edge_data["edge_id"], result["edge out"]
            loss = loss + (edges * weights(self.whole.edge_index.size(1), edges, 2)[ids]).sum()
        return loss

    @staticmethod
    def _tuple(out: Any) -> tuple[Tensor, ...]:
        return out if isinstance(out, tuple) else (out,)

    def expected(self, case: Case, net: nn.Module) -> dict[str, Tensor]:
        """What one process computes, cut to this rank's rows."""
        first, last = self.shard.offsets[self.shard.part : self.shard.part + 2].tolist()
        whole = self.passes(case, net, self.whole)
        order = torch.empty_like(self.whole.edge_data["edge_id"])
        order[self.whole.edge_data["edge_id"]] = torch.arange(len(order))
        edges = order[self.shard.edge_data["edge_id"]]
        parameters = {name for name, _ in [*net.named_parameters(), *net.named_buffers()]}

        def cut(name: str, tensor: Tensor) -> Tensor:
            if name in parameters:
                return tensor
            return tensor[edges] if name in ("edge out", "grad of weight", "grad of attr") else tensor[first:last]

        return {name: cut(name, tensor) for name, tensor in whole.items()}

    def compare(self, case: Case, mode: int, net: nn.Module, expected: dict[str, Tensor]) -> dict[str, float]:
        """Largest relative difference of everything on this rank; parameters' gradients are summed over ranks."""
        before = fingerprint(net) if self.group.rank == 0 else {}
        with self.installed(net, mode) as engine:
            found = self.passes(case, net, self.shard, engine)
        left = changed(before, fingerprint(net)) if self.group.rank == 0 else set()
        gradients = [found[name] for name, _ in net.named_parameters()]
        if gradients:
            unflatten_into(self.group.all_reduce(flatten(gradients)), gradients)
        worst = {name: difference(found[name], expected[name]) for name in expected}
        return worst | {f"left behind: {name}": float("inf") for name in left - self.usual}

    @contextmanager
    def installed(self, net: nn.Module, mode: int) -> Iterator[Patcher]:
        engine = patcher(self.exchange, mode)
        engine.install(net)
        try:
            yield engine
        finally:
            engine.uninstall()

    def run(self, case: Case, modes: list[int], force: bool) -> dict[str, Any]:
        """Compare one case in each mode: the worst relative difference of each thing, or what was raised."""
        torch.default_generator.manual_seed(1)  # torch.manual_seed looks for devices, and takes longer than many a case
        net = case.make().double()
        why = [reason for layer in net.modules() if (reason := unsupported.reason(layer))]
        if why and not force:
            return {"refused": why[0]}
        reference = copied(net)
        before = fingerprint(reference)
        expected = self.expected(case, reference)
        self.usual = changed(before, fingerprint(reference))  # what PyG itself leaves
        with torch.no_grad():
            expected["out after the run"] = self._tuple(case.call(reference, view(self.whole)))[0]
        found = {f"mode {mode}": self._in_mode(case, mode, copied(net), dict(expected)) for mode in modes}
        return found | ({"refused": why[0]} if why else {})

    def _in_mode(self, case: Case, mode: int, net: nn.Module, expected: dict[str, Tensor]) -> dict[str, float] | str:
        later = expected.pop("out after the run")
        try:
            worst = self.compare(case, mode, net, expected)
        except PeerLostError:
            raise
        except Exception as error:  # every rank should have it
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        with torch.no_grad():
            worst["out after the run"] = difference(self._tuple(case.call(net, view(self.whole)))[0], later)
        return worst


def copied(net: nn.Module) -> nn.Module:
    """A copy that shares what PyG found out about the classes of the layers, which is most of what a layer holds."""
    inspectors = [layer.inspector for layer in net.modules() if isinstance(layer, MessagePassing)]
    return copy.deepcopy(net, {id(inspector): inspector for inspector in inspectors})


def fingerprint(net: nn.Module) -> dict[str, list[tuple[str, Any]]]:
    """The objects that a module and the modules and classes of its layers consist of."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for path, layer in net.named_modules():
        for name, value in vars(layer).items():
            found[f"{path}.{name}"] = list(value.items()) if isinstance(value, dict) else [("", value)]
        for cls in type(layer).__mro__:
            if "geometric" in cls.__module__:
                found[cls.__module__] = list(vars(sys.modules[cls.__module__]).items())
                found[f"{cls.__module__}.{cls.__qualname__}"] = list(vars(cls).items())
    return found


def changed(before: dict[str, list[tuple[str, Any]]], after: dict[str, list[tuple[str, Any]]]) -> set[str]:
    """Names of what is there no more, new, or not the same objects."""

    def same(a: list[tuple[str, Any]], b: list[tuple[str, Any]]) -> bool:
        return len(a) == len(b) and all(k == n and v is w for (k, v), (n, w) in zip(a, b, strict=True))

    return {name for name in {*before, *after} if not same(before.get(name, []), after.get(name, []))}


def gradient_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference beside the largest value; infinite where shapes differ or a value is not finite."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = max(float(expected.abs().max()), 1e-2)
    value = float((found - expected).abs().max()) / scale
    return value if value == value else float("inf")
