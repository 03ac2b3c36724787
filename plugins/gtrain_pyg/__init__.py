"""``strategy=pyg``: mini-batch training of graph neural networks on sampled neighbourhoods of a sharded graph.

Each rank owns a part of the graph and trains on the neighbourhoods of its seeds, sampled hop by hop (Hamilton, Ying and
Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS 2017). What a rank does not host it asks the
owner for, in one packed message per owner and hop, while earlier batches train.
"""

from gtrain.backends import Backend, Serves

SERVES = Serves(
    models=frozenset({"message-passing"}),
    refusal="it samples neighbourhoods, and there is nothing to aggregate",
    tasks=("node", "link"),
    heterogeneous=True,
    part_per_rank=True,
)

backend = Backend(
    description="mini-batch GNN training on sampled neighbourhoods of a sharded graph",
    config="gtrain_pyg.config:PygConfig",
    strategy="gtrain_pyg.strategy:PygStrategy",
    conf="gtrain_pyg.conf",
    serves=SERVES,
    gpu="batches are sampled on the CPU and copied to the device while earlier ones train",
    less_memory=(
        "lower data.batch_size or data.num_neighbors",
        "set strategy.device_cache=0, or to fewer bytes",
        "set trainer.precision=bf16-mixed",
        "lower model.hidden_channels or model.num_layers",
        "start fewer ranks on each device",
    ),
    planner="gtrain_pyg.plan:PygPlanner",
)
