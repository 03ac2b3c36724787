"""``strategy=counting``: workers that count their steps at servers, and average their weights once an epoch."""

from gtrain.backends import Backend, Role

backend = Backend(
    description="counts steps at servers, averages weights once an epoch (for tests)",
    config="gtrain_counting.config:CountingConfig",
    strategy="gtrain_counting.strategy:CountingStrategy",
    conf="gtrain_counting.conf",
    roles={
        "counter": Role(
            target="gtrain_counting.server:main",
            count=lambda cfg: cfg.strategy.servers,
            restarts=lambda cfg: cfg.strategy.max_restarts,
        ),
        "worker": Role(restarts=lambda cfg: cfg.strategy.worker_restarts),
    },
)
