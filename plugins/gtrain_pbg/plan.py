"""What a run of ``strategy=pbg`` costs: partitions in memory and on disk, and buckets of edges."""

from __future__ import annotations

from gtrain.plan import layers, wide
from gtrain.plan.estimate import (
    DISK,
    DISK_TIME,
    MEMORY,
    NETWORK,
    OVERHEAD,
    SENT,
    SERVER_MEMORY,
    Estimate,
    NotEstimated,
    PlannedRun,
    Planner,
)
from gtrain.plan.workload import WideTable

_HIDDEN = 0.9  # of partitions read ahead and written behind: docs/benchmarks.md
_SLOTS_OF_SEVERAL = 3
_EDGE_BYTES = 112  # ends, relation and position of an edge of the bucket that is trained, and their shuffled copies
_KNOWN_BYTES = 270  # of an edge that a filtered ranking keeps and looks up as a known answer: measured
_STEP_OPERATIONS = 20
_KERNELS = 60e6  # numba, and the compiled steps: measured beyond the imports in a run of 40 entities


class PbgPlanner(Planner):
    """The formulas of embeddings in buckets."""

    def estimate(self, run: PlannedRun) -> Estimate:
        work, settings = run.workload, run.settings
        if work.kind != wide.EMBEDDING or not work.tables:
            raise NotEstimated("the model's tables are not known before its data are read")
        machines, workers = int(run.config["trainer"]["num_nodes"]), int(run.config["trainer"]["devices"])
        table, partitions = wide.largest(work), int(settings["num_partitions"])
        default = partitions if machines == 1 else _SLOTS_OF_SEVERAL
        slots = min(settings["buffer_partitions"] or default, partitions)
        estimate, edges = Estimate(hidden=_HIDDEN), work.num_seeds / run.ranks
        estimate.add(MEMORY, "imports", "imports", imports=run.machine.imports)
        estimate.add(MEMORY, "compiled kernels", "kernels", kernels=_KERNELS)
        for each in work.tables:
            share = slots / partitions if _is_partitioned(run, each) else 1.0
            wide.add_table_memory(estimate, run, MEMORY, each, share)
        estimate.add(
            MEMORY, "edges of a bucket", "edges / partitions ** 2 * each",
            edges=work.num_edges, partitions=partitions, each=_EDGE_BYTES,
        )  # fmt: skip
        layers.add_ranking(estimate, run, table.rows)
        if run.config["model"].get("filtered") and layers.ranks_held_out(run):
            estimate.add(
                MEMORY, "known answers of held-out edges", "edges * each", edges=work.num_edges, each=_KNOWN_BYTES
            )
        matmul = str(settings["matmul"])
        fast = matmul in ("bfloat16", "int8") or (
            matmul == "auto" and run.machine.flops_bfloat16 > run.machine.flops and table.dim >= 32
        )
        flops = run.cores * (run.machine.flops_bfloat16 if fast else run.machine.flops)
        wide.add_edge_scores(estimate, run, edges, flops=flops, fused=True)
        batch = run.config["data"]["batch_size"] or work.num_seeds
        estimate.add(
            OVERHEAD, "starting steps", "edges / batch * operations * dispatch",
            edges=edges, batch=min(batch, edges), operations=_STEP_OPERATIONS, dispatch=run.machine.dispatch,
        )  # fmt: skip
        if slots < partitions:
            self._swaps(estimate, run, partitions, slots, machines)
        if run.ranks > machines > 0 and workers > 1:
            estimate.assumptions.append("workers of a machine share its tables, which are counted in each of them")
        return estimate

    def _swaps(self, estimate: Estimate, run: PlannedRun, partitions: int, slots: int, machines: int) -> None:
        """Add the partitions that a machine reads and writes in an epoch: about one for each bucket."""
        # Each pair of partitions meets; a bucket that shares a partition with the last one needs one other. Its
        # mirror needs none, and partitions that stay in further slots save their share.
        pairs, chunks = partitions * (partitions - 1) / 2 / machines, int(run.settings["num_edge_chunks"])
        # A machine rarely gets a bucket of partitions that stayed, and writes all of them when the epoch ends.
        swaps = pairs * (1 - (slots - 2) / partitions) * chunks if machines == 1 else pairs * chunks + slots
        estimate.assumptions.append("a swap of partitions for each pair of them, as with bucket_order=affinity")
        partitioned = [table for table in run.workload.tables if _is_partitioned(run, table)]
        if machines == 1:
            for table in partitioned:
                # All partitions, and those being written.
                wide.add_table_memory(estimate, run, DISK, table, 1 + 2 / partitions)
            swapped = estimate.total(DISK) / (partitions + 2)
            estimate.add(
                DISK_TIME, "partitions read and written", "2 * swaps * bytes / disk",
                swaps=swaps, bytes=swapped, disk=run.machine.disk,
            )  # fmt: skip
            return
        for table in partitioned:
            wide.add_table_memory(estimate, run, SENT, table, swaps / partitions)
        estimate.add(
            NETWORK, "partitions in both directions", "2 * sent / link", sent=estimate.total(SENT), link=run.link
        )
        estimate.add(SERVER_MEMORY, "imports", "imports", imports=run.machine.imports)


def _is_partitioned(run: PlannedRun, table: WideTable) -> bool:
    """Whether a table has the store's partitions; otherwise all of it stays in memory."""
    facts = {} if run.workload.store is None else run.workload.store.facts
    return table.name not in (facts.get("unpartitioned") or ()) and table.name not in (facts.get("features") or ())
