"""The settings of ``strategy=pbg``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtrain.config import StrategyConfig
from gtrain.errors import ConfigError

ORDERS = ("random", "affinity", "inside_out", "outside_in", "beta", "sequential")
MATMULS = ("auto", "float32", "bfloat16", "int8")
LOSSES = ("continue", "stop")
EACH = -1
"""``partition_servers``: one on each machine."""


@dataclass
class PBGConfig(StrategyConfig):
    """Settings of the strategy.

    Attributes:
        num_partitions: P, parts of the table; there are P * P buckets of edges.
        buffer_partitions: parts in memory at a time; with one more than the two of a bucket, the next is read and the
            last is written while a bucket is trained. None: all P; on several machines 3.
        bucket_order: in which order an epoch goes through the buckets; see :mod:`gtrain_pbg.order`.
        num_edge_chunks: pieces of each bucket; an epoch goes through all first ones, then through all second ones.
        eval_fraction: share of each bucket's edges, the same in every epoch, that is held back and scored.
        shuffle: whether the edges of a bucket come in another order each epoch.
        matmul: number format of matrix products; sums and tables are in float32. ``int8``: integers in chunks too
            large for the caches, ``bfloat16`` in others. ``auto``: the fastest that the CPUs of all ranks have
            instructions for and that trains the model as accurately as float32; see :mod:`gtrain_pbg.step.arithmetic`.
        warm_start: a checkpoint of another run, or its folder, whose vectors and relations this one begins with.
        partition_servers: servers that keep partitions between their trainings, on several machines: -1: one on each,
            0: none, they are in a folder that all machines share.
        partition_path: that folder; None: ``partitions`` in the run's.
        distributed_tree_init_order: whether, in the first epoch on several machines, a bucket is trained only after
            one of its partitions was, but the first.
        sync_interval: seconds between the exchanges of relation parameters among machines.
        lease_seconds: after how long a machine that is silent is taken for lost.
        on_trainer_loss: ``continue`` trains its buckets on other machines, ``stop`` ends the job.
        max_restarts: how often the lock server or a partition server that died is restarted, or a worker that died
            before it had a part in the job.
        checkpoint_preservation_interval: every so many epochs, the checkpoint is kept for good; None: never.
        checkpoint_chunks: whether the last checkpoint is written after each edge chunk too; all machines wait for it.
    """

    num_partitions: int = 1
    buffer_partitions: int | None = None
    bucket_order: str = "affinity"
    num_edge_chunks: int = 1
    eval_fraction: float = 0.0
    shuffle: bool = True
    matmul: str = "auto"
    warm_start: str | None = None
    partition_servers: int = EACH
    partition_path: str | None = None
    distributed_tree_init_order: bool = True
    sync_interval: float = 0.1
    lease_seconds: float = 30.0
    on_trainer_loss: str = "continue"
    max_restarts: int = 3
    checkpoint_preservation_interval: int | None = None
    checkpoint_chunks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_numbers()
        self._check_choices()
        if self.partition_path is not None and self.partition_servers != 0:
            raise ConfigError(
                f"strategy.partition_path={self.partition_path} was set; with "
                f"strategy.partition_servers={self.partition_servers} partitions are on servers, and not in a folder.",
                hint="set strategy.partition_servers=0, or leave strategy.partition_path.",
            )

    def _check_numbers(self) -> None:
        interval = self.checkpoint_preservation_interval
        for key, value, least in (
            ("num_partitions", self.num_partitions, 1),
            ("num_edge_chunks", self.num_edge_chunks, 1),
            ("partition_servers", self.partition_servers, EACH),
            ("max_restarts", self.max_restarts, 0),
            ("checkpoint_preservation_interval", 1 if interval is None else interval, 1),
        ):
            if value < least:
                raise ConfigError(
                    f"strategy.{key}={value} was set; it must be at least {least}.", hint=f"raise strategy.{key}."
                )
        for key, number in (("sync_interval", self.sync_interval), ("lease_seconds", self.lease_seconds)):
            if not number > 0:
                raise ConfigError(
                    f"strategy.{key}={number} was set; it must be above 0 seconds.", hint=f"raise strategy.{key}."
                )
        buffer, partitions = self.buffer_partitions, self.num_partitions
        if buffer is not None and buffer < min(2, partitions):
            raise ConfigError(
                f"strategy.buffer_partitions={buffer} was set; a bucket joins 2 of the "
                f"strategy.num_partitions={partitions} partitions, so 2 must fit.",
                hint="set strategy.buffer_partitions=2, 3 to read ahead while training, or null for all.",
            )
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(
                f"strategy.eval_fraction={self.eval_fraction} was set; it must be at least 0 and below 1.",
                hint="0.05 holds back a twentieth of the edges; 0 holds back none.",
            )

    def _check_choices(self) -> None:
        for key, text, options in (
            ("bucket_order", self.bucket_order, ORDERS),
            ("matmul", self.matmul, MATMULS),
            ("on_trainer_loss", self.on_trainer_loss, LOSSES),
        ):
            if text not in options:
                raise ConfigError(f"strategy.{key}={text} was set.", hint=f"choose one of {', '.join(options)}.")


def check_machines(machines: int, settings: PBGConfig) -> None:
    """Refuse more machines than can train at a time, and what they do not do.

    Args:
        machines: ``trainer.num_nodes``.
        settings: of the strategy.

    Raises:
        ConfigError: with the arithmetic.
    """
    partitions, buffer = settings.num_partitions, settings.buffer_partitions
    if machines > 1 and 2 * machines > partitions:
        raise ConfigError(
            f"trainer.num_nodes={machines} and strategy.num_partitions={partitions} were set; each machine trains a "
            f"bucket of 2 partitions that no other has: 2 * {machines} = {2 * machines} > {partitions}.",
            hint=f"set strategy.num_partitions={2 * machines} or more, or trainer.num_nodes={max(1, partitions // 2)}.",
        )
    if machines > 1 and buffer not in (None, 2, 3):
        raise ConfigError(
            f"strategy.buffer_partitions={buffer} was set; each of trainer.num_nodes={machines} machines has the 2 "
            "partitions of its bucket and one that it writes back or reads ahead.",
            hint="set strategy.buffer_partitions=3, or 2 to save memory.",
        )


def count_locks(cfg: Any) -> int:
    """Lock servers of a job: one where there are several machines."""
    strategy = cfg.strategy
    check_machines(cfg.trainer.num_nodes, strategy)
    return int(cfg.trainer.num_nodes > 1)


def max_restarts(cfg: Any) -> int:
    """How often a process of a job is restarted that has lost nothing by its end."""
    return int(cfg.strategy.max_restarts)


def worker_restarts(cfg: Any) -> int:
    """How often a worker is restarted that died before it had a part in a job of several machines."""
    return max_restarts(cfg) if cfg.trainer.num_nodes > 1 else 0


def count_partition_servers(cfg: Any) -> int:
    """Partition servers of a job."""
    machines, wanted = cfg.trainer.num_nodes, cfg.strategy.partition_servers
    if machines == 1:
        return 0
    return int(machines if wanted == EACH else wanted)


def count_parameter_servers(cfg: Any) -> int:
    """Parameter servers of a job: one on each of several machines."""
    return int(cfg.trainer.num_nodes if cfg.trainer.num_nodes > 1 else 0)


def store_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the store of a job must be like: a part for each partition, and edges by buckets.

    The partitions that data comes in are kept, unless ``data.keep_parts=false`` or a partitioner was set.

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
    partitioner, keep = data.get("partitioner"), data.get("keep_parts", False)
    kept = {"keep_parts": True} if keep is None and partitioner == "auto" else {}
    given = partitioner in ("file", "given") or keep or kept
    return {"num_parts": partitions, "partitioner": partitioner if given else "random", "buckets": True, **kept}
