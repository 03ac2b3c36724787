"""``strategy=single``: one process, the whole graph; the reference that every other strategy is held against."""

from gtrain.backends import Backend

backend = Backend(
    description="one process, the whole graph: the reference",
    config="gtrain.config:StrategyConfig",
    strategy="gtrain_single.strategy:SingleStrategy",
    conf="gtrain_single.conf",
)
