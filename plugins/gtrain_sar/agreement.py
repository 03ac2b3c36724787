"""Whether all ranks have parts of one graph."""

from __future__ import annotations

from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.shard import GraphShard
from gtrain.graph.shard.hetero import HeteroShard
from gtrain.strategy.group import Group


def check_parts_agree(group: Group, shard: GraphShard | HeteroShard) -> None:
    """Compare types and the tensors' columns and element types of all ranks' parts.

    Raises:
        DataError: says on every rank what the first part has that differs, and how.
    """
    described = group.all_gather_object(_description(shard))
    for part, found in enumerate(described):
        for what in sorted({*described[0], *found}):
            here, there = found.get(what, "nothing"), described[0].get(what, "nothing")
            if here != there:
                raise DataError(
                    f"the parts of the graph differ: of {what}, part {part} has {here} and part 0 has {there}.",
                    hint="partition the graph anew, from one source, and give every machine the same store.",
                )


def _description(shard: GraphShard | HeteroShard) -> dict[str, str]:
    """What must be equal in all parts, in words."""
    if isinstance(shard, GraphShard):
        return {"the nodes": _tensors(shard.node_data), "the edges": _tensors(shard.edge_data)}
    nodes = {f"the node type {kind}": _tensors(tensors) for kind, tensors in shard.node_data.items()}
    edges = {f"the edge type {', '.join(kind)}": _tensors(tensors) for kind, tensors in shard.edge_data.items()}
    return nodes | edges


def _tensors(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {_columns(tensor)}" for name, tensor in sorted(tensors.items()))


def _columns(tensor: Tensor) -> str:
    columns = "".join(f" x {size}" for size in tensor.shape[1:])
    return f"({str(tensor.dtype).removeprefix('torch.')}{columns})"
