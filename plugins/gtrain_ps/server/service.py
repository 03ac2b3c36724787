"""A parameter server: requests over the wire, executed by an :class:`~gtrain_ps.server.engine.Engine`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.memory.heap import keep_freed
from gtrain.nn import TableSpec
from gtrain.strategy.server import ServerContext
from gtrain.wire import Caller, Message
from gtrain_ps.config import PsConfig
from gtrain_ps.placement import Placement
from gtrain_ps.server.block import Block
from gtrain_ps.server.collectives import CollectiveResults, Collectives
from gtrain_ps.server.engine import Engine
from gtrain_ps.server.journal import Journal
from gtrain_ps.server.memory import PersistentServerMemory, ServerMemory
from gtrain_ps.server.requests import Commit, FutureReply, ProductRequest

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
METHODS = (
    *("open", "multiply", "commit", "read", "write", "read_state", "write_state", "reset", "status"),
    *("gather", "passed", "come_back", "withdraw", "recall", "sum", "waiting", "end"),
)
"""Methods of the service; the journal stores their names."""


def main(context: ServerContext) -> None:
    """Serve until the job ends."""
    # A server allocates the same sizes in every step.
    keep_freed()
    settings, trainer = PsConfig(**context.config["strategy"]), context.config["trainer"]
    lasting = context.lasting_file if settings.durability == "process" else None
    memory = ServerMemory() if lasting is None else PersistentServerMemory(lasting)
    journal = _open_journal(context, settings) if settings.durability == "disk" else None
    if journal is not None:
        journal.load(memory)
    engine = Engine(trainer["num_nodes"] * trainer["devices"], settings.lag, memory, settings.keeps_replay_buffer)
    service = ParameterService(engine, context.slot.rank)
    if journal is not None:
        service.replay_journal(journal)
    print(f"process {os.getpid()} serves", flush=True)
    if context.restarts or engine.version:
        print(f"restarted at step {engine.version}, with {len(engine.blocks)} tables", flush=True)
    context.serve({name: getattr(service, name) for name in METHODS}, engine.work)
    if journal is not None and (service.ended or not engine.version):
        journal.remove()


def _open_journal(context: ServerContext, settings: PsConfig) -> Journal:
    """Return the journal in this server's folder."""
    folder = Path(settings.folder) if settings.folder else context.run_dir
    config, trainer = context.config, context.config["trainer"]
    strategy = {name: value for name, value in config["strategy"].items() if name not in ("max_restarts", "folder")}
    job = {name: config.get(name) for name in ("seed", "data", "model")}
    job |= {f"strategy.{name}": value for name, value in strategy.items()}
    job |= {f"trainer.{name}": trainer.get(name) for name in ("num_nodes", "devices", "precision")}
    return Journal(folder / f"parameter-{context.slot.rank}.disk", job)


class ParameterService:
    """The methods of a parameter server, :data:`METHODS`.

    Args:
        engine: computes products and updates.
        server: number of this server.

    Attributes:
        ended: whether training has ended.
    """

    def __init__(self, engine: Engine, server: int) -> None:
        self.engine, self.server = engine, server
        self._placements: dict[str, Placement] = {}
        self._rules_text, self._rules = "", dict[str, Any]()
        self.ended = False
        self._results = CollectiveResults(engine.lag + 4, engine.memory)
        self._collectives = Collectives(engine.workers, self._results, self._store_result)
        for key, note in engine.memory.notes.get("tables", {}).items():
            self._create_block(key, Placement(**note["placement"]), DTYPES[note["dtype"]])

    def open(self, message: Message, caller: Caller) -> FutureReply:
        """Create the block of a table, unless it exists.

        Fields: ``table`` (TableSpec's fields), ``key`` (the layer's name in the module), ``placement``, ``dtype``.
        """
        fields = message.fields
        key, placement = fields["key"], Placement(**fields["placement"])
        table, dtype = TableSpec(**fields["table"]), DTYPES[fields["dtype"]]

        def create() -> Message:
            version, memory = self.engine.version, self.engine.memory
            if key in self._placements:
                if placement != self._placements[key] or dtype != self.engine.blocks[key].table.dtype:
                    raise ConfigError(
                        f"the table {key} was opened as {self._placements[key]}, and now as {placement} of {dtype}.",
                        hint="give all workers the same configuration.",
                    )
                # rank 0 fills a new table, whichever worker opens it first; a restarted rank 0 fills it again
                return Message({"version": version, "new": version == 0})
            block = self._create_block(key, placement, dtype)
            placement.fill_initial(table, self.server, block.table)
            note = {"placement": fields["placement"], "dtype": fields["dtype"], "initial": fields["table"]}
            memory.set_note("tables", {**memory.notes.get("tables", {}), key: note})
            return Message({"version": version, "new": True})

        return self.engine.after(0, create, ("open", 0, fields, ()))

    def multiply(self, message: Message, caller: Caller) -> FutureReply:
        """Multiply rows by a block.

        Fields: ``key``, ``step``, ``call`` or None, ``dtype``, ``each`` (one id per row), ``valued``. Tensors: ids,
        the rows' lengths unless ``each``, values if ``valued``.
        """
        fields, tensors = message.fields, message.tensors
        block = self._block(fields["key"])
        lengths = None if fields["each"] else tensors[1]
        rows = block.rows(tensors[0], lengths, tensors[-1] if fields["valued"] else None)
        request = ProductRequest(
            *(_rank(caller), fields["step"], fields["call"], block, rows, DTYPES[fields["dtype"]], message)
        )
        return self.engine.multiply(request)

    def commit(self, message: Message, caller: Caller) -> FutureReply:
        """Receive a worker's part of a step.

        Fields: those of :class:`Commit`, ``kept`` (names of the replay entries). Tensors: gradients, replay entries,
        and the rest if any.
        """
        fields, tensors = message.fields, message.tensors
        count, names = len(fields["calls"]), fields["kept"]
        replay, after = dict(zip(names, tensors[count:], strict=False)), count + len(names)
        rest: Tensor | None = tensors[after] if len(tensors) > after else None
        if fields["rules"] != self._rules_text:  # usually the text of the step before
            self._rules_text, self._rules = fields["rules"], json.loads(fields["rules"])
        commit = Commit(
            *(_rank(caller), fields["step"], fields["weight"], fields["scale"], fields["calls"]),
            *(tensors[:count], self._rules, rest, replay, message),
        )
        return self.engine.commit(commit)

    def read(self, message: Message, caller: Caller) -> FutureReply:
        """Read rows of a block as they are after ``step`` steps. Fields: ``key``, ``begin``, ``end``, ``step``.

        Tensors: the rows' positions in the block, unless they are those from ``begin`` to ``end``.
        """
        block, rows = self._block(message.fields["key"]), _positions(message, 0)
        return self.engine.after(message.fields["step"], lambda: Message({}, [block.table[rows].clone()]))

    def write(self, message: Message, caller: Caller) -> FutureReply:
        """Overwrite rows of a block as it is after ``step`` steps. Fields: ``key``, ``begin``, ``step``.

        Tensors: rows, and their positions in the block unless they are consecutive from ``begin``. A restarted worker
        may repeat the request when the block has been trained further: it then has no effect.
        """
        fields, rows = message.fields, message.tensors[0]
        block, positions = self._block(fields["key"]), _positions(message, 1)

        def write() -> None:
            # A repeated request must not overwrite rows that were trained since.
            if self.engine.version == fields["step"]:
                block.table[positions] = rows
                block.changed[positions] = 1

        return self.engine.after(fields["step"], write, ("write", 0, fields, message.tensors))

    def read_state(self, message: Message, caller: Caller) -> FutureReply:
        """Read part of a tensor of the optimizer state, as :meth:`read` does. Fields: also ``name``.

        The name ``changed`` stands for the flags of changed rows, uint8. With ``name`` None, the reply has the name of
        the rule, the names of its tensors, the number of changed rows, and what the other rows are: fields of a
        TableSpec (None in the state of an earlier version), and the initial value of the tensor ``sum``.
        """
        fields = message.fields
        block, rows = self._block(fields["key"]), _positions(message, 0)

        def read() -> Message:
            if fields["name"] is None:
                rule, note = block.rule, self.engine.memory.notes["tables"][fields["key"]]
                content = {"rule": rule and rule.name, "names": [] if rule is None else list(rule.state)}
                others = {"initial": note.get("initial"), "accumulator": block.accumulator}
                return Message({**content, **others, "changed": int(block.changed.count_nonzero())})
            tensor = block.changed if fields["name"] == "changed" else block.state[fields["name"]]
            return Message({}, [tensor[rows].clone()])

        return self.engine.after(fields["step"], read)

    def write_state(self, message: Message, caller: Caller) -> FutureReply:
        """Overwrite part of the optimizer state, as :meth:`write` does. Fields: also ``rule`` and ``name``."""
        fields, tensors = message.fields, message.tensors
        block = self._block(fields["key"])

        def write() -> None:
            if self.engine.version != fields["step"]:
                return
            block.set_rule(fields["rule"], {})
            if tensors:
                block.state[fields["name"]][_positions(message, 1)] = tensors[0]

        return self.engine.after(fields["step"], write, ("write_state", 0, fields, tensors))

    def reset(self, message: Message, caller: Caller) -> FutureReply:
        """Set a block to initial rows, and its optimizer state to initial values, before :meth:`write`.

        Fields: ``key``, ``table`` (TableSpec's fields), ``rule`` (None: the state is not changed), ``accumulator``
        (initial value of the state called ``sum``), ``step``.
        """
        fields, memory = message.fields, self.engine.memory
        key, block = fields["key"], self._block(fields["key"])

        def reset() -> None:
            if self.engine.version != fields["step"]:
                return
            block.reset(fields["rule"], fields["accumulator"])
            self._placements[key].fill_initial(TableSpec(**fields["table"]), self.server, block.table)
            notes = memory.notes["tables"]
            memory.set_note("tables", {**notes, key: {**notes[key], "initial": fields["table"]}})

        return self.engine.after(fields["step"], reset, ("reset", 0, fields, ()))

    def status(self, message: Message, caller: Caller) -> Message:
        """Return the number of steps applied, and the counts of missed steps."""
        products, missed = self.engine.missed
        return Message({"version": self.engine.version, "products": products, "missed": missed})

    # ------------------------------------------------------------------------------- restarted workers

    def gather(self, message: Message, caller: Caller) -> FutureReply:
        """Gather a tensor of every worker. Fields: ``where``, the collective's id."""
        return self._collectives.contribute(_rank(caller), message.fields["where"], message.tensors[0])

    def passed(self, message: Message, caller: Caller) -> Message:
        """Return the last completed collective, plus 1."""
        return Message({"passed": self._results.passed})

    def come_back(self, message: Message, caller: Caller) -> Message:
        """Prepare for a restarted worker: drop its unfinished requests, and return the version."""
        self._collectives.drop(_rank(caller))
        return Message({"version": self.engine.forget(_rank(caller))})

    def withdraw(self, message: Message, caller: Caller) -> None:
        """Drop the products that the worker has requested ahead of its steps, between two of these."""
        self.engine.withdraw(_rank(caller))

    def recall(self, message: Message, caller: Caller) -> Message:
        """Return the worker's replay entries of a step. Fields: ``step``."""
        assert self.engine.replay is not None
        entries = self.engine.replay.worker_state(message.fields["step"], _rank(caller))
        return Message({"names": list(entries)}, list(entries.values()))

    def sum(self, message: Message, caller: Caller) -> FutureReply:
        """Return the sum of the workers' gradients of a step that this worker has committed. Fields: ``step``."""
        return self.engine.sum_of(message.fields["step"])

    def waiting(self, message: Message, caller: Caller) -> Message:
        """Return the workers that others wait for."""
        return Message({"workers": sorted(self.engine.missing() | self._collectives.missing())})

    # ------------------------------------------------------------------------------- the journal

    def replay_journal(self, journal: Journal) -> None:
        """Execute the requests of a journal, and write to it from now on."""
        for record in journal.records():
            for method, worker, fields, tensors in record["requests"]:
                # The result of a collective. The name is part of the journal's format.
                if method == "told":
                    self._results.store(fields["where"], tensors)
                else:
                    getattr(self, method)(Message(fields, tensors), Caller(f"rank {worker}", 0, 0))
            self.engine.drain()
        self.engine.journal = journal

    def end(self, message: Message, caller: Caller) -> None:
        """Training has ended."""
        self.ended = True

    def _store_result(self, collective: int, tensors: Sequence[Tensor]) -> None:
        """Store the result of a collective before any worker receives it."""
        if self.engine.journal is not None:
            self.engine.journal.append({"requests": [("told", 0, {"where": collective}, tensors)]})
        self._results.store(collective, tensors)

    def _create_block(self, key: str, placement: Placement, dtype: torch.dtype) -> Block:
        """Create this server's block of a table; a surviving memory has its content."""
        row_block, columns = placement.block_of(self.server)
        width = columns.stop - columns.start
        block = Block(key, placement.block_rows(row_block), width, dtype, self.engine.memory)
        self.engine.blocks[key], self._placements[key] = block, placement
        return block

    def _block(self, key: str) -> Block:
        if key not in self.engine.blocks:
            raise ConfigError(f"parameter {self.server} has no table {key}.", hint="open it first.")
        return self.engine.blocks[key]


def _positions(message: Message, index: int) -> Tensor | slice:
    """Return which rows of a block a message reads or writes: the tensor of this index, or consecutive rows."""
    tensors, begin = message.tensors, message.fields["begin"]
    if len(tensors) > index:
        return tensors[index].long()
    return slice(begin, message.fields["end"] if index == 0 else begin + len(tensors[0]))


def _rank(caller: Caller) -> int:
    """Return the rank of a worker, whose client is called ``rank <r>``."""
    return int(caller.client.rpartition(" ")[2])
