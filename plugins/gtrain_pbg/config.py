"""The settings of ``strategy=pbg``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtrain.config import StrategyConfig
from gtrain.errors import ConfigError
from gtrain.settings import setting

ORDERS = ("random", "affinity", "inside_out", "outside_in", "beta", "sequential")
EACH = -1
"""``partition_servers``: one on each machine."""


@dataclass
class PBGConfig(StrategyConfig):
    """Settings of ``strategy=pbg``."""

    num_partitions: int = setting(
        1, "P; the store has a part for each, so `data.num_parts` is not set; there are P * P buckets of edges", least=1
    )
    buffer_partitions: int | None = setting(
        None,
        "partitions in memory at a time; null: all, on several machines 3. The others are files in the run's folder. 2 "
        "suffice; with 3, the next one is read and the last one written while a bucket is trained",
    )
    bucket_order: str = setting(
        "affinity",
        "in which order an epoch goes through the buckets, drawn anew each epoch, except `sequential`; `beta` is for a "
        "buffer of more than two",
        words=ORDERS,
    )
    num_edge_chunks: int = setting(
        1, "pieces of each bucket: an epoch trains the first chunk of all buckets, then the second of all, ...", least=1
    )
    eval_fraction: float = setting(
        0.0,
        "share of each bucket's edges, the same in every epoch, that is held back from training and ranked before and "
        "after it: `train/held_out_mrr_before`, `train/held_out_mrr`",
        least=0,
        below=1,
        hint="0.05 holds back a twentieth of the edges; 0 holds back none.",
    )
    shuffle: bool = setting(True, "whether the edges of a bucket come in another order each epoch")
    matmul: str = setting(
        "auto",
        "number format of matrix products; sums and tables are float32. `int8`: in chunks too large for the caches, "
        "`bfloat16` in others; `auto`: the fastest that all CPUs have and that is as accurate as float32, see "
        "[arithmetic](pbg.md#arithmetic)",
        words=("auto", "float32", "bfloat16", "int8"),
    )
    warm_start: str | None = setting(
        None, "the folder or a checkpoint of another run, whose vectors and relations this one begins with"
    )
    partition_servers: int = setting(
        EACH,
        "servers that keep partitions between their trainings, on several machines. -1: one on each; 0: none, "
        "partitions are files in a folder that all machines share; n: so many, which "
        "`cluster.standalone=[partition]` has started by hand, with `gtrain serve role=partition`",
        least=EACH,
    )
    partition_path: str | None = setting(
        None,
        "the shared folder, with `strategy.partition_servers=0`, of one job at a time; null: `partitions` in the run's",
    )
    distributed_tree_init_order: bool = setting(
        True,
        "in the first epoch on several machines, a bucket is trained only after one of its partitions was, but the "
        "first of all that are joined by edges: no two machines begin with vectors that have nothing to do with each "
        "other, and later will",
    )
    sync_interval: float = setting(
        0.1,
        "seconds between a machine's exchanges of relation parameters with the parameter servers; at most 100 a "
        "second, and 1 GB a second. Lower it where an epoch takes seconds: operators that are a quarter of an epoch "
        "old are learned more slowly",
        above=0,
        unit="seconds",
    )
    lease_seconds: float = setting(
        30.0, "a machine that is silent for so long is taken for lost", above=0, unit="seconds"
    )
    on_trainer_loss: str = setting(
        "continue",
        "what the loss of a machine means",
        words={"continue": "other machines train its buckets", "stop": "the job ends"},
    )
    max_restarts: int = setting(
        3,
        "how often the lock server or a partition server that died is restarted, or a worker that died before it had "
        "joined",
        least=0,
    )
    checkpoint_preservation_interval: int | None = setting(
        None,
        "every so many epochs, the checkpoint is kept for good, as `checkpoints/epoch-00010.ckpt` after the tenth; "
        "null: never",
        least=1,
    )
    checkpoint_chunks: bool = setting(
        False,
        "`checkpoints/last.ckpt` is written after each edge chunk (of each edge set) too; several machines end a chunk "
        "together, and all wait for it",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        buffer, partitions = self.buffer_partitions, self.num_partitions
        if buffer is not None and buffer < min(2, partitions):
            raise ConfigError(
                f"strategy.buffer_partitions={buffer} was set; a bucket joins 2 of the "
                f"strategy.num_partitions={partitions} partitions, so 2 must fit.",
                hint="set strategy.buffer_partitions=2, 3 to read ahead while training, or null for all.",
            )
        if self.partition_path is not None and self.partition_servers != 0:
            raise ConfigError(
                f"strategy.partition_path={self.partition_path} was set; with "
                f"strategy.partition_servers={self.partition_servers} partitions are on servers, and not in a folder.",
                hint="set strategy.partition_servers=0, or leave strategy.partition_path.",
            )


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
