"""Networks over graphs with types on 1 to 4 ranks beside PyG on the whole graph.

sar_hetero_program.py FOLDER [--world 1,2,3,4] [--mode 1,2,3] [--cases "turns|all|NAME;NAME"] [--patience SECONDS]

With ``turns`` each network has another mode over each number of ranks above one, with ``all`` two over most of them.
Prints one JSON line for each world size: {case: {"mode 1": {what: worst relative difference}}}.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gtrain_sar.typed.patching import TypedPatcher
from gtrain_sar.typed.relations import Relations
from sar_conv_program import MODES, Plan
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    FastRGCNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    GraphSAGE,
    HeteroConv,
    HGTConv,
    RGCNConv,
    SAGEConv,
    SGConv,
    TransformerConv,
    to_hetero,
)
from torch_geometric.nn.models import GAT

from gtrain import run_local
from gtrain.data.batches.loader import graph_batch, hetero_batch, hetero_shard_batch
from gtrain.engine.halo import HaloExchange
from gtrain.engine.schedule import Schedule
from gtrain.graph.shard import load_shard, load_whole
from gtrain.graph.shard.graph import load_hetero_shard
from gtrain.graph.shard.whole import load_whole_hetero
from gtrain.graph.store import Store
from gtrain.graph.store.writer import write_store
from gtrain.launch import (
    preload,  # noqa: F401 - once, for all the ranks
    slot,
)
from gtrain.launch.environment import find_environment
from gtrain.model.relational import HGT, HeteroSAGE, IdRGCNConv
from gtrain.nn import Embedding
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group, flatten, form_group, unflatten_into
from gtrain_sar.patching import Patcher

COUNTS = {"a": 31, "b": 17, "c": 2}
WIDTH = 6
TO, REV, NEAR, OF, IN, RARE = TYPES = (
    ("a", "to", "b"),
    ("b", "rev", "a"),
    ("a", "near", "a"),
    ("c", "of", "a"),
    ("a", "in", "c"),
    ("b", "rare", "b"),
)
METADATA = (list(COUNTS), list(TYPES))
KINDS = 4


# ---------------------------------------------------------------------------------------------------- graphs


def typed_graph() -> HeteroData:
    """Isolated nodes, self-loops, parallel edges, a type with fewer nodes than ranks, and a type with two edges."""
    generator = torch.Generator().manual_seed(7)
    data = HeteroData()
    for kind, count in COUNTS.items():
        data[kind].x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    data["a"].y = torch.arange(COUNTS["a"]) % 3
    data["a"].train_mask = torch.arange(COUNTS["a"]) < 14  # the last parts of three or four have none
    for edge_type, count in {TO: 60, REV: 45, NEAR: 80, OF: 9, IN: 11, RARE: 2}.items():
        ends = [torch.randint(0, COUNTS[edge_type[i]], (count,), generator=generator) for i in (0, 2)]
        kept = (ends[0] % 11 != 5) | (ends[1] % 11 != 5)  # leaves isolated nodes where both ends are of their kind
        index = torch.stack(ends)[:, kept]
        data[edge_type].edge_index = torch.cat([index, index[:, :2]], 1)
        data[edge_type].edge_attr = torch.randn(data[edge_type].edge_index.size(1), 3, generator=generator).double()
    data[NEAR].edge_index[:, :3] = torch.tensor([[4, 6, 6], [4, 6, 6]])
    return data


def relational_graph() -> Data:
    """Nodes of one type and edges of several kinds, one of which occurs twice only."""
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(0, 39, (2, 200), generator=generator)
    kinds = torch.randint(0, KINDS - 1, (200,), generator=generator)
    kinds[:2] = KINDS - 1
    x = torch.randn(40, WIDTH, generator=generator, dtype=torch.float64)
    return Data(
        x=x, edge_index=index, edge_type=kinds, y=torch.arange(40) % 3, train_mask=torch.arange(40) < 18, num_nodes=40
    )


def parts_of(counts: dict[str, int], size: int) -> dict[str, Tensor]:
    """Contiguous, uneven parts; a type with two nodes is spread over the first two."""
    return {kind: (torch.arange(n) * size // n) if n > 2 else torch.arange(n) % size for kind, n in counts.items()}


# ---------------------------------------------------------------------------------------------------- networks


class Layers(nn.Module):
    """Layers over dictionaries one after the other; a type that a layer leaves out keeps its rows."""

    def __init__(self, *layers: nn.Module, attributes: bool = False) -> None:
        super().__init__()
        self.layers, self.attributes = nn.ModuleList(layers), attributes

    def forward(self, batch: HeteroData) -> dict[str, Tensor]:
        x_dict = dict(batch.x_dict)
        extra = {"edge_attr_dict": {NEAR: batch[NEAR].edge_attr, TO: batch[TO].edge_attr}} if self.attributes else {}
        for layer in self.layers:
            new = {k: v for k, v in layer(x_dict, batch.edge_index_dict, **extra).items() if v is not None}
            x_dict = x_dict | {kind: torch.tanh(x) for kind, x in new.items()}
        return x_dict


class Encoded(nn.Module):
    """A network behind linear layers, and a table of learned rows for the smallest type."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.linear = nn.ModuleDict({kind: nn.Linear(WIDTH, 8) for kind in ("a", "b")})
        self.table = Embedding(COUNTS["c"], 8)

    def forward(self, batch: HeteroData) -> dict[str, Tensor]:
        x_dict = {kind: layer(batch[kind].x) for kind, layer in self.linear.items()}
        out: dict[str, Tensor] = self.network(x_dict | {"c": self.table(batch["c"].orig_id)}, batch.edge_index_dict)
        return out


class Traced(nn.Module):
    """What ``to_hetero`` makes of a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = to_hetero(network, METADATA)

    def forward(self, batch: HeteroData) -> dict[str, Tensor]:
        out: dict[str, Tensor] = self.network(batch.x_dict, batch.edge_index_dict)
        return out


class ByHand(nn.Module):
    """Convolutions in a dictionary of one's own, and one that is told by its edges alone."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleDict({"__".join(kind): SAGEConv((WIDTH, WIDTH), 5) for kind in (REV, OF)})
        self.other = GATConv(WIDTH, 5)

    def forward(self, batch: HeteroData) -> dict[str, Tensor]:
        outs = [
            conv((batch[key.split("__")[0]].x, batch["a"].x), batch.edge_index_dict[tuple(key.split("__"))])
            for key, conv in self.convs.items()
        ]
        return {"a": sum(outs, self.other(batch["a"].x, batch.edge_index_dict[NEAR]))}


class Relational(nn.Module):
    """A relational convolution, over features or ids, and one more behind it."""

    def __init__(self, first: nn.Module, ids: bool = False, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.ids = first, ids
        self.second = RGCNConv(8, 5, KINDS) if second is None else second

    def forward(self, batch: Data) -> dict[str, Tensor]:
        x = self.first(batch.orig_id if self.ids else batch.x, batch.edge_index, batch.edge_type)
        return {"node": self.second(torch.tanh(x), batch.edge_index, batch.edge_type)}


def hetero(make: Callable[[str, str], nn.Module], **options: Any) -> HeteroConv:
    return HeteroConv({kind: make(kind[0], kind[2]) for kind in TYPES}, **options)


def sage(source: str, target: str, width: int = WIDTH, **options: Any) -> nn.Module:
    return SAGEConv((width, width), 8, **options)


def mixed(width: int, edge_dim: int | None = None) -> HeteroConv:
    loops = {"add_self_loops": False, "concat": False}
    return HeteroConv(
        {
            TO: GATConv((width, width), 8, heads=2, edge_dim=edge_dim, **loops),
            REV: GATv2Conv((width, width), 8, heads=2, **loops),
            NEAR: TransformerConv(width, 8, edge_dim=edge_dim),
            OF: SAGEConv((width, width), 8),
            IN: GraphConv((width, width), 8),
            RARE: GATConv(width, 8),
        }
    )


def linear(width: int) -> HeteroConv:
    return HeteroConv(
        {
            TO: SAGEConv((width, width), 8, project=True),
            REV: GraphConv((width, width), 8, aggr="mean"),
            NEAR: GCNConv(width, 8),
            OF: SAGEConv((width, width), 8, aggr="sum"),
            RARE: GINConv(nn.Linear(width, 8)),
        },
        aggr="mean",
    )


def gin(source: str, target: str) -> nn.Module:
    return GINConv(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)))


def awkward(width: int) -> HeteroConv:
    """A batch norm inside, two hops, a maximum, and what is packed."""
    norm = nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8))
    return HeteroConv(
        {
            TO: SAGEConv((width, width), 8, aggr="max"),
            REV: GINConv(norm),
            NEAR: SGConv(width, 8, K=2),
            OF: SAGEConv((width, width), 8),
            IN: GATConv((width, width), 8, add_self_loops=False),
        }
    )


TYPED: dict[str, Callable[[], nn.Module]] = {
    "HeteroSAGE": lambda: Encoded(HeteroSAGE(8, 3, list(TYPES))),
    "HGT": lambda: Encoded(HGT(8, 3, list(COUNTS), list(TYPES), heads=2)),
    "HeteroConv SAGE": lambda: Layers(hetero(sage), hetero(lambda a, b: sage(a, b, 8))),
    "HeteroConv mixed": lambda: Layers(mixed(WIDTH), mixed(8)),
    "HeteroConv edge_attr": lambda: Layers(mixed(WIDTH, 3), mixed(8, 3), attributes=True),
    "HeteroConv linear": lambda: Layers(linear(WIDTH), HeteroConv({NEAR: SAGEConv(8, 8), REV: SAGEConv((8, 8), 8)})),
    "HeteroConv batch norm": lambda: Layers(hetero(gin)),
    "HeteroConv awkward": lambda: Layers(awkward(WIDTH)),
    "HGTConv": lambda: Layers(HGTConv(WIDTH, 8, METADATA, heads=2), HGTConv(8, 8, METADATA, heads=4)),
    "to_hetero SAGE": lambda: Traced(GraphSAGE((WIDTH, WIDTH), 8, 2, 5)),
    "to_hetero GAT": lambda: Traced(GAT((WIDTH, WIDTH), 8, 2, 5, heads=2, add_self_loops=False)),
    "to_hetero batch norm": lambda: Traced(GraphSAGE((WIDTH, WIDTH), 8, 2, 5, norm="batch")),
    "by hand": ByHand,
}
RELATIONAL: dict[str, Callable[[], nn.Module]] = {
    "RGCN": lambda: Relational(RGCNConv(WIDTH, 8, KINDS)),
    "RGCN sum": lambda: Relational(RGCNConv(WIDTH, 8, KINDS, aggr="sum")),
    "RGCN max": lambda: Relational(RGCNConv(WIDTH, 8, KINDS, aggr="max")),
    "RGCN bases": lambda: Relational(RGCNConv(WIDTH, 8, KINDS, num_bases=2)),
    "RGCN blocks": lambda: Relational(RGCNConv(WIDTH, 8, KINDS, num_blocks=2)),
    "RGCN ids": lambda: Relational(RGCNConv(40, 8, KINDS), ids=True),
    "IdRGCN": lambda: Relational(IdRGCNConv(40, 8, KINDS, num_bases=2), ids=True),
    "FastRGCN": lambda: Relational(FastRGCNConv(WIDTH, 8, KINDS), second=FastRGCNConv(8, 5, KINDS, num_bases=2)),
}


def dropping() -> HeteroConv:
    """Dropout before, in and after the aggregation."""
    inside = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5))
    return HeteroConv(
        {
            TO: GATConv((WIDTH, WIDTH), 8, add_self_loops=False, dropout=0.5),
            REV: GINConv(inside),
            NEAR: TransformerConv(WIDTH, 8, dropout=0.5),
        }
    )


DROPPING: dict[str, Callable[[], nn.Module]] = {"dropout": lambda: Layers(dropping())}
REPLAYED = ("HeteroConv mixed", "HGTConv", "to_hetero GAT")
"""Layers that mode 1 runs again, which takes their rows once more."""
CHECKS = (
    *(f"constants: {name}" for name in ("HeteroConv SAGE", "HeteroConv mixed", "HGTConv", "to_hetero SAGE", "RGCN")),
    "dropout: dropout",
    *(f"traffic: {name}" for name in ("HeteroConv SAGE", *REPLAYED, "to_hetero SAGE", "RGCN")),
)


# ---------------------------------------------------------------------------------------------------- one case


class Bench:
    """A graph, whole and as this rank's part.

    Args:
        group: the ranks.
        store: the graph; one part for each rank.
        known: what one process computes, by case; filled here. Parts are contiguous, so that nodes have the same
            numbers in every store.
    """

    def __init__(self, group: Group, store: Store, known: dict[str, dict[str, Tensor]]) -> None:
        self.group, self.known = group, known
        if store.is_hetero:
            shard = load_hetero_shard(store, group.rank)
            self.whole: Any = hetero_batch(load_whole_hetero(store), store)
            self.part: Any = hetero_shard_batch(shard, store)
            self.relations = Relations(group, shard)
            self.relations.register(self.part.edge_index_dict)
        else:
            self.whole, self.part = graph_batch(load_whole(store)), graph_batch(load_shard(store, group.rank))
            self.exchange = HaloExchange(group, load_shard(store, group.rank))

    def patcher(self, schedule: Schedule) -> Patcher:
        if isinstance(self.part, HeteroData):
            return TypedPatcher(self.relations, schedule)
        return Patcher(self.exchange, schedule)

    def passes(self, net: nn.Module, batch: Data | HeteroData) -> dict[str, Tensor]:
        """Outputs, loss and gradients of one pass, and outputs without autograd."""
        here = copy.copy(batch)
        kinds = here.node_types if isinstance(here, HeteroData) else ["node"]
        nodes = {kind: here[kind] if isinstance(here, HeteroData) else here for kind in kinds}
        for stored in nodes.values():
            stored.x = stored.x.clone().requires_grad_()
        outs = net(here)
        target = nodes["a" if isinstance(here, HeteroData) else "node"]
        out = outs["a" if isinstance(here, HeteroData) else "node"]
        counts = torch.randn(50, out.size(1), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loss = (out * counts[target.orig_id])[target.train_mask].sum()
        loss.backward()
        found = {f"out {kind}": o.detach()[: nodes[kind].num_nodes] for kind, o in outs.items()}
        found |= {f"grad of x {k}": _gradient(s.x) for k, s in nodes.items()} | {"loss": loss.detach().view(1)}
        found |= {name: _gradient(parameter).clone() for name, parameter in net.named_parameters()}
        found |= {name: b.detach().clone() for name, b in net.named_buffers() if b.is_floating_point()}
        with torch.no_grad():
            again = net.eval()(here)
        net.train()
        return found | {f"eval {kind}": o for kind, o in again.items()}

    def rows(self, name: str) -> Tensor | None:
        """Rows of the whole graph's tensor that are this rank's; None where it has no rows of nodes."""
        if not name.startswith(("out ", "eval ", "grad of x ")):
            return None
        kind = name.rpartition(" ")[2]
        n_id: Tensor = (self.part[kind] if isinstance(self.part, HeteroData) else self.part).n_id
        return n_id

    def run(self, name: str, modes: list[int]) -> dict[str, Any]:
        """The worst difference of everything on this rank, in each mode."""
        net = made(name)
        clean = copy.deepcopy(net)
        expected = self.expected(name, lambda: self.passes(clean, self.whole))
        state = copy.deepcopy(net.state_dict())
        result: dict[str, Any] = {}
        for mode in modes:
            net.load_state_dict(state)
            net.zero_grad()
            patcher = self.patcher(Schedule(mode))
            patcher.install(net)
            found = self.passes(net, self.part)
            patcher.uninstall()
            self.add_up([found[name] for name in ("loss", *(n for n, _ in net.named_parameters()))])
            worst = {name: self.difference(name, found[name], whole) for name, whole in expected.items()}
            worst["left as found"] = float(
                sum(changed(a, b) for a, b in zip(net.modules(), clean.modules(), strict=True))
            )
            result[f"mode {mode}"] = worst
        return result

    def expected(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What one process computes of the whole graph."""
        if name not in self.known:
            self.known[name] = compute()
        return self.known[name]

    def add_up(self, tensors: list[Tensor]) -> None:
        """Sum each over the ranks, in place, by one message."""
        unflatten_into(self.group.all_reduce(flatten(tensors)), tensors)

    def difference(self, name: str, found: Tensor, whole: Tensor) -> float:
        rows = self.rows(name)
        found, whole = found.detach(), whole.detach()
        expected = whole if rows is None else whole[rows]
        if found.shape != expected.shape:
            return float("inf")
        if not found.numel():
            return 0.0
        value = float((found - expected).abs().max()) / max(float(whole.abs().max()), 1e-3)
        return value if value == value else float("inf")

    # ------------------------------------------------------------------------ other checks

    def step(self, net: nn.Module, batch: Data | HeteroData) -> dict[str, Tensor]:
        """Gradients of the parameters in one pass over constant inputs."""
        net.zero_grad()
        typed = isinstance(batch, HeteroData)
        out, target = net(batch)["a" if typed else "node"], batch["a"] if typed else batch
        out[target.train_mask].square().sum().backward()
        return {name: _gradient(parameter).clone() for name, parameter in net.named_parameters()}

    def constants(self, case: str, mode: int) -> dict[str, float]:
        """Two epochs over inputs that never change, so that the second may use what the first one kept."""
        net = made(case)
        expected = self.expected(f"constants: {case}", lambda: self.step(copy.deepcopy(net), self.whole))
        patcher = self.patcher(Schedule(mode, cache_inputs="true"))
        patcher.constants.add(v for stored in self.part.stores for v in stored.values() if isinstance(v, Tensor))
        patcher.install(net)
        worst: dict[str, float] = {}
        for epoch in range(2):
            found = self.step(net, self.part)
            self.add_up(list(found.values()))
            worst |= {f"epoch {epoch}: {name}": self.difference(name, x, expected[name]) for name, x in found.items()}
        patcher.uninstall()
        return worst

    def dropout(self, case: str, mode: int) -> dict[str, float]:
        """The same numbers are drawn when mode 1 runs a layer again, as if it had kept it; and they do something."""
        found = []
        for tried in (mode, 3):
            net = made(case)
            torch.manual_seed(5 + self.group.rank)
            patcher = self.patcher(Schedule(tried))
            patcher.install(net)
            found.append(self.passes(net, self.part))
            patcher.uninstall()
        worst = {name: self.gap(found[0][name], found[1][name]) for name in found[0]}
        torch.manual_seed(6 + self.group.rank)
        other = self.passes(net, self.whole)["grad of x a"].norm()  # without the engine, and with other numbers
        worst["nothing dropped"] = 0.0 if self.gap(other, found[0]["grad of x a"].norm()) > 1e-3 else float("inf")
        return worst

    def traffic(self, case: str, mode: int) -> dict[str, float]:
        """Bytes and messages of a pass through two layers, beside each halo row once a set of messages."""
        net, sets = made(case), 3 if mode == 1 and case in REPLAYED else 2
        patcher = self.patcher(Schedule(mode))
        patcher.install(net)
        self.passes(net, self.part)  # asks once who reads what
        net.zero_grad()
        here = copy.copy(self.part)
        nodes = [here[kind] for kind in here.node_types] if isinstance(here, HeteroData) else [here]
        for stored in nodes:
            stored.x = stored.x.clone().requires_grad_()
        counters, messages = self.group.counters, []
        send = self.group.send
        self.group.send = lambda *args: (messages.append(None), send(*args))[1]  # type: ignore[method-assign]
        counters.bytes_sent, counters.recording = 0, True
        sum(out.sum() for out in net(here).values()).backward()
        counters.recording = False
        del self.group.send
        patcher.uninstall()
        exchanges = self.relations.exchanges.values() if isinstance(here, HeteroData) else [self.exchange]
        there = sum(len(ids) for exchange in exchanges for ids in exchange.send_rows)
        back = sum(sum(exchange.reads) for exchange in exchanges)
        expected = ((sets - 1) * there + back) * (WIDTH + 8) * 8
        packed = sets * 2 * (self.group.size - 1)
        padding = 8 * packed * len(exchanges)  # pieces of a message start at multiples of 8 bytes
        return {
            "bytes": 0.0 if abs(counters.bytes_sent - expected) <= padding else counters.bytes_sent / max(expected, 1),
            "messages": float(len(messages) - packed),
        }

    def gap(self, found: Tensor, expected: Tensor) -> float:
        found, expected = found.detach(), expected.detach()
        return float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-3) if found.numel() else 0.0

    def check(self, name: str, modes: list[int]) -> dict[str, Any]:
        """One of :data:`CHECKS` in each mode."""
        kind, _, case = name.partition(": ")
        return {f"mode {mode}": getattr(self, kind)(case, mode) for mode in modes}


def made(case: str) -> nn.Module:
    """The network of a case, with the same parameters each time."""
    torch.manual_seed(1)
    return (TYPED | RELATIONAL | DROPPING)[case]().double()


def changed(layer: nn.Module, clean: nn.Module) -> bool:
    """Whether a run left something on a module that PyG does not leave itself."""
    hooks = len(layer._forward_hooks) + len(layer._forward_pre_hooks) != len(clean._forward_hooks) + len(
        clean._forward_pre_hooks
    )
    usual = {"_use_segment_matmul_heuristic_output"}  # of RGCNConv
    return hooks or bool((layer.__dict__.keys() ^ clean.__dict__.keys()) - usual)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


# ---------------------------------------------------------------------------------------------------- ranks


def written(folder: Path, graph: Data | HeteroData, size: int, group: Group) -> Store:
    """The graph as a store, written by rank 0."""
    if group.rank == 0 and not folder.exists():
        typed = isinstance(graph, HeteroData)
        counts = COUNTS if typed else {"node": 40}
        parts: Any = parts_of(counts, size)
        facts = {"target": "a"} if typed else {}
        parts = parts if typed else parts["node"]
        write_store(folder, graph, parts, size, source={}, facts=facts, partitioner="file", seed=0)
    group.barrier()
    return Store.open(folder)


def task(folder: str, size: int, plan: Plan, patience: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    group = form_group(find_environment(), slot.current().slot.rank, size, patience, Counters())
    path = Path(folder, "expected.pt")
    known = torch.load(path, weights_only=True) if path.exists() else {}
    benches = {
        "typed": Bench(group, written(Path(folder, f"typed-{size}"), typed_graph(), size, group), known),
        "relational": Bench(group, written(Path(folder, f"relational-{size}"), relational_graph(), size, group), known),
    }
    results = {}
    for name, modes in plan:
        bench = benches["relational" if name.rpartition(": ")[2] in RELATIONAL else "typed"]
        results[name] = bench.check(name, modes) if ": " in name else bench.run(name, modes)
    if size == 1:  # what other numbers of ranks are compared with as well
        torch.save(known, path)
    return worst_of(group.all_gather_object(results))


def worst_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of nested dictionaries with the same keys, the largest of each figure."""
    return {
        key: worst_of([row[key] for row in rows]) if isinstance(value, dict) else max(row[key] for row in rows)
        for key, value in rows[0].items()
    }


def chosen(words: str, size: int, modes: list[int]) -> Plan:
    """The cases of a word, or those named, and their modes."""
    if words not in ("all", "turns"):
        return [(name, modes) for name in words.split(";")]
    every, some = [*TYPED, *RELATIONAL], [mode for mode in modes if mode in MODES[size]]
    if words == "all":
        plan = [(name, some) for name in every]
    else:
        plan = [(name, [1 + (i + size) % 3 if size > 1 else 1]) for i, name in enumerate(every)]
    return plan + [(name, some) for name in CHECKS if size == 3]


def main() -> None:
    warnings.filterwarnings("ignore", "There exist node types")
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--world", default="1,2,3,4")
    parser.add_argument("--mode", default="1,2,3")
    parser.add_argument(
        "--cases", default="all", help="with the first two words, and three ranks, the other checks too"
    )
    parser.add_argument("--patience", type=float, default=40.0, help="seconds a rank waits for another")
    options = parser.parse_args()
    modes = [int(mode) for mode in options.mode.split(",")]
    for case in TYPED | RELATIONAL | DROPPING:
        made(case)  # PyG writes code for each class of convolutions, which the ranks then have
    gc.collect()
    gc.freeze()  # or each rank would look for garbage among all that was imported, again and again
    for size in map(int, options.world.split(",")):
        plan = chosen(options.cases, size, modes)
        given = options.folder, size, plan, options.patience
        found = run_local(task, *given, num_nodes=size, log_dir=f"{options.folder}/logs-{size}")
        print("RESULT", size, json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
