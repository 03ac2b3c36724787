"""Two example strategies: ``replicated`` extends gtrain's base class, ``sar_auto`` another backend's strategy."""

from gtrain.backends import FULL_PRECISION, Backend, Limit, Serves, sampling_limits

_FULL_BATCH = {"data.batch_size": Limit((None,), "trains in full batch"), **sampling_limits("uses every neighbour")}
REPLICATED = Serves(limits={**FULL_PRECISION, **_FULL_BATCH})
SAR_AUTO = Serves(
    models=frozenset({"message-passing"}),
    refusal="it shards message passing, and there is nothing to aggregate",
    tasks=("node", "link"),
    heterogeneous=True,
    limits={**FULL_PRECISION, **_FULL_BATCH},
)

# the names differ from the modules': importing gtrain_example.replicated would replace an object of that name
replicated_backend = Backend(
    description="every rank holds the whole graph and takes a share of the seeds (example)",
    config="gtrain_example.config:ReplicatedConfig",
    strategy="gtrain_example.replicated:ReplicatedStrategy",
    conf="gtrain_example.conf",
    serves=REPLICATED,
    planner="gtrain_example.plan:ReplicatedPlanner",
)

sar_auto_backend = Backend(
    description="sar, with mode 1 or 3 chosen by the size of the halo (example)",
    config="gtrain_example.config:SarAutoConfig",
    strategy="gtrain_example.sar_auto:SarAutoStrategy",
    conf="gtrain_example.conf",
    serves=SAR_AUTO,
)
