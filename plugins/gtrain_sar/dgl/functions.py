"""Runs Python functions of edges, written for DGL, block by block; a probe finds the columns that they read."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from dgl.udf import EdgeBatch
from torch import Tensor, nn

from gtrain.errors import DataError
from gtrain.nn.dropout import current_position
from gtrain_sar.blocks import aggregate_by_blocks
from gtrain_sar.config import Schedule
from gtrain_sar.dgl.edge_values import LazyEdgeValues, ParameterOwner
from gtrain_sar.edges import EdgeBlock
from gtrain_sar.propagate_call import PropagateCall, TensorPool, probe_inputs, probing

Function = Callable[[EdgeBatch], dict[str, Tensor]]
_ERRORS = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError, AttributeError)


class Frame(UserDict[str, Any]):
    """Named tensors with one row for each node, or for each edge.

    Args:
        num_rows: number of rows.
        unit: ``nodes`` or ``edges``, for messages.
        columns: initial tensors.

    Raises:
        DataError: a tensor with another number of rows is set.
    """

    def __init__(self, num_rows: int, unit: str, columns: dict[str, Tensor] | None = None) -> None:
        self.num_rows, self.unit = num_rows, unit
        super().__init__(columns or {})

    def __setitem__(self, name: str, value: Tensor) -> None:
        if len(value) != self.num_rows:
            raise DataError(
                f"a convolution sets {name!r} with {len(value)} rows; the part has {self.num_rows} {self.unit}.",
                hint="pass the convolution the features of the batch's nodes and edges.",
            )
        super().__setitem__(name, value)

    def copied(self) -> Frame:
        """Return another frame with the same columns."""
        return Frame(self.num_rows, self.unit, self.data)


class LazyColumns(Mapping[str, Any]):
    """Columns with one row per edge, each computed when it is first read.

    Args:
        frame: the columns.
        to_edges: [n, ...] -> [E, ...].
        on_read: called with the name of each column that is read.
    """

    def __init__(
        self,
        frame: Mapping[str, Tensor],
        to_edges: Callable[[Tensor], Tensor],
        on_read: Callable[[str], Any] = lambda name: None,
    ) -> None:
        self._frame, self._to_edges, self._on_read = frame, to_edges, on_read
        self._computed: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._computed:
            self._on_read(name)
            self._computed[name] = self._to_edges(self._frame[name])
        return self._computed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._frame

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


class ShardEdgeBatch(EdgeBatch):
    """DGL's batch of edges, for some edges of a shard.

    Args:
        graph: the shard's graph.
        ends: sources and targets in local ids.
        ids: of the edges.
        columns: data of the sources, the edges and the targets.
    """

    def __init__(self, graph: Any, ends: tuple[Tensor, Tensor], ids: Tensor, *columns: LazyColumns) -> None:
        source, data, target = columns
        super().__init__(graph, ids, graph.canonical_etypes[0], source, data, target)
        self._ends = ends

    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, targets and ids."""
        return *self._ends, self._eid


class FunctionCall(PropagateCall):
    """Messages that a Python function computes from edges, for :mod:`gtrain_sar.blocks`.

    Args:
        graph: its ``blocks``, and its ``ndata`` and ``edata``, which the function may read.
        function: returns messages by name.
        field: the message that is reduced.
        reduce: sum, mean, max or min.
    """

    def __init__(self, graph: Any, function: Function, field: str, reduce: str) -> None:
        self.blocks, self.reduce, self.pool, self.attention = graph.blocks, reduce, TensorPool(), None
        self.position = current_position()
        self.conv: Any = ParameterOwner([])
        self._graph, self._function, self._field = graph, function, field
        self._columns: dict[tuple[str, str], int] = {}

    def message_of(self, block: EdgeBlock, tensors: list[Tensor]) -> Tensor:
        """Return the messages of any edges, [E_r, ...]."""
        return self._run(block, tensors, lambda role, name: None)

    def _run(self, block: EdgeBlock, tensors: list[Tensor], on_read: Callable[[str, str], Any]) -> Tensor:
        """Return the messages; ``on_read`` is called with role and name of each column that the function reads."""

        def columns_of(role: str, rows: Tensor) -> LazyColumns:
            columns = {name: tensors[i] for (of_role, name), i in self._columns.items() if of_role == role}
            return LazyColumns(columns, lambda tensor: tensor.index_select(0, rows), partial(on_read, role))

        positions = {"source": block.sources, "edge": block.ids, "target": block.targets}
        columns = [columns_of(role, rows) for role, rows in positions.items()]
        batch = ShardEdgeBatch(self._graph, (block.sources, block.targets), block.ids, *columns)
        return self._function(batch)[self._field]

    def runs_by_blocks(self) -> bool:
        """Find the columns and parameters that the function uses; return whether it can run block by block.

        A probe decides: a message must depend on its edge alone, draw no random numbers, and be computed from columns
        and parameters.
        """
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in _modules(self._function)):
            return False
        graph = self._graph
        for role, frame in (("source", graph.ndata), ("edge", graph.edata), ("target", graph.ndata)):
            for name, tensor in frame.items():
                if not isinstance(tensor, LazyEdgeValues):
                    self._columns[role, name] = self.pool.add(role, tensor)
        try:
            with probing(), torch.enable_grad():
                return self._probe()
        except _ERRORS:
            return False

    def _probe(self) -> bool:
        block, tensors = probe_inputs(self)
        read: set[tuple[str, str]] = set()
        before, start = torch.get_rng_state(), _sequence_number()
        messages = self._run(block, tensors, lambda role, name: read.add((role, name)))
        if not torch.equal(before, torch.get_rng_state()):
            return False
        pair = block.select(slice(2))
        same = torch.allclose(self.message_of(pair, tensors), messages[:2], rtol=1e-3, atol=1e-6, equal_nan=True)
        leaves = _leaves(messages, start)
        if not same or len(messages) != len(block.ids) or leaves is None:
            return False
        self.conv = ParameterOwner(leaves)
        pool, columns = TensorPool(), {}
        for key, position in self._columns.items():
            if key in read:
                columns[key] = pool.add(key[0], self.pool.tensors[position])
        self.pool, self._columns = pool, columns
        return bool(self.sources)


def aggregate_in_blocks(graph: Any, function: Function, field: str, reduce: str, schedule: Schedule) -> Tensor | None:
    """``update_all`` with a Python function, block by block; None in mode 3, or if that is not exact."""
    if schedule.mode == 3 or reduce not in ("sum", "mean"):
        return None
    call = FunctionCall(graph, function, field, reduce)
    return aggregate_by_blocks(call, schedule) if call.runs_by_blocks() else None


def _modules(function: Any) -> Iterator[nn.Module]:
    """Yield the modules that a function references in its closure, or whose method it is."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for value in (getattr(function, "__self__", None), *cells):
        if isinstance(value, nn.Module):
            yield from value.modules()


def _sequence_number() -> int:
    """Return the sequence number of autograd's next node, or one below."""
    node = (torch.ones((), requires_grad=True) * 1).grad_fn
    assert node is not None
    return int(node._sequence_nr())


def _leaves(tensor: Tensor, start: int) -> list[Tensor] | None:
    """Return the leaves that a tensor depends on; None if it depends on a node created before ``start``."""
    leaves: dict[int, Tensor] = {}
    seen: set[Any] = set()
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        elif node._sequence_nr() < start:
            return None
        stack += [operand for operand, _ in node.next_functions]
    return list(leaves.values())
