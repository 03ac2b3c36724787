"""The server's steps: the order of products and updates.

The server's tables have a version: the number of steps that were applied. All workers' products of step t are computed
from version t (from t - lag or later if steps may be missed), and one update from the K stacked batches leads from
version t to t + 1. A product that is requested early waits, so workers may send the rows of coming batches ahead.

One thread, the server's loop, receives requests and computes: requests first, then one product or update, whose replies
leave before the next one. A second thread for computing would spend more time waiting for the interpreter's lock, and
being woken, than it could compute beside the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gtrain.errors import GtrainError
from gtrain.wire import Message
from gtrain_ps.kernels.rows import GroupedEntries
from gtrain_ps.server.block import Block
from gtrain_ps.server.journal import Journal
from gtrain_ps.server.memory import ServerMemory
from gtrain_ps.server.replay import GradientSums, ReplayBuffer
from gtrain_ps.server.requests import Commit, FutureReply, LoggedRequest, ProductRequest, gradient_factor

StepProducts = Mapping[tuple[int, int], ProductRequest]
"""The products of a step, by worker and call."""


@dataclass
class _Step:
    """A step that has not been applied.

    Attributes:
        products: the requested products, by worker and call.
        commits: by worker.
        waiting: replies that receive the sum of the other layers' gradients.
        sent: products that were sent, by worker and call; kept for a worker that is restarted.
        logged: whether the step is in the journal.
    """

    products: dict[tuple[int, int], ProductRequest] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)
    waiting: list[FutureReply] = field(default_factory=list)
    sent: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    logged: bool = False


class Engine:
    """Blocks of tables, and the order of products and updates.

    Args:
        workers: K.
        lag: steps that a product may miss; 0: none.
        memory: holds the blocks.
        replay: whether to keep a replay buffer for workers that are restarted.

    Attributes:
        version: number of steps that were applied.
        missed: number of products for training, and of the steps that they missed.
        journal: the server's journal, set once its content has been replayed; None without one.
    """

    def __init__(self, workers: int, lag: int, memory: ServerMemory, replay: bool = False) -> None:
        self.workers, self.lag, self.memory = workers, lag, memory
        self.blocks: dict[str, Block] = {}
        self.version = memory.version
        self.missed = [0, 0]
        self._products: list[ProductRequest] = []
        self._actions: list[tuple[int, Callable[[], Message | None], FutureReply]] = []
        self._steps: dict[int, _Step] = {}
        self._sums = GradientSums(2 * lag + 4, memory)
        self.replay = ReplayBuffer(lag + 4, memory) if replay else None
        self._updates = Updates(self.blocks)
        self._failure: BaseException | None = None
        self.journal: Journal | None = None

    # ------------------------------------------------------------------------------------ requests

    def multiply(self, request: ProductRequest) -> FutureReply:
        """Compute a product, once the tables have the version for it.

        A worker that saw this server die repeats its requests; products of applied steps are no longer needed. A
        restarted worker repeats them as well, and receives the stored products: the tables may be ahead of its step.
        """
        self._check()
        if request.call is not None:
            stored = None if self.replay is None else self.replay.product(request)
            if request.step >= self.version:
                step = self._steps.setdefault(request.step, _Step())
                if (request.worker, request.call) in step.products:
                    self._updates.forget()  # the worker has discarded a batch that it had sent ahead
                step.products[request.worker, request.call] = request
                if stored is not None:
                    step.sent[request.worker, request.call] = stored
            if request.step < self.version or stored is not None:
                self._reply_product(request, stored)
                return request.reply
        self._products.append(request)
        return request.reply

    def _reply_product(self, request: ProductRequest, product: Tensor | None) -> None:
        request.reply.set_result(Message({"version": self.version}, [] if product is None else [product]))

    def commit(self, commit: Commit) -> FutureReply:
        """Receive a worker's part of a step; repetitions have no effect.

        The reply holds the sum of the workers' other gradients.
        """
        self._check()
        reply: FutureReply = Future()
        total, waiting = self._sums.get(commit.step), [reply]
        if commit.step >= self.version:
            step = self._steps.setdefault(commit.step, _Step())
            step.commits.setdefault(commit.worker, commit)
            step.waiting.append(reply)
            if len(step.commits) == self.workers and self.journal is None:  # with one, _log_step() replies
                total = self._sums.compute(commit.step, [step.commits[worker] for worker in range(self.workers)])
            # The reply follows when the last worker has committed, or when the journal has the step.
            if total is None and (commit.rest is not None or self.journal is not None):
                return reply
            waiting, step.waiting = step.waiting, []
        _reply_sum(waiting, None if commit.rest is None else total)
        return reply

    def sum_of(self, step: int) -> FutureReply:
        """Return the sum of the workers' other gradients of a step, as :meth:`commit` does."""
        self._check()
        reply: FutureReply = Future()
        total = self._sums.get(step)
        if total is None:
            assert step >= self.version, "the sum of an old step was requested"
            self._steps.setdefault(step, _Step()).waiting.append(reply)
        else:
            _reply_sum([reply], total)
        return reply

    def forget(self, worker: int) -> int:
        """Drop what a worker that was restarted had sent ahead of its steps; return the version."""
        self._check()
        self._updates.forget()
        self._products = [request for request in self._products if request.worker != worker]
        for step in self._steps.values():
            if worker not in step.commits:
                for call in [call for call in step.products if call[0] == worker]:
                    del step.products[call]
                    step.sent.pop(call, None)
        return self.version

    def withdraw(self, worker: int) -> None:
        """Drop what a worker has sent ahead of its steps, with empty replies: it sends this again in its turn."""
        ahead = [request for request in self._products if request.worker == worker and request.call is not None]
        self.forget(worker)
        for request in ahead:
            self._reply_product(request, None)

    def missing(self) -> set[int]:
        """Return the workers that have not committed a step that others have."""
        step = self._steps.get(self.version)
        commits = {} if step is None else step.commits
        return {rank for rank in range(self.workers) if rank not in commits} if commits else set()

    def after(
        self, step: int, action: Callable[[], Message | None], logged: LoggedRequest | None = None
    ) -> FutureReply:
        """Run an action on the tables once they have at least this version.

        Args:
            step: the version.
            action: the action.
            logged: the request as the journal stores it, if the action changes a table.
        """
        self._check()
        reply: FutureReply = Future()
        if logged is not None:
            action = partial(self._log_and_run, logged, action)
        self._actions.append((step, action, reply))
        return reply

    # ------------------------------------------------------------------------------------ computing

    def work(self) -> bool:
        """Compute one product or update; return whether there was one."""
        task = self._next_task()
        if task is not None:
            try:
                task()
            except BaseException as error:
                self._fail(error)
        return task is not None

    def drain(self) -> None:
        """Compute all that can be computed."""
        while (task := self._next_task()) is not None:
            task()

    def _next_task(self) -> Callable[[], None] | None:
        """Return the next task: products first, because workers wait for them."""
        for index, request in enumerate(self._products):
            lag = 0 if request.call is None else self.lag
            if self.version >= request.step - lag:
                del self._products[index]
                return partial(self._multiply, request)
        for index, (version, action, reply) in enumerate(self._actions):
            if self.version >= version:
                del self._actions[index]
                return partial(_run, reply, action)
        step = self._steps.get(self.version)
        if step is None:
            return None
        if self._is_complete(step):
            return self._update if self.journal is None or step.logged else partial(self._log_step, step)
        name = self._updates.groupable(step.products, self.workers)
        return None if name is None else partial(self._updates.group_ahead, step.products, name)

    def _is_complete(self, step: _Step) -> bool:
        """Whether all commits of a step have arrived, and the products that they have gradients of."""
        return len(step.commits) == self.workers and all(
            (worker, call) in step.products for worker, commit in step.commits.items() for call in commit.calls
        )

    def _multiply(self, request: ProductRequest) -> None:
        key = None if request.call is None else (request.worker, request.call)
        if key is not None and request.step < self.version:
            # The step was applied while the request waited.
            self._reply_product(request, None if self.replay is None else self.replay.product(request))
            return
        if key is not None:
            self.missed[0] += 1
            self.missed[1] += max(0, request.step - self.version)
        try:
            product = request.block.multiply(request.rows).to(request.dtype)
        except GtrainError as error:
            request.reply.set_exception(error)
            return
        if self.replay is not None and key is not None:
            step = self._steps.get(request.step)
            # Not if the worker was restarted meanwhile and has replaced the request.
            if step is not None and step.products.get(key) is request:
                step.sent[key] = product
        self._reply_product(request, product)

    def _log_and_run(self, logged: LoggedRequest, action: Callable[[], Message | None]) -> Message | None:
        if self.journal is not None:
            self.journal.append({"requests": [logged]})
        return action()

    def _log_step(self, step: _Step) -> None:
        """Write a step to the journal, and reply to its commits."""
        assert self.journal is not None
        logged = [("multiply", r.worker, r.message.fields, r.message.tensors) for r in step.products.values()]
        logged += [("commit", c.worker, c.message.fields, c.message.tensors) for c in step.commits.values()]
        self.journal.append({"requests": logged})
        step.logged = True
        total = self._sums.compute(self.version, [step.commits[worker] for worker in range(self.workers)])
        waiting, step.waiting = step.waiting, []
        _reply_sum(waiting, total)

    def _update(self) -> None:
        """Lead the tables to the next version."""
        step = self._steps[self.version]
        if self.replay is not None:
            # Before the update: afterwards the tables cannot compute these products again.
            self.replay.store(self.version, step.commits, step.sent)
        commits = [step.commits[worker] for worker in range(self.workers)]
        self._updates.apply(step.products, commits, self.version + 1)
        self.memory.set_version(self.version + 1)
        del self._steps[self.version]
        self.version += 1
        if self.journal is not None and self.journal.snapshot_due:
            self.journal.take_snapshot(self.memory)

    # ------------------------------------------------------------------------------------ failing

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        """Have all waiting and later requests raise an error."""
        self._failure = error
        waiting = [request.reply for request in self._products]
        waiting += [reply for _, _, reply in self._actions]
        waiting += [reply for step in self._steps.values() for reply in step.waiting]
        self._products, self._actions, self._steps = [], [], {}
        for reply in waiting:
            if not reply.done():
                reply.set_exception(error)


def _reply_sum(waiting: Iterable[FutureReply], total: Tensor | None) -> None:
    for reply in waiting:
        reply.set_result(Message({}, [] if total is None else [total]))


def _run(reply: FutureReply, action: Callable[[], Message | None]) -> None:
    try:
        reply.set_result(action())
    except BaseException as error:
        reply.set_exception(error)
        if not isinstance(error, GtrainError):
            raise


class Updates:
    """One update of each block from the workers' stacked batches.

    Rows can be stacked, and their entries grouped by id, before their gradients have arrived.

    Args:
        blocks: by name; more may be added.
    """

    def __init__(self, blocks: Mapping[str, Block]) -> None:
        self._blocks = blocks
        self._grouped: dict[str, tuple[list[tuple[int, int]], GroupedEntries]] = {}  # with the products of each table

    def groupable(self, products: StepProducts, workers: int) -> str | None:
        """Return a table whose rows of the next step seem to be complete and are not grouped; None without one."""
        # Some worker has not sent its rows yet, so a group would be incomplete.
        if len({worker for worker, _ in products}) < workers:
            return None
        for request in products.values():
            name = request.block.name
            if name not in self._grouped or self._grouped[name][0] != _calls_of(products, name):
                return name
        return None

    def group_ahead(self, products: StepProducts, name: str) -> None:
        """Stack and group a table's rows ahead of the update."""
        calls = _calls_of(products, name)
        self._grouped[name] = calls, self._blocks[name].group([products[call].rows for call in calls])

    def forget(self) -> None:
        """Drop what was grouped ahead: a restarted worker may send other rows."""
        self._grouped.clear()

    def apply(self, products: StepProducts, commits: Sequence[Commit], step: int) -> None:
        """Apply a step to all blocks that have a gradient.

        Args:
            products: the products of the step.
            commits: of all workers, in rank order.
            step: the step's number, from 1.
        """
        factor = gradient_factor(commits)
        gradients = {
            (commit.worker, call): gradient
            for commit in commits
            for call, gradient in zip(commit.calls, commit.gradients, strict=True)
        }
        for name in sorted({products[call].block.name for call in gradients}):
            block, (rule, settings) = self._blocks[name], commits[0].rules[name]
            block.set_rule(rule, settings)
            calls = [call for call in _calls_of(products, name) if call in gradients]
            grouped_calls, grouped = self._grouped.get(name, (None, None))
            if grouped is None or grouped_calls != calls:
                grouped = block.group([products[call].rows for call in calls])
            parts = [gradients[call].to(block.table.dtype) for call in calls]
            gradient = parts[0] if len(parts) == 1 else torch.cat(parts)
            if factor != 1.0:
                gradient = gradient * factor
            block.update(grouped, gradient.contiguous(), settings, step)
        self._grouped.clear()


def _calls_of(products: StepProducts, name: str) -> list[tuple[int, int]]:
    """Return the products of one table, by worker and call."""
    return sorted(call for call, request in products.items() if request.block.name == name)
