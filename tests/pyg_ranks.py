"""Ranks of ``strategy=pyg`` without processes: each part is served by a server of the wire on the loopback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from helpers import LIMIT
from torch import Tensor
from torch_geometric.data import HeteroData

from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE
from gtrain.wire import Client, Message, Server
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features.feature_store import FeatureStore
from gtrain_pyg.peers import PartBook

NODES, PARTS = 60, 3
NAMES = {"node": ("x", "y", "time", "train_mask", "orig_id"), EDGE_TYPE: ("edge_id", "edge_attr", "edge_weight")}


class LoopbackPeers:
    """Asks servers on the loopback, one a part; counts what is asked and answered."""

    def __init__(self) -> None:
        self.clients: dict[int, Client] = {}
        self.asked: list[tuple[int, str, Mapping[str, Any], Sequence[Tensor]]] = []
        self.answers: list[Message] = []
        self.handlers: dict[str, Any] = {}

    def handle(self, name: str, handler: Any) -> None:
        self.handlers[name] = handler

    def request(self, part: int, method: str, fields: Any = None, tensors: Any = ()) -> Future[Message]:
        self.asked.append((part, method, fields, tensors))
        return self.clients[part].submit(method, fields, tensors)

    def wait(self, part: int, answer: Future[Message]) -> Message:
        self.answers.append(answer.result())
        return self.answers[-1]


class Ranks:
    """A store, a server for each part, and rows of ranks that host whatever a test says."""

    def __init__(self, store: Store) -> None:
        self.store, self.book, self.pool = store, PartBook.of(store), BufferPool()
        self.servers: list[Server] = []
        self.clients: list[Client] = []

    def serve(self, names: Any, **options: Any) -> None:
        for part in range(self.store.num_parts):
            peers = LoopbackPeers()
            FeatureStore(self.store, self.book, [part], peers, self.pool, names, **options)
            handlers = {name: lambda message, caller, h=handler: h(message) for name, handler in peers.handlers.items()}
            self.servers.append(Server(handlers, name=f"part {part}", address="tcp://127.0.0.1:0").start())

    def rows(self, hosted: Sequence[int], names: Any, **options: Any) -> tuple[FeatureStore, LoopbackPeers]:
        peers = LoopbackPeers()
        for part, server in enumerate(self.servers):
            peers.clients[part] = Client(server.address, peer=f"rank {part}", timeout_seconds=LIMIT)
        self.clients += peers.clients.values()
        return FeatureStore(self.store, self.book, hosted, peers, self.pool, names, **options), peers

    def close(self) -> None:
        for each in (*self.clients, *self.servers):
            each.close()


def edge_ids(store: Store, edge_type: Any = None) -> np.ndarray:
    """By global edge position, the position in the source data."""
    return torch.cat([store.edge("edge_id", part, edge_type) for part in range(store.num_parts)]).numpy()


def orig_ids(store: Store, kind: str | None = None) -> np.ndarray:
    """By global id, the original id."""
    return torch.cat([store.node("orig_id", part, kind) for part in range(store.num_parts)]).numpy()


def hetero_graph() -> HeteroData:
    generator, data = torch.Generator().manual_seed(0), HeteroData()
    data["paper"].x = torch.randn(50, 4, generator=generator)
    data["author"].x = torch.randn(30, 7, generator=generator)
    data["author"].y = torch.arange(30)
    data["venue"].num_nodes = 5
    for source, relation, target in (("author", "writes", "paper"), ("paper", "in", "venue")):
        kind = (source, relation, target)
        ends = [torch.randint(0, int(data[end].num_nodes), (80,), generator=generator) for end in (source, target)]
        data[kind].edge_index = torch.stack(ends)
        data[kind].edge_attr = torch.randn(80, 2, generator=generator)
    return data
