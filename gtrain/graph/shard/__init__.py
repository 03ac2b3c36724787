"""Shards: the piece of a graph that one rank holds, or the whole of it."""

from gtrain.graph.shard.graph import GraphShard, block_edges, load_shard, load_whole

__all__ = ["GraphShard", "block_edges", "load_shard", "load_whole"]
