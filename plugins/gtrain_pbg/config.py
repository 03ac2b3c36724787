"""The settings of ``strategy=pbg``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gtrain.config import StrategyConfig
from gtrain.errors import ConfigError
from gtrain.settings import setting

if TYPE_CHECKING:
    from gtrain.graph.store import Store
    from gtrain.nn.recipe import ModelRecipe
    from gtrain.protocols import StoreData

ORDERS = ("random", "affinity", "inside_out", "outside_in", "beta", "sequential")
EACH = -1
"""Value of ``partition_servers``: one on each machine."""


@dataclass
class PBGConfig(StrategyConfig):
    """Settings of ``strategy=pbg``."""

    num_partitions: int = setting(
        1,
        "P; there are P * P buckets of edges. Replaces `data.num_parts`: the store has one part per partition",
        least=1,
    )
    buffer_partitions: int | None = setting(
        None,
        "partitions in memory at a time; null: all, on several machines 3. The others are files in the run's folder. "
        "The least is 2; with 3, the next partition is prefetched and the last one written while a bucket is trained",
    )
    device_partitions: int | None = setting(
        None,
        "partitions on the GPU at a time, with `trainer.accelerator=gpu`; null: as many as fit. The others are in the "
        "host's memory. The least is 2; with 3, the next partition is copied to the GPU, and the last one back, while "
        "a bucket is trained",
    )
    bucket_order: str = setting(
        "affinity",
        "order of the buckets in an epoch, drawn again for each epoch unless `sequential`; `beta` is for a buffer of "
        "more than two",
        words=ORDERS,
    )
    num_edge_chunks: int = setting(
        1, "chunks per bucket: an epoch trains the first chunk of all buckets, then the second of all, ...", least=1
    )
    eval_fraction: float = setting(
        0.0,
        "share of each bucket's edges, the same edges in every epoch, that is held out of training and ranked before "
        "and after it: `train/held_out_mrr_before`, `train/held_out_mrr`",
        least=0,
        below=1,
        hint="0.05 holds out a twentieth of the edges; 0 holds out none.",
    )
    shuffle: bool = setting(True, "whether the edges of a bucket are shuffled in each epoch")
    matmul: str = setting(
        "auto",
        "number format of matrix products; sums and tables are float32. `int8`: in chunks too large for the caches, "
        "and `bfloat16` in others; `auto`: the fastest format that all CPUs have and that is as accurate as float32, "
        "see [arithmetic](pbg.md#arithmetic). A GPU has no `int8`",
        words=("auto", "float32", "bfloat16", "int8"),
    )
    warm_start: str | None = setting(
        None,
        "folder or checkpoint of another run, or the address of a checkpoint, whose vectors and relations are the "
        "initial values of this run",
        path=True,
    )
    partition_servers: int = setting(
        EACH,
        "partition servers of several machines, which store partitions that no machine trains. -1: one on each "
        "machine; 0: none, partitions are files in a folder that all machines share; n: n servers that are started "
        "by hand, with `cluster.standalone=[partition]` and `gtrain serve role=partition`",
        least=EACH,
    )
    partition_path: str | None = setting(
        None,
        "with `strategy.partition_servers=0`, the shared folder, for one job at a time; null: `partitions` in the "
        "run's folder",
    )
    distributed_tree_init_order: bool = setting(
        True,
        "in the first epoch on several machines, a bucket is granted only once one of its partitions has been "
        "trained (except the first bucket of each connected component), so that no two machines start from unrelated "
        "vectors that meet later",
    )
    sync_interval: float = setting(
        0.1,
        "seconds between a machine's exchanges of relation parameters with the parameter servers, at most 100 "
        "exchanges and 1 GB per second. Lower it if an epoch takes seconds: operators that are a quarter of an epoch "
        "old are learned more slowly",
        above=0,
        unit="seconds",
    )
    lease_seconds: float = setting(
        30.0, "a machine without heartbeats for this time is declared lost", above=0, unit="seconds"
    )
    on_trainer_loss: str = setting(
        "continue",
        "reaction to the loss of a machine",
        words={"continue": "other machines train its buckets", "stop": "the job ends"},
    )
    max_restarts: int = setting(
        3,
        "restarts of a lock server or partition server that died, and of a worker that died before it joined",
        least=0,
    )
    checkpoint_preservation_interval: int | None = setting(
        None,
        "epochs between checkpoints that are preserved, as `checkpoints/epoch-00010.ckpt` after the tenth; null: never",
        least=1,
    )
    checkpoint_chunks: bool = setting(
        False,
        "whether `checkpoints/last.ckpt` is also written after each edge chunk (of each edge set); several machines "
        "then wait for each other at the end of a chunk",
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
        device = self.device_partitions
        if device is not None and device < min(2, partitions):
            raise ConfigError(
                f"strategy.device_partitions={device} was set; a bucket joins 2 of the "
                f"strategy.num_partitions={partitions} partitions, so 2 must be on the GPU.",
                hint="set strategy.device_partitions=2, 3 to copy while training, or null for as many as fit.",
            )
        if self.partition_path is not None and self.partition_servers != 0:
            raise ConfigError(
                f"strategy.partition_path={self.partition_path} was set; with "
                f"strategy.partition_servers={self.partition_servers} servers store the partitions, not a folder.",
                hint="set strategy.partition_servers=0, or remove strategy.partition_path.",
            )


def check_machines(machines: int, settings: PBGConfig) -> None:
    """Check that all machines can train at a time.

    Args:
        machines: ``trainer.num_nodes``.
        settings: of the strategy.

    Raises:
        ConfigError: there are too few partitions, or too many in memory.
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
    """Return the number of lock servers: one for several machines."""
    check_machines(cfg.trainer.num_nodes, cfg.strategy)
    return int(cfg.trainer.num_nodes > 1)


def count_partition_servers(cfg: Any) -> int:
    """Return the number of partition servers of a job."""
    machines, servers = cfg.trainer.num_nodes, cfg.strategy.partition_servers
    return int((machines if servers == EACH else servers) if machines > 1 else 0)


def store_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the job's store: a part per partition, and edges by bucket.

    Partitions in which the data comes are kept, unless ``data.keep_parts=false`` or a partitioner was set.

    Args:
        config: the composed configuration.

    Raises:
        ConfigError: ``data.num_parts`` is another number.
    """
    data, partitions = config["data"], config["strategy"]["num_partitions"]
    if data.get("num_parts") not in (None, partitions):
        raise ConfigError(
            f"data.num_parts={data['num_parts']} was set; strategy=pbg has strategy.num_partitions={partitions} "
            "partitions, and the store has a part for each.",
            hint=f"remove data.num_parts, or set strategy.num_partitions={data['num_parts']}.",
        )
    partitioner, keep = data.get("partitioner"), data.get("keep_parts", False)
    keeps = {"keep_parts": True} if keep is None and partitioner == "auto" else {}
    is_set = partitioner in ("file", "given") or keep or keeps
    return {"num_parts": partitions, "partitioner": partitioner if is_set else "random", "buckets": True, **keeps}


def check_training(trainer: Any, data: StoreData | None, model: ModelRecipe) -> None:
    """Check that batches consist of whole chunks, and that a limit of the epoch can be kept.

    Raises:
        ConfigError: with the setting.
    """
    limit = 0 if trainer is None else trainer.limit_train_batches
    if not isinstance(limit, int) and 0 < limit < 1:
        raise ConfigError(
            f"trainer.limit_train_batches={limit} was set; strategy=pbg makes the batches of an epoch as it trains, "
            "and cannot train a fraction of them.",
            hint="set a whole number of batches of about 50,000 edges.",
        )
    if isinstance(limit, int) and limit and trainer.num_nodes > 1:
        raise ConfigError(
            f"trainer.limit_train_batches={limit} was set with trainer.num_nodes={trainer.num_nodes}; strategy=pbg "
            "on several machines ends an epoch when all buckets are trained, not after a number of batches.",
            hint="remove trainer.limit_train_batches, or set trainer.num_nodes=1.",
        )
    size = None if data is None else data.batch_size
    recipe = next((group for group in model.groups if not group.all_negs), None)  # without chunks any size will do
    if size is not None and recipe is not None and size > recipe.chunk_size and size % recipe.chunk_size:
        key = "num_batch_negs" if recipe.num_batch_negs else "num_uniform_negs"
        raise ConfigError(
            f"data.batch_size={size} is not a multiple of model.{key}={recipe.chunk_size}, the edges of a chunk: "
            f"{size} = {size // recipe.chunk_size} * {recipe.chunk_size} + {size % recipe.chunk_size}.",
            hint=f"set data.batch_size={size // recipe.chunk_size * recipe.chunk_size}.",
        )


def check_device(workers: int, settings: PBGConfig, model: ModelRecipe) -> None:
    """Check that a GPU can train a model.

    Args:
        workers: of a machine.
        settings: of the strategy.
        model: its recipe.

    Raises:
        ConfigError: with the setting that a GPU does not serve.
    """
    if workers > 1:
        raise ConfigError(
            f"trainer.devices={workers} was set with trainer.accelerator=gpu; the workers of a machine would train on "
            "copies of the same partitions, one on each GPU.",
            hint=f"set trainer.devices=1 trainer.num_nodes={workers}: each GPU then counts as a machine, and trains "
            "buckets of its own.",
        )
    if settings.matmul == "int8":
        raise ConfigError(
            "strategy.matmul=int8 was set with trainer.accelerator=gpu; it is for CPUs.",
            hint="set strategy.matmul=bfloat16, float32, or auto.",
        )
    if any(bags is not None for group in model.groups for bags in group.bags):
        raise ConfigError(
            "an entity type has features (data.entities.<type>.featurized), and trainer.accelerator=gpu was set; "
            "strategy=pbg trains embeddings that are means of features' rows on CPUs.",
            hint="set trainer.accelerator=cpu.",
        )


def check_store(store: Store, partitions: int) -> None:
    """Check that a store was made for this number of partitions.

    Raises:
        ConfigError: it has another number of parts, or no buckets.
    """
    if store.num_parts != partitions or not store.has_buckets:
        raise ConfigError(
            f"strategy.num_partitions={partitions} was set, and the store {store.path} has "
            f"{store.num_parts} parts{'' if store.has_buckets else ' and no edge buckets'}.",
            hint="let the gtrain command make the store, or set num_parts and edge_buckets of the data module.",
        )
