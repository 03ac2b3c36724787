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
    gpu="model, graph and features are on the device; convolutions run by Triton kernels",
    less_memory=(
        "choose strategy=pyg, which trains on sampled neighbourhoods (data.batch_size, data.num_neighbors), or "
        "strategy=sar, which divides the graph among ranks on several devices",
        "set trainer.precision=bf16-mixed",
        "lower model.hidden_channels or model.num_layers",
    ),
    planner="gtrain_single.plan:SinglePlanner",
)
