"""Shards: the part of a graph that one rank holds, or the whole graph as one shard."""

from gtrain.graph.shard.graph import (
    GraphShard,
    HeteroShard,
    block_edges,
    load_hetero_shard,
    load_shard,
    load_whole,
)

__all__ = ["GraphShard", "HeteroShard", "block_edges", "load_hetero_shard", "load_shard", "load_whole"]
