"""``strategy=pbg``: embeddings trained in buckets, pairs of partitions of the table (Lerer et al. 2019)."""

from gtrain.backends import Backend, Role
from gtrain_pbg import config

backend = Backend(
    description="embedding tables in partitions, trained bucket by bucket by Hogwild workers",
    config="gtrain_pbg.config:PBGConfig",
    strategy="gtrain_pbg.strategy:PBGStrategy",
    conf="gtrain_pbg.conf",
    serves=frozenset({"embedding"}),
    refusal="it trains tables of embeddings from edges alone, and no layers that pass messages",
    roles={
        "lock": Role("gtrain_pbg.machines.lock_server:main", config.count_locks),
        "partition": Role(
            "gtrain_pbg.machines.partition_server:main",
            config.count_partition_servers,
            restarts=lambda cfg: cfg.strategy.max_restarts,
        ),
        "parameter": Role("gtrain_pbg.machines.parameter_server:main", config.count_parameter_servers),
    },
    store="gtrain_pbg.config:store_settings",
)
