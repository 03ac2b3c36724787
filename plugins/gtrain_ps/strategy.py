"""The ps strategy: training with wide sparse layers on parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch_geometric.data import Data, HeteroData

from gtrain.backends import Serves
from gtrain.data.batches.loader import SeedLoader, graph_batch, hetero_batch
from gtrain.data.module import GraphDataModule
from gtrain.engine.local import LocalEngine
from gtrain.errors import CheckpointError, ConfigError
from gtrain.graph.shard import GraphShard, load_whole
from gtrain.graph.shard.whole import load_whole_hetero
from gtrain.graph.store import Store
from gtrain.nn import deferred, tables
from gtrain.nn.patching import normalises
from gtrain.protocols import DealsEdges, MultipliesRows
from gtrain.strategy.checkpoint import SavedRows
from gtrain.strategy.gradients import sum_gradients
from gtrain.strategy.metric_states import METRICS
from gtrain_ps import SERVES
from gtrain_ps.checkpoints import export, read_blocks, write_blocks
from gtrain_ps.config import PsConfig, make_folder
from gtrain_ps.costs import Load
from gtrain_ps.placement import Placement, spreading_multiplier
from gtrain_ps.server.service import DTYPES
from gtrain_ps.worker.batches import BatchSource, RowSource, WholeGraph, WorkerBatches, samples
from gtrain_ps.worker.planning import estimate_load, estimate_sampled_load, plan_of, rules_of
from gtrain_ps.worker.restarts import ROLE, RestartingStrategy
from gtrain_ps.worker.row_table import RowTable, is_rows
from gtrain_ps.worker.served_table import ServerTableStorage
from gtrain_ps.worker.steps import flat_gradients, send_step, set_gradients


class PsStrategy(RestartingStrategy):
    """Stores tables of ``gtrain.nn`` on servers; each worker trains the other layers on its share of a step's seeds.

    The settings are those of :class:`gtrain_ps.config.PsConfig`.
    """

    strategy_name: ClassVar[str] = "ps"
    serves: ClassVar[Serves] = SERVES
    settings_type = PsConfig

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.served_tables: dict[str, ServerTableStorage] = {}
        self._deferred: set[str] = set()  # tables that never have all their rows in a worker
        self._weight: tuple[float | Tensor, float] = (1.0, 1.0)  # of a batch, and the divisor of its loss
        self._engine = LocalEngine(constant=True)
        self._local: list[Parameter] | None = None
        self._batches: WorkerBatches | None = None

    # ---------------------------------------------------------------------------------------------------- batches

    @property
    def full_batch(self) -> bool:  # type: ignore[override]
        return self.data is None or self.data.batch_size is None

    def open_shard(self, store: Store) -> BatchSource:
        if is_rows(store) and self._row_table is not None:
            predicts = self.trainer is not None and self.trainer.predicting
            ids = ("orig_id",) if predicts or self.dropout == "exact" else ()
            return RowSource(RowTable(store, self.dtype), ("y", *ids))
        whole = load_whole_hetero(store) if store.is_hetero else load_whole(store)
        batch: Data | HeteroData
        if isinstance(whole, GraphShard):
            batch = graph_batch(whole, self.dtype)
        else:
            batch = hetero_batch(whole, store, self.dtype)
        constants = [value for stored in batch.stores for value in stored.values()]
        self.worker_device.add_constants(constants, self._engine.add_constants)
        return WholeGraph(batch)

    def batches(self, shard: BatchSource, loader: SeedLoader) -> Iterable[Data | HeteroData]:
        if isinstance(shard, WholeGraph):
            assert self.lightning_module is not None
            shard = shard.for_loader(loader, trim=not any(map(normalises, self.lightning_module.modules())))
        worker = self.global_rank, self.world_size
        prefetch = self.settings.prefetch if isinstance(shard, RowSource) else 0
        training = loader.split == "train" and self.trainer is not None and self.trainer.training
        inline = training and torch.get_num_threads() == 1
        deal = self.lightning_module.deal if isinstance(self.lightning_module, DealsEdges) else None
        on_batch, on_end = self._prefetcher(training), partial(self._discard_prefetched, training)
        batches = WorkerBatches(loader, shard, worker, prefetch, on_batch, on_end, inline, deal)
        if training:
            self._batches = batches
        return batches

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch, but for the sparse rows that the servers multiply; with the module's hooks if it has some."""
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        module = type(self.lightning_module)
        if all(getattr(module, name) is getattr(pl.LightningModule, name) for name in names):
            return self.worker_device.batch(batch) if isinstance(batch, (Data, HeteroData)) else batch
        if not self.worker_device.is_host and isinstance(batch, (Data, HeteroData)):
            batch = self.worker_device.batch(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @property
    def _row_table(self) -> str | None:
        """Name of the served table that multiplies the rows of a batch's seeds, if the module declares one."""
        module = self.lightning_module
        name = module.row_table if isinstance(module, MultipliesRows) else None
        return name if name in self.served_tables else None

    def _prefetcher(self, training: bool) -> Callable[[Data, int], None]:
        """Return a function that sends a new batch's rows to the servers, and its tensors to the device."""
        name, servers = self._row_table, self._connected()
        table = None if name is None else self.served_tables[name]
        first_step = 0

        def send(batch: Data, number: int) -> None:
            nonlocal first_step
            if number == 0:
                first_step = servers.step
            if table is not None and not table.pull and not isinstance(batch.x, Tensor):
                table.prefetch(batch.x, first_step + number if training else servers.step, training)
            self.worker_device.copy_ahead(batch)

        return send

    def _discard_prefetched(self, training: bool) -> None:
        """Forget the products that a pass over training's or other batches has requested ahead and not used."""
        for table in self.served_tables.values():
            table.discard_prefetched(training)
        if training:
            self._connected().restart_calls()

    # ---------------------------------------------------------------------------------------------------- tables

    def check_module(self, module: Module) -> None:
        if not any(True for _ in tables(module)):
            raise ConfigError(
                f"strategy=ps stores tables of gtrain.nn on servers; {type(module).__name__} has none.",
                hint="choose a model with a SparseLinear or an Embedding: model=sparse, model=kg, a graph model with "
                "data.feature_layout=sparse or without features (model.learn_features=true); or strategy=single.",
            )
        if self.fitting:
            assert isinstance(module, pl.LightningModule)
            self._check_training(module)
            if self.settings.export is not None and self.is_global_zero:
                make_folder(Path(self.settings.export), "strategy.export")

    def _check_training(self, module: pl.LightningModule) -> None:
        """Refuse modules that parameter servers cannot train exactly."""
        if not module.automatic_optimization:
            raise ConfigError(
                f"{type(module).__name__} uses manual optimization; strategy=ps sends the gradients of a step when "
                "Lightning takes it.",
                hint="use automatic optimization.",
            )
        norms = [name for name, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        if norms and self.num_nodes * self.num_processes > 1:
            raise ConfigError(
                f"{norms[0]} is a batch norm, whose statistics strategy=ps would compute over one worker's share.",
                hint="set model.norm=layer or null, or trainer.num_nodes=1.",
            )

    def check_optimizers(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        rules_of({name: layer.weight for name, layer in tables(module)}, optimizers)

    def making_model(self) -> AbstractContextManager[None]:
        return deferred()

    def install(self, module: Module) -> None:
        """Move the module's tables to the servers; tables that are there already keep their rows."""
        if self.settings.layers == "auto":
            self._engine.install(module)
        settings, servers = self.settings, self._connected()
        wire = self.dtype if settings.wire_dtype == "float32" else DTYPES[settings.wire_dtype]
        for name, layer in tables(module):
            if name not in self.served_tables:
                count = self.servers.count(ROLE)
                plan = plan_of(name, layer, settings, count, wire, self._estimate_load, verbose=self.is_global_zero)
                spec, pull = layer.table, plan.protocol == "pull"
                multiplier = spreading_multiplier(spec.rows) if settings.blocks == "hash" else 1
                placement = Placement(spec.rows, spec.dim, plan.row_blocks, plan.column_blocks, multiplier)
                dtype = layer.weight.dtype
                table = ServerTableStorage(name, spec, placement, servers, dtype, wire, pull, self.worker_device)
                self.served_tables[name] = table
                is_new = table.open()
                if not layer.weight.size(0) and layer.table.rows:
                    self._deferred.add(name)
                elif is_new and self.is_global_zero:
                    table.write([(torch.arange(layer.table.rows), layer.weight.detach())])
            layer.move(self.served_tables[name])
        self._local = None
        self.group.barrier()
        if self.fitting:
            rules_of(self._anchors, self.optimizers)

    @property
    def _anchors(self) -> dict[str, Parameter]:
        """The parameters that represent the tables in the module."""
        return {name: table.anchor for name, table in self.served_tables.items()}

    def follows_messages(self, conv: Module) -> bool:
        return not self._engine.runs(conv)

    def uninstall(self, module: Module) -> None:
        self._engine.uninstall()
        for name, layer in tables(module):
            if name not in self.served_tables or layer.storage is not self.served_tables[name]:
                continue
            if name in self._deferred:
                layer.move_back(layer.weight.new_empty(0, layer.table.dim))  # may exceed a worker's memory
            else:
                layer.move_back(self.served_tables[name].read(0, layer.table.rows))

    def _estimate_load(self) -> tuple[Load, bool]:
        """Return the load of the first steps, and whether entries have values other than 1."""
        module = self.data
        if not isinstance(module, GraphDataModule):
            raise ConfigError(
                "strategy.protocol or strategy.split leaves a choice, decided by the first batches; data is not a "
                "GraphDataModule.",
                hint="set strategy.protocol=ship and strategy.split=row.",
            )
        loader = module.train_dataloader()
        assert isinstance(loader, SeedLoader)
        if not samples(loader):
            return estimate_load(loader, self.world_size)
        return estimate_sampled_load(
            loader, self.shard_of(loader.store).for_loader(loader, trim=False), self.world_size
        )

    # ---------------------------------------------------------------------------------------------------- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step.

        Raises:
            ConfigError: it skips the batch, whose rows the servers have already received for this step.
        """
        if self.parameter_servers is not None:
            self.parameter_servers.go_ahead()
        output = super().training_step(*args, **kwargs)
        if output is None:
            raise ConfigError(
                f"{type(self.lightning_module).__name__}.training_step returned None; strategy=ps takes a step with "
                "every batch.",
                hint="return `loss * 0` for a batch that is to be skipped.",
            )
        return output

    def loss_share(self, output: Any, batch: Any) -> float | Tensor:
        """Local estimate of this rank's share; servers rescale by the global weight."""
        if self.settings.rest == "allreduce":
            share = super().loss_share(output, batch)
            self._weight = float(share), 1.0
            return share
        weight, rows = output.get("weight") if isinstance(output, dict) else None, float(batch.step_rows)
        if isinstance(weight, Tensor) and weight.device.type != "cpu":
            there = weight.detach().double()
            self._weight = self.worker_device.to_host(there), rows
            return there / rows
        self._weight = float(batch.seeds.numel() if weight is None else weight), rows
        return self._weight[0] / rows

    def sum_gradients(self) -> None:
        """Send the step to the servers, and receive the sum of the other layers' gradients."""
        rest = self._rest()
        requested, by_servers = self.interruption.requested, self.settings.rest == "server"
        self._send_step(flat_gradients(rest, self.worker_device, requested) if by_servers else None)
        if self.settings.rest == "allreduce":
            sum_gradients(self.group, rest)
        self._receive_step(rest)

    def _rest(self) -> list[Parameter]:
        """Return the parameters that the workers hold."""
        if self._local is None:
            anchors = {id(anchor) for anchor in self._anchors.values()}
            parameters = self._module.parameters()
            self._local = [p for p in parameters if p.requires_grad and id(p) not in anchors]
        return self._local

    def _send_step(self, rest: Tensor | None) -> None:
        self.worker_device.synchronize()
        weight = (float(self._weight[0]), self._weight[1]) if self.world_size > 1 else (1.0, 1.0)
        replay = None if self._progress is None else self._progress.finish_step()
        rules = rules_of(self._anchors, self.optimizers)
        requests = send_step(self._connected(), self.served_tables.values(), rules, weight, rest, replay)
        self._pending_sums.append(requests)
        if self._batches is not None:
            self._batches.build_ahead()  # while the servers compute

    def _receive_step(self, rest: list[Parameter]) -> None:
        """Receive the gradient sums of the step that is due: the current one, or an earlier one if steps may lag."""
        if len(self._pending_sums) > self.settings.lag:
            self._receive_sums(rest)
        elif self.settings.rest == "server":
            for parameter in rest:
                parameter.grad = None

    def _receive_sums(self, rest: list[Parameter]) -> None:
        replies = [request.result() for request in self._pending_sums.popleft()]
        if self.settings.rest == "server":
            requests = set_gradients([reply.tensors[0] for reply in replies], rest, self.worker_device)
            self.interruption.settle(requests)

    @property
    def saves_on_request(self) -> bool:
        return True

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        assert self.trainer is not None
        if self._pending_sums and self.trainer.is_last_batch:
            self._catch_up()
        return result

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._withdraw()

    def _withdraw(self) -> None:
        """Take back the rows of later steps before something that may need many requests."""
        if self.parameter_servers is None:
            return
        self.parameter_servers.hold()  # the thread that builds batches may be about to send some
        if any(table.has_prefetched for table in self.served_tables.values()):
            self.parameter_servers.withdraw()
            for table in self.served_tables.values():
                table.withdraw()

    def on_train_end(self) -> None:
        super().on_train_end()
        self._catch_up()
        if self.settings.lag and self.is_global_zero and self.parameter_servers is not None:
            status = [reply.fields for reply in self.parameter_servers.request_all("status", {})]
            products, missed = (sum(fields[name] for fields in status) for name in ("products", "missed"))
            print(f"products missed {missed / max(1, products):.2f} steps on average", flush=True)
        if self.settings.export is not None:
            if self.is_global_zero and not self.group.passed():
                export(Path(self.settings.export), self.served_tables)
            self.group.barrier()
        self._connected().request_all("end", {})

    def _catch_up(self) -> None:
        """Apply the gradient sums that are pending, so that an epoch ends without outstanding steps."""
        rest = self._rest()
        while self._pending_sums:
            self._receive_sums(rest)
            if self.settings.rest == "server":
                for optimizer in self.optimizers:
                    optimizer.step()

    # --------------------------------------------------------------------------------------- checkpoints, exports

    def shard_state(self) -> dict[str, Any]:
        self._catch_up()
        return {METRICS: {}}  # its absence shows that another number of workers wrote the checkpoint

    def shard_files(self, folder: Path) -> None:
        self._withdraw()
        write_blocks(folder, self.served_tables, self._assigned_servers)

    @property
    def _assigned_servers(self) -> range:
        """The servers whose blocks this worker writes and reads: worker k has the servers p with p mod K = k."""
        return range(self.global_rank, self.servers.count(ROLE), self.world_size)

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def load_tables(self, rows: Mapping[str, SavedRows]) -> None:
        if self.is_global_zero:
            for name, table in self.served_tables.items():
                table.write(rows[name].pieces())
        self.group.barrier()

    def load_shard_files(self, folder: Path) -> None:
        """Read the blocks of a checkpoint; another placement is allowed for testing, prediction and export only."""
        saved = read_blocks(folder)
        for name, served in self.served_tables.items():
            if name not in saved:
                raise CheckpointError(f"{folder} lacks rows of the table {name}.", hint="use another checkpoint.")
            table = saved[name]
            if table.placement == served.placement:
                for server in self._assigned_servers:
                    block = table.blocks[server]
                    tensors = block.tensors if self.fitting else {"rows": block.tensors["rows"]}
                    rule = block.rule if self.fitting else None
                    served.write_block(server, rule, tensors, block.positions, block.initial)
            elif self.fitting:
                raise CheckpointError(
                    f"ckpt_path={folder}: the checkpoint's table {name} has the placement "
                    f"{table.placement.fields()}; that of this run is {served.placement.fields()}.",
                    hint="set strategy.servers, strategy.split and strategy.blocks as in the run that wrote it.",
                )
            elif self.is_global_zero:
                served.write(table.pieces())
        self.group.barrier()

    def load_shard_state(self, state: dict[str, Any]) -> None:
        if self.fitting and METRICS not in state:
            raise CheckpointError(
                f"the checkpoint has no state of worker {self.global_rank} of {self.world_size}.",
                hint="set trainer.num_nodes and trainer.devices as in the run that wrote it.",
            )
