"""Two strategies to copy: ``replicated`` on gtrain's own base, ``sar_auto`` on another backend's strategy."""

from gtrain.backends import Backend

# not named as the modules are: importing gtrain_example.replicated would put the module in the object's place
replicated_backend = Backend(
    description="every rank holds the whole graph and takes a share of the seeds (example)",
    config="gtrain_example.config:ReplicatedConfig",
    strategy="gtrain_example.replicated:ReplicatedStrategy",
    conf="gtrain_example.conf",
)

sar_auto_backend = Backend(
    description="sar, with mode 1 or 3 chosen by the size of the halo (example)",
    config="gtrain_example.config:SarAutoConfig",
    strategy="gtrain_example.sar_auto:SarAutoStrategy",
    conf="gtrain_example.conf",
    serves=frozenset({"message-passing"}),
    refusal="it shards message passing, and there is nothing to aggregate",
)
