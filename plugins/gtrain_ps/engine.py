"""What a server does step by step, whatever carries the requests.

The server's tables have a version: the number of steps that were applied. All workers' products of step t are computed
from version t (from t - lag or later where steps may be missed), and one update from the K stacked batches leads from
version t to t + 1. So a product that is asked for early waits, and workers may send the rows of coming batches ahead.

Requests are taken in by one thread; products and updates are computed by another, in whose hands alone the tables are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import GtrainError
from gtrain.wire import Message
from gtrain_ps.block import Block, Grouped, Rows
from gtrain_ps.memory import Region

Answer = Future[Message | None]
Rules = Mapping[str, tuple[str, Mapping[str, Any]]]
"""By a table's name: its rule, and the rule's numbers."""


@dataclass(frozen=True)
class Product:
    """Rows whose product with a block is wanted.

    Attributes:
        worker: who asks.
        step: the step that it is for.
        call: number of the product within the worker's step; None where nothing will be trained from it.
        block: the block.
        rows: what it is multiplied by.
        dtype: type in which the product travels.
        answer: gets it.
    """

    worker: int
    step: int
    call: int | None
    block: Block
    rows: Rows
    dtype: torch.dtype
    answer: Answer = field(default_factory=Future)


@dataclass(frozen=True)
class Commit:
    """What a worker has to say of one step.

    Attributes:
        worker: who says it.
        step: which step.
        weight: of its batch.
        scale: what its loss and gradients were divided by, the same for all workers.
        calls: its products that have a gradient.
        gradients: of these products, ``[m, d]`` each.
        rules: of the tables.
        rest: a piece of the gradients of its other layers; None where the workers sum them.
    """

    worker: int
    step: int
    weight: float
    scale: float
    calls: Sequence[int]
    gradients: Sequence[Tensor]
    rules: Rules
    rest: Tensor | None


@dataclass
class _Step:
    """What is known of a step that has not been applied.

    Attributes:
        rows: what was multiplied for it, by worker and call.
        commits: by worker.
        waiting: answers that get the sum of the rests.
    """

    rows: dict[tuple[int, int], Product] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)
    waiting: list[Answer] = field(default_factory=list)


@dataclass(frozen=True)
class _Stacked:
    """Rows of one table that were multiplied in one step, over all workers."""

    calls: list[tuple[int, int]]
    grouped: Grouped


class Engine:
    """Blocks of tables, and the order of products and updates.

    Args:
        workers: K.
        lag: steps that a product may miss; 0: none.
        region: where blocks are kept.
    """

    def __init__(self, workers: int, lag: int, region: Region) -> None:
        self.workers, self.lag, self.region = workers, lag, region
        self.blocks: dict[str, Block] = {}
        self.version = region.version
        self.missed = [0, 0]  # products for training, and steps that they missed
        self._changed = threading.Condition()
        self._products: list[Product] = []
        self._actions: list[tuple[int, Callable[[], Message | None], Answer]] = []
        self._steps: dict[int, _Step] = {}
        self._sums = _Sums(lag + 2, region)
        self._stacked: dict[str, _Stacked] = {}
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------------------------ taking requests in

    def multiply(self, product: Product) -> Answer:
        """Ask for a product.

        A worker that saw this server die asks again, for what it may have lost: what has been applied is not needed.
        """
        with self._changed:
            self._check()
            if product.call is not None:
                if product.step < self.version:
                    product.answer.set_result(Message({"version": self.version}))
                    return product.answer
                self._steps.setdefault(product.step, _Step()).rows[product.worker, product.call] = product
            self._products.append(product)
            self._changed.notify()
        return product.answer

    def commit(self, commit: Commit) -> Answer:
        """Hand in a worker's part of a step; once is enough, twice is the same.

        The answer is the sum of the workers' rests.
        """
        answer: Answer = Future()
        with self._changed:
            self._check()
            found = self._sums.of(commit.step)
            if commit.step >= self.version:
                step = self._steps.setdefault(commit.step, _Step())
                step.commits.setdefault(commit.worker, commit)
                step.waiting.append(answer)
                if len(step.commits) == self.workers:
                    self._changed.notify()
                    found = self._sums.make(commit.step, [step.commits[worker] for worker in range(self.workers)])
                if found is None and commit.rest is not None:
                    return answer
                waiting, step.waiting = step.waiting, []
            else:
                waiting = [answer]
        for each in waiting:
            each.set_result(Message({}, [] if commit.rest is None or found is None else [found]))
        return answer

    def after(self, step: int, action: Callable[[], Message | None]) -> Answer:
        """Do something with the tables once they have at least this version."""
        answer: Answer = Future()
        with self._changed:
            self._check()
            self._actions.append((step, action, answer))
            self._changed.notify()
        return answer

    # ------------------------------------------------------------------------------------ computing

    def run(self, stop: threading.Event) -> None:
        """Compute until ``stop`` is set and :meth:`wake` was called."""
        while not stop.is_set():
            with self._changed:
                task = self._next()
                if task is None:
                    self._changed.wait()
                    continue
            try:
                task()
            except BaseException as error:
                self._fail(error)

    def wake(self) -> None:
        """Have :meth:`run` look around."""
        with self._changed:
            self._changed.notify()

    def _next(self) -> Callable[[], None] | None:
        """What to do next: products first, for workers wait for them."""
        for index, product in enumerate(self._products):
            lag = 0 if product.call is None else self.lag
            if self.version >= product.step - lag:
                del self._products[index]
                return lambda: self._multiply(product)
        for index, (step, action, answer) in enumerate(self._actions):
            if self.version >= step:
                del self._actions[index]
                return lambda: _settle(answer, action)
        if self._complete():
            return self._update
        name = self._unstacked()
        return None if name is None else lambda: self._stack(name)

    def _complete(self) -> bool:
        """Whether all that leads to the next version is here."""
        step = self._steps.get(self.version)
        if step is None or len(step.commits) < self.workers:
            return False
        return all((worker, call) in step.rows for worker, commit in step.commits.items() for call in commit.calls)

    def _multiply(self, product: Product) -> None:
        if product.call is not None:
            self.missed[0] += 1
            self.missed[1] += max(0, product.step - self.version)
        try:
            made = product.block.multiply(product.rows)
        except GtrainError as error:
            product.answer.set_exception(error)
            return
        product.answer.set_result(Message({"version": self.version}, [made.to(product.dtype)]))

    def _unstacked(self) -> str | None:
        """A table whose rows of the next step seem to be all there, and are not grouped yet."""
        step = self._steps.get(self.version)
        kept = {} if step is None else step.rows
        if len({worker for worker, _ in kept}) < self.workers:
            return None
        for product in kept.values():
            name = product.block.name
            stacked = self._stacked.get(name)
            if stacked is None or stacked.calls != _calls_of(kept, name):
                return name
        return None

    def _stack(self, name: str) -> None:
        kept = dict(self._steps[self.version].rows)
        calls = _calls_of(kept, name)
        self._stacked[name] = _Stacked(calls, self.blocks[name].group([kept[call].rows for call in calls]))

    def _update(self) -> None:
        """Lead the tables to the next version."""
        with self._changed:
            step = self._steps[self.version]
        kept, ordered = step.rows, [step.commits[worker] for worker in range(self.workers)]
        factor = _factor(ordered)
        given = {
            (commit.worker, call): gradient
            for commit in ordered
            for call, gradient in zip(commit.calls, commit.gradients, strict=True)
        }
        for name in sorted({kept[call].block.name for call in given}):
            block, (rule, settings) = self.blocks[name], ordered[0].rules[name]
            block.use(rule, settings)
            calls = [call for call in _calls_of(kept, name) if call in given]
            stacked = self._stacked.get(name)
            if stacked is None or stacked.calls != calls:
                stacked = _Stacked(calls, block.group([kept[call].rows for call in calls]))
            gradients = [given[call].to(block.table.dtype) for call in calls]
            gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
            if factor != 1.0:
                gradient = gradient * factor
            block.update(stacked.grouped, gradient.contiguous(), settings, self.version + 1)
        self._stacked.clear()
        self.region.set_version(self.version + 1)
        with self._changed:
            del self._steps[self.version]
            self.version += 1

    # ------------------------------------------------------------------------------------ failing

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        """Have everybody know what went wrong."""
        with self._changed:
            self._failure = error
            waiting = [product.answer for product in self._products]
            waiting += [answer for _, _, answer in self._actions]
            waiting += [answer for step in self._steps.values() for answer in step.waiting]
            self._products, self._actions, self._steps = [], [], {}
        for answer in waiting:
            if not answer.done():
                answer.set_exception(error)


def _calls_of(kept: Mapping[tuple[int, int], Product], name: str) -> list[tuple[int, int]]:
    """The products of one table, by worker and call."""
    return sorted(call for call, product in kept.items() if product.block.name == name)


def _factor(commits: Sequence[Commit]) -> float:
    """What turns gradients that were divided by ``scale`` into those of the mean over all workers' weights."""
    scale, total = commits[0].scale, sum(commit.weight for commit in commits)
    if scale == total:
        return 1.0
    return scale / total if total > 0 else 0.0


class _Sums:
    """The sums of the workers' rests in the last steps, for workers that have not got them when a server dies.

    Args:
        count: steps that are kept.
        region: where.
    """

    def __init__(self, count: int, region: Region) -> None:
        self._count, self._region = count, region
        self._steps = region.tensor("sums/step", (count,), torch.int64)
        self._tensors: Tensor | None = None
        if "sums" in region.notes:
            self._open(region.notes["sums"][0], getattr(torch, region.notes["sums"][1]))

    def of(self, step: int) -> Tensor | None:
        """The sum of a step; None where it is not known."""
        slot = step % self._count
        if self._tensors is None or int(self._steps[slot]) != step + 1:
            return None
        return self._tensors[slot].clone()

    def make(self, step: int, commits: Sequence[Commit]) -> Tensor | None:
        """Add up a step's rests in the order of the workers' ranks; None where they sum them themselves."""
        rests = [commit.rest for commit in commits if commit.rest is not None]
        if len(rests) < len(commits):
            return None
        known = self.of(step)
        if known is not None:
            return known
        total = rests[0].clone()
        for rest in rests[1:]:
            total += rest
        factor = _factor(commits)
        if factor != 1.0:
            total *= factor
        if self._tensors is None:
            self._open(total.numel(), total.dtype)
            self._region.note("sums", [total.numel(), str(total.dtype).removeprefix("torch.")])
        assert self._tensors is not None
        slot = step % self._count
        self._steps[slot] = 0
        self._tensors[slot] = total
        self._steps[slot] = step + 1
        return total

    def _open(self, size: int, dtype: torch.dtype) -> None:
        self._tensors = self._region.tensor("sums", (self._count, size), dtype)


def _settle(answer: Answer, action: Callable[[], Message | None]) -> None:
    try:
        answer.set_result(action())
    except GtrainError as error:
        answer.set_exception(error)
