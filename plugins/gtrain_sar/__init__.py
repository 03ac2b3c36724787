"""``strategy=sar``: sharded-aggregation full-batch training of graph neural networks.

Each rank owns a part of the graph. For every message-passing layer it fetches the rows of remote nodes that its edges
read, block by block (one block for each owner), and aggregates them (Mostafa, "Sequential Aggregation and
Rematerialization: Distributed Full-batch Training of Graph Neural Networks on Large Graphs", MLSys 2022).
"""

from gtrain.backends import BFLOAT16_TOO, Backend, Limit, Serves, sampling_limits

SERVES = Serves(
    models=frozenset({"message-passing"}),
    refusal="it shards message passing, and there is nothing to aggregate",
    tasks=("node", "link"),
    heterogeneous=True,
    part_per_rank=True,
    limits={
        **BFLOAT16_TOO,
        "data.batch_size": Limit((None,), "trains on the whole graph at once"),
        "trainer.accumulate_grad_batches": Limit(
            (1,), "takes the whole graph as one batch, so there is nothing to accumulate"
        ),
        **sampling_limits("uses every neighbour"),
    },
)

backend = Backend(
    description="full-batch GNN training over a sharded graph; mode=1 recomputes, 2 keeps, 3 exchanges at once",
    config="gtrain_sar.config:SarConfig",
    strategy="gtrain_sar.strategy:SarStrategy",
    conf="gtrain_sar.conf",
    serves=SERVES,
    shortcuts=("mode",),
    gpu="each rank's part of the graph is on its device; convolutions run by Triton kernels",
    less_memory=(
        "set mode=1 and strategy.prefetch=0, with which a rank has the rows of one remote block at a time",
        "start more ranks, each on a device of its own (trainer.devices, trainer.num_nodes)",
        "set trainer.precision=bf16-mixed",
        "lower model.hidden_channels or model.num_layers",
    ),
    planner="gtrain_sar.plan:SarPlanner",
)
