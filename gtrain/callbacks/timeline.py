"""Timeline of each rank: operators, layers, batches, requests, and the spans in which it waits for other processes."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch_geometric.nn import MessagePassing

from gtrain.errors import ConfigError
from gtrain.protocols import network_of
from gtrain.record.spans import SpanLog, write_spans
from gtrain.strategy.base import GraphStrategy
from gtrain.wire import tracing


class Timeline(Callback):
    """Records some epochs with torch's profiler and writes ``trace-rank<r>.json`` per rank.

    The files are Chrome traces for ``chrome://tracing`` and https://ui.perfetto.dev. They contain torch's operators,
    forward and backward, and the spans in which the rank waited for others (``wait: ...``). ``spans-rank-<r>.json``
    has gtrain's own spans, which ``gtrain trace`` merges with those of servers. The recording stays in memory until
    the last recorded epoch ends. Writing the files is excluded from a run's times, but recorded epochs are slower than
    others.

    Args:
        folder: folder of the files; created if missing.
        first_epoch: epochs of this run before the recording; the first epoch also warms caches up. A run that is too
            short is recorded from its start.
        epochs: epochs to record.
        max_batches: most batches to record, including validation. It bounds the file, about 250 bytes per operator.
    """

    def __init__(self, folder: str | Path, first_epoch: int = 1, epochs: int = 2, max_batches: int = 20) -> None:
        limits = {"first_epoch": (first_epoch, 0), "epochs": (epochs, 1), "max_batches": (max_batches, 1)}
        for name, (value, least) in limits.items():
            if not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"callbacks.timeline.{name}={value} was set; it must be an integer from {least}.",
                    hint=f"remove callbacks.timeline.{name} for the default.",
                )
        self._folder, self._first, self._epochs, self._max_batches = Path(folder), first_epoch, epochs, max_batches
        self._epoch = self._batches = 0
        self._profile: Any = None
        self._batch: Any = None
        self._running = False
        self._spans: SpanLog | None = None
        self._batch_start = ("", 0.0)
        self._recorded: list[int] = []
        self._layers: list[tuple[nn.Module, Any, Any]] = []  # with the forward that is timed, and a backend's own

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not on_fit_start: a run that is resumed has its epoch from here on.
        last = trainer.max_epochs if trainer.max_epochs is not None else -1
        if 0 <= last - trainer.current_epoch < self._first + self._epochs:
            self._first = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._epoch == self._first:
            self._begin(trainer)

    def on_train_batch_start(self, *args: Any) -> None:
        self._enter("training batch")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._leave(trainer)

    def on_validation_batch_start(self, *args: Any) -> None:
        self._enter("validation batch")

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._leave(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch += 1
        if self._running:
            self._recorded.append(trainer.current_epoch)
            self._sample(trainer)
        if self._profile is not None and self._epoch == self._first + self._epochs:
            self._finish(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._profile is not None:  # training stopped early
            self._finish(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # Otherwise the profiler prints a line when it starts and when it stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(activities=activities)
        self._profile.start()
        self._profile.add_metadata("gtrain_rank", str(trainer.global_rank))
        self._running = True
        self._spans = SpanLog(record_function)
        tracing.start()
        _record_spans(trainer, self._spans)
        self._wrap_layers(trainer.lightning_module)
        self._sample(trainer)

    def _enter(self, name: str) -> None:
        if self._running:
            self._batch = record_function(name)
            self._batch.__enter__()
            self._batch_start = name, time.perf_counter()

    def _leave(self, trainer: pl.Trainer) -> None:
        if self._running:
            assert self._spans is not None
            self._spans.add("batches", *self._batch_start, time.perf_counter())
            self._batch.__exit__(None, None, None)
            self._batches += 1
            if self._batches == self._max_batches:
                self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> None:
        if self._running:
            self._running = False
            self._sample(trainer)
            _record_spans(trainer, None)
            for layer, timed, forward in self._layers:
                if vars(layer).get("forward") is not timed:  # a backend has replaced or removed it
                    continue
                del layer.forward
                if forward is not None:  # a backend's
                    layer.forward = forward
            self._layers.clear()
            self._profile.stop()

    def _finish(self, trainer: pl.Trainer) -> None:
        self._stop(trainer)
        self._folder.mkdir(parents=True, exist_ok=True)
        rank = trainer.global_rank
        self._profile.export_chrome_trace(str(self._folder / f"trace-rank{rank}.json"))
        self._profile = None
        if self._spans is not None:
            content = {"spans": self._spans.spans, "samples": self._spans.samples, "sent": tracing.stop().sent}
            path = self._folder / f"spans-rank-{rank}.json"
            write_spans(path, f"rank {rank}", {**content, "epochs": self._recorded})
            self._spans = None

    def _sample(self, trainer: pl.Trainer) -> None:
        """Record the counters as they are."""
        if self._spans is not None and isinstance(trainer.strategy, GraphStrategy):
            counters = trainer.strategy.counters
            values = {"bytes_sent": counters.bytes_sent, "bytes_received": counters.bytes_received}
            self._spans.sample(**values, wait_seconds=counters.wait_seconds)

    def _wrap_layers(self, module: pl.LightningModule) -> None:
        """Record the forward pass of the network's layers, by an attribute: hooks would change their kernels."""
        for name, layer in (network_of(module) or module).named_modules():
            if any(True for _ in layer.parameters(recurse=False)) or isinstance(layer, MessagePassing):
                timed = self._timed(f"{name} {type(layer).__name__}", layer.forward)
                self._layers.append((layer, timed, vars(layer).get("forward")))
                layer.forward = timed

    def _timed(self, name: str, forward: Any) -> Any:
        def timed(*args: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return forward(*args, **keywords)
            finally:
                if self._spans is not None:
                    self._spans.add("layers", name, start, time.perf_counter())

        return timed


def _record_spans(trainer: pl.Trainer, spans: SpanLog | None) -> None:
    if isinstance(trainer.strategy, GraphStrategy):
        trainer.strategy.counters.spans = spans
        trainer.strategy.counters.span = nullcontext if spans is None else spans.named
