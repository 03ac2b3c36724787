"""``gtrain predict``: what a model says of each graph node, by the source data's ids."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch_geometric.data import Data, HeteroData

from gtrain.callbacks import formats
from gtrain.data.batches.loader import target_type
from gtrain.errors import ConfigError
from gtrain.graph.store import Store
from gtrain.graph.store.entities import entity_types
from gtrain.graph.store.manifest import safe_name
from gtrain.protocols import Embeds, EmbedsTypes, network_of
from gtrain.strategy.base import GraphStrategy

FORMATS = ("npy", *formats.WRITERS)
_COPIED_BYTES = 16 << 20
"""Rows that are copied at a time."""


class PredictionWriter(pl.Callback):
    """Collects each rank's rows and writes them into one file, in the order of the source data's ids.

    A graph with entity types becomes a folder, with a file for each of them.

    A rank appends the rows of each batch to a temporary file without a name, and in the end copies them into a
    memory-mapped file that all ranks share: it holds the rows of one batch. The file gets its name when it is complete.

    Args:
        path: the file to write; see :func:`check_output`.
        fmt: ``npy``: float [N, D], row i of node i of the source data (all its nodes, NaN for those that the source
            left out); ``parquet``: columns ``id`` (the name, where the data has names) and ``values`` (a list of D
            numbers), and ``prediction`` (the best class) where the values are scores of classes; ``tsv`` and
            ``pbg_hdf5``: see :mod:`gtrain.callbacks.predictions`.
        store: the graph.
        strategy: the ranks.
        embeddings: write what the module's own ``embed(batch)`` returns for the seeds, or where it has none what its
            network's last layer reads, instead of what ``predict_step`` returns.

    Raises:
        ConfigError: ``predict_step`` does not return one row for each seed.
    """

    def __init__(self, path: Path, fmt: str, store: Store, strategy: GraphStrategy, embeddings: bool) -> None:
        self.path, self._format, self._store, self._embeddings = path, fmt, store, embeddings
        self._strategy = strategy  # its group of ranks is formed later
        self._rows: BinaryIO | None = None  # float32, batch after batch
        self._width = 0
        self._ids: list[Tensor] = []
        self._seen: list[Tensor] = []
        self._hook: RemovableHandle | None = None
        self._dimensions: Mapping[str, int] = {}  # columns of each entity type, where they differ

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._embeddings and not isinstance(pl_module, Embeds):
            layer = last_layer(pl_module)
            self._hook = layer.register_forward_pre_hook(lambda _, args: self._seen.append(_features(args[0])))

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._embeddings:
            own = pl_module.embed(batch) if isinstance(pl_module, Embeds) else None
            outputs = self._embedded(batch)[batch.seeds] if own is None else own
            self._seen.clear()
        if not isinstance(outputs, Tensor) or len(outputs) != len(batch.seeds):
            found = f"{len(outputs)} rows" if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ConfigError(
                f"{type(pl_module).__name__}.predict_step returned {found} for {len(batch.seeds)} seeds.",
                hint="return one row for each of batch.seeds.",
            )
        self._append(outputs.detach().reshape(len(outputs), -1).float().cpu())
        self._ids.append(_orig_ids(batch)[batch.seeds])

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._hook is not None:
            self._hook.remove()
        if isinstance(pl_module, EmbedsTypes):
            self._dimensions = pl_module.dimensions
        ids = torch.cat(self._ids)
        width = int(self._strategy.group.all_reduce(torch.tensor([self._width]), "max"))
        shape = (self._store.num_nodes_of(target_type(self._store)), width)
        if self._format == "npy" and "source_nodes" in self._store.facts:
            shape, ids = (self._store.facts["source_nodes"], width), self._source_ids(ids)
        with self._shared_file(shape) as values:
            if len(ids) and width:
                self._copy_rows(ids.numpy(), values)
        classes = not self._embeddings and width == self._store.facts.get("num_classes")
        if self._strategy.is_global_zero:
            self._finish(shape, classes and not self._store.facts.get("multilabel"))
        self._strategy.barrier()

    def _append(self, rows: Tensor) -> None:
        """Append rows to the temporary file."""
        if self._rows is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._rows = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115 - closed once it is copied
        self._width = rows.size(1)
        self._rows.write(rows.contiguous().numpy().data)

    def _copy_rows(self, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Copy the temporary file's rows to their places."""
        assert self._rows is not None
        self._rows.flush()
        rows: NDArray[np.float32] = np.memmap(self._rows, np.float32, "r", shape=(len(ids), values.shape[1]))
        each = max(1, _COPIED_BYTES // rows[:1].nbytes)
        for begin in range(0, len(ids), each):
            values[ids[begin : begin + each]] = rows[begin : begin + each]
        self._rows.close()

    def _embedded(self, batch: Data | HeteroData) -> Tensor:
        """What the last layer read; by node type in turn where it is called for each of them."""
        if isinstance(batch, HeteroData) and len(self._seen) == len(batch.node_types):
            return self._seen[batch.node_types.index(batch.target)]
        return self._seen[-1]

    def _source_ids(self, ids: Tensor) -> Tensor:
        """Return the ids in the source data of nodes whose names they are: the source left some nodes out."""
        names = self._store.names(target_type(self._store))
        assert names is not None  # a source with source_nodes names its nodes
        return torch.tensor([int(name) for name in names.decode(ids)], dtype=torch.int64)

    @property
    def _scratch(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    @contextmanager
    def _shared_file(self, shape: tuple[int, int]) -> Iterator[NDArray[np.float32]]:
        """A file that all ranks write into; a node that no rank predicts has NaN."""
        if self._strategy.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            made = np.lib.format.open_memmap(self._scratch, "w+", np.float32, shape)
            made[:] = np.nan
            made.flush()
        self._strategy.barrier()
        values: np.memmap[Any, np.dtype[np.float32]] = np.load(self._scratch, mmap_mode="r+")
        yield values
        values.flush()
        self._strategy.barrier()

    def _finish(self, shape: tuple[int, int], classes: bool) -> None:
        values = np.load(self._scratch, mmap_mode="r")
        kind = target_type(self._store)
        done = self.path.with_name(self.path.name + ".done")
        if self._store.facts.get("entity_types"):
            self._write_types(done, values)
        elif self._format == "npy":
            os.replace(self._scratch, self.path)
            return
        elif classes and self._format == "parquet":
            formats.write_parquet(done, values, self._store.names(kind), kind, classes=True)
        else:
            formats.WRITERS[self._format](done, values, self._store.names(kind), kind)
        os.replace(done, self.path)
        self._scratch.unlink()

    def _write_types(self, folder: Path, values: Any) -> None:
        """Write a folder with a file for each entity type, or the files that PyTorch-BigGraph has for each."""
        folder.mkdir()
        for each in entity_types(self._store):
            rows = values[each.first : each.first + each.count, : self._dimensions.get(each.name)]
            path = folder if self._format == "pbg_hdf5" else folder / f"{safe_name(each.name)}.{self._format}"
            if self._format == "npy":
                np.save(path, rows)
            else:
                formats.WRITERS[self._format](path, rows, self._store.names(each.name), each.name)


def check_output(path: Path, fmt: str) -> None:
    """Refuse, before anything is computed, a format that is unknown and a path where something is already.

    Raises:
        ConfigError: one of the two.
    """
    if fmt not in FORMATS:
        raise ConfigError(f"format={fmt} was set.", hint=f"the formats are {', '.join(FORMATS)}.")
    if path.exists():
        raise ConfigError(f"output={path} is there already.", hint="delete it first, or set output to another path.")


def last_layer(module: pl.LightningModule) -> nn.Module:
    """Return the layer that makes the scores: the last with parameters among the network's direct layers.

    Raises:
        ConfigError: the module has no ``network``, so its embeddings are not known.
    """
    network = network_of(module)
    if network is None:
        raise ConfigError(
            f"embeddings=true was set, and {type(module).__name__} has no network to look into.",
            hint="leave embeddings=false: predict_step then says what is written.",
        )
    layers = [layer for layer in _flat(network) if any(True for _ in layer.parameters())]
    return [layer for layer in layers if "Norm" not in type(layer).__name__][-1]


def _flat(network: nn.Module) -> Iterator[nn.Module]:
    """The layers in order; lists are opened, layers are not."""
    for child in network.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) or type(child).__name__ == "MLP":
            yield from _flat(child)
        else:
            yield child


def _features(argument: Any) -> Tensor:
    """The features that a layer was called with; those of the node itself where it takes a pair."""
    value: Tensor = argument[1] if isinstance(argument, tuple) else argument
    return value


def _orig_ids(batch: Data | HeteroData) -> Tensor:
    nodes = batch[batch.target] if isinstance(batch, HeteroData) else batch
    ids: Tensor = nodes.orig_id
    return ids
