"""``strategy=pbg`` in a worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from gtrain.backends import Serves
from gtrain.data.batches.loader import SeedLoader
from gtrain.errors import CheckpointError, ConfigError
from gtrain.graph.store import Store
from gtrain.launch.job_store import store_address
from gtrain.nn import deferred, tables
from gtrain.nn.recipe import ModelRecipe
from gtrain.protocols import HasRecipe
from gtrain.strategy.base import GraphStrategy
from gtrain.strategy.checkpoint import SavedRows
from gtrain.strategy.group import Group, form_group
from gtrain.wire.shared import SharedDirectory, SharedTensors
from gtrain_pbg import SERVES
from gtrain_pbg.checkpoints import (
    EpochProgress,
    check_numbering,
    describe,
    load_states,
    matmul_of,
    preserve,
    relations_of,
    save_states,
    warm_start,
    warm_start_location,
)
from gtrain_pbg.config import PBGConfig, check_device, check_machines, check_store, check_training
from gtrain_pbg.deployment import Deployment
from gtrain_pbg.device.lanes import Device
from gtrain_pbg.device.tables import CommonTensors, DeviceTables
from gtrain_pbg.device.training import DeviceTraining
from gtrain_pbg.edges import BucketEdges, RelationGroups
from gtrain_pbg.evaluation import EvaluationBatches
from gtrain_pbg.machines.deployment import MultiMachineDeployment
from gtrain_pbg.machines.members import JobEndedError
from gtrain_pbg.step.matmul_format import FORMATS, choose_format, device_format, fastest_format, without_int8
from gtrain_pbg.step.relations import state_width
from gtrain_pbg.tables import PartitionedTableStorage, Partitioning, TensorShapes
from gtrain_pbg.training import BucketTraining, StepRules, fill_relations, relation_shapes
from gtrain_pbg.typed import TypedTables, partition_types
from gtrain_pbg.worker import BucketBatches, BucketWorker, EpochSteps

MEMORY = "pbg"
"""Name of the memory that the workers of a machine share."""
log = logging.getLogger("gtrain")


@dataclass
class InstalledModel:
    """A model whose tables are in partitions, and whose relation parameters are in shared memory.

    Attributes:
        recipe: how to compute its training step.
        store: the graph.
        tables: the tables of all entity types.
        shared: memory of the machine's workers: tables, relation parameters, optimizer state.
        common: what of this is on the GPU in every run; None on a CPU, and between runs.
    """

    recipe: ModelRecipe
    store: Store
    tables: TypedTables
    shared: SharedTensors
    common: CommonTensors | None = None


class PBGStrategy(GraphStrategy):
    """Trains embeddings bucket by bucket: the edges between two partitions of the table while both are in memory.

    The workers of a machine take steps independently on tables in shared memory, without locks (Hogwild, Recht et al.
    2011), and meet at the end of each bucket. The module's ``training_step`` is not run:
    :class:`~gtrain_pbg.step.training.TrainingStep` computes its ``recipe()``. :mod:`gtrain_pbg.machines` has what
    several machines need.

    Its settings are those of :class:`gtrain_pbg.config.PBGConfig`.
    """

    strategy_name: ClassVar[str] = "pbg"
    full_batch = False
    serves: ClassVar[Serves] = SERVES
    lockstep: ClassVar[bool] = False
    settings_type = PBGConfig
    settings: PBGConfig

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self._installed: InstalledModel | None = None
        self._deployment = Deployment(self.settings, self.group)
        self._worker: BucketWorker | None = None
        self._training: BucketTraining | None = None
        self._cpu_formats: list[str] = []  # the fastest number format of each rank's CPU
        self._epoch_progress: EpochProgress | None = None  # set while a checkpoint is written within an epoch
        self._resume_point = EpochProgress(0, 0)
        self._device: Device | None = None  # set during a run on a GPU

    def make_device(self) -> Device | None:
        """Return the GPU of this rank; None on a CPU."""
        return Device(self.root_device) if self.root_device.type == "cuda" else None

    @property
    def _state(self) -> InstalledModel:
        assert self._installed is not None
        return self._installed

    # ------------------------------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        check_machines(self.num_nodes, self.settings)
        super().setup_environment()

    def make_group(self) -> Group:
        """Form the group of all workers, and that of this machine."""
        if self.num_nodes == 1:
            self._deployment = Deployment(self.settings, super().make_group())
            return self._deployment.group
        environment = self.cluster_environment
        assert environment is not None
        self._deployment = machines = MultiMachineDeployment(
            *(self.settings, self.servers, self.global_rank, self.world_size, self.counters),
            store=store_address(environment) if self.node_rank else None,
            tell=self.say if self.speaks else None,
            timeout_seconds=self.timeout_seconds,
        )
        # Machine 0 cannot be lost: all ranks meet there.
        if self.fitting and self.settings.on_trainer_loss == "continue" and self.node_rank > 0:
            self.may_be_lost()
            machines.lock.on_loss(lambda error: self.may_be_lost(not isinstance(error, JobEndedError)))
        self.joined()
        # From now on the lock server counts this rank's death as the loss of its machine.
        machines.lock.request("stay", {})
        machines.machine = form_group(
            *(environment, self.local_rank, self.num_processes, self.timeout_seconds, self.counters),
            name=f" of machine {self.node_rank}",
            first=self.node_rank * self.num_processes,
        )
        return machines.group

    def restart_checkpoint(self, run_dir: Path) -> Path | None:
        """Return None: a rank is restarted only before it has joined the job, and starts with the others."""
        return None

    @property
    def _leads(self) -> bool:
        """Whether this worker moves the machine's partitions."""
        return self._deployment.machine.rank == 0

    def making_model(self) -> AbstractContextManager[None]:
        return deferred()

    def check_module(self, module: Module) -> None:
        if not isinstance(module, HasRecipe):
            raise ConfigError(
                f"{type(module).__name__} has no recipe(), by which strategy=pbg trains; see gtrain.nn.recipe.",
                hint="set model=kg, or strategy=single.",
            )
        recipe = module.recipe()
        check_training(self.trainer, self.data, recipe)
        if self.root_device.type != "cpu":
            check_device(self.num_processes, self.settings, recipe)

    def check_optimizers(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        StepRules(optimizers, module.recipe())  # type: ignore[operator]

    def open_shard(self, store: Store) -> Store:
        check_store(store, self.settings.num_partitions)
        return store

    def install(self, module: Module) -> None:
        """Move the tables to partitions and relation parameters to shared memory."""
        recipe: ModelRecipe = module.recipe()  # type: ignore[operator]
        rules = StepRules(self.optimizers, recipe) if self.fitting else None
        if self._installed is None:
            self._installed = self._make_tables(recipe, rules)
            if self._leads:
                self._fill(rules.initial_states if rules else (0.0, 0.0))
            self._state.tables.assign_first_slots()
            self.group.barrier()
        self._state.recipe = recipe
        values: Mapping[str, Tensor] = self._state.shared
        self._device = self.make_device()
        if self._device is not None:
            values = self._put_on_device(self._state, self._device).tensors
        for name, parameter in recipe.parameters.items():
            parameter.data = values[name]
        for layer, table in zip(recipe.tables.values(), self._state.tables.tables, strict=True):
            layer.move(PartitionedTableStorage(table))
        if rules is not None:
            self._worker = self._make_worker(self._state, rules)

    def _put_on_device(self, state: InstalledModel, device: Device) -> CommonTensors:
        """Copy relation parameters, and tables that are not partitioned, to the GPU."""
        host = state.tables.in_common(state.shared)
        dtype, exchanging = state.tables.dtype, self._deployment.exchanging
        state.common = CommonTensors(device, state.recipe, dtype, host, exchanging)
        return state.common

    def _make_worker(self, state: InstalledModel, rules: StepRules) -> BucketWorker:
        tables, shared, settings, trainer = state.tables, state.shared, self.settings, self.trainer
        assert trainer is not None
        matmul = settings.matmul if settings.matmul != "auto" else self._choose_matmul(state.recipe, tables.dtype)
        arguments = self.lightning_module, state.recipe, rules, shared, tables, matmul
        if self._device is None or state.common is None:
            self._training = training = BucketTraining(*arguments)
        else:
            self._device.register(shared.values())
            on_device = DeviceTables(self._device, tables, shared, state.common, settings.device_partitions)
            tables.attach(on_device)
            self._training = training = DeviceTraining(self._device, on_device, *arguments, self.num_nodes > 1)
        limit = trainer.limit_train_batches if isinstance(trainer.limit_train_batches, int) else None
        source = self._deployment.source(tables, shared, state.store, lambda epoch: self._resume_point.of(epoch), limit)
        return BucketWorker(
            *(source, training, self._deployment.machine, self._deployment.group),
            clock=lambda: trainer.current_epoch,
            held_out=settings.eval_fraction > 0,
            limit=limit,
        )

    def _choose_matmul(self, recipe: ModelRecipe, dtype: torch.dtype) -> str:
        """Resolve ``strategy.matmul=auto``, to the same format on all ranks, whose CPUs may differ."""
        if self._device is None:
            self._cpu_formats = self.group.all_gather_object(fastest_format())
            chosen = choose_format(recipe, dtype, self._cpu_formats)
        else:
            self._cpu_formats = ["bfloat16"]
            chosen = device_format(recipe, dtype)
        if self.is_global_zero:
            log.info("strategy.matmul=auto: matrix products in %s", chosen)
        return chosen

    def resolved_settings(self) -> dict[str, Any]:
        return {} if self._training is None else {"strategy.matmul": self._training.matmul}

    def _make_tables(self, recipe: ModelRecipe, rules: StepRules | None) -> InstalledModel:
        """Allocate memory for tables, relations and their optimizer state; the machine's leader makes it."""
        assert self.data is not None and self.trainer is not None
        store = self.open_shard(self.data.open_store())
        nodes = Partitioning(store.offsets, tuple(store.node("orig_id", part) for part in range(store.num_parts)))
        layers = list(recipe.tables.values())
        dtype, types = layers[0].weight.dtype, partition_types(store, [layer.table for layer in layers])
        widths = [state_width(rules.table.name, layer.table.dim) if rules else 0 for layer in layers]
        slots, machine = self._deployment.slots, self._deployment.machine
        shapes = TypedTables.tensors(types, slots, widths, dtype) | relation_shapes(recipe, rules)
        shared = share_memory(machine, shapes, self.timeout_seconds)
        run_dir, folder = Path(self.trainer.default_root_dir), self._deployment.folder
        tables = TypedTables(types, nodes, slots, widths, dtype, run_dir / folder, shared, self._leads)
        self._deployment.connect(tables, run_dir, self.is_global_zero)
        return InstalledModel(recipe, store, tables, shared)

    def _fill(self, initial_states: tuple[float, float]) -> None:
        """Fill the machine's shared memory with initial values; rank 0 fills the tables too."""
        recipe, shared, tables = self._state.recipe, self._state.shared, self._state.tables
        fill_relations(shared, recipe, initial_states[1])
        if not self.is_global_zero:
            return
        tables.initialize(initial_states[0])
        if self.settings.warm_start is not None and self.optimizers:
            assert self.lightning_module is not None
            known = {id(parameter): shared[name] for name, parameter in recipe.parameters.items()}
            named = self.lightning_module.named_parameters()
            parameters = {name: known[id(parameter)] for name, parameter in named if id(parameter) in known}
            path, relations = warm_start_location(self.settings.warm_start), relations_of(self.lightning_module, recipe)
            if isinstance(path, str):
                path = self.local_copies.own(path, self.run_folder, "strategy.warm_start")
            warm_start(path, self._state.store, tables, parameters, relations)
        tables.publish()

    def uninstall(self, module: Module) -> None:
        if self._installed is None:
            return
        recipe = self._installed.recipe
        for parameter in recipe.parameters.values():
            parameter.data = parameter.data.clone()
        if self._installed.common is not None:
            self._installed.common.save()
        for layer, table in zip(recipe.tables.values(), self._installed.tables.tables, strict=True):
            # In the order of the source data: the module takes it as it is.
            one_partition = table.partitions.count == 1
            layer.move_back(table.read(0) if one_partition else layer.weight.new_empty(0, layer.table.dim))
        # Frees the GPU's memory: a later run copies from the host again.
        self._installed.tables.detach()
        if isinstance(self._training, DeviceTraining) and self._worker is not None:
            self._training.release()
        self._worker = None
        if self._device is not None:
            self._device.unregister()
        self._installed.common = self._device = None

    # ------------------------------------------------------------------------------------------ batches

    def batches(self, shard: Store, loader: SeedLoader) -> Iterable[Any]:
        settings, tables, machine = self.settings, self._state.tables, self._deployment.machine
        if loader.split != "train":
            assert isinstance(self.lightning_module, HasRecipe)
            filtered, share = self.lightning_module.filtered, self._deployment.evaluation_share
            return EvaluationBatches(loader, tables.nodes, filtered, share, not tables.whole)
        edges = BucketEdges(
            shard, settings.num_edge_chunks, settings.eval_fraction, settings.shuffle, loader.seed, self.dtype
        )
        size, keys = loader.batch_size or max(1, shard.num_edges), RelationGroups(self._state.recipe).batching_keys
        assert self._worker is not None
        return EpochSteps(self._worker, BucketBatches(edges, size, keys, machine.rank, machine.size))

    # ------------------------------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on the batches of a step; the module's own ``training_step`` is not run."""
        module = self.lightning_module
        assert isinstance(module, HasRecipe) and self._worker is not None
        total, weight, logged = self._worker.train()
        for name, value in logged.items():
            module.log(f"train/{name}", value, on_step=False, on_epoch=True, batch_size=1)
        pair = torch.tensor([total, weight], dtype=torch.float64)
        return {"loss": module.log_training(pair[0], pair[1])}

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Do nothing: the step has computed and applied the gradients."""
        return closure_loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the step, which applies the optimizer's rule itself; Lightning counts it as one."""
        return closure()

    # ------------------------------------------------------------------------------------------ checkpoints

    @property
    def saves_on_request(self) -> bool:
        """On one machine, whose workers take steps together; several machines train different buckets."""
        return self.num_nodes == 1

    def interrupted(self) -> bool:
        return bool(self.group.all_reduce(torch.tensor([int(self.interruption.requested)]), "max"))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Write the last checkpoint after an edge chunk, with ``strategy.checkpoint_chunks``."""
        trainer, chunk = self.trainer, self._worker.done if self._worker is not None else 0
        folder = getattr(trainer and trainer.checkpoint_callback, "dirpath", None)
        if not self.settings.checkpoint_chunks or not chunk or trainer is None or folder is None:
            return
        self._epoch_progress = EpochProgress(trainer.current_epoch, chunk)
        try:
            trainer.save_checkpoint(os.path.join(folder, "last.ckpt"))
        finally:
            self._epoch_progress = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        worker, trainer = self._worker, self.trainer
        if (
            self._epoch_progress is None
            and self.fitting
            and worker is not None
            and trainer is not None
            and not worker.over
        ):
            if self.num_nodes > 1:
                raise ConfigError(
                    "a checkpoint is due within an epoch, and the machines of strategy=pbg train different "
                    "numbers of steps.",
                    hint="set strategy.num_edge_chunks and strategy.checkpoint_chunks=true instead of "
                    "every_n_train_steps, or trainer.num_nodes=1.",
                )
            start = self._resume_point.of(trainer.current_epoch)
            self._epoch_progress = replace(start, step=start.step + worker.trained_steps)
            try:
                super().save_checkpoint(checkpoint, filepath, storage_options)
            finally:
                self._epoch_progress = None
            return
        super().save_checkpoint(checkpoint, filepath, storage_options)
        interval = self.settings.checkpoint_preservation_interval
        if self.is_global_zero and interval is not None and self._epoch_progress is None:
            preserve(filepath, int(checkpoint["epoch"]), interval)

    def shard_files(self, folder: Path) -> None:
        if self.is_global_zero and self._installed is not None:
            state, module = self._installed, self.lightning_module
            assert module is not None
            if state.common is not None:
                state.common.save()
            state.tables.save(folder)
            if self._epoch_progress is not None:
                self._epoch_progress.write(folder)
            save_states(folder, state.shared, state.recipe)
            matmul = None if self._training is None else self._training.matmul
            describe(folder, state.store, state.tables, relations_of(module, state.recipe), matmul)

    def _adopt_matmul(self, folder: Path, training: BucketTraining) -> None:
        """With ``strategy.matmul=auto``, continue in the number format of the checkpoint, whatever this CPU is."""
        recorded, warns = matmul_of(folder), self.is_global_zero
        if self._device is not None:
            recorded = without_int8(recorded)
        if recorded == training.matmul or "float64" in (recorded, training.matmul):
            return
        if self.settings.matmul != "auto":
            text = "%s was trained with strategy.matmul=%s; the run continues with strategy.matmul=%s, as set."
            if warns:
                log.warning(text, folder, recorded, training.matmul)
            return
        training.use(recorded)
        slowest = min(self._cpu_formats, key=FORMATS.index)
        if warns and FORMATS.index(recorded) > FORMATS.index(slowest):
            text = "%s was trained with strategy.matmul=%s, and the run continues with it. Not all CPUs of this run "
            text += "have fast instructions for it. HINT: strategy.matmul=%s is faster here, and rounds differently."
            log.warning(text, folder, recorded, slowest)

    def load_tables(self, rows: Mapping[str, SavedRows]) -> None:
        state = self._state
        if state.tables.in_shared_store:
            raise CheckpointError(
                f"ckpt_path was written by another strategy, and trainer.num_nodes={self.num_nodes} was set.",
                hint="set trainer.num_nodes=1; several machines read checkpoints of strategy=pbg alone.",
            )
        named = {id(layer): name for name, layer in tables(self.lightning_module)}  # type: ignore[arg-type]
        self.group.barrier()
        for layer, table in zip(state.recipe.tables.values(), state.tables.tables, strict=True):
            for partition in range(table.partitions.count) if self._leads else ():
                table.overwrite(partition, rows[named[id(layer)]].pieces())
        self.group.barrier()

    def load_shard_files(self, folder: Path) -> None:
        self.group.barrier()
        self._state.tables.load(folder)
        check_numbering(folder, self._state.store)
        if self.fitting and self._training is not None:
            self._adopt_matmul(folder, self._training)
        self._resume_point = EpochProgress.read(folder) or self._resume_point
        if self._leads:
            load_states(folder, self._state.shared)
        self.group.barrier()
        if self._state.common is not None:
            self._state.common.load()


def share_memory(machine: Group, shapes: TensorShapes, timeout_seconds: float) -> SharedTensors:
    """Allocate tensors that all workers of a machine share; rank 0 of the machine makes them.

    Args:
        machine: the workers.
        shapes: shapes and dtypes by name.
        timeout_seconds: how long to wait for them.
    """
    if machine.rank > 0:
        return SharedTensors.attach(machine.broadcast_object(None), MEMORY, timeout_seconds)
    directory = SharedDirectory()
    shared = SharedTensors.create(directory.name, MEMORY, shapes)
    machine.broadcast_object(directory.name)
    return shared
