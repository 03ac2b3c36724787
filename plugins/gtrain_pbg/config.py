"""The settings of ``strategy=pbg``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtrain.config import StrategyConfig
from gtrain.errors import ConfigError

ORDERS = ("random", "affinity", "inside_out", "outside_in", "beta", "sequential")
MATMULS = ("float32", "bfloat16")


@dataclass
class PBGConfig(StrategyConfig):
    """Settings of the strategy.

    Attributes:
        num_partitions: P, parts of the table; there are P * P buckets of edges.
        buffer_partitions: parts in memory at a time; with one more than the two of a bucket, the next is read and the
            last is written while a bucket is trained. None: all P.
        bucket_order: in which order an epoch goes through the buckets; see :mod:`gtrain_pbg.order`.
        num_edge_chunks: pieces of each bucket; an epoch goes through all first ones, then through all second ones.
        eval_fraction: share of each bucket's edges, the same in every epoch, that is held back and scored.
        shuffle: whether the edges of a bucket come in another order each epoch.
        matmul: type of products of matrices; sums are in float32, and so are tables.
        warm_start: a checkpoint of another run, or its folder, whose vectors and relations this one begins with.
    """

    num_partitions: int = 1
    buffer_partitions: int | None = None
    bucket_order: str = "inside_out"
    num_edge_chunks: int = 1
    eval_fraction: float = 0.0
    shuffle: bool = True
    matmul: str = "float32"
    warm_start: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.num_partitions,
            self.buffer_partitions,
            self.bucket_order,
            self.num_edge_chunks,
            self.eval_fraction,
            self.matmul,
        )


def check(
    num_partitions: int,
    buffer_partitions: int | None,
    bucket_order: str,
    num_edge_chunks: int,
    eval_fraction: float,
    matmul: str,
) -> None:
    """Check settings against each other.

    Raises:
        ConfigError: with what was set and what is allowed.
    """
    for key, value in (("num_partitions", num_partitions), ("num_edge_chunks", num_edge_chunks)):
        if value < 1:
            raise ConfigError(f"strategy.{key}={value} was set; it must be at least 1.", hint=f"raise strategy.{key}.")
    if buffer_partitions is not None and buffer_partitions < min(2, num_partitions):
        raise ConfigError(
            f"strategy.buffer_partitions={buffer_partitions} was set; a bucket joins 2 of the "
            f"strategy.num_partitions={num_partitions} partitions, so 2 must fit.",
            hint="set strategy.buffer_partitions=2, 3 to read ahead while training, or null for all.",
        )
    for key, text, options in (("bucket_order", bucket_order, ORDERS), ("matmul", matmul, MATMULS)):
        if text not in options:
            raise ConfigError(f"strategy.{key}={text} was set.", hint=f"choose one of {', '.join(options)}.")
    if not 0 <= eval_fraction < 1:
        raise ConfigError(
            f"strategy.eval_fraction={eval_fraction} was set; it must be at least 0 and below 1.",
            hint="0.05 holds back a twentieth of the edges; 0 holds back none.",
        )


def store_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the store of a job must be like: a part for each partition, and edges by buckets.

    Args:
        config: the composed configuration.

    Raises:
        ConfigError: ``data.num_parts`` says something else.
    """
    data, partitions = config["data"], config["strategy"]["num_partitions"]
    if data.get("num_parts") not in (None, partitions):
        raise ConfigError(
            f"data.num_parts={data['num_parts']} was set; strategy=pbg has strategy.num_partitions={partitions} "
            "partitions, and the store has a part for each.",
            hint=f"leave data.num_parts, or set strategy.num_partitions={data['num_parts']}.",
        )
    partitioner = data.get("partitioner")
    given = partitioner in ("file", "given") or data.get("keep_parts")
    return {"num_parts": partitions, "partitioner": partitioner if given else "random", "buckets": True}
