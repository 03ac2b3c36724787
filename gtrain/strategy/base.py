"""Base class of all backends: a Lightning strategy over ranks that each hold a part of the graph.

A backend subclasses :class:`GraphStrategy` and implements two methods: ``open_shard`` opens the rank's shard and
``batches`` creates batches from it. It may override further methods, such as ``install`` and ``uninstall``, which
replace layers during a run; docs/contract.md lists them. The base class implements the group of ranks, gradients,
metrics, checkpoints and checks of the configuration.
"""

from __future__ import annotations

import inspect
import logging
from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch_geometric.data import Data, HeteroData
from torchmetrics import Metric

from gtrain.backends import FULL_PRECISION, UNEQUAL_STEPS, Serves, Traits, get, installed, not_honoured, serving
from gtrain.config import StrategyConfig
from gtrain.data.batches.loader import SeedLoader
from gtrain.data.module import GraphDataModule, training_of
from gtrain.errors import ConfigError, GtrainError
from gtrain.graph.store import Store
from gtrain.launch import slot as slots
from gtrain.launch.environment import agent_environment, find_environment
from gtrain.launch.job_store import job_store
from gtrain.launch.logs import watch_stacks_signal
from gtrain.model.inputs import check_weights, unread_data, weight_demand, zero_demand
from gtrain.nn import RemoteTableStorage, tables
from gtrain.nn.dropout import ExactDropout, StepRows, rows_of
from gtrain.object_store import is_address
from gtrain.protocols import DrawsNegatives, OrdersByQuery, StoreData, data_of, network_of, trainer_of
from gtrain.settings import parameters, pop_settings, signature_of
from gtrain.strategy import checkpoint as checkpoints
from gtrain.strategy import device_memory, trainer_checks
from gtrain.strategy.counters import Counters
from gtrain.strategy.device_group import connect_devices
from gtrain.strategy.folder_sharing import FolderSharing
from gtrain.strategy.gradients import average_statistics, sum_gradients
from gtrain.strategy.group import Group, form_group
from gtrain.strategy.interruption import Interruption
from gtrain.strategy.metric_states import METRICS, metric_states, module_metrics, restore_metrics
from gtrain.strategy.preparation import prepare
from gtrain.strategy.rank_devices import device_of, sharing
from gtrain.strategy.remote_checkpoint import LocalCopies
from gtrain.strategy.servers import Servers

log = logging.getLogger("gtrain")

_PER_RANK = ("loops", "epoch", "global_step", "optimizer_states", "lr_schedulers")  # of a checkpoint without lockstep
_DTYPES = {"64-true": torch.float64, "32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_LIGHTNING_ARGUMENTS = tuple(inspect.signature(ParallelStrategy.__init__).parameters)


def _parameters(config: type[StrategyConfig]) -> list[inspect.Parameter]:
    """Return a strategy's settings as parameters, those of all strategies last and keyword-only."""
    every = {parameter.name: parameter for parameter in parameters(config, inspect.Parameter.POSITIONAL_OR_KEYWORD)}
    shared = [every.pop(p.name).replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters(StrategyConfig)]
    return [*every.values(), *shared, inspect.Parameter("lightning", inspect.Parameter.VAR_KEYWORD)]


class GraphStrategy(ParallelStrategy):
    """A Lightning strategy whose ranks each hold a part of a partitioned graph.

    Args:
        values: settings in the order of :attr:`settings_type`.
        settings: settings by name, and arguments of Lightning's ``ParallelStrategy``.

    Attributes:
        trainer: trainer of the run; None before it.
        settings: the settings, an instance of :attr:`settings_type`.

    Raises:
        ConfigError: a setting is unknown or has an invalid value.
    """

    strategy_name: ClassVar[str] = "graph"
    settings_type: ClassVar[type[StrategyConfig]] = StrategyConfig
    """Dataclass that declares the settings, which are the constructor's keywords."""
    settings: StrategyConfig
    serves: ClassVar[Serves] = Serves(limits=FULL_PRECISION)
    """Capabilities and limits; the ``Backend`` has the same object."""
    full_batch: bool = True
    """Whether an epoch is one batch of the whole graph."""
    lockstep: ClassVar[bool] = True
    """Whether all ranks take each step together. Otherwise ranks step independently, and may take unequal numbers."""
    reforms: ClassVar[bool] = False
    """Whether :attr:`group` can be formed again after a rank was restarted; see :meth:`Group.reform`."""

    model_name: str | None = None
    """Name of the model in messages; None for the name of its class."""
    run_folder: Path | None = None
    """Folder of the run that the ``gtrain`` command started; None in a program that uses the strategy."""
    loaded_epoch: int | None = None
    """Epoch of the checkpoint that was loaded last; None if none was."""

    # Lightning requires it of a custom strategy.
    is_distributed = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the settings as the constructor's parameters."""
        super().__init_subclass__(**kwargs)
        declared = "settings_type" in vars(cls)
        cls.__signature__ = signature_of(cls, lambda: _parameters(cls.settings_type), own=declared)  # type: ignore[attr-defined]

    def __init__(self, *values: Any, **settings: Any) -> None:
        names = [parameter.name for parameter in _parameters(self.settings_type)]
        settings |= dict(zip(names, values, strict=False))
        fields = pop_settings(self.settings_type, type(self).__name__, settings, _LIGHTNING_ARGUMENTS)
        self.settings = self.settings_type(**{"name": self.strategy_name, **fields})
        settings.setdefault("cluster_environment", find_environment())
        super().__init__(**settings)
        self.timeout_seconds = self.settings.timeout_seconds
        self.dropout = self.settings.dropout
        self._exact: ExactDropout | None = None
        self._sharing: FolderSharing | None = None
        self._copies: LocalCopies | None = None
        self.interruption = Interruption()
        self.counters = Counters()
        self.group = Group(counters=self.counters)
        self._group_formed = self._accumulating = self._holdings_reported = False
        self._share_of_step: float | Tensor = 1.0  # of the losses of a step with manual optimization
        self._shards: dict[Path, Any] = {}
        self.trainer: pl.Trainer | None = None
        self._servers: Servers | None = None
        self._logged_warnings: set[str] = set()
        self._explained: GtrainError | None = None

    # ------------------------------------------------------------------------ methods that backends implement

    @abstractmethod
    def open_shard(self, store: Store) -> Any:
        """Return the part of the store that this rank trains on, a ``GraphShard`` in most backends.

        Raises:
            ConfigError: the store's number of parts does not suit the number of ranks.
        """

    @abstractmethod
    def batches(self, shard: Any, loader: SeedLoader) -> Iterable[Data | HeteroData]:
        """Return the batches of an epoch over ``loader``'s split.

        All ranks must return the same number of batches; otherwise ranks wait for each other until a time-out.

        Args:
            shard: result of :meth:`open_shard`.
            loader: describes the split.

        Returns:
            A sized iterable that is iterated once per epoch; not a ``DataLoader``.
        """

    def install(self, module: Module) -> None:
        """Replace or redirect layers of ``module`` for the run. The default changes nothing."""

    def uninstall(self, module: Module) -> None:
        """Revert the changes of :meth:`install`."""

    def resolved_settings(self) -> dict[str, Any]:
        """Return the values that the run used for settings with ``auto``, by full name, for ``summary.json``."""
        return {}

    def check_module(self, module: Module) -> None:
        """Check that this backend trains a module exactly.

        Raises:
            ConfigError: it does not; the message names the layer and the reason.
        """

    def check_optimizers(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        """Check that this backend can perform the updates of these optimizers.

        Raises:
            ConfigError: it cannot; the message names the setting.
        """

    def making_model(self) -> AbstractContextManager[None]:
        """Return the context that models are created in: backends with remote tables create them without rows."""
        return nullcontext()

    # ------------------------------------------------------------------------ the run

    @property
    def fitting(self) -> bool:
        """Whether the run trains; otherwise it tests, validates or predicts."""
        return self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING

    @property
    def data(self) -> StoreData | None:
        """The run's data module; None before a run, and if the data module has no store."""
        data = None if self.trainer is None else data_of(self.trainer)
        return data if isinstance(data, StoreData) else None

    # ------------------------------------------------------------------------ machines, ranks and devices

    num_nodes: int = 1
    """Machines of the job; Lightning sets it to ``Trainer(num_nodes=...)``."""

    @property
    def num_processes(self) -> int:
        """Ranks on each machine."""
        return len(self.parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        """The CPU, or this rank's GPU: the one whose number is the rank's number on its machine."""
        devices = self.parallel_devices or [torch.device("cpu")]
        agent = agent_environment()
        simulated = devices[0].type == "cuda" and agent is not None and agent.context.simulated
        return device_of(devices, self.global_rank, self.local_rank, torch.cuda.device_count() if simulated else None)

    def set_world_ranks(self) -> None:
        """Set Lightning's global rank, which it guessed when it was imported."""
        if isinstance(self.cluster_environment, LightningEnvironment):
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        assert self.cluster_environment is not None
        trainer_checks.check_world(self.cluster_environment, self.num_nodes, self.num_processes)
        module = self.lightning_module
        trainer = None if module is None else trainer_of(module)
        if module is not None and trainer is not None:  # before Lightning prepares the data
            self.check_start(trainer, module, data_of(trainer))
        super().setup_environment()
        self.set_world_ranks()
        if not self._group_formed:
            self._prepare_data()
            if self.world_size > 1:
                watch_stacks_signal()  # a thread, so not before the data are prepared
            self.group = self.make_group()
            self._group_formed = True

    def _prepare_data(self) -> None:
        """Prepare the data before Lightning does, while this process has no threads of the group and can still be
        forked. All ranks call this, because Lightning's barrier uses torch's default process group."""
        model, data = self.lightning_module, self.data
        if model is not None and isinstance(data, GraphDataModule):
            name = self._name_of(model)
            data.weight_demand, data.zero_demand = weight_demand(model, name), zero_demand(model, name)
            prepare(data, self.cluster_environment)

    def make_group(self) -> Group:
        """Return the group of the job's ranks for collectives; called once, after the environment is set up."""
        environment, rank, size = self.cluster_environment, self.global_rank, self.world_size
        assert environment is not None
        return form_group(environment, rank, size, self.timeout_seconds, self.counters, again=self.reforms)

    # ------------------------------------------------------------------------ life of a run

    def check_start(self, trainer: pl.Trainer, module: pl.LightningModule, data: pl.LightningDataModule | None) -> None:
        """Check settings and the model before the data are read and before the ranks connect.

        Args:
            trainer: trainer of the run.
            module: the model.
            data: data module of the run.

        Raises:
            ConfigError: this strategy does not support a setting or a layer.
        """
        self.trainer = trainer
        settings = trainer_checks.settings_of(trainer, self.root_device, data)
        if isinstance(module, OrdersByQuery):
            settings["model.by_query"] = module.by_query
        serves = self.serves if self.lockstep else replace(self.serves, limits={**self.serves.limits, **UNEQUAL_STEPS})
        for key in serves.violated(settings):
            raise not_honoured(self.strategy_name, key, serves.limits, settings)
        if self.full_batch:
            trainer_checks.check_full_batch(self.strategy_name, trainer)
        if not is_overridden("configure_model", module):
            # configure_model creates layers only after the data are prepared.
            self.check_module(module)

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        self.check_start(trainer, self.lightning_module, data_of(trainer))
        self.check_module(self.lightning_module)
        self._check_edge_data(self.lightning_module)
        slow = trainer_checks.slow_precision(str(trainer.precision), self.root_device, self.lightning_module)
        if slow is not None:
            self._warn_once(slow)
        super().setup(trainer)
        if self.root_device.type == "cuda" and self.world_size > 1:
            self._connect_devices()
        self.broadcast_module(self.lightning_module)
        self._synchronise_metrics(self.lightning_module)
        self.install(self.lightning_module)
        if self.fitting:
            self._install_dropout(self.lightning_module)
            if self.global_rank > 0:
                torch.manual_seed(torch.initial_seed() + self.global_rank)  # random numbers differ between ranks

    def _connect_devices(self) -> None:
        """Connect the ranks' GPUs, and say so if ranks share one."""
        agent = agent_environment()
        text = sharing(self.world_size, torch.cuda.device_count()) if agent and agent.context.simulated else None
        if text is not None and self.is_global_zero and self.fitting:
            log.warning("%s", text)
        # A rank that is restarted alone would not meet the others here, nor could their connections be formed again.
        if self.group.takes_devices and not self.reforms and not slots.restarts():
            assert self.cluster_environment is not None
            store = job_store(self.cluster_environment).prefixed("gtrain-devices")
            connect_devices(self.group, store, self.root_device, self.timeout_seconds)

    def _check_edge_data(self, module: pl.LightningModule) -> None:
        """Refuse edge weights that the model cannot train with; warn once about tensors that the model ignores."""
        data = self.data
        if not isinstance(data, GraphDataModule):
            return
        name, store = self._name_of(module), data.open_store()
        check_weights(module, store.facts, name)
        for warning in unread_data(module, store, data.edge_data_read, name) if self.is_global_zero else []:
            self._warn_once(warning)

    def _warn_once(self, warning: str) -> None:
        if self.is_global_zero and warning not in self._logged_warnings:
            log.warning("%s", warning)
            self._logged_warnings.add(warning)

    def _name_of(self, module: Module) -> str:
        return self.model_name or type(network_of(module) or module).__name__

    watches_edges: ClassVar[bool] = True
    """Whether convolutions run unchanged. Otherwise the backend passes the edges of messages to dropout itself."""

    def follows_messages(self, conv: Module) -> bool:
        """Whether dropout follows ``propagate`` of this convolution; otherwise the backend passes the edges itself."""
        return self.watches_edges

    def _install_dropout(self, module: pl.LightningModule) -> None:
        """Make dropout masks independent of the partitioning; all ranks use the seed of rank 0."""
        if self.dropout == "torch":
            return
        # 62 bits of torch's seed, which is an unsigned number of 64 bits, so that they fit a tensor of int64.
        seed = self.group.broadcast(torch.tensor([torch.initial_seed() & (1 << 62) - 1]))
        self._exact = ExactDropout(module, int(seed), self.follows_messages)

    def dropout_rows(self, batch: Any) -> StepRows:
        """Return the rows that tensors of a step may have, for masks of dropout."""
        return rows_of(batch)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def teardown(self) -> None:
        if self._exact is not None:
            self._exact.remove()
            self._exact = None
        if self.lightning_module is not None:
            self.uninstall(self.lightning_module)
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Report the cause before the teardown, because the agent shows the failure that is reported first."""
        explained = self.explained(exception)
        slots.report_failure(explained)
        if explained is not exception:  # for programs, whose exception Lightning raises again
            exception.add_note(f"gtrain: {explained}")
        super().on_exception(exception)

    def explained(self, exception: BaseException) -> BaseException:
        """Return the error that tells a user what to do, for a rank without memory; else the exception."""
        if isinstance(exception, GtrainError) or not device_memory.is_out_of_memory(exception):
            return exception
        if self._explained is None:  # before the teardown, which frees the memory
            backend = get(self.strategy_name) if self.strategy_name in installed() else None
            self._explained = device_memory.out_of_memory(
                exception,
                rank=f"rank {self.global_rank} of {self.world_size}",
                device=self.root_device,
                module=self.lightning_module,
                optimizers=self.optimizers,
                hints=() if backend is None else backend.less_memory,
            )
        return self._explained or exception

    # ------------------------------------------------------------------------ servers and restarts

    @property
    def servers(self) -> Servers:
        """The servers of the backend's roles in this job, and their clients."""
        if self._servers is None:
            assert self.cluster_environment is not None
            self._servers = Servers(self.cluster_environment, self.counters, self.timeout_seconds)
        return self._servers

    @property
    def started_by_agent(self) -> bool:
        """Whether gtrain's agent started the ranks. Other launchers do not restart single ranks."""
        return agent_environment() is not None

    @property
    def former_lives(self) -> int:
        """Number of restarts of this rank."""
        return slots.restarts()

    @property
    def outlives_job(self) -> bool:
        """Whether an interrupted job resumes its state when it is restarted."""
        return False

    def restart_checkpoint(self, run_dir: Path) -> Path | None:
        """Return the checkpoint that a restarted rank or job resumes from; None to start from the first epoch."""
        path = run_dir / "checkpoints" / "last.ckpt"
        return path if path.exists() or path.with_name("last.ckpt.old").exists() else None

    def joined(self) -> None:
        """Report that this rank has joined the group: if it dies from now on, it must not be restarted."""
        slots.report("joined")

    def say(self, text: str) -> None:
        """Print a line to the terminal, through the agent."""
        slots.print_line(text)

    @property
    def speaks(self) -> bool:
        """Whether this is the first of the ranks that share a terminal."""
        agent = agent_environment()
        simulated = agent is not None and agent.context.simulated
        return self.is_global_zero if simulated else self.local_rank == 0

    def may_be_lost(self, may: bool = True) -> None:
        """Set whether the job continues without this rank's machine if one of its workers dies.

        The machine's servers keep running. Launchers other than gtrain's agent ignore this and end the job.
        """
        slots.report("may be lost", value=may)

    # ------------------------------------------------------------------------ collectives, on the group of the ranks

    def barrier(self, name: str | None = None) -> None:
        self.group.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.group.broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        op = (reduce_op if isinstance(reduce_op, str) else getattr(reduce_op, "name", "sum")).lower()
        # Integers are reduced in float64, because Lightning asks for means.
        value = tensor.clone() if tensor.is_floating_point() else tensor.to(torch.float64)
        return self.group.all_reduce(value, op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads and self.world_size > 1:
            raise ConfigError(
                f"all_gather(sync_grads=True) is not supported by strategy={self.strategy_name}.",
                hint="gather without gradients, or let the loss be local: gradients are summed over the ranks.",
            )
        return torch.stack(self.group.all_gather(tensor))

    def broadcast_module(self, module: Module) -> None:
        """Give all ranks the parameters and buffers of rank 0.

        Raises:
            ConfigError: a lazy layer has not seen its input yet.
        """
        if self.world_size == 1:
            return
        lazy = [name for name, tensor in module.named_parameters() if is_lazy(tensor)]
        if lazy:
            raise ConfigError(
                f"{lazy[0]} of {type(module).__name__} has no shape yet, and the ranks would start with different "
                "numbers.",
                hint="give the layer its number of input channels in place of -1, or call it once on a sample before.",
            )
        for tensor in (*module.parameters(), *module.buffers()):
            self.group.broadcast(tensor.data)

    def _synchronise_metrics(self, module: Module) -> None:
        """Have every torchmetrics metric gather over the group instead of torch's default group."""
        for metric in module.modules():
            if isinstance(metric, Metric):
                if any(isinstance(state, Tensor) and state.is_inference() for state in metric.metric_state.values()):
                    # An evaluation before has reset it in inference mode; updates in training are in place.
                    metric.reset()
                metric.distributed_available_fn = lambda: self.world_size > 1
                metric.dist_sync_fn = lambda tensor, group=None: self.group.all_gather(tensor)

    # ------------------------------------------------------------------------ batches

    def process_dataloader(self, dataloader: object) -> Iterable[Data | HeteroData]:
        """Return this rank's batches of the split that a loader describes."""
        if not isinstance(dataloader, SeedLoader):
            raise ConfigError(
                f"strategy={self.strategy_name} makes batches from the loaders of a GraphDataModule; "
                f"a {type(dataloader).__name__} was passed.",
                hint="subclass gtrain.GraphDataModule, or return a gtrain.data.SeedLoader from the data module.",
            )
        self._check_data(dataloader)
        module = self.lightning_module
        dataloader.set_num_negatives(module.num_negatives if isinstance(module, DrawsNegatives) else None)
        dataloader.by_query = isinstance(module, OrdersByQuery) and module.by_query
        trainer, store = self.trainer, dataloader.store
        if trainer is not None and dataloader.split == "train":
            # A resumed run continues with the order of its next epoch.
            dataloader.clock = lambda: trainer.current_epoch
        # They outlive the evaluation that may be the first to ask; autograd saves no tensor of inference mode.
        with torch.inference_mode(mode=False):
            return self.batches(self.shard_of(store), dataloader)

    def shard_of(self, store: Store) -> Any:
        """Return this rank's shard of a store, which is opened at the first call."""
        # One shard at a time: the previous store's may be as large as memory allows.
        if store.path not in self._shards:
            self._shards = {store.path: self.open_shard(store)}
        return self._shards[store.path]

    def _check_data(self, loader: SeedLoader) -> None:
        """Refuse a task, or a heterogeneous graph, that the backend does not support."""
        if loader.seeds_are_edges and "link" not in self.serves.tasks:
            raise ConfigError(
                f"data.task=link was set; strategy={self.strategy_name} makes batches of nodes.",
                hint=f"set data.task=node, or strategy={' or '.join(serving(Traits(task='link')))}.",
            )
        if loader.store.is_hetero and not self.serves.heterogeneous:
            raise ConfigError(
                f"the graph has {len(loader.store.node_types)} types of nodes and {len(loader.store.edge_types)} of "
                f"edges; strategy={self.strategy_name} takes graphs with one of each.",
                hint=f"set strategy={' or '.join(serving(Traits(heterogeneous=True)))}.",
            )

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the inputs, from ``trainer.precision``."""
        return _DTYPES.get(self.precision_plugin.precision, torch.float32)

    # ------------------------------------------------------------------------ loss and gradients

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step and scale its mean over this rank's seeds to the rank's share of the global mean.

        A rank's share is ``loss * weight / total``. The weight is the batch's number of seeds, or ``output["weight"]``
        if the module averages over something else, such as class weights; the total is the sum over all ranks.
        Gradients are then *summed*, so that the step equals that of a single process for any division of the seeds.
        """
        if not self._holdings_reported:
            # If the kernel kills this rank, nothing else can say what it held.
            self._holdings_reported = True
            slots.report("holds", text=device_memory.holdings(self.lightning_module, args[0]))
        if self._exact is not None:
            assert self.trainer is not None
            batch_idx = self.trainer.fit_loop.epoch_loop.batch_idx
            self._exact.start_step(self.trainer.current_epoch, batch_idx, self.dropout_rows(args[0]))
        if self._optimizes_manually:
            return self._manual_step(*args, **kwargs)
        output = super().training_step(*args, **kwargs)
        if output is None or self.world_size == 1 or not self.lockstep:
            return output
        loss = output["loss"] if isinstance(output, Mapping) else output
        scaled = _scaled(loss, self.loss_share(output, args[0]))
        return {**output, "loss": scaled} if isinstance(output, Mapping) else scaled

    @property
    def _optimizes_manually(self) -> bool:
        """Whether the module's step makes its backward passes itself, and other ranks take the same step."""
        assert self.lightning_module is not None
        return not self.lightning_module.automatic_optimization and self.world_size > 1 and self.lockstep

    def _manual_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step with manual optimization, in which :meth:`backward` scales losses and sums gradients.

        Raises:
            ConfigError: the step returns a weight, which was needed before its backward passes.
        """
        self._share_of_step = self.loss_share(None, args[0])
        output = super().training_step(*args, **kwargs)
        if isinstance(output, Mapping) and output.get("weight") is not None:
            raise ConfigError(
                f"{type(self.lightning_module).__name__}.training_step returned a weight; with manual optimization a "
                "loss is the mean over the batch's seeds.",
                hint="use automatic optimization, or return no weight and let the loss be the mean over batch.seeds.",
            )
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward pass. With manual optimization it takes the rank's share of the loss.

        Each of a step's passes then sums the gradients that it has added, and no others, over the ranks: so gradients
        that are accumulated, clipped or divided among optimizers are those of a single process.
        """
        if not self._optimizes_manually:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        earlier = [(p, p.grad) for p in self.lightning_module.parameters() if p.requires_grad and p.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        loss = super().backward(_scaled(closure_loss, self._share_of_step), optimizer, *args, **kwargs)
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        return loss

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._exact is not None:
            self._exact.end_step()
        return super().validation_step(*args, **kwargs)

    def loss_share(self, output: Any, batch: Any) -> float | Tensor:
        """Return this rank's share of a step's loss, 0 to 1: its weight divided by the sum of all ranks' weights.

        It may be a tensor on the device of the loss, so that the host does not wait for it.

        Args:
            output: result of the module's ``training_step``.
            batch: argument of the module's ``training_step``.
        """
        weight = output.get("weight") if isinstance(output, Mapping) else None
        if weight is None:
            weight = batch.seeds.numel() if isinstance(batch, (Data, HeteroData)) and "seeds" in batch else 1
        own = torch.tensor([float(weight), float(self.interruption.requested)], dtype=torch.float64)
        total, requests = self.group.all_reduce(own).tolist()
        self.interruption.settle(requests)
        return float(weight) / total if total > 0 else 0.0

    def post_backward(self, closure_loss: Tensor) -> None:
        assert self.lightning_module is not None
        if not self._accumulating and self.lockstep:
            self.sum_gradients()
        super().post_backward(closure_loss)

    def sum_gradients(self) -> None:
        """Sum gradients over the ranks. All ranks call this after the backward pass of a step."""
        assert self.lightning_module is not None
        sum_gradients(self.group, self.lightning_module.parameters())
        if not self.full_batch:
            average_statistics(self.group, self.lightning_module)

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Skip the sum over ranks during gradient accumulation; the last batch's backward pass sums for all batches."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    # ------------------------------------------------------------------------ checkpoints

    @property
    def saves_on_request(self) -> bool:
        """Whether ranks that receive SIGTERM save a checkpoint together after a step; see :meth:`interrupted`.

        The base's :meth:`loss_share` tells all ranks. A backend that overrides it passes the request on itself.
        """
        return self.lockstep and type(self).loss_share is GraphStrategy.loss_share

    def interrupted(self) -> bool:
        """Whether to save a checkpoint after this step and to end; the same on all ranks, which call it together."""
        return self.interruption.requested if self.world_size == 1 else self.interruption.agreed

    # setup converts parameters to their precision.
    restore_checkpoint_after_setup = True

    def shard_state(self) -> dict[str, Any]:
        """Return the state that only this rank holds, for a checkpoint: tensors, numbers and strings."""
        return {}

    def load_shard_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`shard_state` returned."""

    def shard_files(self, folder: Path) -> None:
        """Write state that is too large for :meth:`shard_state` into a checkpoint's folder. All ranks call this."""

    def load_shard_files(self, folder: Path) -> None:
        """Restore the state that :meth:`shard_files` wrote, on any number of ranks. Rank 0 first verifies checksums."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self.lightning_module is not None
        if self._exact is not None:
            checkpoint["dropout_seed"] = self._exact.seed
        shard = self.shard_state()
        if not self.lockstep:
            shard = {"own": {name: checkpoint[name] for name in _PER_RANK if name in checkpoint}, "shard": shard}
        if self._within_epoch:
            shard = {**shard, METRICS: metric_states(module_metrics(self.lightning_module))}
        checkpoints.save(
            self.group,
            filepath,
            checkpoint,
            shard,
            self.lightning_module,
            self.shard_files,
            self._numbering(),
            self.strategy_name,
            self.folder_sharing,
            self.run_folder,
            None if self.data is None else training_of(self.data.open_store()),
        )

    @property
    def _within_epoch(self) -> bool:
        """Whether an epoch has started and not ended."""
        if not self.fitting:
            return False
        assert self.trainer is not None
        epochs = self.trainer.fit_loop.epoch_progress.current
        return epochs.processed < epochs.started  # type: ignore[attr-defined, no-any-return]

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        location = checkpoints.located(checkpoint_path)
        if isinstance(location, str):
            readable = self.local_copies.readable(location, self.run_folder)
        else:
            readable = self.folder_sharing.readable(location, checkpoints.MANIFEST)
        with readable as path:
            return self._load_checkpoint(path)

    @property
    def local_copies(self) -> LocalCopies:
        """Temporary copies of checkpoints that are read from an object store."""
        if self._copies is None:
            self._copies = LocalCopies(self.cluster_environment)
        return self._copies

    @property
    def folder_sharing(self) -> FolderSharing:
        """Moves the files of checkpoints and predictions between machines without a shared folder."""
        if self._sharing is None:
            self._sharing = FolderSharing(self.cluster_environment)
        return self._sharing

    def _load_checkpoint(self, path: Path) -> dict[str, Any]:
        assert self.lightning_module is not None
        folder = checkpoints.find(path)
        if folder.is_dir():
            elsewhere = any(isinstance(layer.storage, RemoteTableStorage) for _, layer in tables(self.lightning_module))
            writer = checkpoints.writer_of_tables(folder, self.lightning_module, self.strategy_name, elsewhere)
            if writer is not None:
                return self._load_other(folder, writer)
        loaded = checkpoints.load(
            # self.group excludes a restarted rank until it rejoins.
            Group(self.global_rank, self.world_size),
            path,
            self.lightning_module,
            restore_rng=self.fitting,
            numbering=self._numbering(),
        )
        if self.fitting and self._exact is not None:
            self._exact.seed = int(loaded.checkpoint.get("dropout_seed", self._exact.seed))
        self.loaded_epoch = loaded.checkpoint.get("epoch")
        if folder.is_dir():
            if self.is_global_zero:
                checkpoints.verify_files(folder)
            self.load_shard_files(folder)
        if self.fitting:
            restore_metrics(module_metrics(self.lightning_module), loaded.shard.get(METRICS, {}), updated=False)
        if self.lockstep:
            self.load_shard_state(loaded.shard)
            return loaded.checkpoint
        self.load_shard_state(loaded.shard.get("shard", {}))
        return {**loaded.checkpoint, **loaded.shard.get("own", {})}

    def _load_other(self, folder: Path, writer: str) -> dict[str, Any]:
        """Load a checkpoint of another strategy, which stores the rows of tables differently."""
        assert self.lightning_module is not None
        if self.fitting:
            raise checkpoints.refuse_training(folder, writer, self.strategy_name)
        reader = get(writer).load_table_reader()
        checkpoint, rows = checkpoints.load_other(folder, self.lightning_module, reader, self._numbering())
        self.load_tables(rows)
        self.loaded_epoch = checkpoint.get("epoch")
        return checkpoint

    def load_tables(self, rows: Mapping[str, checkpoints.SavedRows]) -> None:
        """Load the rows of tables, by layer, from a checkpoint of another strategy. All ranks call this."""
        assert self.lightning_module is not None
        for name, layer in tables(self.lightning_module):
            for ids, piece in rows[name].pieces():
                layer.weight.data[ids] = piece.to(layer.weight)

    def _numbering(self) -> dict[str, Any] | None:
        """Return the identity of the module's learned rows; None if it has none, or the data has no store."""
        if self.data is None or self.lightning_module is None:
            return None
        return checkpoints.numbering_of(self.lightning_module, self.data.open_store())

    def remove_checkpoint(self, filepath: Any) -> None:
        if not self.is_global_zero:
            return
        checkpoints.remove(str(filepath) if is_address(filepath) else Path(filepath))
        if self.run_folder is not None:
            pointer = self.run_folder / "checkpoints" / Path(filepath).name
            if pointer.is_symlink() and not pointer.exists():
                checkpoints.remove(pointer)


def _scaled(loss: Tensor, share: float | Tensor) -> Tensor:
    """Return a loss times a rank's share; 0 if that is 0, because the mean over no seeds may be NaN."""
    if isinstance(share, Tensor):
        return torch.where(share > 0, loss, torch.zeros_like(loss)) * share.to(loss.dtype)
    return loss * share if share > 0 else torch.nan_to_num(loss) * 0.0
