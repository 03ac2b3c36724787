"""Settings of the ps strategy. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtrain.config import StrategyConfig
from gtrain.errors import ConfigError

PROTOCOLS = {
    "ship": "sparse rows go to the servers, their products come back",
    "pull": "the table's rows come to the workers, their gradients go back",
    "auto": "whichever moves fewer bytes",
}
SPLITS = {
    "row": "a server keeps some rows, with all columns",
    "column": "a server keeps some columns, of all rows; exact with SGD and Adagrad without weight decay",
    "grid": "both",
    "auto": "whichever moves fewest bytes",
}
BLOCKS = {"hash": "ids are spread evenly over the servers", "range": "a server keeps a range of ids"}
RESTS = {
    "server": "gradients of the other layers are summed by the servers",
    "allreduce": "the workers sum them among themselves",
}
CONSISTENCIES = {
    "sync": "every step sees the step before: what one process would train",
    "async": "a step may miss the last strategy.staleness steps",
}
DURABILITIES = {
    "none": "a server that dies ends the job",
    "process": "what a server keeps outlives its process",
    "disk": "what a server acknowledged is on a disk first, and outlives the machine",
}
WIRE_DTYPES = {"float32": "exact", "bfloat16": "half the bytes of products and gradients, not exact"}
_WORDS: dict[str, dict[str, str]] = {
    "protocol": PROTOCOLS,
    "split": SPLITS,
    "blocks": BLOCKS,
    "rest": RESTS,
    "consistency": CONSISTENCIES,
    "durability": DURABILITIES,
    "wire_dtype": WIRE_DTYPES,
}


@dataclass
class PsConfig(StrategyConfig):
    """``strategy`` group of ``strategy=ps``.

    Attributes:
        servers: P, in the whole job.
        protocol: what travels for products with sparse rows; see :data:`PROTOCOLS`.
        split: how tables are cut; see :data:`SPLITS`.
        blocks: which rows go to which server; see :data:`BLOCKS`.
        rest: who sums the gradients of the layers that are on the workers; see :data:`RESTS`.
        consistency: see :data:`CONSISTENCIES`.
        staleness: steps that ``async`` may miss.
        durability: what survives a server; see :data:`DURABILITIES`.
        folder: where servers write with ``durability=disk``; a job that is restarted with the same folder goes on
            where the one before was cut off. None: the run's own.
        max_restarts: how often each server is restarted, where what it keeps outlives it; and each worker, where
            ``rest=server`` too.
        wire_dtype: type in which products and gradients travel; see :data:`WIRE_DTYPES`.
        prefetch: batches whose rows are sent ahead of the one in training.
        export: folder to write the tables to after training, ``<table>.npy`` in the order of ids; None: none.
    """

    servers: int = 2
    protocol: str = "ship"
    split: str = "row"
    blocks: str = "hash"
    rest: str = "server"
    consistency: str = "sync"
    staleness: int = 2
    durability: str = "process"
    folder: str | None = None
    max_restarts: int = 3
    wire_dtype: str = "float32"
    prefetch: int = 2
    export: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, options in _WORDS.items():
            _check_word(key, getattr(self, key), options)
        for key, least in (("servers", 1), ("staleness", 1), ("max_restarts", 0), ("prefetch", 0)):
            if getattr(self, key) < least:
                raise ConfigError(
                    f"strategy.{key}={getattr(self, key)} was set; it must be {least} or more.",
                    hint=f"set strategy.{key}={least}.",
                )

    @property
    def restarts(self) -> int:
        """How often a server is restarted."""
        return 0 if self.durability == "none" else self.max_restarts

    @property
    def worker_restarts(self) -> int:
        """How often a worker is restarted."""
        return self.restarts if self.rest == "server" else 0

    @property
    def keeps_workers(self) -> bool:
        """Whether servers keep what a worker needs that comes back, in this job or the next."""
        return self.rest == "server" and (self.worker_restarts > 0 or self.durability == "disk")

    @property
    def lag(self) -> int:
        """Steps that a step may miss."""
        return self.staleness if self.consistency == "async" else 0


def store_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """One part, unless the data's settings say otherwise: every worker reads the whole store, and maps the files of a
    graph in one part into memory; it has to join the tensors of several parts in memory.

    Args:
        config: the composed configuration.
    """
    data = config["data"]
    given = data.get("num_parts") or data.get("keep_parts") or data.get("partitioner") in ("file", "given")
    return {} if given else {"num_parts": 1}


def _check_word(key: str, value: Any, options: dict[str, str]) -> None:
    if value not in options:
        listed = "; ".join(f"{word}: {text}" for word, text in options.items())
        raise ConfigError(f"strategy.{key}={value} was set.", hint=f"choose {listed}.")
