"""``strategy=pbg``: embeddings trained in buckets, pairs of partitions of the table (Lerer et al. 2019)."""

from gtrain.backends import FULL_PRECISION, UNEQUAL_STEPS, Backend, Limit, Role, Serves, sampling_limits
from gtrain_pbg import config

SERVES = Serves(
    models=frozenset({"embedding"}),
    refusal="it trains tables of embeddings from edges alone, and no layers that pass messages",
    tasks=("link",),
    limits={
        **FULL_PRECISION,
        **UNEQUAL_STEPS,
        "trainer.gradient_clip_val": Limit((None, 0), "applies the gradients of a step at once"),
        "model.by_query": Limit((False,), "trains both ends of an edge in one step"),
        "trainer.accumulate_grad_batches": Limit((1,), "applies the gradients of a step at once"),
        **sampling_limits("draws no neighbours"),
    },
)

backend = Backend(
    description="embedding tables in partitions, trained bucket by bucket by Hogwild workers",
    config="gtrain_pbg.config:PBGConfig",
    strategy="gtrain_pbg.strategy:PBGStrategy",
    conf="gtrain_pbg.conf",
    serves=SERVES,
    roles={
        "lock": Role(
            "gtrain_pbg.machines.lock_server:main",
            config.count_locks,
            restarts=lambda cfg: cfg.strategy.max_restarts,
        ),
        "partition": Role(
            "gtrain_pbg.machines.partition_server:main",
            config.count_partition_servers,
            restarts=lambda cfg: cfg.strategy.max_restarts,
        ),
        # a worker is restarted only if it dies before it has joined a job of several machines
        "worker": Role(restarts=lambda cfg: cfg.strategy.max_restarts if cfg.trainer.num_nodes > 1 else 0),
        "parameter": Role(
            "gtrain_pbg.machines.parameter_server:main",
            lambda cfg: cfg.trainer.num_nodes if cfg.trainer.num_nodes > 1 else 0,
        ),
    },
    store="gtrain_pbg.config:store_settings",
    parts_key="strategy.num_partitions",
    table_reader="gtrain_pbg.checkpoints:read_table",
    gpu="partitions and batches are on the device, swapped from page-locked memory of the host while it computes",
    less_memory=(
        "raise strategy.num_partitions and set strategy.device_partitions=2",
        "lower data.batch_size",
        "lower model.dimension, model.num_batch_negs or model.num_uniform_negs",
        "start fewer machines' workers on each device",
    ),
    planner="gtrain_pbg.plan:PbgPlanner",
)
