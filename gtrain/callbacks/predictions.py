"""``gtrain predict``: predictions or embeddings of each graph node, by the source data's ids."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch_geometric.data import Data, HeteroData

from gtrain.callbacks import biggraph
from gtrain.callbacks.relations import ScoringModel, files_beside, write_beside
from gtrain.callbacks.smoothing import Smoothing
from gtrain.data.batches.loader import target_type
from gtrain.errors import ConfigError, DataError
from gtrain.graph.store import Store
from gtrain.graph.store.entities import entity_types
from gtrain.graph.store.manifest import safe_name
from gtrain.graph.store.names import JOINT, Names
from gtrain.protocols import Embeds, EmbedsTypes, HasBiases, HasRecipe, network_of
from gtrain.strategy.base import GraphStrategy

_COPIED_BYTES = 16 << 20
"""Bytes of rows copied at a time."""
ROWS = 1 << 16
"""Rows written at a time."""
_VALUES = "values.npy"
Rows = NDArray[np.float32]


@dataclass(frozen=True)
class NodeIds:
    """How nodes of one type are named in a file.

    Attributes:
        names: their names by id; None: ids are numbers.
        columns: the columns of their key in the source data.
        types: type of each column, see :class:`~gtrain.data.tables.keys.KeyForm`.
    """

    names: Names | None
    columns: tuple[str, ...] = ("id",)
    types: tuple[str, ...] = ("string",)

    @classmethod
    def of(cls, store: Store, node_type: str) -> NodeIds:
        """Return how a store names the nodes of a type."""
        names, key = store.names(node_type), store.facts.get("keys", {}).get(node_type)
        if names is None or key is None:
            return cls(names)
        # "values", "prediction" and "label" are columns of the file.
        taken = {"values", "prediction", "label"} & set(key["columns"])
        return cls(names, tuple(f"{n}_key" if n in taken else n for n in key["columns"]), tuple(key["types"]))

    @property
    def fields(self) -> list[tuple[str, Any]]:
        """The columns of the ids with their types."""
        if self.names is None:
            return [("id", pa.int64())]
        return [(name, pa.type_for_alias(dtype)) for name, dtype in zip(self.columns, self.types, strict=True)]

    def arrays(self, ids: NDArray[np.int64]) -> list[Any]:
        """Return the columns of some ids."""
        if self.names is None:
            return [pa.array(ids)]
        names = self.names.decode(torch.from_numpy(ids))
        parts = [names] if len(self.columns) == 1 else zip(*(name.split(JOINT) for name in names), strict=True)
        return [pa.array(part).cast(dtype) for part, (_, dtype) in zip(parts, self.fields, strict=True)]

    def texts(self, ids: NDArray[np.int64]) -> list[str]:
        """Return some ids as text, several columns separated by tabs."""
        if self.names is None:
            return [str(number) for number in ids.tolist()]
        return [name.replace(JOINT, "\t") for name in self.names.decode(torch.from_numpy(ids))]


Writer = Callable[[Path, Rows, NodeIds, str], None]
"""Writes a file of one node type: its path, the rows, the nodes' ids, the node type; see :func:`write_parquet`."""


class PredictionWriter(pl.Callback):
    """Collects the rows of all ranks and writes them into one file, in the order of the source data's ids.

    For a graph with entity types it writes a folder with a file per type. Beside the embeddings of a model that scores
    edges by relations it writes what scores them, see :mod:`gtrain.callbacks.relations`.

    Each rank appends the rows of every batch to an unnamed temporary file, so it holds the rows of one batch in memory.
    At the end it copies them into a memory-mapped file that all ranks share. A rank of a machine that does not see this
    file sends its rows to rank 0. The file is renamed when it is complete.

    Args:
        path: the file to write; see :func:`check_output`.
        fmt: ``npy``: float [N, D], row i of node i of the source data (NaN for nodes that the data source left out);
            ``parquet``: columns ``id`` (the name, if the data has names; the columns of the key of ``data=tables``),
            ``values`` (a list of D numbers) and ``prediction`` in a node task: the best class (and its ``label``, if
            the data has labels with other values), or the predicted number; ``tsv``: see :func:`write_tsv`;
            ``pbg_hdf5``: see :mod:`gtrain.callbacks.biggraph`.
        store: the graph.
        strategy: its group has the ranks that write.
        embeddings: write embeddings instead of the output of ``predict_step``: the output of the module's
            ``embed(batch)``, or else the input of its network's last layer.
        node_type: the type of the nodes; None: that of the labels.
        smoothing: changes the scores of all nodes; for a group of one rank.

    Attributes:
        every_type: whether the network returned rows of every node type.
        written: the files, once they are complete; of rank 0.
        notes: sentences about what the format cannot hold; of rank 0.

    Raises:
        ConfigError: ``predict_step`` does not return one row per seed.
    """

    def __init__(
        self,
        path: Path,
        fmt: str,
        store: Store,
        strategy: GraphStrategy,
        embeddings: bool,
        node_type: str | None = None,
        smoothing: Smoothing | None = None,
    ) -> None:
        self._smoothing = smoothing
        self.path, self._format, self._store, self._embeddings = path, fmt, store, embeddings
        self._node_type = node_type or target_type(store)
        self.every_type = False
        self.written: list[Path] = []
        self.notes: list[str] = []
        # The strategy, not its process group, which does not exist yet.
        self._strategy = strategy
        self._rows: BinaryIO | None = None  # float32, batch after batch
        self._width = 0  # columns
        self._ids: list[Tensor] = []
        self._captured: list[Tensor] = []  # inputs of the last layer
        self._hooks: list[RemovableHandle] = []
        self._dimensions: Mapping[str, int] = {}  # columns of each entity type, if they differ
        self._model: ScoringModel | None = None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._embeddings and not isinstance(pl_module, Embeds):
            layer = last_layer(pl_module)
            self._hooks.append(layer.register_forward_pre_hook(self._capture))
        if (network := network_of(pl_module)) is not None:
            self._hooks.append(network.register_forward_hook(self._check_types))

    def _capture(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        features = features_of(arguments)
        if features is None:
            raise ConfigError(
                f"embeddings=true was set, and the last layer, {type(layer).__name__}, is called without features.",
                hint="set embeddings=false to write the output of predict_step, or add embed(batch) to the module.",
            )
        self._captured.append(features)

    def _check_types(self, network: nn.Module, arguments: tuple[Any, ...], outputs: Any) -> None:
        self.every_type = isinstance(outputs, Mapping) and set(self._store.node_types) <= outputs.keys()

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
            embedded = pl_module.embed(batch) if isinstance(pl_module, Embeds) else None
            outputs = inputs_of_target(self._captured, batch)[batch.seeds] if embedded is None else embedded
            self._captured.clear()
            biases = pl_module.biases(batch) if isinstance(pl_module, HasBiases) else None
            if biases is not None:  # the last column, until the end
                outputs = torch.cat([outputs, biases.unsqueeze(1)], dim=1)
        if not isinstance(outputs, Tensor) or len(outputs) != len(batch.seeds):
            returned = f"{len(outputs)} rows" if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ConfigError(
                f"{type(pl_module).__name__}.predict_step returned {returned} for {len(batch.seeds)} seeds.",
                hint="return one row for each of batch.seeds.",
            )
        self._append(outputs.detach().reshape(len(outputs), math.prod(outputs.shape[1:])).float().cpu())
        self._ids.append(_orig_ids(batch)[batch.seeds].cpu())

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if isinstance(pl_module, EmbedsTypes):
            self._dimensions = pl_module.dimensions
        if self._embeddings and isinstance(pl_module, HasRecipe):
            self._model = ScoringModel.of(pl_module.recipe(), self._store)
        ids = torch.cat(self._ids)
        width = int(self._strategy.group.all_reduce(torch.tensor([self._width]), "max"))
        shape = (self._store.num_nodes_of(self._node_type), width)
        rows = self._saved_rows(len(ids))
        if self._smoothing is not None:
            rows = self._smoothing(self._store, ids, torch.from_numpy(np.array(rows))).numpy()
            if self._smoothing.note is not None:
                self.notes.append(self._smoothing.note)
        if self._format == "npy" and "source_nodes" in self._store.facts:
            shape, ids = (self._store.facts["source_nodes"], width), self._source_ids(ids)
        self._write_shared(shape, ids.numpy(), rows)
        if self._strategy.is_global_zero:
            self._finish()
        self._strategy.barrier()

    def _append(self, rows: Tensor) -> None:
        """Append rows to the temporary file."""
        if self._rows is None:
            folder: Path | None = self.path.parent
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except (
                OSError
            ):  # a folder that only rank 0's machine can create: write to the default folder for temporary files
                folder = None
            self._rows = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed after the copy
        self._width = rows.size(1)
        self._rows.write(rows.contiguous().numpy().data)

    def _saved_rows(self, count: int) -> Rows:
        """Map the temporary file into memory, ``[count, width]``, and close it; pages are read when they are copied."""
        if not count or self._rows is None:
            return np.empty((count, self._width), np.float32)
        self._rows.flush()
        rows: Rows = np.memmap(self._rows, np.float32, "r", shape=(count, self._width))
        self._rows.close()
        return rows

    def _source_ids(self, ids: Tensor) -> Tensor:
        """Return the source data's ids of nodes. A source that left nodes out stored these ids as names."""
        names = self._store.names(self._node_type)
        # A data source with source_nodes names its nodes.
        assert names is not None
        return torch.tensor([int(name) for name in names.decode(ids)], dtype=torch.int64)

    @property
    def _scratch(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    @property
    def _done(self) -> Path:
        """The converted file or folder, until it is renamed."""
        return self.path.with_name(self.path.name + ".done")

    def _write_shared(self, shape: tuple[int, int], ids: NDArray[np.int64], rows: Rows) -> None:
        """Write the rows of all ranks into one file; rows of nodes without predictions are NaN.

        Args:
            shape: of the file.
            ids: rows of the file that this rank writes, ``[n]``.
            rows: their values, ``[n, width]``.
        """
        sharing, folder, rank = self._strategy.folder_sharing, self._scratch, self._strategy.global_rank
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
            shutil.rmtree(self._done, ignore_errors=True)
            folder.mkdir(parents=True)
            file = np.lib.format.open_memmap(folder / _VALUES, "w+", np.float32, shape)
            file[:] = np.nan
            file.flush()
            sharing.announce(folder)
        self._strategy.barrier()
        target = sharing.target(folder, _VALUES)
        if target == folder:  # this machine sees rank 0's file
            _copy_rows(ids, rows, folder / _VALUES)
        elif rows.size:
            np.save(target / f"ids-{rank}.npy", ids)
            np.save(target / f"rows-{rank}.npy", rows)
        sharing.offer(folder)
        self._strategy.barrier()
        if rank == 0:
            sharing.collect(folder)
            for path in folder.glob("ids-*.npy"):
                sent = path.with_name(path.name.replace("ids", "rows", 1))
                _copy_rows(np.load(path), np.load(sent, mmap_mode="r"), folder / _VALUES)
        self._strategy.barrier()
        sharing.withdraw(folder)

    def _finish(self) -> None:
        """Convert the collected rows to the format, and rename the result to :attr:`path`."""
        facts, model = self._store.facts, self._model
        values = np.load(self._scratch / _VALUES, mmap_mode="r")
        values, biases = (values[:, :-1], values[:, -1]) if model is not None and model.bias else (values, None)
        node_type = self._node_type
        done = self._done
        if self._format == "pbg_hdf5":
            self._write_biggraph(done, values, biases)
        elif facts.get("entity_types"):
            self._write_types(done, values)
        elif self._format == "npy" and biases is None:
            os.replace(self._scratch / _VALUES, done)
        elif self._format == "npy":
            copy = np.lib.format.open_memmap(done, "w+", np.float32, values.shape)
            for ids, rows in blocks(values):
                copy[ids] = rows
            copy.flush()
        elif self._format == "parquet" and not self._embeddings:
            is_class = values.shape[1] == facts.get("num_classes") and not facts.get("multilabel")
            is_number = values.shape[1] == 1 and facts.get("label_scale") is not None
            kind, labels = "class" if is_class else "number" if is_number else None, facts.get("label_values")
            write_parquet(done, values, NodeIds.of(self._store, node_type), node_type, predicts=kind, labels=labels)
        else:
            WRITERS[self._format](done, values, NodeIds.of(self._store, node_type), node_type)
        if model is not None and self._format != "pbg_hdf5":
            self.written += write_beside(self.path, self._format, model, biases)
        os.replace(done, self.path)
        self.written.insert(0, self.path)
        shutil.rmtree(self._scratch)

    def _write_types(self, folder: Path, values: Rows) -> None:
        """Write a folder with a file per entity type."""
        folder.mkdir()
        for entity in entity_types(self._store):
            rows = values[entity.first : entity.first + entity.count, : self._dimensions.get(entity.name)]
            path = folder / f"{safe_name(entity.name)}.{self._format}"
            if self._format == "npy":
                np.save(path, rows)
            else:
                WRITERS[self._format](path, rows, NodeIds.of(self._store, entity.name), entity.name)

    def _write_biggraph(self, folder: Path, values: Rows, biases: Rows | None) -> None:
        """Write a folder with PyTorch-BigGraph's files, and its model file if that can hold the model."""
        folder.mkdir()
        model = self._model
        reason = "the model scores no edges by relations" if model is None else biggraph.why_not(model)
        columns = None
        if model is not None and reason is None:
            columns = biggraph.columns_of(model, model.groups[0].dimension)
            biggraph.write_model(folder, self.path, model)
        elif model is not None:
            self.notes.append(
                f"the folder has no relation parameters: {reason}.\nHINT: format=npy writes them beside the embeddings."
            )
        for entity in entity_types(self._store):
            ids = slice(entity.first, entity.first + entity.count)
            rows, nodes = values[ids, : self._dimensions.get(entity.name)], NodeIds.of(self._store, entity.name)
            names = [name for numbers, _ in blocks(rows[:, :1]) for name in nodes.texts(numbers)]
            biggraph.write_entities(
                folder, entity.name, rows, names, columns, None if biases is None or columns is None else biases[ids]
            )


def _copy_rows(ids: NDArray[np.int64], rows: Rows, file: Path) -> None:
    """Copy ``rows`` ``[n, width]`` to the rows ``ids`` of the array in a file."""
    if not rows.size:
        return
    values: np.memmap[Any, np.dtype[np.float32]] = np.load(file, mmap_mode="r+")
    step = max(1, _COPIED_BYTES // rows[:1].nbytes)
    for start in range(0, len(ids), step):
        values[ids[start : start + step]] = rows[start : start + step]
    values.flush()


def format_of(output: str | None) -> str:
    """Return the format that the ending of a file name says; ``npy`` without an ending.

    Raises:
        ConfigError: the ending is not a format.
    """
    suffix = Path(output or "").suffix.removeprefix(".")
    if suffix and suffix not in FORMATS:
        raise ConfigError(
            f"output={output} was set; .{suffix} is not a format.",
            hint=f"the formats are {', '.join(FORMATS)}; format= chooses one under any name.",
        )
    return suffix or FORMATS[0]


def check_output(path: Path, fmt: str, *, beside: bool = False) -> None:
    """Check format and path before anything is computed.

    Args:
        path: the file to write.
        fmt: its format.
        beside: whether embeddings are written, which may have others beside them: see
            :func:`~gtrain.callbacks.relations.files_beside` and :func:`types_beside`.

    Raises:
        ConfigError: the format is unknown, or the path exists or has the suffix of another format.
    """
    if fmt not in FORMATS:
        raise ConfigError(f"format={fmt} was set.", hint=f"the formats are {', '.join(FORMATS)}.")
    if (suffix := path.suffix.removeprefix(".")) in FORMATS and suffix != fmt:
        raise ConfigError(
            f"output={path} was set; format={fmt} would write a file of another format under that name.",
            hint=f"set format={suffix}, or an output that ends in .{fmt}.",
        )
    if fmt == "pbg_hdf5":
        biggraph.check_installed()
    for file in (path, *((types_beside(path), *files_beside(path, fmt).values()) if beside else ())):
        if file.exists():
            raise ConfigError(f"output={file} exists already.", hint="delete it first, or set output to another path.")


def types_beside(output: Path) -> Path:
    """Return the folder with the embeddings of the node types without labels, beside the file of the labelled one."""
    return output.with_name(output.name + ".types")


def last_layer(module: pl.LightningModule) -> nn.Module:
    """Return the layer that computes the scores: the last with parameters among the network's direct layers.

    Raises:
        ConfigError: the module has no ``network``, so its last layer is unknown.
    """
    network = network_of(module)
    if network is None:
        raise ConfigError(
            f"embeddings=true was set, and {type(module).__name__} has neither embed() nor a network.",
            hint="set embeddings=false to write the output of predict_step, or add embed(batch) to the module.",
        )
    layers = [layer for layer in _flat(network) if any(True for _ in layer.parameters())]
    # A norm after the last convolution has parameters, but its input is already the scores.
    return [layer for layer in layers if "Norm" not in type(layer).__name__][-1]


def _flat(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers in order, descending into lists of layers only."""
    for child in network.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) or type(child).__name__ == "MLP":
            yield from _flat(child)
        else:
            yield child


def features_of(arguments: tuple[Any, ...]) -> Tensor | None:
    """Return the features that a layer was called with; of a pair, those of the target nodes. None: it has none.

    They are PyG's first argument, and follow DGL's graph.
    """
    for argument in arguments:
        value = argument[1] if isinstance(argument, tuple) and len(argument) == 2 else argument
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None


def inputs_of_target(captured: Sequence[Tensor], batch: Data | HeteroData) -> Tensor:
    """Return a layer's input for the nodes of the target type, from all of its calls in a batch.

    Args:
        captured: the features of each call, not empty; a network may call a layer for each node type in turn.
        batch: the batch.
    """
    if isinstance(batch, HeteroData) and len(captured) == len(batch.node_types):
        return captured[batch.node_types.index(batch.target)]
    return captured[-1]


def _orig_ids(batch: Data | HeteroData) -> Tensor:
    return (batch[batch.target] if isinstance(batch, HeteroData) else batch).orig_id


# ---------------------------------------------------------------------------------------------------- file formats


def blocks(values: Rows) -> Iterator[tuple[NDArray[np.int64], Rows]]:
    """Yield blocks of ids and rows."""
    for first in range(0, len(values), ROWS):
        block = np.ascontiguousarray(values[first : first + ROWS])
        yield np.arange(first, first + len(block)), block


def write_parquet(
    path: Path,
    values: Rows,
    nodes: NodeIds,
    node_type: str,
    *,
    predicts: str | None = None,
    labels: list[Any] | None = None,
) -> None:
    """Write the columns of the ids, ``values`` (a list of D numbers), and ``prediction`` of what is predicted.

    Args:
        path: the file.
        values: ``[N, D]``, by the source data's ids.
        nodes: their ids.
        node_type: of the nodes.
        predicts: ``class`` if the numbers are scores of classes: ``prediction`` is the best one; ``number`` if there is
            one number, the prediction; None: no such column. A node without numbers (NaN) has no prediction (null).
        labels: the label that each class stands for, in the column ``label``; None: no such column. Of more classes, as
            with ``data.num_classes``, the last have no label (null).
    """
    fields = [*nodes.fields, ("values", pa.list_(pa.float32(), values.shape[1]))]
    fields += [] if predicts is None else [("prediction", pa.int64() if predicts == "class" else pa.float32())]
    names = None
    if labels is not None and predicts == "class":
        names = pa.array([*labels, *[None] * (values.shape[1] - len(labels))])
    schema = pa.schema(fields if names is None else [*fields, ("label", names.type)])
    with pq.ParquetWriter(path, schema) as writer:
        for ids, block in blocks(values):
            columns = [*nodes.arrays(ids), pa.FixedSizeListArray.from_arrays(block.reshape(-1), values.shape[1])]
            if predicts is not None:
                best = block.argmax(axis=1) if predicts == "class" else block[:, 0]
                columns.append(pa.array(best, mask=np.isnan(block).any(axis=1)))
            columns += [] if names is None else [names.take(columns[-1])]
            writer.write_table(pa.table(columns, schema=schema))


def write_tsv(path: Path, values: Rows, nodes: NodeIds, node_type: str) -> None:
    """Write a line per node: its name or id, then its numbers, separated by tabs. As :func:`write_parquet`.

    Raises:
        DataError: a name has a tab or a line break.
    """
    fields = max(len(nodes.columns), 1)
    with open(path, "w", encoding="utf-8") as handle:
        for ids, block in blocks(values):
            for name, row in zip(nodes.texts(ids), block, strict=True):
                if "\n" in name or "\r" in name or name.count("\t") >= fields:
                    raise DataError(
                        f"the name {name!r} has a tab or a line break, which a line of {path} cannot hold",
                        hint="write a Parquet file: output=FILE.parquet",
                    )
                numbers = "\t".join(f"{value:.9g}" for value in row.tolist())
                handle.write(f"{name}\t{numbers}\n")


WRITERS: dict[str, Writer] = {"parquet": write_parquet, "tsv": write_tsv}
FORMATS = ("npy", *WRITERS, "pbg_hdf5")
