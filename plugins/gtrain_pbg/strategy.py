"""``strategy=pbg`` in a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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
from gtrain.wire.shared import SharedTensors
from gtrain_pbg import SERVES
from gtrain_pbg.checkpoints import EpochProgress, preserve
from gtrain_pbg.checks import check_store, check_training
from gtrain_pbg.config import PBGConfig, check_machines
from gtrain_pbg.deployment import Deployment, SingleMachineDeployment
from gtrain_pbg.edges import BucketEdges, batching_keys
from gtrain_pbg.evaluation import EvaluationBatches
from gtrain_pbg.machines.deployment import MultiMachineDeployment
from gtrain_pbg.machines.members import JobEndedError
from gtrain_pbg.memory import fill_relations, load_states, relations_layout, save_states, share_memory
from gtrain_pbg.optimizers import StepRules
from gtrain_pbg.step.arithmetic import FORMATS, choose, fastest_of_cpu
from gtrain_pbg.step.relations import state_width
from gtrain_pbg.tables import PartitionedHome, Partitioning
from gtrain_pbg.training import BucketTraining
from gtrain_pbg.typed import TypedTables, partition_types
from gtrain_pbg.warm_start import check_numbering, describe, matmul_of, relations_of, warm_start
from gtrain_pbg.worker import BucketBatches, BucketWorker, EpochSteps

log = logging.getLogger("gtrain")


class PBGStrategy(GraphStrategy):
    """Trains embeddings bucket by bucket: edges between two partitions of the table while both are in memory.

    Each worker takes its own steps, on tables that all workers of the machine have in the same memory, without locks
    (Hogwild, Recht et al. 2011). They meet at the ends of buckets. The module's own ``training_step`` is not run: what
    its ``recipe()`` says is computed by :class:`~gtrain_pbg.step.training.TrainingStep`. What several machines do is in
    :mod:`gtrain_pbg.machines`.

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
        self._store: Store | None = None
        self._recipe: ModelRecipe | None = None
        self._table: TypedTables | None = None
        self._shared: SharedTensors | None = None
        self._deployment: Deployment = SingleMachineDeployment(self.settings, self.group)
        self._worker: BucketWorker | None = None
        self._training: BucketTraining | None = None
        self._cpus: list[str] = []  # the fastest number format of each rank's CPU
        self._now: EpochProgress | None = None  # while a checkpoint is written within an epoch
        self._reached = EpochProgress(0, 0)

    # ------------------------------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        check_machines(self.num_nodes, self.settings)
        super().setup_environment()

    def make_group(self) -> Group:
        """The group of all workers, and that of this machine's."""
        if self.num_nodes == 1:
            self._deployment = SingleMachineDeployment(self.settings, super().make_group())
            return self._deployment.group
        rank = self.global_rank, self.world_size
        environment = self.cluster_environment
        assert environment is not None
        tell = self.say if self.speaks else None
        store = store_address(environment) if self.node_rank else None
        self._deployment = machines = MultiMachineDeployment(
            self.settings, self.servers, *rank, self.counters, store, tell, self.timeout_seconds
        )
        if self.fitting and self.settings.on_trainer_loss == "continue" and self.node_rank > 0:  # all meet on machine 0
            self.may_be_lost()
            machines.lock.on_loss(lambda error: self.may_be_lost(not isinstance(error, JobEndedError)))
        self.joined()
        machines.lock.ask("stay", {})
        place = environment, self.local_rank, self.num_processes
        name = f" of machine {self.node_rank}"
        first = self.node_rank * self.num_processes
        machines.machine = form_group(*place, self.timeout_seconds, self.counters, name=name, first=first)
        return machines.group

    def restart_checkpoint(self, run_dir: Path) -> Path | None:
        """None: a rank is restarted before it has a part in the job, and begins with the others."""
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
        check_training(self.trainer, self.data, module.recipe())

    def check_optimizers(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        StepRules(optimizers, module.recipe())  # type: ignore[operator]

    def open_shard(self, store: Store) -> Store:
        check_store(store, self.settings.num_partitions)
        return store

    def install(self, module: Module) -> None:
        """Let the table live in partitions, and relations where all workers have them."""
        self._recipe = recipe = module.recipe()  # type: ignore[operator]
        rules = StepRules(self.optimizers, recipe) if self.fitting else None
        if self._table is None:
            self._table = self._make_table(recipe, rules)
            if self._leads:
                self._fill(recipe, rules.starts if rules else (0.0, 0.0))
            self._table.assign_first_slots()
            self.group.barrier()
        assert self._shared is not None
        for name, parameter in recipe.parameters.items():
            parameter.data = self._shared[name]
        for layer, table in zip(recipe.tables.values(), self._table.tables, strict=True):
            layer.move(PartitionedHome(table))
        if rules is not None:
            self._worker = self._make_worker(recipe, rules)

    def _make_worker(self, recipe: ModelRecipe, rules: StepRules) -> BucketWorker:
        table, shared, settings, trainer = self._table, self._shared, self.settings, self.trainer
        assert table is not None and shared is not None and trainer is not None and self._store is not None
        matmul = settings.matmul if settings.matmul != "auto" else self._choose_matmul(recipe, table.dtype)
        self._training = training = BucketTraining(self.lightning_module, recipe, rules, shared, table, matmul)
        limit = trainer.limit_train_batches if isinstance(trainer.limit_train_batches, int) else None
        source = self._deployment.source(table, shared, self._store, lambda epoch: self._reached.first(epoch), limit)
        groups = self._deployment.machine, self._deployment.group
        return BucketWorker(source, training, *groups, lambda: trainer.current_epoch, settings.eval_fraction > 0, limit)

    def _choose_matmul(self, recipe: ModelRecipe, dtype: torch.dtype) -> str:
        """What ``strategy.matmul=auto`` stands for, the same on all ranks, whose CPUs may differ."""
        self._cpus = self.group.all_gather_object(fastest_of_cpu())
        chosen = choose(recipe, dtype, self._cpus)
        if self.is_global_zero:
            log.info("strategy.matmul=auto: matrix products in %s", chosen)
        return chosen

    def resolved_settings(self) -> dict[str, Any]:
        return {} if self._training is None else {"strategy.matmul": self._training.matmul}

    def _make_table(self, recipe: ModelRecipe, rules: StepRules | None) -> TypedTables:
        """Memory for the tables and for relations, with what optimizers keep of them; the machine's leader makes it."""
        assert self.data is not None
        self._store = store = self.open_shard(self.data.open_store())
        nodes = Partitioning(store.offsets, tuple(store.node("orig_id", part) for part in range(store.num_parts)))
        layers = list(recipe.tables.values())
        dtype, types = layers[0].weight.dtype, partition_types(store, [layer.table for layer in layers])
        widths = [state_width(rules.table.name, layer.table.dim) if rules else 0 for layer in layers]
        slots, machine = self._deployment.slots, self._deployment.machine
        layout = TypedTables.tensors(types, slots, widths, dtype) | relations_layout(recipe, rules)
        self._shared = share_memory(machine, layout, self.timeout_seconds)
        assert self.trainer is not None
        run_dir = Path(self.trainer.default_root_dir)
        folder = run_dir / self._deployment.folder
        tables = TypedTables(types, nodes, slots, widths, dtype, folder, self._shared, self._leads)
        self._deployment.connect(tables, run_dir, self.is_global_zero)
        return tables

    def _fill(self, recipe: ModelRecipe, start: tuple[float, float]) -> None:
        """Fill the machine's memory with initial values, and the table."""
        assert self._table is not None and self._shared is not None
        fill_relations(self._shared, recipe, start[1])
        if not self.is_global_zero:
            return
        self._table.initialize(start[0])
        if self.settings.warm_start is not None and self.optimizers:
            assert self.lightning_module is not None and self._store is not None
            known = {id(parameter): self._shared[name] for name, parameter in recipe.parameters.items()}
            named = self.lightning_module.named_parameters()
            shared = {name: known[id(parameter)] for name, parameter in named if id(parameter) in known}
            relations = relations_of(self.lightning_module, recipe)
            warm_start(Path(self.settings.warm_start), self._store, self._table, shared, relations)
        self._table.publish()

    def uninstall(self, module: Module) -> None:
        if self._recipe is None or self._table is None:
            return
        for parameter in self._recipe.parameters.values():
            parameter.data = parameter.data.clone()
        for layer, table in zip(self._recipe.tables.values(), self._table.tables, strict=True):
            whole = table.partitions.count == 1  # in the order of the source data: the module may have it as it is
            layer.move_back(table.read(0) if whole else layer.weight.new_empty(0, layer.table.dim))
        self._worker = None

    # ------------------------------------------------------------------------------------------ batches

    def batches(self, shard: Store, loader: SeedLoader) -> Iterable[Any]:
        settings, table = self.settings, self._table
        assert table is not None and self._recipe is not None
        if loader.split != "train":
            assert isinstance(self.lightning_module, HasRecipe)
            filtered = self.lightning_module.filtered
            return EvaluationBatches(loader, table.nodes, filtered, self._deployment.share, not table.whole)
        edges = BucketEdges(
            shard, settings.num_edge_chunks, settings.eval_fraction, settings.shuffle, loader.seed, self.dtype
        )
        machine = self._deployment.machine
        size = loader.batch_size or max(1, shard.num_edges)
        assert self._worker is not None
        return EpochSteps(
            self._worker, BucketBatches(edges, size, batching_keys(self._recipe), machine.rank, machine.size)
        )

    # ------------------------------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on the batches of a turn; the module's own step is not run."""
        module = self.lightning_module
        assert isinstance(module, HasRecipe) and self._worker is not None
        total, weight, logged = self._worker.train()
        for name, value in logged.items():
            module.log(f"train/{name}", value, on_step=False, on_epoch=True, batch_size=1)
        pair = torch.tensor([total, weight], dtype=torch.float64)
        return {"loss": module.log_training(pair[0], pair[1])}

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing: the step has gone back already."""
        return closure_loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the step, which applies the optimizer's rules itself; Lightning counts it as one."""
        return closure()

    # ------------------------------------------------------------------------------------------ checkpoints

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Write the last checkpoint where an edge chunk is trained, if that is wished for."""
        trainer, chunk = self.trainer, self._worker.done if self._worker is not None else 0
        folder = getattr(trainer and trainer.checkpoint_callback, "dirpath", None)
        if not self.settings.checkpoint_chunks or not chunk or trainer is None or folder is None:
            return
        self._now = EpochProgress(trainer.current_epoch, chunk)
        try:
            trainer.save_checkpoint(Path(folder) / "last.ckpt")
        finally:
            self._now = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        interval = self.settings.checkpoint_preservation_interval
        if self.is_global_zero and interval is not None and self._now is None:
            preserve(Path(filepath), int(checkpoint["epoch"]), interval)

    def shard_files(self, folder: Path) -> None:
        if self.is_global_zero and self._table is not None and self._shared is not None:
            self._table.save(folder)
            if self._now is not None:
                self._now.write(folder)
            assert self._recipe is not None and self._store is not None and self.lightning_module is not None
            save_states(folder, self._shared, self._recipe)
            matmul = None if self._training is None else self._training.matmul
            describe(folder, self._store, self._table, relations_of(self.lightning_module, self._recipe), matmul)

    def _keep_matmul(self, folder: Path, training: BucketTraining) -> None:
        """Continue with the number format of the checkpoint where ``strategy.matmul=auto``, whatever this CPU is."""
        recorded, warns = matmul_of(folder), self.is_global_zero
        if recorded == training.matmul or "float64" in (recorded, training.matmul):
            return
        if self.settings.matmul != "auto":
            text = "%s was trained with strategy.matmul=%s; the run continues with strategy.matmul=%s, as set."
            if warns:
                log.warning(text, folder, recorded, training.matmul)
            return
        training.use(recorded)
        slowest = min(self._cpus, key=FORMATS.index)
        if warns and FORMATS.index(recorded) > FORMATS.index(slowest):
            text = "%s was trained with strategy.matmul=%s, and the run continues with it. Not all CPUs of this run "
            text += "have fast instructions for it. HINT: strategy.matmul=%s is faster here, and rounds differently."
            log.warning(text, folder, recorded, slowest)

    def load_tables(self, rows: Mapping[str, SavedRows]) -> None:
        assert self._recipe is not None and self._table is not None
        if self._table.in_shared_store:
            raise CheckpointError(
                f"ckpt_path was written by another strategy, and trainer.num_nodes={self.num_nodes} was set.",
                hint="set trainer.num_nodes=1; several machines read checkpoints of strategy=pbg alone.",
            )
        named = {id(layer): name for name, layer in tables(self.lightning_module)}  # type: ignore[arg-type]
        self.group.barrier()
        for layer, table in zip(self._recipe.tables.values(), self._table.tables, strict=True):
            for partition in range(table.partitions.count) if self._leads else ():
                table.overwrite(partition, rows[named[id(layer)]].pieces())
        self.group.barrier()

    def load_shard_files(self, folder: Path) -> None:
        assert self._table is not None and self._shared is not None and self._store is not None
        self.group.barrier()
        self._table.load(folder)
        check_numbering(folder, self._store)
        if self.fitting and self._training is not None:
            self._keep_matmul(folder, self._training)
        self._reached = EpochProgress.read(folder) or self._reached
        if self._leads:
            load_states(folder, self._shared)
        self.group.barrier()
