"""Settings of the ps strategy. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtrain.config import StrategyConfig
from gtrain.settings import setting


@dataclass
class PsConfig(StrategyConfig):
    """Settings of ``strategy=ps``."""

    servers: int = setting(2, "parameter servers in the whole job", least=1, unit="servers")
    protocol: str = setting(
        "ship",
        "what travels for products with sparse rows",
        words={
            "ship": "sparse rows go to the servers, their products come back",
            "pull": "the table's rows come to the workers, their gradients go back",
            "auto": "whichever moves fewer bytes",
        },
    )
    split: str = setting(
        "row",
        "how tables are cut",
        words={
            "row": "a server keeps some rows, with all columns",
            "column": "a server keeps some columns, of all rows; exact with SGD and Adagrad without weight decay",
            "grid": "both",
            "auto": "whichever moves fewest bytes",
        },
    )
    blocks: str = setting(
        "hash",
        "which rows go to which server",
        words={"hash": "ids are spread evenly over the servers", "range": "a server keeps a range of ids"},
    )
    rest: str = setting(
        "server",
        "who sums the gradients of the layers that are on the workers",
        words={
            "server": "gradients of the other layers are summed by the servers",
            "allreduce": "the workers sum them among themselves",
        },
    )
    consistency: str = setting(
        "sync",
        "what a step may miss",
        words={
            "sync": "every step sees the step before: what one process would train",
            "async": "a step may miss the last strategy.staleness steps",
        },
    )
    staleness: int = setting(2, "steps that `async` may miss", least=1, unit="steps")
    durability: str = setting(
        "process",
        "what survives a server",
        words={
            "none": "a server that dies ends the job",
            "process": "what a server keeps outlives its process",
            "disk": "what a server acknowledged is on a disk first, and outlives the machine",
        },
    )
    folder: str | None = setting(
        None,
        "where servers write with `strategy.durability=disk`; a job that is restarted with the same folder goes on "
        "where the one before was cut off; null: the run's folder",
    )
    max_restarts: int = setting(
        3,
        "how often each server is restarted, where what it keeps outlives it; with `strategy.rest=server` each "
        "worker too",
        least=0,
        unit="restarts",
    )
    wire_dtype: str = setting(
        "float32",
        "type in which products and gradients travel",
        words={"float32": "exact", "bfloat16": "half the bytes of products and gradients, not exact"},
    )
    prefetch: int = setting(2, "batches whose rows are sent ahead of the one in training", least=0, unit="batches")
    export: str | None = setting(
        None, "folder to write the tables to after training, `<table>.npy` in the order of ids; null: none"
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
