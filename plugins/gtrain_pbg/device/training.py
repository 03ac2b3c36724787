"""A worker's training on a device: batches are prepared ahead, steps are replayed, losses are read later."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gtrain.nn.recipe import ModelRecipe
from gtrain_pbg.buckets import Bucket, ScheduledBucket
from gtrain_pbg.device.batches import BatchPreparation, BatchShape, BatchTensors, Ends, Piece, runs, shape_of
from gtrain_pbg.device.kernels import DeviceRule
from gtrain_pbg.device.lanes import Device, Event
from gtrain_pbg.device.step import DeviceRules, DeviceStep, FusedStep, PlainStep, fits
from gtrain_pbg.device.tables import DeviceTables, parameters_of
from gtrain_pbg.edges import EdgeList
from gtrain_pbg.step.layout import PartitionRows
from gtrain_pbg.step.relations import UpdateRule
from gtrain_pbg.training import BucketTraining, StepRules, diverged

PIECE = 16
"""Batches that are prepared together."""
FIRST = 2
"""Batches of the first piece, for a device that is idle."""
PIECES = 4
"""Pieces that are launched and not yet trained, at the most."""
AHEAD = 3
"""Pieces that are being prepared, at the most: one is drawn while another is launched."""
UNREAD = 2
"""Calls of :meth:`DeviceTraining.train` whose losses are not read yet, at the most."""


@dataclass
class CapturedStep:
    """The step of one group for batches of one shape.

    Attributes:
        inputs: that it reads.
        replay: of its graph; None until it is captured.
    """

    inputs: BatchTensors
    replay: Callable[[], None] | None = None


@dataclass
class PreparedSteps:
    """The batches of one call of :meth:`DeviceTraining.train`, in pieces that threads prepare.

    Attributes:
        batches: of the call.
        runs: pieces that nobody prepares yet.
        pieces: group, ends, and the piece, in their order.
        before: state of torch's generator before the draws of the first piece.
    """

    batches: list[EdgeList]
    runs: Iterator[tuple[int, BatchShape, list[EdgeList]]]
    before: Tensor
    pieces: deque[tuple[int, tuple[Ends, Ends], Future[Piece]]] = field(default_factory=deque)


class DeviceTraining(BucketTraining):
    """Trains on batches of a bucket on a device.

    Args:
        device: that trains.
        device_tables: the tables.
        module, recipe, rules, shared, tables, matmul: see :class:`BucketTraining`.
    """

    is_fast = True

    def __init__(
        self,
        device: Device,
        device_tables: DeviceTables,
        module: Any,
        recipe: ModelRecipe,
        rules: StepRules,
        shared: Mapping[str, Tensor],
        tables: Any,
        matmul: str,
        several_machines: bool = False,
    ) -> None:
        self._device, self._on_device, self._several = device, device_tables, several_machines
        self._pieces: deque[Piece] = deque()
        self._unread: deque[tuple[list[Tensor], Event, float, Bucket]] = deque()
        self._numbers: dict[str, tuple[UpdateRule, DeviceRule]] = {}
        self._drawing = ThreadPoolExecutor(1, "gtrain-pbg-draws")
        self._preparing = ThreadPoolExecutor(1, "gtrain-pbg-batches")
        self._generator = torch.Generator()
        self._prepared: PreparedSteps | None = None
        super().__init__(module, recipe, rules, shared, tables, matmul)

    def use(self, matmul: str) -> None:
        dtype, recipe, common = self._tables.dtype, self._recipe, self._on_device.common
        self.matmul = "float64" if dtype == torch.float64 else matmul
        low = torch.bfloat16 if self.matmul == "bfloat16" else dtype
        rules = self._update_rules()
        self._device_steps: list[DeviceStep] = []
        self._prepare = [BatchPreparation(group, dtype, self._device) for group in recipe.groups]
        self._captured: dict[tuple[int, BatchShape], CapturedStep] = {}
        for number, group in enumerate(recipe.groups):
            heads, tails = (self._on_device.tables[entity_type] for entity_type in group.types)
            ends = tails, heads
            if fits(group):
                self._device_steps.append(FusedStep(group, ends, rules, low, common.operators[number]))
            else:
                parameters = parameters_of(common, recipe, number)
                self._device_steps.append(PlainStep(group, ends, rules, low, parameters))

    def _update_rules(self) -> DeviceRules:
        """Return the rules of the optimizers, with their current numbers on the device."""
        return DeviceRules(
            self._rule("table", self._rules.table),
            self._rule("relations", self._rules.relations),
        )

    def _rule(self, name: str, rule: UpdateRule) -> DeviceRule:
        before, on_device = self._numbers.get(name, (None, None))
        if on_device is None:
            on_device = DeviceRule(rule.name, self._device.empty(3, dtype=self._tables.dtype))
        if before != rule:
            on_device.numbers.copy_(torch.tensor([rule.lr, rule.eps, rule.weight_decay], dtype=self._tables.dtype))
        self._numbers[name] = rule, on_device
        return on_device

    # ------------------------------------------------------------------------------------------ training

    def train(
        self, batches: list[EdgeList], scheduled: ScheduledBucket, following: list[EdgeList] | None = None
    ) -> tuple[float, float]:
        """Train on batches of a bucket; return sums of losses and weights of earlier calls, which are complete.

        The first batches of ``following`` are prepared meanwhile. Their negatives are drawn from a copy of torch's
        generator, whose state the next call adopts: a checkpoint between both has the state before them.

        Raises:
            DataError: a loss is NaN or infinite.
        """
        if self._several:
            # What other machines have changed since the last bucket.
            self._on_device.common.save()
        self._device.compute.follow()
        with torch.no_grad():
            weight = self._train(batches, scheduled, following)
        if self._several:
            self._on_device.common.save()
        with self._device.compute():
            lost = [self._read_later(step.lost) for step in self._device_steps]
            event = self._device.compute.record()
        self._unread.append((lost, event, weight, scheduled.bucket))
        return self._losses(UNREAD)

    def drain(self) -> tuple[float, float]:
        return self._losses(0)

    def release(self) -> None:
        """Free the device's memory; the training is over."""
        self._forget_prepared()
        self._device_steps, self._captured = [], {}
        self._pieces.clear()
        self._unread.clear()
        self._numbers = {}
        del self._on_device

    def _train(self, batches: list[EdgeList], scheduled: ScheduledBucket, following: list[EdgeList] | None) -> float:
        """Launch the steps of batches; return the sum of their weights."""
        self._on_device.begin(scheduled)
        with self._device.compute():
            self._update_rules()
        while self._pieces and _happened(self._pieces[0].done):
            self._pieces.popleft()
        prepared = self._prepared
        if prepared is None or prepared.batches is not batches or not prepared.before.equal(torch.get_rng_state()):
            self._forget_prepared()
            # An idle device begins with few batches, so that it waits for few.
            prepared = self._prepared = self._begin_to_prepare(batches, FIRST if not self._pieces else PIECE)
        weight = 0.0
        while True:
            self._prepare_more(prepared, scheduled)
            if not prepared.pieces:
                break
            number, ends, piece = prepared.pieces.popleft()
            weight += self._launch(number, piece.result(), ends)
        torch.set_rng_state(self._generator.get_state())
        self._prepared = None
        if following:
            self._prepared = self._begin_to_prepare(following, PIECE)
            self._prepare_more(self._prepared, scheduled)
        self._on_device.trained(scheduled)
        return weight

    def _begin_to_prepare(self, batches: list[EdgeList], first: int) -> PreparedSteps:
        """Return the pieces of batches, drawn from torch's generator as it is; ``first``: most of the first piece."""
        before = torch.get_rng_state()
        self._generator.set_state(before)
        return PreparedSteps(batches, self._runs(batches, first), before)

    def _prepare_more(self, prepared: PreparedSteps, scheduled: ScheduledBucket) -> None:
        """Have as many pieces prepared as may be."""
        while len(prepared.pieces) < AHEAD and (run := next(prepared.runs, None)) is not None:
            number, shape, edges = run
            ends = self._ends(number, scheduled)
            # One thread draws all negatives, so that their order is that of the batches.
            draw = self._prepare[number].draw
            drawn = self._drawing.submit(draw, len(edges), shape, *ends, self._generator)
            piece = self._preparing.submit(self._piece, number, shape, edges, scheduled, ends, drawn)
            prepared.pieces.append((number, ends, piece))

    def _forget_prepared(self) -> None:
        """Drop pieces that were prepared for a call that did not come."""
        if self._prepared is not None:
            wait([piece for _, _, piece in self._prepared.pieces])
            self._prepared = None

    def _piece(
        self,
        number: int,
        shape: BatchShape,
        run: list[EdgeList],
        scheduled: ScheduledBucket,
        ends: tuple[Ends, Ends],
        drawn: Future[Tensor],
    ) -> Piece:
        """Prepare batches of one group and one shape."""
        local = [self._localized(number, edges, scheduled) for edges in run]
        return self._prepare[number](local, shape, *ends, drawn.result())

    def _launch(self, number: int, piece: Piece, ends: tuple[Ends, Ends]) -> float:
        """Launch the steps of prepared batches; return the sum of their weights."""
        heads, tails = ends
        self._device.compute.wait(piece.ready)
        with self._device.compute():
            for batch in range(piece.batches):
                self._step(number, piece, batch, (tails, heads))
            piece.done = self._device.compute.record()
        self._pieces.append(piece)
        while len(self._pieces) > PIECES:
            _wait(self._pieces.popleft().done)
        return piece.weight

    def _runs(self, batches: list[EdgeList], first: int) -> Iterator[tuple[int, BatchShape, list[EdgeList]]]:
        def key(edges: EdgeList) -> tuple[int, BatchShape]:
            number = self._groups.of(edges)
            return number, shape_of(self._recipe.groups[number], len(edges))

        return runs(batches, key, first, PIECE)

    def _step(self, number: int, piece: Piece, batch: int, ends: tuple[Ends, Ends]) -> None:
        """Train on one batch: the first of a shape as it is, later ones by replaying its graph."""
        step, shape, relations = self._device_steps[number], piece.shape, piece.relations[batch]
        if not (self._device.graphs and step.captured):
            step(piece.tensors.batch(batch), shape, ends, relations)
            return
        captured = self._captured.get((number, shape))
        if captured is None:
            # The same tensors as later: kernels are compiled for them before they are captured.
            captured = self._captured[number, shape] = CapturedStep(piece.tensors.batch(batch).like())
            captured.inputs.memory.copy_(piece.tensors.memory[batch])
            step(captured.inputs, shape, ends, relations)
            return
        inputs = captured.inputs
        inputs.memory.copy_(piece.tensors.memory[batch])
        if captured.replay is None:
            # Before it captures, torch returns free memory to the driver, which does not wait for what other threads
            # launch meanwhile: no other thread may use the device.
            if self._prepared is not None:
                wait([piece for _, _, piece in self._prepared.pieces])
            with self._on_device.lock:
                captured.replay = self._device.captured(lambda: step(inputs, shape, ends, relations))
        captured.replay()

    def _ends(self, number: int, scheduled: ScheduledBucket) -> tuple[Ends, Ends]:
        """Return where the rows of a group's heads and tails are."""
        types, bucket = self._recipe.groups[number].types, scheduled.bucket
        heads, tails = (self._on_device.ends(t, partition) for t, partition in zip(types, bucket, strict=True))
        return heads, tails

    # ------------------------------------------------------------------------------------------ losses

    def _read_later(self, lost: Tensor) -> Tensor:
        """Copy a sum of losses to the host, asynchronously, and reset it."""
        host = self._device.pinned(1, dtype=torch.float64)
        host.copy_(lost, non_blocking=True)
        lost.zero_()
        return host

    def _losses(self, most: int) -> tuple[float, float]:
        """Return the sums of losses and weights of all calls but the last ``most``.

        Raises:
            DataError: a loss is NaN or infinite.
        """
        total = weight = 0.0
        while len(self._unread) > most:
            lost, event, counted, bucket = self._unread.popleft()
            _wait(event)
            value = float(torch.cat(lost).sum())
            if not math.isfinite(value):
                raise diverged(bucket, value)
            total, weight = total + value, weight + counted
        return total, weight

    def _rows(self, number: int, scheduled: ScheduledBucket) -> tuple[PartitionRows, PartitionRows]:
        self._on_device.begin(scheduled)
        rows = []
        for entity_type, end in zip(self._recipe.groups[number].types, self._ends(number, scheduled), strict=True):
            table, part = self._on_device.tables[entity_type], slice(end.first, end.first + end.count)
            rows.append(PartitionRows(table.value[part], table.state[part], torch.empty(0)))
        return rows[0], rows[1]

    def _score(self, held: EdgeList, scheduled: ScheduledBucket) -> float:
        if not len(held):
            return 0.0
        with self._device.compute():
            return super()._score(held, scheduled)

    def _to_device(self, edges: EdgeList) -> EdgeList:
        moved = self._device.moved
        return EdgeList(moved(edges.heads), moved(edges.relation), moved(edges.tails), None)


def _wait(event: Event) -> None:
    """Block until an event has happened."""
    if event is not None:
        event.synchronize()


def _happened(event: Event) -> bool:
    """Return whether an event has happened."""
    return event is None or event.query()
