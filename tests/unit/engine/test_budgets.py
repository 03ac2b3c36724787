"""What a training step costs, in counts that do not depend on the machine: operations, kernel calls, allocations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.nn import GAT, GCN, GraphSAGE, RGCNConv

from gtrain.engine import bipartite, blocks, linear, relations
from gtrain.engine.attention import fused
from gtrain.engine.local import LocalEngine
from gtrain.model.inputs import targets_only
from gtrain.model.relational import HeteroSAGE
from gtrain.nn.relational import IdRGCNConv

NODES, EDGES, IN, HIDDEN, OUT = 300, 9000, 24, 32, 5


class Allocated(TorchDispatchMode):
    """The largest result of an operation, in numbers, and the number of operations that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += not func.is_view
        tensors = (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        self.largest = max(self.largest, *(tensor.numel() for tensor in tensors), 0)
        return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of calls of each kernel; a sparse product, and each pass of attention, reads every edge once."""
    counts: Counter[str] = Counter()

    def counted(name: str, kernel: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return kernel(*args, **kwargs)

        return call

    for module in (linear, blocks, fused, bipartite, relations):
        for name in ("spmm", "sddmm", "attention_forward", "attention_backward", "extreme_forward", "extreme_backward"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return counts


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(constant=True)
    yield engine
    engine.uninstall()


def step(network: nn.Module, *args: Any, **kwargs: Any) -> None:
    network(*args, **kwargs).square().sum().backward()


NETWORKS = {
    # the first layer's sum of constant features is cached; each later layer is summed forward and backward
    "sage": (GraphSAGE(IN, HIDDEN, 3, OUT), {"spmm": 4}),
    "gcn": (GCN(IN, HIDDEN, 3, OUT), {"spmm": 4}),
    "gat": (GAT(IN, HIDDEN, 3, OUT, heads=4), {"attention_forward": 3, "attention_backward": 3}),
    "maxima": (GraphSAGE(IN, HIDDEN, 3, OUT, aggr="max"), {"extreme_forward": 3, "extreme_backward": 2}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_over_a_whole_graph(name: str, engine: LocalEngine, calls: Counter[str]) -> None:
    network, expected = NETWORKS[name]
    x, edge_index = torch.randn(NODES, IN), torch.randint(0, NODES, (2, EDGES))
    engine.add_constants([x, edge_index])
    engine.install(network)
    step(network, x, edge_index)
    calls.clear()
    with Allocated() as allocated:
        step(network, x, edge_index)
    assert calls == expected
    # no message per edge: no tensor is larger than the widest matrix of the nodes
    assert 0 < allocated.largest <= NODES * max(IN, HIDDEN) + 1


def test_products_of_a_sampled_batch_are_those_of_the_rows_that_the_next_layer_reads() -> None:
    """Hops of 10, 60 and 230 nodes: the layers compute the rows of 70 and of 10 nodes."""
    nodes, edges = [10, 60, 230], [100, 900]
    total = sum(nodes)
    x = torch.randn(total, IN)
    first = torch.stack([torch.randint(0, 70, (100,)), torch.randint(0, 10, (100,)).sort().values])
    second = torch.stack([torch.randint(0, total, (900,)), torch.randint(10, 70, (900,)).sort().values])
    edge_index = torch.cat([first, second], 1)
    network, engine = GraphSAGE(IN, HIDDEN, 2, OUT), LocalEngine()
    engine.install(network)
    with FlopCounterMode(display=False) as counter, targets_only(network):
        step(network, x, edge_index, num_sampled_nodes_per_hop=nodes, num_sampled_edges_per_hop=edges)
    engine.uninstall()
    # multiplications and additions of W_l and W_r: forward, gradient of the weight, and from the second layer on that
    # of the input
    layers = 2 * 2 * (70 * IN * HIDDEN * 2 + 10 * HIDDEN * OUT * 3)
    assert 0.5 * layers < counter.get_total_flops() <= layers


@pytest.mark.parametrize("relations_", [3, 30])
def test_sums_of_relations_do_not_grow_with_their_number(
    relations_: int, engine: LocalEngine, calls: Counter[str]
) -> None:
    edge_index, edge_type = torch.randint(0, NODES, (2, EDGES)), torch.arange(EDGES) % relations_
    network = nn.ModuleList([IdRGCNConv(NODES, IN, relations_), RGCNConv(IN, OUT, relations_)])
    engine.install(network)
    ids = torch.arange(NODES)

    def run() -> None:
        network[1](network[0](ids, edge_index, edge_type), edge_index, edge_type).square().sum().backward()

    run()
    calls.clear()
    with Allocated() as allocated:
        run()
    # over ids: a sum, and its gradient; over features: sums into pairs and by target, and one gradient
    assert calls == {"spmm": 5}
    # products of a relation: forward, for its weight and for the rows; PyG takes some twenty operations more for each
    assert allocated.operations <= 70 + 3 * relations_
    # nothing has a row for each relation and node but the learned rows themselves
    assert allocated.largest <= max(EDGES * IN, relations_ * NODES * IN)


def test_operations_of_a_layer_over_edge_types(engine: LocalEngine, calls: Counter[str]) -> None:
    types = [("a", "to", "b"), ("b", "to", "a"), ("b", "to", "b"), ("c", "to", "b")]
    network = HeteroSAGE(IN, OUT, types, num_layers=2)
    x = {name: torch.randn(NODES, IN, requires_grad=True) for name in "abc"}
    edges = {each: torch.randint(0, NODES, (2, EDGES)) for each in types}

    def count() -> int:
        sum(out.square().sum() for out in network(x, edges).values()).backward()  # type: ignore[union-attr]
        calls.clear()
        with Allocated() as allocated:
            sum(out.square().sum() for out in network(x, edges).values()).backward()  # type: ignore[union-attr]
        return allocated.operations

    plain = count()
    engine.install(network)
    compiled = count()
    # a sum and its gradient for each edge type and layer
    assert calls == {"spmm": 16}
    assert compiled < 0.75 * plain
