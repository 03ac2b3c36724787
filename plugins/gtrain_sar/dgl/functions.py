"""Functions of edges that users write for DGL: what they read, and running them block by block."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from dgl.udf import EdgeBatch
from torch import Tensor, nn

from gtrain.errors import DataError
from gtrain.nn.dropout import here
from gtrain_sar.blocks import aggregate_by_blocks
from gtrain_sar.config import Schedule
from gtrain_sar.dgl.edge_values import EdgeValues, ParameterOwner
from gtrain_sar.edges import EdgeBlock
from gtrain_sar.propagate_call import Pool, PropagateCall, sample, trial

Function = Callable[[EdgeBatch], dict[str, Tensor]]
_ERRORS = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError, AttributeError)


class Frame(UserDict[str, Any]):
    """Tensors of as many rows as there are nodes, or edges.

    Args:
        rows: their number.
        of: what they are, for messages.
        columns: what is there already.

    Raises:
        DataError: a tensor with another number of rows is set.
    """

    def __init__(self, rows: int, of: str, columns: dict[str, Tensor] | None = None) -> None:
        self.rows, self.of = rows, of
        super().__init__(columns or {})

    def __setitem__(self, name: str, value: Tensor) -> None:
        if len(value) != self.rows:
            raise DataError(
                f"a convolution sets {name!r} with {len(value)} rows on a graph whose part has {self.rows} {self.of}.",
                hint="give the convolution the features of the batch's own nodes and edges.",
            )
        super().__setitem__(name, value)

    def copied(self) -> Frame:
        """The same columns in a frame of their own."""
        return Frame(self.rows, self.of, self.data)


class Columns(Mapping[str, Any]):
    """Columns brought to the edges, each when it is asked for.

    Args:
        frame: the columns.
        bring: [n, ...] -> [E, ...].
        note: told the name of each column that is asked for.
    """

    def __init__(
        self,
        frame: Mapping[str, Tensor],
        bring: Callable[[Tensor], Tensor],
        note: Callable[[str], Any] = lambda name: None,
    ) -> None:
        self._frame, self._bring, self._note = frame, bring, note
        self._known: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            self._note(name)
            self._known[name] = self._bring(self._frame[name])
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._frame

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


class Batch(EdgeBatch):
    """Some edges, whose ends are given.

    Args:
        graph: whose edges they are.
        ends: sources and targets in local ids.
        ids: of the edges.
        columns: data of the sources, the edges and the targets.
    """

    def __init__(self, graph: Any, ends: tuple[Tensor, Tensor], ids: Tensor, *columns: Columns) -> None:
        source, data, target = columns
        super().__init__(graph, ids, graph.canonical_etypes[0], source, data, target)
        self._ends = ends

    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, targets and ids."""
        return *self._ends, self._eid


class FunctionCall(PropagateCall):
    """Messages that a function in Python makes of edges, for :mod:`gtrain_sar.blocks`.

    Args:
        graph: its ``blocks``, and its ``ndata`` and ``edata``, which the function may read.
        function: returns messages by name.
        field: the message that is reduced.
        reduce: sum, mean, max or min.
    """

    def __init__(self, graph: Any, function: Function, field: str, reduce: str) -> None:
        self.blocks, self.reduce, self.pool, self.attention = graph.blocks, reduce, Pool(), None
        self.layer = here()
        self.conv: Any = ParameterOwner([])
        self._graph, self._function, self._field = graph, function, field
        self._places: dict[tuple[str, str], int] = {}

    def message_of(self, block: EdgeBlock, tensors: list[Tensor]) -> Tensor:
        """Messages of any edges, [E_r, ...]."""
        return self._run(block, tensors, lambda kind, name: None)

    def _run(self, block: EdgeBlock, tensors: list[Tensor], note: Callable[[str, str], Any]) -> Tensor:
        """The messages; ``note`` is told the kind and the name of each column that is read."""

        def of(kind: str, rows: Tensor) -> Columns:
            columns = {name: tensors[i] for (kind_, name), i in self._places.items() if kind_ == kind}
            return Columns(columns, lambda tensor: tensor.index_select(0, rows), partial(note, kind))

        ends = block.sources, block.targets
        columns = of("source", block.sources), of("edge", block.ids), of("target", block.targets)
        return self._function(Batch(self._graph, ends, block.ids, *columns))[self._field]

    def served(self) -> bool:
        """Find what the function reads and the parameters that it uses; whether blocks of edges are all it needs.

        It is tried on a few made-up edges, the same on all ranks: a message must depend on its own edge alone, draw no
        random numbers, and be made of columns and parameters.
        """
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in _modules(self._function)):
            return False
        graph = self._graph
        for kind, frame in (("source", graph.ndata), ("edge", graph.edata), ("target", graph.ndata)):
            for name, tensor in frame.items():
                if not isinstance(tensor, EdgeValues):
                    self._places[kind, name] = self.pool.add(kind, tensor)
        try:
            with trial(), torch.enable_grad():
                return self._try()
        except _ERRORS:
            return False

    def _try(self) -> bool:
        block, tensors = sample(self)
        read: set[tuple[str, str]] = set()
        before, start = torch.get_rng_state(), _sequence_number()
        messages = self._run(block, tensors, lambda kind, name: read.add((kind, name)))
        if not torch.equal(before, torch.get_rng_state()):
            return False
        pair = EdgeBlock(block.ids[:2], block.sources[:2], block.targets[:2], block.num_sources, block.num_targets)
        same = torch.allclose(self.message_of(pair, tensors), messages[:2], rtol=1e-3, atol=1e-6, equal_nan=True)
        leaves = _leaves(messages, start)
        if not same or len(messages) != len(block.ids) or leaves is None:
            return False
        self.conv = ParameterOwner(leaves)
        self._keep(read)
        return bool(self.sources)

    def _keep(self, read: set[tuple[str, str]]) -> None:
        """Leave out the columns that the function does not read."""
        pool, places = Pool(), {}
        for key, i in self._places.items():
            if key in read:
                places[key] = pool.add(key[0], self.pool.tensors[i])
        self.pool, self._places = pool, places


def aggregate_in_blocks(graph: Any, function: Function, field: str, reduce: str, schedule: Schedule) -> Tensor | None:
    """``update_all`` with a function in Python, block by block; None where that would not be exact, or in mode 3."""
    if schedule.mode == 3 or reduce not in ("sum", "mean"):
        return None
    call = FunctionCall(graph, function, field, reduce)
    return aggregate_by_blocks(call, schedule) if call.served() else None


def _modules(function: Any) -> Iterator[nn.Module]:
    """Modules that a function can reach by its closure or the object whose method it is."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for value in (getattr(function, "__self__", None), *cells):
        if isinstance(value, nn.Module):
            yield from value.modules()


def _sequence_number() -> int:
    """The number that autograd gives the next function, or one below."""
    node = (torch.ones((), requires_grad=True) * 1).grad_fn
    assert node is not None
    return int(node._sequence_nr())


def _leaves(tensor: Tensor, start: int) -> list[Tensor] | None:
    """Leaves that a tensor depends on; None where it depends on what was computed before ``start``."""
    leaves: dict[int, Tensor] = {}
    seen: set[Any] = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        elif node._sequence_nr() < start:
            return None
        waiting += [following for following, _ in node.next_functions]
    return list(leaves.values())
