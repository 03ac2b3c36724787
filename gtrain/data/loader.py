"""What a DataModule hands out: a description of batches, which a strategy turns into its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.errors import ConfigError, DataError
from gtrain.graph.shard import GraphShard, load_whole
from gtrain.graph.store import Store

SPLITS = ("train", "val", "test", "predict")


@dataclass
class SeedLoader:
    """A description of the batches of one split.

    A strategy reads the fields and makes its own batches. Iterated as it is, by a stock Lightning strategy or a test,
    it yields the whole graph, once for each group of ``batch_size`` seeds, with no sampling.

    Attributes:
        store: the graph.
        split: ``train``, ``val``, ``test``, or ``predict`` for all nodes.
        batch_size: seeds of one optimizer step over all ranks; None means all of them (full batch).
        num_neighbors: neighbours that a sampling strategy draws for each hop; None means all of them.
        shuffle: whether each epoch has another order; it matters only with a ``batch_size``.
        seed: seed of the order; epoch e is shuffled with ``seed + e``.
        epoch: number of the next epoch, advanced by each iteration.
    """

    store: Store
    split: str
    batch_size: int | None = None
    num_neighbors: Sequence[int] | None = None
    shuffle: bool = False
    seed: int = 0
    epoch: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"{self.split!r} is not a split", hint=f"choose one of {', '.join(SPLITS)}")
        if self.split != "predict" and f"{self.split}_mask" not in self.store.node_names:
            raise _no_split(self.split)

    def __len__(self) -> int:
        """Return the optimizer steps of one epoch: 1 for full batch."""
        if self.batch_size is None:
            return 1
        return max(1, -(-self.num_seeds // self.batch_size))

    @property
    def num_seeds(self) -> int:
        """Number of the split's nodes over all parts."""
        return self.store.num_nodes if self.split == "predict" else self.store.split_size(self.split)

    def __iter__(self) -> Iterator[Data]:
        return self.steps(full_batch(load_whole(self.store), self.split))

    def steps(self, batch: Data) -> Iterator[Data]:
        """Yield ``batch``, the whole graph, once for each group of its seeds: one epoch without sampling."""
        if self.num_neighbors is not None:
            raise ConfigError(
                f"data.num_neighbors={list(self.num_neighbors)} is set, and this strategy draws no neighbours",
                hint="set data.num_neighbors=null, or choose a strategy that samples",
            )
        seeds, epoch = batch.seeds, self.epoch
        self.epoch += 1
        if self.shuffle and self.batch_size is not None:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            seeds = seeds[torch.randperm(seeds.numel(), generator=generator)]
        for chunk in seeds.split(self.batch_size) if self.batch_size else (seeds,):
            yield _with_seeds(batch, chunk)


def full_batch(shard: GraphShard, split: str, dtype: torch.dtype | None = None) -> Data:
    """Return a shard as the batch that a LightningModule sees, all its nodes and edges in it.

    Args:
        shard: the rank's part, with n own nodes, h halo nodes and E edges.
        split: ``train``, ``val``, ``test`` or ``predict``.
        dtype: the precision to give ``x`` and floating-point edge data; None leaves them as they are stored.

    Returns:
        A ``Data`` with every tensor of ``node_data`` and ``edge_data``, and

        * ``edge_index`` int64 ``[2, E]``, local ids (sources up to n+h-1, targets up to n-1);
        * ``num_nodes`` n, the own nodes, which is the number of rows of ``x``;
        * ``seeds`` int64 ``[s]``, local ids of the own nodes that are in the split, ascending (``predict``: all own
          nodes). **A batch's loss and metrics are over these nodes, and over no others.** A rank may have none;
        * ``batch_size`` s;
        * ``n_id`` int64 ``[n]``, global ids of the own nodes.
    """
    batch = Data(edge_index=shard.edge_index, num_nodes=shard.num_local)
    for name, tensor in shard.node_data.items():
        batch[name] = _cast(tensor, dtype) if name == "x" else tensor
    for name, tensor in shard.edge_data.items():
        batch[name] = _cast(tensor, dtype)
    batch.n_id = torch.arange(int(shard.offsets[shard.part]), int(shard.offsets[shard.part + 1]))
    return _with_seeds(batch, _seeds(shard, split))


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _seeds(shard: GraphShard, split: str) -> Tensor:
    if split == "predict":
        return torch.arange(shard.num_local)
    if f"{split}_mask" not in shard.node_data:
        raise _no_split(split)
    return shard.node_data[f"{split}_mask"].nonzero().flatten()


def _with_seeds(batch: Data, seeds: Tensor) -> Data:
    """Return a shallow copy of a batch with other seeds."""
    batch = Data(**batch.to_dict())
    batch.seeds, batch.batch_size = seeds, seeds.numel()
    return batch


def _no_split(split: str) -> DataError:
    return DataError(
        f"the stored graph has no {split} split, because it was prepared without labels",
        hint="give the labels (data.labels=FILE for an edge list), or choose a task that needs none",
    )
