"""Having kernels compiled, or loaded from numba's cache, before a peer waits for what they make."""

from __future__ import annotations

import numpy as np

from gtrain.graph.sampling import scratch
from gtrain.graph.sampling.hop import Choice, Frontier, choose
from gtrain.graph.sampling.options import SamplingOptions
from gtrain_pyg.sampling.kernels import by_owner, count, merge, rows_of, spread
from gtrain_pyg.structure.hosted import Graph, Structure

_NUMBERS, _SHORT = np.zeros(1, np.int64), np.zeros(1, np.int32)


def load_kernels(structure: Structure, graph: Graph, options: SamplingOptions) -> None:
    """Call each kernel that sampling and answering with these options will call, on next to nothing."""
    for kind, by_part in graph.columns.items():
        columns, rule = next(iter(by_part.values())), graph.rules[kind]
        if columns.num_targets:
            frontier = Frontier(_NUMBERS, _NUMBERS[: int(options.disjoint)], _NUMBERS, _NUMBERS)
            for number in {*options.fan_out([*graph.columns])[kind], -1 if options.subgraph_type == "induced" else 1}:
                choice = Choice(number, np.uint64(0), rule)
                choose(columns, frontier.under(rule), choice, scratch.Edges(), scratch.Spans())
    nodes = scratch.Nodes(1, options.disjoint)
    nodes.begin(1)
    nodes.number(_NUMBERS.copy(), _NUMBERS, _NUMBERS)
    if options.subgraph_type == "induced":
        nodes.keep(_NUMBERS.copy(), _NUMBERS.copy(), _NUMBERS.copy(), _NUMBERS)
    if structure.book.num_parts > 1:
        by_owner(_NUMBERS, 0, np.array([0, 1]), np.zeros(1, np.int16), np.zeros(2, np.int64), *_outputs(2))
    if len(structure.parts) < structure.book.num_parts:
        count(_NUMBERS, _SHORT.copy())
        spread(_SHORT, _NUMBERS, *_outputs(1))
    if graph.replicas:
        rows_of(_NUMBERS, scratch.read_only(np.zeros(1, np.uint64)), scratch.read_only(_NUMBERS), *_outputs(1))
        own, told = (_NUMBERS, _NUMBERS, _NUMBERS[:0]), (_SHORT, _SHORT, _SHORT)
        merge(_NUMBERS - 1, scratch.read_only(_NUMBERS), *own, *told, _NUMBERS, 0, *_outputs(3))


def _outputs(number: int) -> list[np.ndarray]:
    return [np.zeros(1, np.int64) for _ in range(number)]
