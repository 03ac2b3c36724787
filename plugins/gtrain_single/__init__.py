"""``strategy=single``: one process, the whole graph; the reference for all other strategies."""

from gtrain.backends import Backend, Limit, Serves, sampling_limits

SERVES = Serves(
    tasks=("node", "link"),
    heterogeneous=True,
    limits={
        "trainer.num_nodes": Limit((1,), "is one process"),
        "trainer.devices": Limit((1,), "is one process"),
        **sampling_limits("uses every neighbour"),
    },
)

backend = Backend(
    description="one process, the whole graph: the reference",
    config="gtrain_single.config:SingleConfig",
    strategy="gtrain_single.strategy:SingleStrategy",
    conf="gtrain_single.conf",
    serves=SERVES,
)
