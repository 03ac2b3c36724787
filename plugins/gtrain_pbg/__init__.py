"""``strategy=pbg``: embeddings trained in buckets, pairs of partitions of the table (Lerer et al. 2019)."""

from gtrain.backends import Backend

backend = Backend(
    description="embedding tables in partitions, trained bucket by bucket by Hogwild workers",
    config="gtrain_pbg.config:PBGConfig",
    strategy="gtrain_pbg.strategy:PBGStrategy",
    conf="gtrain_pbg.conf",
    serves=frozenset({"embedding"}),
    refusal="it trains tables of embeddings from edges alone, and no layers that pass messages",
    store="gtrain_pbg.config:store_settings",
)
