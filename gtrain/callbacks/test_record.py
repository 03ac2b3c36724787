"""Summary of a test for ``gtrain report``: counts by class and score, and samples of scores and of the hidden layer."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch_geometric.data import HeteroData

from gtrain.callbacks.predictions import features_of, inputs_of_target, last_layer
from gtrain.errors import ConfigError
from gtrain.files import replace_text
from gtrain.model.outputs import ClassScores, EdgeScores, NumberScores
from gtrain.protocols import Embeds
from gtrain.record.events import record_folder
from gtrain.record.score_counts import ScoreCounts

HIDDEN = 2000
"""Rows of the hidden layer, or embeddings, that all ranks together write."""
SCORED = 20_000
"""Seeds, or edges, whose scores all ranks together write."""
CLASSES = 200
"""Beyond this number of classes no confusion matrix is written."""
_ROWS = 1 << 16  # whose scores are counted at a time
BINS, FEWEST_BINS, ALL_BINS = 4096, 512, 65_536
"""Scores are counted in at most BINS bins, with many classes in ALL_BINS over all of them and FEWEST_BINS of each."""
RESIDUAL_BINS, RESIDUAL_REACH = 80, 4.0
"""Residuals are counted in this number of equal bins, from -RESIDUAL_REACH to RESIDUAL_REACH standard deviations of the
training labels; those beyond are in the outermost bins."""


class TestRecorder(Callback):
    """Writes ``test-rank-<r>.json`` and ``hidden-rank-<r>.npz`` to the record of a run; see ``docs/formats.md``.

    Each rank counts its own seeds, without messages. Models other than gtrain's have no summary.

    Args:
        run_dir: the run's folder.
        rank: this process.
        world_size: number of ranks, which share the sizes of the samples.
    """

    def __init__(self, run_dir: Path, rank: int, world_size: int) -> None:
        self._folder, self._rank = record_folder(run_dir), rank
        self._limits = {"scored": -(-SCORED // world_size), "hidden": -(-HIDDEN // world_size)}
        self._batches = 1
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._scores: list[ScoreCounts] = []  # of each class, or of edges
        self._sums: dict[str, dict[int, list[float]]] = {}
        self._facts: dict[str, Any] = {}
        self._scored: dict[str, list[Tensor]] = {}
        self._hidden: list[tuple[Tensor, Tensor, Tensor | None]] = []  # ids, rows, labels
        self._captured: list[Tensor] = []
        self._hook: RemovableHandle | None = None

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = max(1, int(sum(count for count in trainer.num_test_batches if math.isfinite(count))))
        if not isinstance(pl_module, Embeds):
            try:
                layer = last_layer(pl_module)
            except ConfigError:  # a module without a network
                return
            self._hook = layer.register_forward_pre_hook(self._capture)

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if isinstance(outputs, ClassScores):
            self._count_classes(outputs, batch, pl_module)
        elif isinstance(outputs, NumberScores):
            self._count_numbers(outputs, batch, pl_module)
        elif isinstance(outputs, EdgeScores):
            self._count_edges(outputs, batch)
        self._captured.clear()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if not self._facts:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        content = {
            **self._facts,
            "counts": {name: counts.tolist() for name, counts in self._counts.items()},
            "scores": [counts.as_dict() for counts in self._scores],
            "sums": self._sums,
            "scored": {name: torch.cat(parts).tolist() for name, parts in self._scored.items()},
        }
        replace_text(self._folder / f"test-rank-{self._rank}.json", json.dumps(content))
        if self._hidden:
            self._write_hidden(self._folder / f"hidden-rank-{self._rank}.npz")

    # ------------------------------------------------------------------------------------------ classes

    def _count_classes(self, outputs: ClassScores, batch: Any, module: pl.LightningModule) -> None:
        scores, labels = outputs.scores.detach().float().cpu(), outputs.labels.cpu()
        classes = scores.size(1)
        self._facts |= {"task": "labels" if outputs.multilabel else "classes", "num_classes": classes}
        if outputs.multilabel:
            correct = ((scores > 0) == labels.bool()).float().mean(1)
        else:
            prediction = scores.argmax(1)
            correct = (prediction == labels).float()
            if classes <= CLASSES:
                pairs = torch.bincount(labels.long() * classes + prediction, minlength=classes * classes)
                self._add("confusion", pairs.view(classes, classes).numpy())
        if classes <= CLASSES:
            for some, truth in zip(scores.split(_ROWS), labels.split(_ROWS), strict=True):
                self._count_scores(some, truth, outputs.multilabel)
        ids = _ids(batch)
        if ids is None:
            return
        rows = self._sample(len(scores), "scored")
        self._keep(ids=ids[batch.seeds[rows].cpu()], score=correct[rows])
        rows = self._sample(len(scores), "hidden")
        hidden = self._hidden_rows(module, batch, rows)
        if hidden is not None:
            label = None if outputs.multilabel else labels[rows]
            self._hidden.append((ids[batch.seeds[rows].cpu()], hidden, label))

    def _count_scores(self, scores: Tensor, labels: Tensor, multilabel: bool) -> None:
        """Count the scores of each class, of seeds that have it and of those that do not."""
        if multilabel:
            logits, truth = scores, labels.bool()
        else:  # the logit of a class against all others
            logits = scores.double().softmax(1).logit()
            truth = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, labels.view(-1, 1).long(), True)
        classes = scores.size(1)
        self._count_series(classes)
        for number, counts in enumerate(self._scores):
            mine, chosen = logits[:, number].float().numpy(), truth[:, number].numpy()
            counts.add(mine[chosen], positive=True)
            counts.add(mine[~chosen], positive=False)

    def _count_series(self, series: int) -> None:
        """Make the counts of scores, one for each class."""
        limit = min(BINS, max(FEWEST_BINS, ALL_BINS // max(series, 1)))
        self._scores = self._scores or [ScoreCounts(limit) for _ in range(series)]

    def _hidden_rows(self, module: pl.LightningModule, batch: Any, rows: Tensor) -> Tensor | None:
        """Return the last layer's inputs for some of the seeds, float32 ``[b, D]``; None if the model has none."""
        if isinstance(module, Embeds):
            try:
                embedded = module.embed(batch)  # also without rows: other ranks may exchange messages in it
            except ConfigError:  # a model without a hidden layer
                return None
            return embedded[rows].detach().float().cpu() if len(rows) else None
        if not self._captured or not len(rows):
            return None
        captured = inputs_of_target(self._captured, batch)
        seeds = batch.seeds[rows.to(batch.seeds.device)]
        if captured.dim() != 2 or (len(seeds) and int(seeds.max()) >= len(captured)):
            return None
        return captured[seeds.to(captured.device)].detach().float().cpu()

    def _capture(self, _: Any, arguments: tuple[Any, ...]) -> None:
        features = features_of(arguments)
        if features is not None:
            self._captured.append(features)

    # ------------------------------------------------------------------------------------------ numbers

    def _count_numbers(self, outputs: NumberScores, batch: Any, module: pl.LightningModule) -> None:
        predicted, labels = outputs.predicted.detach().cpu(), outputs.labels.cpu()
        self._facts |= {"task": "numbers", "deviation": outputs.deviation, "residual_reach": RESIDUAL_REACH}
        place = ((predicted - labels) / outputs.deviation).nan_to_num(RESIDUAL_REACH) + RESIDUAL_REACH
        bins = (place * (RESIDUAL_BINS / (2 * RESIDUAL_REACH))).clamp(0, RESIDUAL_BINS - 1).long()
        self._add("residuals", torch.bincount(bins, minlength=RESIDUAL_BINS).numpy())
        ids = _ids(batch)
        if ids is None:
            return
        rows = self._sample(len(labels), "scored")
        errors = (predicted - labels).abs()[rows]
        self._keep(ids=ids[batch.seeds[rows].cpu()], score=errors, true=labels[rows], predicted=predicted[rows])
        rows = self._sample(len(labels), "hidden")
        hidden = self._hidden_rows(module, batch, rows)
        if hidden is not None:
            self._hidden.append((ids[batch.seeds[rows].cpu()], hidden, None))

    # ------------------------------------------------------------------------------------------ edges

    def _count_edges(self, outputs: EdgeScores, batch: Any) -> None:
        self._facts["task"] = "edges"
        self._count_series(1)
        for scores, positive in ((outputs.true, True), (outputs.negative, False)):
            self._scores[0].add(scores.detach().float().flatten().cpu().numpy(), positive=positive)
        ranks = torch.stack([outputs.tail_ranks, outputs.head_ranks]).cpu()
        # Bin k has the ranks from 2**k to 2**(k + 1).
        self._add("ranks", torch.bincount(ranks.log2().floor().long().flatten(), minlength=48).numpy())
        inverse = (1 / ranks).mean(0)
        relation = torch.zeros(len(inverse)).long() if outputs.relation is None else outputs.relation.cpu().long()
        sums = self._sums.setdefault("relation", {})
        for number in relation.unique().tolist() if outputs.relation is not None else ():
            chosen = relation == number
            hits = float((ranks[:, chosen] <= 10).double().mean(0).sum())
            values = (int(chosen.sum()), float(inverse[chosen].sum()), hits)
            sums[number] = [old + new for old, new in zip(sums.get(number, (0, 0.0, 0.0)), values, strict=True)]
        ids = _ids(batch)
        if ids is None:
            return
        source, target = batch.edge_label_index.cpu()
        rows = self._sample(len(inverse), "scored")
        rows = rows[target[rows] < len(ids)]  # the others are on another rank
        self._keep(ids=ids[target[rows]], score=inverse[rows].float())
        if outputs.embedding is not None:
            own = source[: len(outputs.embedding)]
            chosen = self._sample(len(own), "hidden")
            chosen = chosen[own[chosen] < len(ids)]
            embedded = outputs.embedding.detach().float().cpu()[chosen]
            self._hidden.append((ids[own[chosen]], embedded, None))

    # ------------------------------------------------------------------------------------------ samples

    def _add(self, name: str, counts: NDArray[np.int64]) -> None:
        self._counts[name] = self._counts[name] + counts if name in self._counts else counts

    def _sample(self, count: int, name: str) -> Tensor:
        """Return evenly spaced positions, so that all batches together fill the sample."""
        share = min(count, -(-self._limits[name] // self._batches))
        return torch.arange(share) * count // max(share, 1)

    def _keep(self, **columns: Tensor) -> None:
        for name, values in columns.items():
            self._scored.setdefault(name, []).append(values)

    def _write_hidden(self, path: Path) -> None:
        ids, rows = torch.cat([part[0] for part in self._hidden]), torch.cat([part[1] for part in self._hidden])
        labels = [part[2] for part in self._hidden if part[2] is not None]
        # An id may occur in several batches.
        _, first = np.unique(ids.numpy(), return_index=True)
        columns: dict[str, Any] = {"id": ids.numpy()[first], "values": rows.numpy()[first]}
        if labels:
            columns["label"] = torch.cat(labels).numpy()[first]
        part = path.with_name(f"{path.name}.{os.getpid()}.part")  # a report may read the folder meanwhile
        with open(part, "wb") as file:
            np.savez(file, **columns)
        os.replace(part, path)


def _ids(batch: Any) -> Tensor | None:
    """Return the source data's ids of the batch's nodes, of the target type; None if the batch has none."""
    if isinstance(batch, HeteroData):
        if not isinstance(batch.target, str):  # an edge type: the samples do without ids
            return None
        batch = batch[batch.target]
    return batch.orig_id.cpu() if "orig_id" in batch else None
