"""What a run of ``strategy=replicated`` costs, for ``gtrain plan``: each rank computes the whole graph."""

from __future__ import annotations

from gtrain.plan import layers
from gtrain.plan.estimate import MEMORY, NETWORK, SENT, Estimate, PlannedRun, Planner


class ReplicatedPlanner(Planner):
    """The formulas of ``replicated``: those of the whole graph, messages per edge, and one sum of gradients."""

    def estimate(self, run: PlannedRun) -> Estimate:
        work, estimate = run.workload, Estimate()
        layers.add_memory(estimate, run, work.num_nodes, work.num_edges)
        layers.add_time(estimate, run, work.num_nodes, work.num_edges, work.num_seeds)
        for number, layer in enumerate(work.layers, start=1):
            # PyG's own convolutions make a message for each edge.
            estimate.add(
                MEMORY, f"messages of layer {number}", "edges * inputs * item",
                edges=work.num_edges, inputs=layer.inputs, item=work.item,
            )  # fmt: skip
        if run.ranks > 1:
            estimate.add(SENT, "sum of gradients", "parameters * item", parameters=work.parameters, item=work.item)
            estimate.add(NETWORK, "transfer", "sent / link", sent=estimate.total(SENT), link=run.link)
        return estimate
