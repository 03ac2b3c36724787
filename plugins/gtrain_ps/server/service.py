"""A parameter server: requests over the wire, answered by an :class:`~gtrain_ps.server.engine.Engine`."""

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
from gtrain_ps.server.memory import LastingRegion, Region
from gtrain_ps.server.requests import Answer, Commit, Product

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def main(context: ServerContext) -> None:
    """Serve until asked to end."""
    keep_freed()
    settings, trainer = PsConfig(**context.config["strategy"]), context.config["trainer"]
    lasting = context.lasting_file if settings.durability == "process" else None
    region = Region() if lasting is None else LastingRegion(lasting)
    journal = _journal(context, settings) if settings.durability == "disk" else None
    if journal is not None:
        journal.load(region)
    engine = Engine(trainer["num_nodes"] * trainer["devices"], settings.lag, region, settings.keeps_workers)
    handlers = Handlers(engine, context.slot.rank)
    if journal is not None:
        handlers.do_again(journal)
    print(f"process {os.getpid()} serves", flush=True)
    if context.restarts or engine.version:
        print(f"restarted at step {engine.version}, with {len(engine.blocks)} tables", flush=True)
    context.serve(handlers.methods(), engine.work)
    if journal is not None and (handlers.over or not engine.version):
        journal.remove()


def _journal(context: ServerContext, settings: PsConfig) -> Journal:
    """This server's folder, where it writes down what it does."""
    folder = Path(settings.folder) if settings.folder else context.run_dir
    config, trainer = context.config, context.config["trainer"]
    strategy = {name: value for name, value in config["strategy"].items() if name not in ("max_restarts", "folder")}
    job = {name: config.get(name) for name in ("seed", "data", "model")}
    job |= {f"strategy.{name}": value for name, value in strategy.items()}
    job |= {f"trainer.{name}": trainer.get(name) for name in ("num_nodes", "devices", "precision")}
    return Journal(folder / f"parameter-{context.slot.rank}.disk", job)


class Handlers:
    """The methods of a parameter server.

    Args:
        engine: what computes the answers.
        server: number of this server.

    Attributes:
        over: whether the training came to its end.
    """

    def __init__(self, engine: Engine, server: int) -> None:
        self.engine, self.server = engine, server
        self._placements: dict[str, Placement] = {}
        self._said, self._rules = "", dict[str, Any]()
        self.over = False
        self._exchanges = CollectiveResults(engine.lag + 4, engine.region)
        self._gathers = Collectives(engine.workers, self._exchanges, self._keep)
        for key, noted in engine.region.notes.get("tables", {}).items():
            self._block_of(key, Placement(**noted["placement"]), DTYPES[noted["dtype"]])

    def methods(self) -> dict[str, Any]:
        """The handlers by the names of their methods."""
        names = ("open", "multiply", "commit", "read", "write", "read_state", "write_state", "status")
        more = ("gather", "passed", "come_back", "recall", "sum", "waiting", "end")
        return {name: getattr(self, name) for name in (*names, *more)}

    def open(self, message: Message, caller: Caller) -> Answer:
        """Make the block of a table, unless it is there.

        Fields: ``table`` (TableSpec's fields), ``key`` (its name in the module), ``placement``, ``dtype``.
        """
        fields = message.fields
        key, placement = fields["key"], Placement(**fields["placement"])
        table, dtype = TableSpec(**fields["table"]), DTYPES[fields["dtype"]]

        def make() -> Message:
            if key in self._placements:
                self._check_same(key, placement, dtype)
                # whoever opens a table first, it is for rank 0 to fill it, and for a later life of it to do so again
                return Message({"version": self.engine.version, "new": self.engine.version == 0})
            block = self._block_of(key, placement, dtype)
            placement.initial(table, self.server, block.table)
            region = self.engine.region
            noted = {"placement": fields["placement"], "dtype": fields["dtype"]}
            region.note("tables", {**region.notes.get("tables", {}), key: noted})
            return Message({"version": self.engine.version, "new": True})

        return self.engine.after(0, make, ("open", 0, fields, ()))

    def multiply(self, message: Message, caller: Caller) -> Answer:
        """Rows times a block. Fields: ``key``, ``step``, ``call`` or None, ``dtype``, ``each`` (one id a row)."""
        fields, tensors = message.fields, message.tensors
        block = self._block(fields["key"])
        lengths = None if fields["each"] else tensors[1]
        values = tensors[-1] if fields["valued"] else None
        rows = block.rows(tensors[0], lengths, values)
        said = (_rank(caller), fields["step"], fields["call"], block, rows, DTYPES[fields["dtype"]])
        return self.engine.multiply(Product(*said, message=message))

    def commit(self, message: Message, caller: Caller) -> Answer:
        """A worker's part of a step.

        Fields: those of :class:`Commit`, ``kept`` as names; tensors: gradients, what is kept, and the rest if any.
        """
        fields, tensors = message.fields, message.tensors
        count, names = len(fields["calls"]), fields["kept"]
        kept = dict(zip(names, tensors[count:], strict=False))
        behind = count + len(names)
        rest: Tensor | None = tensors[behind] if len(tensors) > behind else None
        if fields["rules"] != self._said:  # the same text, most of the time
            self._said, self._rules = fields["rules"], json.loads(fields["rules"])
        said = (fields["step"], fields["weight"], fields["scale"], fields["calls"], tensors[:count])
        return self.engine.commit(Commit(_rank(caller), *said, self._rules, rest, kept, message))

    def read(self, message: Message, caller: Caller) -> Answer:
        """Rows of a block as they are after ``step`` steps. Fields: ``key``, ``begin``, ``end``, ``step``."""
        fields = message.fields
        block = self._block(fields["key"])
        return self.engine.after(
            fields["step"], lambda: Message({}, [block.table[fields["begin"] : fields["end"]].clone()])
        )

    def write(self, message: Message, caller: Caller) -> Answer:
        """Overwrite rows of a block as it is after ``step`` steps. Fields: ``key``, ``begin``, ``step``.

        Tensors: rows, and the places of these in the block where they do not follow each other from ``begin``.

        A worker that was restarted may ask once more when the block has been trained further: too late, then.
        """
        block, begin, rows = self._block(message.fields["key"]), message.fields["begin"], message.tensors[0]
        step = message.fields["step"]
        places = message.tensors[1] if len(message.tensors) > 1 else slice(begin, begin + len(rows))

        def write() -> None:
            if self.engine.version == step:
                block.table[places] = rows

        return self.engine.after(step, write, ("write", 0, message.fields, message.tensors))

    def read_state(self, message: Message, caller: Caller) -> Answer:
        """A piece of the optimizer state. Fields: ``key``, ``name`` or None, ``begin``, ``end``, ``step``."""
        fields = message.fields
        block = self._block(fields["key"])

        def read() -> Message:
            if fields["name"] is None:
                rule = block.rule
                return Message({"rule": rule and rule.name, "names": [] if rule is None else list(rule.state)})
            return Message({}, [block.state[fields["name"]][fields["begin"] : fields["end"]].clone()])

        return self.engine.after(fields["step"], read)

    def write_state(self, message: Message, caller: Caller) -> Answer:
        """Overwrite a piece of the optimizer state, as :meth:`write` does. Fields: also ``rule`` and ``name``."""
        fields, tensors = message.fields, message.tensors
        block = self._block(fields["key"])

        def write() -> None:
            if self.engine.version != fields["step"]:
                return
            block.use(fields["rule"], {})
            if tensors:
                block.state[fields["name"]][fields["begin"] : fields["begin"] + len(tensors[0])] = tensors[0]

        return self.engine.after(fields["step"], write, ("write_state", 0, fields, tensors))

    def status(self, message: Message, caller: Caller) -> Message:
        """How far this server is."""
        products, missed = self.engine.missed
        return Message({"version": self.engine.version, "products": products, "missed": missed})

    # ------------------------------------------------------------------------------- workers that die and come back

    def gather(self, message: Message, caller: Caller) -> Answer:
        """A worker's tensor to all workers, answered by those of all. Fields: ``where``."""
        return self._gathers.give(_rank(caller), message.fields["where"], message.tensors[0])

    def passed(self, message: Message, caller: Caller) -> Message:
        """How far the workers have come in what they say to each other."""
        return Message({"passed": self._gathers.passed})

    def come_back(self, message: Message, caller: Caller) -> Message:
        """A worker has been restarted; what its life before left unfinished here is dropped."""
        self._gathers.drop(_rank(caller))
        return Message({"version": self.engine.forget(_rank(caller))})

    def recall(self, message: Message, caller: Caller) -> Message:
        """What was kept of a step for this worker. Fields: ``step``."""
        assert self.engine.replay is not None
        found = self.engine.replay.recall(message.fields["step"], _rank(caller))
        return Message({"names": list(found)}, list(found.values()))

    def sum(self, message: Message, caller: Caller) -> Answer:
        """The sum of the workers' gradients of a step that this worker has committed. Fields: ``step``."""
        return self.engine.sum_of(message.fields["step"])

    def waiting(self, message: Message, caller: Caller) -> Message:
        """For which workers others wait."""
        return Message({"workers": sorted(self.engine.missing() | self._gathers.missing())})

    # ------------------------------------------------------------------------------- what is on the disk

    def do_again(self, journal: Journal) -> None:
        """Do what the journal knows, and from now on write down what is done."""
        for record in journal.records():
            for method, worker, fields, tensors in record["requests"]:
                if method == "told":
                    self._exchanges.keep(fields["where"], tensors)
                else:
                    getattr(self, method)(Message(fields, tensors), Caller(f"rank {worker}", 0, 0))
            self.engine.drain()
        self.engine.journal = journal

    def end(self, message: Message, caller: Caller) -> None:
        """The training has come to its end."""
        self.over = True

    def _keep(self, where: int, rows: Sequence[Tensor]) -> None:
        """Keep what all workers told each other, before anybody is told."""
        if self.engine.journal is None:
            self._exchanges.keep(where, rows)
        else:
            record = {"requests": [("told", 0, {"where": where}, rows)]}
            self.engine.journal.append(record)
            self._exchanges.keep(where, rows)

    def _block_of(self, key: str, placement: Placement, dtype: torch.dtype) -> Block:
        """This server's block of a table: new, or as the life before left it."""
        row, column = divmod(self.server, placement.column_blocks)
        first, last = placement.columns(column)
        block = Block(key, placement.block_rows(row), last - first, dtype, self.engine.region)
        self.engine.blocks[key], self._placements[key] = block, placement
        return block

    def _block(self, key: str) -> Block:
        if key not in self.engine.blocks:
            raise ConfigError(f"parameter {self.server} has no table {key}.", hint="open it first.")
        return self.engine.blocks[key]

    def _check_same(self, key: str, placement: Placement, dtype: torch.dtype) -> None:
        if placement != self._placements[key] or dtype != self.engine.blocks[key].table.dtype:
            raise ConfigError(
                f"the table {key} was opened as {self._placements[key]}, and now as {placement} of {dtype}.",
                hint="give all workers the same configuration.",
            )


def _rank(caller: Caller) -> int:
    """The worker that a client is of: it is called ``rank <r>``."""
    return int(caller.client.rpartition(" ")[2])
