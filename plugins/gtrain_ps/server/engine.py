"""What a server does step by step, whatever carries the requests.

The server's tables have a version: the number of steps that were applied. All workers' products of step t are computed
from version t (from t - lag or later where steps may be missed), and one update from the K stacked batches leads from
version t to t + 1. So a product that is asked for early waits, and workers may send the rows of coming batches ahead.

Requests are taken in and products and updates computed by one thread, the server's loop, in turn: requests first, then
one product or update, and its answers leave before the next one. A thread of its own for computing would wait for the
interpreter's lock, and be woken, more often than it could compute beside the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gtrain.errors import GtrainError
from gtrain.wire import Message
from gtrain_ps.server.block import Block, Grouped
from gtrain_ps.server.journal import Journal
from gtrain_ps.server.memory import Region
from gtrain_ps.server.replay import ReplayBuffer, Sums
from gtrain_ps.server.requests import Answer, Commit, Product, Request, factor_of

Rows = Mapping[tuple[int, int], Product]
"""What was multiplied for a step, by worker and call."""


@dataclass
class _Step:
    """What is known of a step that has not been applied.

    Attributes:
        rows: what was multiplied for it, by worker and call.
        commits: by worker.
        waiting: answers that get the sum of the rests.
        made: products that were answered, where they are kept for a worker that comes back.
        written: whether it is on the disk.
    """

    rows: dict[tuple[int, int], Product] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)
    waiting: list[Answer] = field(default_factory=list)
    made: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    written: bool = False


class Engine:
    """Blocks of tables, and the order of products and updates.

    Args:
        workers: K.
        lag: steps that a product may miss; 0: none.
        region: where blocks are kept.
        keep: whether a worker may die and come back, and finds here what it needs.
    """

    def __init__(self, workers: int, lag: int, region: Region, keep: bool = False) -> None:
        self.workers, self.lag, self.region = workers, lag, region
        self.blocks: dict[str, Block] = {}
        self.version = region.version
        self.missed = [0, 0]  # products for training, and steps that they missed
        self._products: list[Product] = []
        self._actions: list[tuple[int, Callable[[], Message | None], Answer]] = []
        self._steps: dict[int, _Step] = {}
        self._sums = Sums(2 * lag + 4, region)
        self.replay = ReplayBuffer(lag + 4, region) if keep else None
        self._updates = Updates(self.blocks)
        self._failure: BaseException | None = None
        self.journal: Journal | None = None  # set once what it knows has been done again

    # ------------------------------------------------------------------------------------ taking requests in

    def multiply(self, product: Product) -> Answer:
        """Ask for a product.

        A worker that saw this server die asks again, for what it may have lost: what has been applied is not needed.
        One that died itself asks again for what it had been answered, which is kept: the tables may be past it.
        """
        self._check()
        if product.call is not None:
            kept = None if self.replay is None else self.replay.product(product)
            if product.step >= self.version:
                step = self._steps.setdefault(product.step, _Step())
                step.rows[product.worker, product.call] = product
                if kept is not None:
                    step.made[product.worker, product.call] = kept
            if product.step < self.version or kept is not None:
                product.answer.set_result(Message({"version": self.version}, [] if kept is None else [kept]))
                return product.answer
        self._products.append(product)
        return product.answer

    def commit(self, commit: Commit) -> Answer:
        """Hand in a worker's part of a step; once is enough, twice is the same.

        The answer is the sum of the workers' rests.
        """
        self._check()
        answer: Answer = Future()
        found = self._sums.of(commit.step)
        if commit.step >= self.version:
            step = self._steps.setdefault(commit.step, _Step())
            step.commits.setdefault(commit.worker, commit)
            step.waiting.append(answer)
            if len(step.commits) == self.workers and self.journal is None:  # else it is answered once it is written
                found = self._sums.make(commit.step, [step.commits[worker] for worker in range(self.workers)])
            if found is None and (commit.rest is not None or self.journal is not None):
                return answer
            waiting, step.waiting = step.waiting, []
        else:
            waiting = [answer]
        for each in waiting:
            each.set_result(Message({}, [] if commit.rest is None or found is None else [found]))
        return answer

    def sum_of(self, step: int) -> Answer:
        """The sum of the workers' rests of a step, as :meth:`commit` answers it."""
        self._check()
        answer: Answer = Future()
        found = self._sums.of(step)
        if found is None:
            assert step >= self.version, "a step that no worker can need any more"
            self._steps.setdefault(step, _Step()).waiting.append(answer)
            return answer
        answer.set_result(Message({}, [found]))
        return answer

    def forget(self, worker: int) -> int:
        """A worker has died and come back: drop what its life before sent ahead of its steps; return the version."""
        self._check()
        self._products = [product for product in self._products if product.worker != worker]
        for step in self._steps.values():
            if worker not in step.commits:
                for call in [call for call in step.rows if call[0] == worker]:
                    del step.rows[call]
                    step.made.pop(call, None)
        return self.version

    def missing(self) -> set[int]:
        """Workers that have not committed a step that others have."""
        step = self._steps.get(self.version)
        commits = {} if step is None else step.commits
        return {rank for rank in range(self.workers) if rank not in commits} if commits else set()

    def after(self, step: int, action: Callable[[], Message | None], asked: Request | None = None) -> Answer:
        """Do something with the tables once they have at least this version.

        Args:
            step: the version.
            action: what to do.
            asked: how it was asked for, where it changes anything.
        """
        self._check()
        answer: Answer = Future()
        if asked is not None:
            action = partial(self._written, [asked], action)
        self._actions.append((step, action, answer))
        return answer

    # ------------------------------------------------------------------------------------ computing

    def work(self) -> bool:
        """Compute one thing; tell whether there was anything."""
        task = self._next()
        if task is not None:
            try:
                task()
            except BaseException as error:
                self._fail(error)
        return task is not None

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
            complete = self._steps[self.version]
            return self._update if self.journal is None or complete.written else partial(self._write_step, complete)
        coming = self._steps.get(self.version)
        if coming is not None and (name := self._updates.ahead(coming.rows, self.workers)) is not None:
            return partial(self._updates.stack, coming.rows, name)
        return None

    def _complete(self) -> bool:
        """Whether all that leads to the next version is here."""
        step = self._steps.get(self.version)
        if step is None or len(step.commits) < self.workers:
            return False
        return all((worker, call) in step.rows for worker, commit in step.commits.items() for call in commit.calls)

    def _multiply(self, product: Product) -> None:
        if product.call is not None and product.step < self.version:  # the step was applied while this waited
            kept = None if self.replay is None else self.replay.product(product)
            product.answer.set_result(Message({"version": self.version}, [] if kept is None else [kept]))
            return
        if product.call is not None:
            self.missed[0] += 1
            self.missed[1] += max(0, product.step - self.version)
        try:
            made = product.block.multiply(product.rows)
        except GtrainError as error:
            product.answer.set_exception(error)
            return
        made = made.to(product.dtype)
        if self.replay is not None and product.call is not None:
            step = self._steps.get(product.step)
            if step is not None and step.rows.get((product.worker, product.call)) is product:
                step.made[product.worker, product.call] = made
        product.answer.set_result(Message({"version": self.version}, [made]))

    def drain(self) -> None:
        """Do all that can be done."""
        while (task := self._next()) is not None:
            task()

    def _written(self, asked: list[Request], action: Callable[[], Message | None]) -> Message | None:
        if self.journal is not None:
            self.journal.append({"requests": asked})
        return action()

    def _write_step(self, step: _Step) -> None:
        """Have a step on the disk, and answer those who said it."""
        assert self.journal is not None
        said = [product.said() for product in step.rows.values()] + [commit.said() for commit in step.commits.values()]
        self.journal.append({"requests": said})
        step.written = True
        found = self._sums.make(self.version, [step.commits[worker] for worker in range(self.workers)])
        waiting, step.waiting = step.waiting, []
        for each in waiting:
            each.set_result(Message({}, [] if found is None else [found]))

    def _update(self) -> None:
        """Lead the tables to the next version."""
        step = self._steps[self.version]
        if self.replay is not None:
            self.replay.keep(self.version, step.commits, step.made)
        ordered = [step.commits[worker] for worker in range(self.workers)]
        self._updates.apply(step.rows, ordered, self.version + 1)
        self.region.set_version(self.version + 1)
        del self._steps[self.version]
        self.version += 1
        if self.journal is not None and self.journal.due:
            self.journal.cut(self.region)

    # ------------------------------------------------------------------------------------ failing

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        """Have everybody know what went wrong."""
        self._failure = error
        waiting = [product.answer for product in self._products]
        waiting += [answer for _, _, answer in self._actions]
        waiting += [answer for step in self._steps.values() for answer in step.waiting]
        self._products, self._actions, self._steps = [], [], {}
        for answer in waiting:
            if not answer.done():
                answer.set_exception(error)


def _settle(answer: Answer, action: Callable[[], Message | None]) -> None:
    try:
        answer.set_result(action())
    except BaseException as error:
        answer.set_exception(error)
        if not isinstance(error, GtrainError):
            raise


@dataclass(frozen=True)
class _Stacked:
    """Rows of one table that were multiplied in one step, over all workers."""

    calls: list[tuple[int, int]]
    grouped: Grouped


class Updates:
    """One update of each block from the workers' stacked batches.

    Rows can be stacked, and grouped by id, before their gradients are there.

    Args:
        blocks: by name; more may come.
    """

    def __init__(self, blocks: Mapping[str, Block]) -> None:
        self._blocks = blocks
        self._stacked: dict[str, _Stacked] = {}

    def ahead(self, rows: Rows, workers: int) -> str | None:
        """A table whose rows of the next step seem to be all there, and are not grouped yet."""
        if len({worker for worker, _ in rows}) < workers:
            return None
        for product in rows.values():
            name = product.block.name
            stacked = self._stacked.get(name)
            if stacked is None or stacked.calls != _calls_of(rows, name):
                return name
        return None

    def stack(self, rows: Rows, name: str) -> None:
        """Stack and group a table's rows ahead of the update."""
        kept = dict(rows)
        calls = _calls_of(kept, name)
        self._stacked[name] = _Stacked(calls, self._blocks[name].group([kept[call].rows for call in calls]))

    def apply(self, rows: Rows, commits: Sequence[Commit], step: int) -> None:
        """Apply a step to all blocks that have a gradient.

        Args:
            rows: what was multiplied.
            commits: of all workers, in the order of their ranks.
            step: its number, above 0.
        """
        factor = factor_of(commits)
        given = {
            (commit.worker, call): gradient
            for commit in commits
            for call, gradient in zip(commit.calls, commit.gradients, strict=True)
        }
        for name in sorted({rows[call].block.name for call in given}):
            block, (rule, settings) = self._blocks[name], commits[0].rules[name]
            block.use(rule, settings)
            calls = [call for call in _calls_of(rows, name) if call in given]
            stacked = self._stacked.get(name)
            if stacked is None or stacked.calls != calls:
                stacked = _Stacked(calls, block.group([rows[call].rows for call in calls]))
            gradients = [given[call].to(block.table.dtype) for call in calls]
            gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
            if factor != 1.0:
                gradient = gradient * factor
            block.update(stacked.grouped, gradient.contiguous(), settings, step)
        self._stacked.clear()


def _calls_of(rows: Rows, name: str) -> list[tuple[int, int]]:
    """The products of one table, by worker and call."""
    return sorted(call for call, product in rows.items() if product.block.name == name)
