"""The job that every rank executes: fit, test, predict, export or partition."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from omegaconf import DictConfig

from gtrain import backends, targets
from gtrain.callbacks.checkpoint import RunCheckpoint, check_stopping
from gtrain.callbacks.loggers import end_wandb, log_configuration, log_ranks, make_loggers, silent_loggers
from gtrain.callbacks.predictions import PredictionWriter, check_output, format_of, types_beside
from gtrain.callbacks.progress import ProgressLine
from gtrain.callbacks.recorder import RunRecorder
from gtrain.callbacks.smoothing import Smoothing
from gtrain.callbacks.test_record import TestRecorder
from gtrain.config import APPLYING, PREPARING, plain
from gtrain.data.batches.loader import target_type
from gtrain.data.module import GraphDataModule
from gtrain.errors import ConfigError, DataError
from gtrain.graph.store.manifest import safe_name
from gtrain.graph.store.replica import RemoteFolder
from gtrain.kernel_cache import find_cache
from gtrain.launch import slot as slots
from gtrain.launch.environment import divide_cores, find_environment, ranks_on_this_machine
from gtrain.model.classification import default_score
from gtrain.model.inputs import weight_demand, zero_demand
from gtrain.model.kinds import kind
from gtrain.nn import tables
from gtrain.record import events
from gtrain.record.collecting import collect_record
from gtrain.record.process_log import ProcessLog
from gtrain.run import build, report, runs
from gtrain.run.sketch import sketch_model
from gtrain.run.table_sizes import table_sizes
from gtrain.settings import as_typed
from gtrain.strategy import checkpoint as checkpoints
from gtrain.strategy.base import GraphStrategy
from gtrain.strategy.counters import PeakMemory
from gtrain.strategy.folder_sharing import agreed_path
from gtrain.strategy.preparation import prepare
from gtrain.strategy.servers import ServerMeter

log = logging.getLogger("gtrain")


def run(cfg: DictConfig, choices: dict[str, str]) -> float | None:
    """Execute ``cfg.verb``.

    Args:
        cfg: the resolved and validated configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.

    Returns:
        The best monitored score of a training, which a sweeper optimises; else None.
    """
    _silence_lightning()
    divide_cores(ranks_on_this_machine())
    find_cache()
    config = plain(cfg)
    if config["trainer"]["accelerator"] == "cpu" and not config["cluster"].get("gpus_per_rank"):
        # Lightning asks for the states of CUDA's generators, which would take memory of the GPU in each rank.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config["verb"] not in PREPARING:
        targets.check_objects(config, build.find_target)
        return Task(config, choices).run()
    targets.check_objects(config, build.find_target, ["data"])
    module = data_module(config, config["trainer"]["num_nodes"] * config["trainer"]["devices"])
    if config["verb"] == "schema":
        report.print_schema(module.columns(), as_json=config["format"] == "json")
        return None
    module.prepare_data()
    report.print_partition(module.open_store())
    if (address := config["data"].get("remote_store")) is not None:
        RemoteFolder(address).write(module.open_store())
        print(f"wrote the store to {address}")
    return None


def data_module(config: dict[str, Any], ranks: int) -> GraphDataModule:
    """Build the DataModule, with one part per rank unless the configuration or the strategy sets another number.

    Raises:
        ConfigError: ``data._target_`` is not a GraphDataModule.
    """
    parts = config["data"].get("num_parts")
    parts = ranks if parts is None else parts  # not `or`: the DataModule refuses 0
    backend = backends.get(config["strategy"]["name"])
    store_settings = backend.store_settings(config)
    buckets = store_settings.pop("buckets", False)
    if config["verb"] == "partition":  # it writes the remote store
        store_settings["remote_store"] = None
    module = build.make({**config["data"], "num_parts": parts, **store_settings}, "data")
    if not isinstance(module, GraphDataModule):
        raise ConfigError(
            f"data._target_={config['data']['_target_']} is not a GraphDataModule.",
            hint="subclass gtrain.GraphDataModule.",
        )
    module.edge_buckets, module.parts_key = buckets, backend.parts_key
    return module


def _weight_demand(
    config: dict[str, Any], model: str, data: GraphDataModule, *, demand: Callable[..., str | None] = weight_demand
) -> str | None:
    """Return what the model of a job demands of edge weights, before the graph is read.

    Only the process that prepares the store calls this, so a rank builds a user's model once.

    Args:
        config: the configuration.
        model: what messages call the model.
        data: the DataModule, not prepared.
        demand: ``weight_demand`` or ``zero_demand``.

    Returns:
        A clause for messages; None if the model demands nothing, or can be built only with the graph.
    """
    with torch.random.fork_rng(devices=[]):
        module = sketch_model(config, data)
    return None if module is None else demand(module, model)


@dataclass
class Task:
    """The job as one rank runs it."""

    config: dict[str, Any]
    choices: dict[str, str]

    @property
    def model_name(self) -> str:
        """What messages call the model: its option, or its import path if the model is not one of gtrain's."""
        target = str(self.config["model"].get("_target_"))
        is_option = target.startswith("gtrain.model.") and target != self.choices["model"]
        return f"model={self.choices['model']}" if is_option else f"model._target_={target}"

    def run(self) -> float | None:
        if self.config["verb"] in ("predict", "export"):
            check_output(self.output, self.format, beside=self.embeds)
        pl.seed_everything(self.config["seed"], verbose=False)
        strategy = self.make_strategy()
        with contextlib.closing(strategy.local_copies):
            try:
                best = self._run(strategy)
                end_wandb(0)
                return best
            except Exception as exception:
                end_wandb(1)
                if (explained := strategy.explained(exception)) is exception:
                    raise
                raise explained from exception

    def _run(self, strategy: GraphStrategy) -> float | None:
        config, run_dir = self.config, Path(self.config["paths"]["run"])
        checkpoint = agreed_path(find_environment(), self.checkpoint)
        training = None if checkpoint is None else checkpoints.training_data(checkpoint)
        strategy.model_name, strategy.run_folder = self.model_name, run_dir.absolute()
        # After make_strategy: the baseline includes the strategy's imports.
        process_log = self._process_log(strategy, run_dir)
        memory = PeakMemory(process_log)
        # A restarted rank, or a job whose servers still have its state, continues from there.
        if slots.restarts() or strategy.outlives_job:
            checkpoint = strategy.restart_checkpoint(run_dir) or checkpoint
        server_meter = _server_meter(strategy)
        data = data_module(config, strategy.world_size)
        # That of the command's checkpoint, also in a rank that was restarted.
        data.follow(training, applied=config["verb"] in APPLYING)
        data.weight_demand = partial(_weight_demand, config, strategy.model_name)
        data.zero_demand = partial(_weight_demand, config, strategy.model_name, demand=zero_demand)
        prepare(data)
        # After prepare, which forks: this starts a thread, and a process with threads cannot fork.
        memory.start()
        store = data.open_store()
        if strategy.is_global_zero and (sizes := table_sizes(config, store)) is not None:
            log.info("%s", sizes)
        with strategy.making_model():
            model = build.make_model(config["model"], store)
        traits = backends.Traits(kind(model), data.task, store.is_hetero, any(True for _ in tables(model)))
        if (reason := traits.refusal(strategy.serves)) is not None:
            others = backends.serving(traits, {"data.task": data.task})
            raise backends.not_served(strategy.strategy_name, self.model_name, traits, reason, others)
        recorder = RunRecorder(strategy.counters, process_log)
        if strategy.is_global_zero:
            process_log.write("store", path=str(store.path.absolute()), parts=store.num_parts)
        trainer = self._trainer(strategy, recorder, model, data)
        again = bool(slots.restarts() or slots.attempt())
        if config["verb"] == "train" and strategy.is_global_zero and not (again and runs.is_registered(run_dir)):
            runs.register(self._runs, run_dir, config)
        if config["verb"] in ("predict", "export"):
            self._predict(trainer, model, data, checkpoint)
            return None
        log_configuration(trainer.loggers, config)
        fit_seconds, best = 0.0, None
        if config["verb"] == "train":
            start = time.perf_counter()
            trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
            fit_seconds, best = time.perf_counter() - start, _best(trainer)
        # A job that restarted after its last epoch, or its last validation, has those values in its history alone.
        metrics = recorder.newest | {name: float(value) for name, value in trainer.callback_metrics.items()}
        epoch_of = {name: recorder.epoch_of.get(name) for name in metrics}
        if config["verb"] == "test" and not data.num_seeds("test"):
            tested = "edges" if data.task == "link" else "nodes with labels"
            raise DataError(
                f"{data.origin} has no {tested} in its test split, so nothing can be tested.",
                hint="give data that have some; gtrain predict needs none.",
            )
        if data.num_seeds("test") > 0:
            test_metrics, epoch = self._test(trainer, model, data, checkpoint, recorder)
            metrics |= test_metrics
            epoch_of |= dict.fromkeys(test_metrics, epoch)
        best_possible = {name: value for name, value in store.facts.items() if name.startswith("best_")}
        metrics |= {f"data/{name}": float(value) for name, value in best_possible.items() if value is not None}
        figures = report.rank_figures(strategy.global_rank, memory, recorder, strategy.counters)
        # Requested now, while every machine still has its servers.
        server_figures = strategy.servers.figures() if server_meter else []
        gathered = strategy.group.all_gather_object((figures, strategy.servers.traffic, data.preparation_memory))
        ranks = [figures for figures, _, _ in gathered]
        process_log.flush()
        collect_record(strategy, run_dir)
        if server_meter:
            ranks += server_meter.ranks(server_figures, [traffic for _, traffic, _ in gathered])
        if strategy.is_global_zero:
            preparation = next((memory for _, _, memory in gathered if memory is not None), None)
            chosen = config["plan"]["chosen"]
            resolved = strategy.resolved_settings() | ({} if chosen is None else {"strategy": chosen})
            epoch_metrics = report.EpochMetrics(metrics, epoch_of, best)
            content = report.summary(
                config, self.choices, data, recorder, epoch_metrics, ranks, fit_seconds, resolved, preparation
            )
            report.write(run_dir / events.SUMMARY, content)
            log_ranks(trainer.loggers, ranks, trainer.global_step)
            report.print_summary(content, run_dir)
        return None if best is None else best.value

    def _process_log(self, strategy: GraphStrategy, run_dir: Path) -> ProcessLog:
        """Return this rank's log in the record of the run, which only training and tests have."""
        recorded = self.config["verb"] in events.RECORDED
        label, again = f"rank {strategy.global_rank}", bool(slots.restarts() or slots.attempt())
        return ProcessLog(run_dir if recorded else None, label, append=again)

    @property
    def output(self) -> Path:
        """The file that ``gtrain predict`` and ``gtrain export`` write."""
        name = "embeddings" if self.config["verb"] == "export" else "predictions"
        return Path(self.config["output"] or Path(self.config["paths"]["run"], f"{name}.{self.format}"))

    @property
    def format(self) -> str:
        """The format of :attr:`output`: the one that was set, or else the one of its ending."""
        chosen: str | None = self.config["format"]
        return chosen or format_of(self.config["output"])

    @property
    def embeds(self) -> bool:
        """Whether :attr:`output` has embeddings, not predictions."""
        return self.config["verb"] == "export" or bool(self.config["embeddings"])

    def make_smoothing(self) -> Smoothing | None:
        """Return what corrects the predictions; None without ``correct_and_smooth``.

        Raises:
            ConfigError: the job does not predict scores of classes in one process.
        """
        setting, trainer = self.config["correct_and_smooth"], self.config["trainer"]
        if setting is None or setting is False:
            return None
        ranks, limit = trainer["num_nodes"] * trainer["devices"], trainer["limit_predict_batches"]
        every = limit is None or (isinstance(limit, float) and limit == 1.0)  # the number 1 is one batch
        for unfit, found in (
            (self.config["verb"] != "predict", f"{self.config['verb']} writes no predictions"),
            (self.embeds, "embeddings=true writes no scores"),
            (self.config["data"]["task"] != "node", "data.task=link predicts edges"),
            (ranks > 1, f"{ranks} ranks each have a part of the graph"),
            (not every, f"trainer.limit_predict_batches={limit} leaves nodes without scores"),
            (trainer["fast_dev_run"], "trainer.fast_dev_run leaves nodes without scores"),
        ):
            if unfit:
                raise ConfigError(
                    f"correct_and_smooth={as_typed(setting)} was set, and {found}.",
                    hint="gtrain predict run=FOLDER strategy=single correct_and_smooth=true, for classes of nodes.",
                )
        return Smoothing(setting)

    @property
    def _runs(self) -> Path:
        return Path(self.config["paths"]["runs"]).absolute()

    def make_strategy(self) -> GraphStrategy:
        """Return the chosen strategy, with its settings."""
        settings = {key: value for key, value in self.config["strategy"].items() if key != "name"}
        return backends.get(self.choices["strategy"]).load_strategy()(**settings)

    def checkpoint(self) -> Path | str | None:
        """Return the path or address of the checkpoint to resume from, or to test; None if none is set."""
        path = self.config["ckpt_path"]
        if path is None and self.config["verb"] in APPLYING:
            path = "best"
        return None if path is None else runs.resolve(path, self._runs, self.config)

    def _trainer(
        self, strategy: GraphStrategy, recorder: RunRecorder, model: pl.LightningModule, data: GraphDataModule
    ) -> pl.Trainer:
        settings = dict(self.config["trainer"])
        if data.num_seeds("val") == 0:
            # A data set may hold nothing out for validation.
            settings["limit_val_batches"] = 0
        made = {
            f"callbacks.{name}": build.make(node, f"callbacks.{name}")
            for name, node in self.config["callbacks"].items()
            if node
        }
        if self.config["verb"] == "train" and not settings["limit_val_batches"] and not settings["fast_dev_run"]:
            for key, callback in made.items():
                if isinstance(callback, EarlyStopping):
                    empty = f"the validation split of {data.origin} is empty"
                    reason = "trainer.limit_val_batches=0" if data.num_seeds("val") else empty
                    check_stopping(key, callback.monitor, callback.strict, reason)
        callbacks = [*made.values()]
        savers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in savers:
            if not settings["limit_val_batches"]:
                # Without validation the last epoch counts as the best.
                callback.monitor = None
            elif isinstance(callback, RunCheckpoint) and callback.monitor == self.config["model"].get("score"):
                callback.monitor_key = "model.score"
            elif callback.monitor == "auto":
                score = default_score(model, data.facts)
                if isinstance(callback, RunCheckpoint):
                    callback.select_by(score)
                else:
                    callback.monitor = score
        if not settings["enable_checkpointing"]:
            callbacks = [callback for callback in callbacks if callback not in savers]
        settings["enable_checkpointing"] = bool(savers) and settings["enable_checkpointing"]
        progress = [ProgressLine(recorder, *data.work)] if settings.pop("enable_progress_bar") else []
        loggers = silent_loggers(self.config["logger"])
        if strategy.is_global_zero and self.config["verb"] in events.RECORDED:
            restarted = bool(slots.restarts() or slots.attempt())
            loggers = make_loggers(
                self.config["logger"], build.make, Path(self.config["paths"]["run"]), continues=restarted
            )
        return build.make_trainer(
            settings,
            strategy=strategy,
            callbacks=[recorder, *progress, *callbacks],
            logger=loggers or False,
            default_root_dir=self.config["paths"]["run"],
            # ProgressLine takes the place of Lightning's bar.
            enable_progress_bar=False,
            use_distributed_sampler=False,
        )

    def _write(
        self,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        data: GraphDataModule,
        checkpoint: Path | str | None,
        path: Path,
        node_type: str | None = None,
    ) -> PredictionWriter:
        """Write a file of the nodes of one type; None: that of the labels."""
        assert isinstance(trainer.strategy, GraphStrategy)
        store, smoothing = data.open_store(), self.make_smoothing()
        if smoothing is not None:
            smoothing.check(store)
        writer = PredictionWriter(path, self.format, store, trainer.strategy, self.embeds, node_type, smoothing)
        data.predict_type = node_type
        trainer.callbacks.append(writer)  # type: ignore[attr-defined]
        trainer.predict(model, datamodule=data, ckpt_path=checkpoint, return_predictions=False)
        trainer.callbacks.remove(writer)  # type: ignore[attr-defined]
        return writer

    def _write_types(
        self,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        data: GraphDataModule,
        checkpoint: Path | str | None,
        first: PredictionWriter,
    ) -> None:
        """Write the embeddings of the other node types too, if the network has them, into a folder."""
        store, output = data.open_store(), self.output
        target = target_type(store)
        if not first.every_type:
            first.notes.append(
                f"the network computes nodes of the type {target} alone, so that others are not written."
            )
            return
        folder = types_beside(output)
        incomplete = folder.with_name(folder.name + ".done")
        for node_type in store.node_types:
            if node_type != target:
                path = incomplete / f"{safe_name(node_type)}.{self.format}"
                self._write(trainer, model, data, checkpoint, path, node_type)
        if trainer.strategy.is_global_zero:
            os.replace(incomplete, folder)
            first.written.append(folder)
        trainer.strategy.barrier()

    def _predict(
        self, trainer: pl.Trainer, model: pl.LightningModule, data: GraphDataModule, checkpoint: Path | str | None
    ) -> None:
        """Write the scores or the embedding of every node."""
        strategy = trainer.strategy
        assert isinstance(strategy, GraphStrategy)
        writer = self._write(trainer, model, data, checkpoint, self.output)
        store = data.open_store()
        if (
            (self.embeds or data.task == "link")  # of which predictions are the embeddings of both ends
            and len(store.node_types) > 1
            and not store.facts.get("entity_types")
            and self.format != "pbg_hdf5"
        ):
            self._write_types(trainer, model, data, checkpoint, writer)
        if strategy.is_global_zero:
            for path in writer.written:
                print(f"written: {path}")
            for note in writer.notes:
                print(f"gtrain: {note}", file=sys.stderr)

    def _test(
        self,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        data: GraphDataModule,
        checkpoint: Path | str | None,
        recorder: RunRecorder,
    ) -> tuple[dict[str, float], int | None]:
        """Test the best checkpoint of this run, or ``checkpoint`` for ``gtrain test``.

        Returns:
            The metrics that the test logged, and the epoch of the weights.
        """
        if self.config["verb"] == "train":
            best = getattr(trainer.checkpoint_callback, "best_model_path", "")
            checkpoint = best or None
        run_dir = Path(self.config["paths"]["run"])
        assert isinstance(trainer.strategy, GraphStrategy)
        summary = TestRecorder(run_dir, trainer.strategy.global_rank, trainer.strategy.world_size)
        trainer.callbacks.append(summary)  # type: ignore[attr-defined]
        results = trainer.test(model, datamodule=data, ckpt_path=checkpoint, verbose=False)
        trained = recorder.history[-1]["epoch"] if recorder.history else None
        epoch = trained if checkpoint is None else trainer.strategy.loaded_epoch
        return {name: float(value) for result in results for name, value in result.items()}, epoch


def _server_meter(strategy: GraphStrategy) -> ServerMeter | None:
    """Return rank 0's meter of the job's servers; None on other ranks and in a job without servers."""
    if not slots.roster().counts or not strategy.is_global_zero:
        return None
    meter = ServerMeter(strategy.servers)
    # First, so that its requests are not counted as this rank's traffic.
    strategy.counters.meters.insert(0, meter)
    return meter


def _best(trainer: pl.Trainer) -> report.BestScore | None:
    """Return the best monitored score of a fit, which a sweeper optimises; None if nothing is monitored."""
    callback = trainer.checkpoint_callback
    if not isinstance(callback, ModelCheckpoint) or callback.monitor is None or callback.best_model_score is None:
        return None
    epoch = getattr(callback, "best_epoch", None)
    return report.BestScore(callback.monitor, float(callback.best_model_score), epoch, callback.mode)


def _silence_lightning() -> None:
    """Silence Lightning's advice to authors of a Trainer: here the configuration decides."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for pattern in (
        ".*does not have many workers.*",
        ".*Experiment logs directory.*",
        ".*Checkpoint directory.*",
        ".*number of training batches.*",
        ".*`isinstance.treespec, LeafSpec.`.*",
        ".*log_every_n_steps.*",
        ".*The dirpath has changed.*",
        ".*ckpt_path.*weights_only.*",
        ".*callbacks used to create the checkpoint need to be provided.*",
        ".*Sparse CSR tensor support is in beta.*",
        ".*Sparse invariant checks are implicitly disabled.*",
        ".*`srun` command is available on your system but is not used.*",
    ):
        warnings.filterwarnings("ignore", pattern)
