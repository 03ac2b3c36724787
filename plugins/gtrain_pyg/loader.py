"""The batches of a split as Lightning iterates over them: sized, made ahead, and resumable within an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.loader import SeedLoader
from gtrain.memory.heap import trim_heap
from gtrain.strategy.counters import Counters
from gtrain_pyg.batches import Kind, make_batch
from gtrain_pyg.epoch import Step, common_shares, num_steps, own_shares
from gtrain_pyg.features.feature_store import FeatureStore, PendingBatch, Prefetcher
from gtrain_pyg.pipeline import Pipeline, Stages
from gtrain_pyg.sampling.sampler import DistributedSampler
from gtrain_pyg.sampling.subgraph import Array, Subgraph
from gtrain_pyg.seeds import SeedSource


@dataclass(frozen=True)
class Plan:
    """How batches are made ahead.

    Attributes:
        threads: that sample.
        prefetch: batches that are sampled and whose remote rows are fetched ahead; 0 makes each when it is asked for.
        lookahead: successive batches that ask for a remote row once, together.
        beside: put a batch together while the one before it is in use.
        trim: whether layers may leave out what the seeds' results do not depend on.
    """

    threads: int = 1
    prefetch: int = 2
    lookahead: int = 1
    beside: bool = False
    trim: bool = True


class SampledBatches:
    """Batches of one split, another order in each epoch where the loader shuffles.

    Args:
        loader: describes the split.
        source: its seeds.
        sampler: grows subgraphs from them.
        features: fetches the subgraphs' node and edge tensors.
        plan: how.
        place: this rank, and the number of ranks.
        counters: where waiting for a batch is counted.
        show: called with each batch just before it is handed out.
    """

    def __init__(
        self,
        loader: SeedLoader,
        source: SeedSource,
        sampler: DistributedSampler,
        features: FeatureStore,
        plan: Plan,
        place: tuple[int, int],
        counters: Counters,
        show: Callable[[Data | HeteroData], None] = lambda batch: None,
    ) -> None:
        self._loader, self._source, self._sampler, self._features = loader, source, sampler, features
        self._plan, self._counters, self._show = plan, counters, show
        self._rank, self._world = place
        self._hetero = loader.store.is_hetero
        self._skip = self._handed_out = 0
        self._epoch = loader.epoch

    def __len__(self) -> int:
        """Return the steps of an epoch, the same on every rank."""
        return num_steps(self._source.total, self._loader.batch_size)

    def __iter__(self) -> Iterator[Data | HeteroData]:
        self._epoch = self._loader.next_epoch()
        self._handed_out, self._skip = self._skip, 0
        trim_heap()
        plan = self._plan
        prefetcher = self._features.prefetcher(plan.lookahead)
        stages = Stages(self._sample, partial(self._prefetch, prefetcher), self._finish)
        pipeline = Pipeline(stages, threads=plan.threads, ahead=plan.prefetch, beside=plan.beside)
        with closing(pipeline.run(self.steps(self._epoch)[self._handed_out :])) as batches:
            while True:
                with self._counters.span("wait: batch"):
                    batch = next(batches, None)
                if batch is None:
                    return
                self._handed_out += 1
                self._show(batch)
                yield batch
                del batch

    def steps(self, epoch: int) -> Sequence[Step]:
        """Return this rank's share of each step of an epoch."""
        loader, source = self._loader, self._source
        order = loader.seed + epoch if loader.shuffle else None
        if source.owner is None:
            shares = own_shares(source.count, len(self), order)
        else:
            shares = common_shares(source.owner, loader.batch_size, order, self._rank, self._world)
        named = epoch if loader.shuffle else 0
        return [Step(named, n, n * self._world + self._rank, share) for n, share in enumerate(shares)]

    # ------------------------------------------------------------------------------- resuming, as Lightning asks

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands."""
        return {"epoch": self._epoch, "batches": self._handed_out % len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the epoch stood: the next iteration leaves out the batches handed out already."""
        self._skip = state["batches"]

    # -------------------------------------------------------------------------------------------------- stages

    def _sample(self, step: Step) -> Subgraph:
        roots = self._source.roots(step)
        return self._sampler.sample(roots.ids, epoch=step.epoch, batch=step.batch, seed_time=roots.time)

    def _prefetch(self, prefetcher: Prefetcher, sample: Subgraph) -> PendingBatch:
        ids: dict[Kind, Array] = dict(sample.node.items())
        ids.update(sample.edge.items())
        sample.edge.clear()  # nothing else needs the edges' positions
        return prefetcher.prefetch(ids)

    def _finish(self, step: Step, sample: Subgraph, pending: PendingBatch) -> Data | HeteroData:
        rows: dict[Kind, dict[str, Tensor]] = pending.get()
        seeds = self._source.describe(step, sample)
        return make_batch(sample, rows, seeds, hetero=self._hetero, trim=self._plan.trim)
