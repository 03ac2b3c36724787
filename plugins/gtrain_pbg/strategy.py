"""``strategy=pbg`` in a worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from gtrain.data.loader import SeedLoader
from gtrain.errors import ConfigError, DataError
from gtrain.graph.store import Store
from gtrain.nn import deferred
from gtrain.nn.recipe import EdgeRecipe, ModelRecipe
from gtrain.strategy.base import GraphStrategy
from gtrain.wire.addresses import IpcFolder, ipc_folder
from gtrain.wire.shared import SharedTensors
from gtrain_pbg import config
from gtrain_pbg.edges import BucketEdges, EdgeList, Groups, batches_of, kinds_of, mixed, passes_of
from gtrain_pbg.evaluation import EvaluationBatches
from gtrain_pbg.home import PartitionedHome
from gtrain_pbg.optimizers import StepRules
from gtrain_pbg.order import bucket_order
from gtrain_pbg.step.relations import Weights, state_width
from gtrain_pbg.step.training import EdgeBatch, Rows, TrainingStep
from gtrain_pbg.swaps import Visit
from gtrain_pbg.tables import Partitions
from gtrain_pbg.typed import TypedTables, cuts_of
from gtrain_pbg.warm_start import describe, relations_of, warm_start

SPAN_EDGES = 50_000
"""Edges of one ``training_step``, about: Lightning's own work in a step takes a quarter of a millisecond and more."""
HELD = 500
"""Edges that were held back which are ranked at a time, among each other and twice as many nodes."""
RELATIONS = "relations.pt"


class PBGStrategy(GraphStrategy):
    """Trains embeddings bucket by bucket: edges between two partitions of the table while both are in memory.

    Each worker takes its own steps, on tables that all workers of the machine have in the same memory, without locks
    (Hogwild, Recht et al. 2011). They meet at the ends of buckets. The module's own ``training_step`` is not run: what
    its ``recipe()`` says is computed by :class:`~gtrain_pbg.step.training.TrainingStep`.

    Args:
        num_partitions, buffer_partitions, bucket_order, num_edge_chunks, eval_fraction, shuffle, matmul,
            warm_start: see :class:`~gtrain_pbg.config.PBGConfig`.
        kwargs: passed on to :class:`~gtrain.strategy.base.GraphStrategy`.
    """

    strategy_name: ClassVar[str] = "pbg"
    full_batch = False
    tasks: ClassVar[tuple[str, ...]] = ("link",)
    lockstep: ClassVar[bool] = False

    def __init__(
        self,
        *,
        num_partitions: int = 1,
        buffer_partitions: int | None = None,
        bucket_order: str = "inside_out",
        num_edge_chunks: int = 1,
        eval_fraction: float = 0.0,
        shuffle: bool = True,
        matmul: str = "float32",
        warm_start: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._warm_start = warm_start
        self._store: Store | None = None
        config.check(num_partitions, buffer_partitions, bucket_order, num_edge_chunks, eval_fraction, matmul)
        self._partitions_wanted, self._order = num_partitions, bucket_order
        self._slots = min(num_partitions, buffer_partitions or num_partitions)
        self._chunks, self._eval_fraction, self._shuffle, self._low = (
            num_edge_chunks,
            eval_fraction,
            shuffle,
            matmul == "bfloat16",
        )
        self._recipe: ModelRecipe | None = None
        self._partitions: Partitions | None = None
        self._table: TypedTables | None = None
        self._shared: SharedTensors | None = None
        self._ipc: IpcFolder | None = None
        self._trainee: Trainee | None = None

    # ------------------------------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        if self.num_nodes > 1:
            raise ConfigError(
                f"trainer.num_nodes={self.num_nodes} was set; strategy=pbg trains on one machine.",
                hint="set trainer.num_nodes=1 and trainer.devices to the number of workers.",
            )
        super().setup_environment()

    def making_model(self) -> AbstractContextManager[None]:
        return deferred()

    def check_module(self, module: Module) -> None:
        if not callable(getattr(module, "recipe", None)):
            raise ConfigError(
                f"{type(module).__name__} has no recipe(), by which strategy=pbg trains; see gtrain.nn.recipe.",
                hint="set model=kg, or strategy=single.",
            )
        trainer = self._trainer
        for key, found, allowed in (
            ("gradient_clip_val", trainer and trainer.gradient_clip_val, (None, 0)),
            ("accumulate_grad_batches", trainer and trainer.accumulate_grad_batches, (None, 1)),
        ):
            if found not in allowed:
                raise ConfigError(
                    f"trainer.{key}={found} was set; a step of strategy=pbg applies its gradients at once.",
                    hint=f"leave trainer.{key} out.",
                )
        size, recipe = getattr(getattr(trainer, "datamodule", None), "batch_size", None), _chunked(module.recipe())  # type: ignore[operator]
        if size is not None and recipe is not None and size > recipe.places and size % recipe.places:
            key = "num_batch_negs" if recipe.num_batch_negs else "num_uniform_negs"
            raise ConfigError(
                f"data.batch_size={size} is no multiple of model.{key}={recipe.places}, the edges of a chunk: "
                f"{size} = {size // recipe.places} * {recipe.places} + {size % recipe.places}.",
                hint=f"set data.batch_size={size // recipe.places * recipe.places}.",
            )

    def open_shard(self, store: Store) -> Store:
        if store.num_parts != self._partitions_wanted or not store.has_buckets:
            raise ConfigError(
                f"strategy.num_partitions={self._partitions_wanted} was set, and the store {store.path} has "
                f"{store.num_parts} parts{'' if store.has_buckets else ' and no edge buckets'}.",
                hint="let the gtrain command make the store, or set num_parts and buckets of the data module.",
            )
        return store

    def install(self, module: Module) -> None:
        """Let the table live in partitions, and relations where all workers have them."""
        fitting = self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING
        self._recipe = recipe = module.recipe()  # type: ignore[operator]
        if self._table is None:
            rules = StepRules(self.optimizers, recipe) if fitting else None
            self._table = self._make_table(recipe, rules)
            start = rules.starts if rules else (0.0, 0.0)
            if self.is_global_zero:
                self._fill(recipe, start)
            self._table.place_first()
            self.group.barrier()
        assert self._shared is not None
        for name, parameter in recipe.parameters.items():
            parameter.data = self._shared[name]
        for layer, table in zip(recipe.tables.values(), self._table.tables, strict=True):
            layer.move(PartitionedHome(table))
        if fitting:
            self._trainee = Trainee(self, recipe, StepRules(self.optimizers, recipe))

    def _make_table(self, recipe: ModelRecipe, rules: StepRules | None) -> TypedTables:
        """Memory for the tables and for relations, with what optimizers keep of them; rank 0 makes it."""
        datamodule = getattr(self._trainer, "datamodule", None)
        self._store = store = self.open_shard(datamodule.open_store())  # type: ignore[union-attr]
        self._partitions = Partitions(
            store.offsets, tuple(store.node("orig_id", part).clone() for part in range(store.num_parts))
        )
        layers = list(recipe.tables.values())
        dtype, cuts = layers[0].weight.dtype, cuts_of(store, [layer.table for layer in layers])
        widths = [state_width(rules.table.kind, layer.table.dim) if rules else 0 for layer in layers]
        layout: dict[str, Any] = TypedTables.tensors(cuts, self._slots, widths, dtype)
        for name, parameter in recipe.parameters.items():
            layout[name] = (tuple(parameter.shape), parameter.dtype)
            if rules is not None:
                columns = state_width(rules.relations.kind, parameter[0].numel())
                layout[f"{name}.state"] = ((len(parameter), columns), parameter.dtype)
        if self.is_global_zero:
            self._ipc = ipc_folder()
            self._shared = SharedTensors.create(self._ipc.path, "pbg", layout)
            self.group.broadcast_object(str(self._ipc.path))
        else:
            folder = self.group.broadcast_object(None)
            self._shared = SharedTensors.attach(folder, "pbg", self.timeout_seconds)
        return TypedTables(cuts, self._slots, widths, dtype, self._scratch, self._shared, self.is_global_zero)

    def _fill(self, recipe: ModelRecipe, start: tuple[float, float]) -> None:
        assert self._table is not None and self._shared is not None
        self._table.initialize(start[0])
        for name, parameter in recipe.parameters.items():
            self._shared[name].copy_(parameter.detach())
            if f"{name}.state" in self._shared:
                self._shared[f"{name}.state"].fill_(start[1])
        if self._warm_start is not None and self.optimizers:
            assert self.lightning_module is not None and self._store is not None
            known = {id(parameter): self._shared[name] for name, parameter in recipe.parameters.items()}
            named = self.lightning_module.named_parameters()
            shared = {name: known[id(parameter)] for name, parameter in named if id(parameter) in known}
            relations = relations_of(self.lightning_module, recipe)
            warm_start(Path(self._warm_start), self._store, self._table, shared, relations)

    @property
    def _scratch(self) -> Path:
        """Where partitions are that have no slot."""
        assert self._trainer is not None
        return Path(self._trainer.default_root_dir) / "partitions"

    def uninstall(self, module: Module) -> None:
        if self._recipe is None or self._table is None:
            return
        for parameter in self._recipe.parameters.values():
            parameter.data = parameter.data.clone()
        for layer, table in zip(self._recipe.tables.values(), self._table.tables, strict=True):
            whole = table.partitions.count == 1  # in the order of the source data: the module may have it as it is
            layer.move_back(table.read(0) if whole else layer.weight.new_empty(0, layer.table.dim))
        self._trainee = None

    # ------------------------------------------------------------------------------------------ batches

    def batches(self, shard: Store, loader: SeedLoader) -> Iterable[Any]:
        assert self._partitions is not None and self.lightning_module is not None
        if loader.split != "train":
            filtered = bool(getattr(self.lightning_module, "filtered", True))
            place = self.global_rank, self.world_size
            assert self._table is not None
            return EvaluationBatches(loader, self._partitions, filtered, *place, not self._table.whole)
        edges = BucketEdges(shard, self._chunks, self._eval_fraction, self._shuffle, loader.seed, self.dtype)
        size = loader.batch_size or max(1, shard.num_edges)
        return Spans(self, edges, size)

    def visits(self, epoch: int, seed: int) -> list[Visit]:
        """The buckets of an epoch, and what must be swapped for them; the same on all workers."""
        assert self._table is not None and self._store is not None
        order = [
            (bucket, chunk)
            for chunk in range(passes_of(self._store, self._chunks))
            for bucket in bucket_order(self._order, self._partitions_wanted, self._slots, mixed(seed, epoch, chunk))
        ]
        return self._table.buffer.plan(order)

    # ------------------------------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a span of batches; the module's own step is not run."""
        assert self._trainee is not None
        span, module = args[0], self.lightning_module
        assert module is not None
        total, weight = self._trainee.train(span)
        if span.final and self._eval_fraction:
            for name, value in self._trainee.held_out().items():
                module.log(f"train/{name}", value, on_step=False, on_epoch=True, batch_size=1)
        pair = torch.tensor([total, weight], dtype=torch.float64)
        return {"loss": module.log_training(pair[0], pair[1])}  # type: ignore[operator]

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

    def shard_files(self, folder: Path) -> None:
        if self.is_global_zero and self._table is not None and self._shared is not None:
            self._table.save(folder)
            assert self._recipe is not None and self._store is not None and self.lightning_module is not None
            states = {f"{name}.state" for name in self._recipe.parameters} & set(self._shared)
            torch.save({name: self._shared[name].clone() for name in sorted(states)}, folder / RELATIONS)
            describe(folder, self._store, self._table, relations_of(self.lightning_module, self._recipe))

    def load_shard_files(self, folder: Path) -> None:
        assert self._table is not None and self._shared is not None
        self.group.barrier()
        self._table.load(folder)
        if self.is_global_zero and (folder / RELATIONS).exists():
            for name, state in torch.load(folder / RELATIONS, map_location="cpu", weights_only=True).items():
                if name in self._shared:
                    self._shared[name].copy_(state)
        self.group.barrier()


class Span:
    """Some batches of one bucket, what Lightning takes for one.

    Attributes:
        visit: the bucket; None: an epoch begins, and there is nothing to train yet.
        first, last: whether a worker's training of the bucket begins, and ends, with it.
        final: whether it is the last of the epoch.
        batches: the edges.
        held: edges that are held back.
    """

    def __init__(self, visit: Visit | None, batches: list[EdgeList], held: EdgeList) -> None:
        self.visit, self.batches, self.held = visit, batches, held
        self.first = self.last = self.final = False


class Spans:
    """An epoch of one worker: one span to begin with, and at least one for each bucket, perhaps without edges.

    Args:
        strategy: the strategy.
        edges: where edges come from.
        batch_size: edges of a batch.
    """

    def __init__(self, strategy: PBGStrategy, edges: BucketEdges, batch_size: int) -> None:
        self._strategy, self._edges, self._batch_size = strategy, edges, batch_size

    def __iter__(self) -> Iterator[Span]:
        yield Span(None, [], EdgeList.empty())  # Lightning asks for one before a resumed run knows its epoch
        strategy, seed = self._strategy, self._edges.seed
        trainer, recipe = strategy._trainer, strategy._recipe
        assert trainer is not None and recipe is not None
        epoch, worker, workers = trainer.current_epoch, strategy.global_rank, strategy.world_size
        kinds = kinds_of(recipe)
        each = max(1, SPAN_EDGES // self._batch_size)
        visits = strategy.visits(epoch, seed)
        for number, visit in enumerate(visits):
            mine, held = self._edges.share(visit.bucket, visit.chunk, epoch, worker, workers)
            generator = torch.Generator().manual_seed(mixed(seed, epoch, visit.chunk, *visit.bucket, worker))
            batches = list(batches_of(mine, self._batch_size, kinds, generator))
            pieces = [batches[begin : begin + each] for begin in range(0, len(batches), each)] or [[]]
            for place, piece in enumerate(pieces):
                span = Span(visit, piece, held.select(torch.arange(len(held)).tensor_split(workers)[worker]))
                span.first, span.last = place == 0, place + 1 == len(pieces)
                span.final = span.last and number + 1 == len(visits)
                yield span


class Trainee:
    """A worker's training: partitions come and go at the borders of buckets, where all workers meet.

    Args:
        strategy: the strategy.
        recipe: the module's.
        rules: of its optimizers.
    """

    def __init__(self, strategy: PBGStrategy, recipe: ModelRecipe, rules: StepRules) -> None:
        shared, table = strategy._shared, strategy._table
        assert shared is not None and table is not None
        self._strategy, self._recipe, self._rules, self._table = strategy, recipe, rules, table
        weights = {name: Weights(shared[name], shared[f"{name}.state"]) for name in recipe.parameters}
        self._groups = Groups(recipe)
        self._steps: list[TrainingStep] = []
        for number, group in enumerate(recipe.groups):
            own = {name: weights[shared_name] for name, shared_name in recipe.names_of(number).items()}
            work = self._steps[0].work if self._steps else None
            self._steps.append(TrainingStep(group, own, table.dtype, strategy._low, work))
        self._under_way: list[Future[None]] = []
        self._drawn: dict[str, Tensor] = {}
        self._held = torch.zeros(3, dtype=torch.float64)  # reciprocal ranks before, after, and how many

    def train(self, span: Span) -> tuple[float, float]:
        """Train on a span; return the weighted sum of the losses, and of the weights."""
        visit = span.visit
        if visit is None:
            return 0.0, 0.0
        if span.first:
            self._enter(visit)
        if span.first:
            self._held[0] += self._score(span.held, visit)
        table_rule, relation_rule = self._rules.table, self._rules.relations
        total = weight = 0.0
        for edges in span.batches:
            number = self._groups.of(edges)
            batch, heads, tails = self._batch(number, edges, visit)
            lost, counted = self._steps[number](batch, heads, tails, table_rule, relation_rule)
            if not math.isfinite(lost):
                raise DataError(
                    f"the loss of a batch of bucket {visit.bucket} is {lost}.",
                    hint="lower model.sparse_optimizer.lr or model.init_scale, set model.max_norm, and look for "
                    "weights that are no numbers in the data.",
                )
            total, weight = total + lost, weight + counted
        if span.last:
            self._leave(visit, span.final)
            self._held += torch.tensor([0.0, self._score(span.held, visit), 2.0 * len(span.held)])
            self._strategy.group.barrier()
        return total, weight

    def held_out(self) -> dict[str, float]:
        """Mean reciprocal ranks of the epoch's edges that were held back, before and after their bucket's training.

        All workers call it together, once an epoch.
        """
        before, after, count = self._strategy.group.all_reduce(self._held.clone()).tolist()
        self._held.zero_()
        return {"held_out_mrr_before": before / max(count, 1), "held_out_mrr": after / max(count, 1)}

    def _score(self, edges: EdgeList, visit: Visit) -> float:
        """Sum of the reciprocal ranks of both ends of edges, among each other and nodes drawn from both partitions."""
        module: Any = self._strategy.lightning_module
        generator, found = torch.Generator().manual_seed(0), 0.0
        for number, every in self._groups.split(edges):
            heads, tails = self._rows(number, visit)
            every = self._localized(number, every, visit)
            for begin in range(0, len(every), HELD):
                some = every.select(slice(begin, begin + HELD))
                drawn = [rows.read(torch.randperm(rows.count, generator=generator)[:HELD]) for rows in (heads, tails)]
                with torch.no_grad():
                    rows = heads.read(some.heads), tails.read(some.tails)
                    ranks = module.sampled_ranks(rows, some.relation, (drawn[0], drawn[1]), number)
                found += float(torch.cat(ranks).reciprocal().sum())
        return found

    def _rows(self, number: int, visit: Visit) -> tuple[Rows, Rows]:
        """The tables that a group's edges of a bucket refer to."""
        group = self._recipe.groups[number]
        found = (self._table.rows(kind, end, visit) for end, kind in enumerate(group.types))
        heads, tails = (replace(rows, bags=bags) for rows, bags in zip(found, group.bags, strict=True))
        return heads, tails

    def _localized(self, number: int, edges: EdgeList, visit: Visit) -> EdgeList:
        """A group's edges by rows of these tables and numbers among its relations."""
        lhs, rhs = self._recipe.groups[number].types
        return self._groups.localized(edges, self._table.begin(lhs, 0, visit), self._table.begin(rhs, 1, visit))

    def _batch(self, number: int, edges: EdgeList, visit: Visit) -> tuple[EdgeBatch, Rows, Rows]:
        heads, tails = self._rows(number, visit)
        count = self._steps[number].draws(len(edges))
        drawn = self._draw("heads", heads.count, count), self._draw("tails", tails.count, count)
        own = self._localized(number, edges, visit)
        return EdgeBatch(own.heads, own.relation, own.tails, own.weight, drawn), heads, tails

    def _draw(self, name: str, nodes: int, count: int) -> Tensor:
        held = self._drawn.get(name)
        if held is None or held.numel() < count:
            held = self._drawn[name] = torch.empty(count, dtype=torch.int64)
        return torch.randint(nodes, (count,), out=held[:count])

    def _enter(self, visit: Visit) -> None:
        """All workers have left the last bucket; its successor's partitions must be there before any goes on."""
        group = self._strategy.group
        if visit.before or self._under_way:
            self._finish()
            for under_way in self._table.swap(visit.before):
                under_way.result()
        group.barrier()
        self._under_way = self._table.swap(visit.during)

    def _leave(self, visit: Visit, final: bool) -> None:
        self._table.trained(visit.bucket)
        self._strategy.group.barrier()
        if final:
            self._finish()

    def _finish(self) -> None:
        """Wait for what is read and written, and raise what went wrong."""
        for under_way in self._under_way:
            under_way.result()
        self._under_way = []


def _chunked(recipe: ModelRecipe) -> EdgeRecipe | None:
    """A group whose batches are cut into chunks; None where all nodes are negatives everywhere."""
    return next((group for group in recipe.groups if not group.all_negs), None)
