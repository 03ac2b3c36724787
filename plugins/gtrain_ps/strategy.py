"""Training with wide sparse layers on parameter servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch_geometric.data import Data, HeteroData

from gtrain.backends import Serves
from gtrain.data.batches.loader import SeedLoader, graph_batch, hetero_batch
from gtrain.data.module import GraphDataModule
from gtrain.errors import CheckpointError, ConfigError
from gtrain.graph.shard import GraphShard, load_whole
from gtrain.graph.shard.whole import load_whole_hetero
from gtrain.graph.store import Store
from gtrain.nn import deferred, tables
from gtrain.protocols import DealsEdges, MultipliesRows
from gtrain.strategy.checkpoint import SavedRows
from gtrain.strategy.gradients import sum_gradients
from gtrain_ps import SERVES
from gtrain_ps.checkpoints import export, read_blocks, write_blocks
from gtrain_ps.checks import check_training
from gtrain_ps.config import PsConfig
from gtrain_ps.costs import Load
from gtrain_ps.folders import make_folder
from gtrain_ps.server.service import DTYPES
from gtrain_ps.worker import lightning_state
from gtrain_ps.worker.batches import RowSource, Shares, Source, WholeGraph
from gtrain_ps.worker.planning import first_load, placement_of, plan_of, rules_of
from gtrain_ps.worker.restarts import ROLE, RestartingStrategy
from gtrain_ps.worker.row_table import RowTable, is_rows
from gtrain_ps.worker.served_table import ServedTable
from gtrain_ps.worker.steps import flat, send_step, take_flat

METERS = "@meters"  # in a worker's state of a checkpoint


class PsStrategy(RestartingStrategy):
    """Tables of ``gtrain.nn`` live on servers; a worker trains the other layers on its share of each step's seeds.

    Its settings are those of :class:`gtrain_ps.config.PsConfig`.
    """

    strategy_name: ClassVar[str] = "ps"
    serves: ClassVar[Serves] = SERVES
    settings_type = PsConfig

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.homes: dict[str, ServedTable] = {}
        self._deferred: set[str] = set()
        self._weight = (1.0, 1.0)
        self._trained: list[Parameter] | None = None
        self._shares: Shares | None = None

    # ---------------------------------------------------------------------------------------------------- batches

    @property
    def full_batch(self) -> bool:  # type: ignore[override]
        return self.data is None or self.data.batch_size is None

    def open_shard(self, store: Store) -> Source:
        if is_rows(store) and self._takes_rows is not None:
            predicts = self.trainer is not None and self.trainer.predicting
            ids = ("orig_id",) if predicts or self.dropout == "exact" else ()
            return RowSource(RowTable(store, self.dtype), ("y", *ids))
        whole = load_whole_hetero(store) if store.is_hetero else load_whole(store)
        if isinstance(whole, GraphShard):
            return WholeGraph(graph_batch(whole, self.dtype))
        return WholeGraph(hetero_batch(whole, store, self.dtype))

    def batches(self, shard: Source, loader: SeedLoader) -> Iterable[Data | HeteroData]:
        place = self.global_rank, self.world_size
        prefetch = self.settings.prefetch if isinstance(shard, RowSource) else 0
        training = loader.split == "train" and self.trainer is not None and self.trainer.training
        inline = training and torch.get_num_threads() == 1
        deal = self.lightning_module.deal if isinstance(self.lightning_module, DealsEdges) else None
        shares = Shares(loader, shard, place, prefetch, self._ahead(training), self._forget_ahead, inline, deal)
        if training:
            self._shares = shares
        return shares

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Batches are where they are wanted; a module's own hooks are heeded."""
        if not self._transfers:
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    @property
    def _transfers(self) -> bool:
        """Whether the module has a hook that wants to see batches on their way to a device."""
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        kind = type(self.lightning_module)
        return any(getattr(kind, name) is not getattr(pl.LightningModule, name) for name in names)

    @property
    def _takes_rows(self) -> str | None:
        """The name of the table that multiplies the rows of a batch's seeds, where the module says so."""
        module = self.lightning_module
        return module.row_table if isinstance(module, MultipliesRows) and module.row_table in self.homes else None

    def _ahead(self, training: bool) -> Any:
        """What sends a batch's rows to the servers as soon as they are known."""
        name = self._takes_rows
        home = None if name is None else self.homes[name]
        servers = self.parameter_servers
        assert servers is not None
        begin: list[int] = []

        def send(batch: Data, number: int) -> None:
            if number == 0:
                begin[:] = [servers.step]
            if home is not None and not home.pull and not isinstance(batch.x, Tensor):
                home.ahead(batch.x, begin[0] + number if training else servers.step, training)

        return send

    def _forget_ahead(self) -> None:
        for home in self.homes.values():
            home.forget_ahead()

    # ---------------------------------------------------------------------------------------------------- tables

    def check_module(self, module: Module) -> None:
        if not any(True for _ in tables(module)):
            raise ConfigError(
                f"strategy=ps keeps tables of gtrain.nn on servers, and {type(module).__name__} has none.",
                hint="choose a model with a SparseLinear or an Embedding (model=sparse, model=kg, or sparse features), "
                "or strategy=single.",
            )
        if self.fitting:
            assert isinstance(module, pl.LightningModule)
            check_training(module, self.num_nodes * self.num_processes)
            if self.settings.export is not None and self.is_global_zero:
                make_folder(Path(self.settings.export), "strategy.export")

    def check_optimizers(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        rules_of({name: layer.weight for name, layer in tables(module)}, optimizers)

    def making_model(self) -> AbstractContextManager[None]:
        return deferred()

    def install(self, module: Module) -> None:
        """Let the module's tables live on the servers; those that were there already keep what they learned."""
        settings, servers = self.settings, self._asked()
        wire = self.dtype if settings.wire_dtype == "float32" else DTYPES[settings.wire_dtype]
        for name, layer in tables(module):
            if name not in self.homes:
                chosen = settings, self.servers.count(ROLE), wire, self._load
                plan = plan_of(name, layer, *chosen, tell=self.is_global_zero)
                placement, pull = placement_of(layer, plan, settings), plan.protocol == "pull"
                home = ServedTable(name, layer.table, placement, servers, layer.weight.dtype, wire, pull)
                self.homes[name] = home
                new = home.open()
                if not layer.weight.size(0) and layer.table.rows:
                    self._deferred.add(name)
                elif new and self.is_global_zero:
                    home.write([(torch.arange(layer.table.rows), layer.weight.detach())])
            layer.move(self.homes[name])
        self._trained = None
        self.group.barrier()
        if self.fitting:
            rules_of(self._anchors, self.optimizers)

    @property
    def _anchors(self) -> dict[str, Parameter]:
        """What stands for each table in the module."""
        return {name: home.anchor for name, home in self.homes.items()}

    def uninstall(self, module: Module) -> None:
        for name, layer in tables(module):
            if name not in self.homes or layer.home is not self.homes[name]:
                continue
            if name in self._deferred:
                layer.move_back(layer.weight.new_empty(0, layer.table.dim))  # larger than a worker, perhaps
            else:
                layer.move_back(self.homes[name].read(0, layer.table.rows))

    def _load(self) -> tuple[Load, bool]:
        """What a worker asks of a table in the first steps, and whether entries have values other than 1."""
        module = self.data
        if not isinstance(module, GraphDataModule):
            raise ConfigError(
                "strategy.split or strategy.protocol leaves a choice, which is made by looking at the first batches of "
                "a GraphDataModule.",
                hint="set strategy.protocol=ship and strategy.split=row.",
            )
        loader = module.train_dataloader()
        assert isinstance(loader, SeedLoader)
        return first_load(loader, self.world_size)

    # ---------------------------------------------------------------------------------------------------- steps

    def loss_share(self, output: Any, batch: Any) -> float:
        """Local estimate of this rank's share; servers rescale by the global weight."""
        if self.settings.rest == "allreduce":
            share = super().loss_share(output, batch)
            self._weight = share, 1.0
            return share
        weight = output.get("weight") if isinstance(output, dict) else None
        weight = float(batch.seeds.numel() if weight is None else weight)
        self._weight = weight, float(batch.step_rows)
        return weight / self._weight[1]

    def sum_gradients(self) -> None:
        """Send the step to the servers, and take from them what the other layers' gradients come to."""
        rest = self._rest()
        self._send_step(None if self.settings.rest == "allreduce" else flat(rest))
        if self.settings.rest == "allreduce":
            sum_gradients(self.group, rest)
        self._receive_step(rest)

    def _rest(self) -> list[Parameter]:
        """The parameters that are on the workers."""
        if self._trained is None:
            assert self.lightning_module is not None
            anchors = {id(anchor) for anchor in self._anchors.values()}
            every = self.lightning_module.parameters()
            self._trained = [p for p in every if p.requires_grad and id(p) not in anchors]
        return self._trained

    def _send_step(self, rest: Tensor | None) -> None:
        servers = self.parameter_servers
        assert servers is not None
        weight = self._weight if self.world_size > 1 else (1.0, 1.0)
        kept = None if self._progress is None else self._progress.end()
        rules = rules_of(self._anchors, self.optimizers)
        self._flying.append(send_step(servers, self.homes.values(), rules, weight, rest, kept))
        if self._shares is not None:
            self._shares.draw()  # while the servers are at work

    def _receive_step(self, rest: list[Parameter]) -> None:
        """Wait for the servers to have a step, and take over what they made of the other layers' gradients."""
        if len(self._flying) <= self.settings.lag:
            if self.settings.rest == "server":
                for parameter in rest:
                    parameter.grad = None
            return
        self._take_step(rest)

    def _take_step(self, rest: list[Parameter]) -> None:
        answers = [answer.result() for answer in self._flying.popleft()]
        if self.settings.rest == "server" and rest:
            take_flat(torch.cat([answer.tensors[0] for answer in answers]), rest)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        assert self.trainer is not None
        if self._flying and self.trainer.is_last_batch:
            self._catch_up()
        return result

    def on_train_end(self) -> None:
        super().on_train_end()
        self._catch_up()
        if self.settings.lag and self.is_global_zero and self.parameter_servers is not None:
            said = [answer.fields for answer in self.parameter_servers.everybody("status", {})]
            products, missed = (sum(fields[name] for fields in said) for name in ("products", "missed"))
            print(f"products missed {missed / max(1, products):.2f} of the last steps on average", flush=True)
        if self.settings.export is not None:
            if self.is_global_zero and not self.group.passed():
                export(Path(self.settings.export), self.homes)
            self.group.barrier()
        self._asked().everybody("end", {})

    def _catch_up(self) -> None:
        """Where steps may be missed: take in those that are under way, so that an epoch ends like any other."""
        rest = self._rest()
        while self._flying:
            self._take_step(rest)
            if self.settings.rest == "server":
                for optimizer in self.optimizers:
                    optimizer.step()

    # --------------------------------------------------------------------------------------- checkpoints, exports

    def shard_state(self) -> dict[str, Any]:
        self._catch_up()
        return {
            METERS: lightning_state.module_metric_states(lightning_state.metrics_of(self._module))
            if self._within_epoch
            else {}
        }

    def shard_files(self, folder: Path) -> None:
        write_blocks(folder, self.homes, self._answered_for)

    @property
    def _answered_for(self) -> range:
        """The servers whose blocks this worker writes and reads: server p of P is worker p mod K's."""
        return range(self.global_rank, self.servers.count(ROLE), self.world_size)

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _within_epoch(self) -> bool:
        """Whether batches of an epoch have been trained, and it has not ended."""
        assert self.trainer is not None
        epochs = self.trainer.fit_loop.epoch_progress.current
        return self.fitting and epochs.processed < epochs.started  # type: ignore[attr-defined]

    def load_tables(self, rows: Mapping[str, SavedRows]) -> None:
        if self.is_global_zero:
            for name, home in self.homes.items():
                home.write(rows[name].pieces())
        self.group.barrier()

    def load_shard_files(self, folder: Path) -> None:
        """Read blocks as they were cut; to test, predict and export also into blocks that are cut differently."""
        saved = read_blocks(folder)
        for name, home in self.homes.items():
            if name not in saved:
                raise CheckpointError(f"{folder} lacks rows of the table {name}.", hint="use another checkpoint.")
            table = saved[name]
            if table.placement == home.placement:
                for server in self._answered_for:
                    block = table.blocks[server]
                    tensors = block.tensors if self.fitting else {"rows": block.tensors["rows"]}
                    home.write_block(server, block.rule if self.fitting else None, tensors)
            elif self.fitting:
                raise CheckpointError(
                    f"ckpt_path={folder}: the checkpoint's table {name} was cut as {table.placement.fields()}, and is "
                    f"now cut as {home.placement.fields()}.",
                    hint="set strategy.servers, strategy.split and strategy.blocks as in the run that wrote it.",
                )
            elif self.is_global_zero:
                home.write(table.pieces())
        self.group.barrier()

    def load_shard_state(self, state: dict[str, Any]) -> None:
        if not self.fitting:
            return
        if METERS not in state:
            raise CheckpointError(
                f"the checkpoint has no state of worker {self.global_rank} of {self.world_size}.",
                hint="set trainer.num_nodes and trainer.devices as in the run that wrote it.",
            )
        lightning_state.prepare_metrics(lightning_state.metrics_of(self._module), state[METERS])
