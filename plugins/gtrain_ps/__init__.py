"""``strategy=ps``: wide sparse layers in blocks on parameter servers; only sparse inputs and activations are sent.

X W = X_1 W_1 + ... + X_P W_P: a server stores a block of the layer's matrix and never sends it. A worker sends the
parts X_i of its batch, sums the products, trains the other layers, and returns the products' gradient; the server
computes X_i' dY and updates its block.
"""

from typing import Any

from gtrain.backends import FULL_PRECISION, Backend, Limit, Role, Serves, sampling_limits

SERVES = Serves(
    models=frozenset({"sparse", "embedding", "message-passing"}),
    refusal="it trains sparse, embedding and graph models, whose tables it keeps on servers",
    tasks=("node", "link"),
    heterogeneous=True,
    needs_table=True,
    limits={
        **FULL_PRECISION,
        "trainer.gradient_clip_val": Limit((None, 0), "cannot clip the gradients of tables, which no worker has"),
        "model.by_query": Limit((False,), "trains both ends of an edge in one step"),
        "trainer.accumulate_grad_batches": Limit((1,), "takes a step after every batch; raise data.batch_size"),
        "data.num_neighbors": Limit((None,), "samples neighbours of nodes, not of edges", task="link"),
        **sampling_limits(
            "samples neighbours by data.num_neighbors and data.replace alone",
            but=("data.num_neighbors", "data.replace"),
        ),
    },
)


def _server_restarts(cfg: Any) -> int:
    return 0 if cfg.strategy.durability == "none" else cfg.strategy.max_restarts


backend = Backend(
    description="wide sparse layers and tables in blocks on parameter servers",
    config="gtrain_ps.config:PsConfig",
    strategy="gtrain_ps.strategy:PsStrategy",
    conf="gtrain_ps.conf",
    serves=SERVES,
    store="gtrain_ps.config:store_settings",
    gpu="servers stay on CPUs; the layers behind the tables, and the graph, are on the workers' devices",
    less_memory=(
        "lower data.batch_size",
        "on a graph set data.num_neighbors, with which a batch is a sample of the graph",
        "lower model.hidden_channels or model.num_layers",
        "start fewer workers on each device",
    ),
    table_reader="gtrain_ps.checkpoints:read_table",
    roles={
        "parameter": Role(
            target="gtrain_ps.server.service:main",
            count=lambda cfg: cfg.strategy.servers,
            restarts=_server_restarts,
        ),
        "worker": Role(restarts=lambda cfg: _server_restarts(cfg) if cfg.strategy.rest == "server" else 0),
    },
    planner="gtrain_ps.plan:PsPlanner",
)
