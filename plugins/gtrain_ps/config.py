"""Settings of the ps strategy. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtrain.config import LAYERS, StrategyConfig
from gtrain.errors import ConfigError
from gtrain.settings import setting


@dataclass
class PsConfig(StrategyConfig):
    """Settings of ``strategy=ps``."""

    servers: int = setting(2, "parameter servers in the whole job", least=1, unit="servers")
    protocol: str = setting(
        "ship",
        "what is sent for products with sparse rows",
        words={
            "ship": "the servers receive sparse rows and return their products",
            "pull": "the workers fetch rows of the table and return their gradients",
            "auto": "the one that sends fewer bytes",
        },
    )
    split: str = setting(
        "row",
        "how tables are cut",
        words={
            "row": "a server stores some rows, with all columns",
            "column": "a server stores some columns of all rows; exact with SGD and Adagrad without weight decay",
            "grid": "both",
            "auto": "the one that sends the fewest bytes",
        },
    )
    blocks: str = setting(
        "hash",
        "which rows go to which server",
        words={"hash": "ids are spread evenly over the servers", "range": "a server stores a range of ids"},
    )
    rest: str = setting(
        "server",
        "who sums the gradients of the layers that the workers hold",
        words={
            "server": "the servers sum the gradients of the other layers",
            "allreduce": "the workers sum them by an all-reduce",
        },
    )
    consistency: str = setting(
        "sync",
        "which updates a step may miss",
        words={
            "sync": "every step sees the step before, as in one process",
            "async": "a step may miss the last strategy.staleness steps",
        },
    )
    staleness: int = setting(2, "steps that `async` may miss", least=1, unit="steps")
    durability: str = setting(
        "process",
        "what survives a server that dies",
        words={
            "none": "a server that dies ends the job",
            "process": "a server's state survives its process",
            "disk": "a server writes to disk before it acknowledges; its state survives the machine",
        },
    )
    folder: str | None = setting(
        None,
        "where servers write with `strategy.durability=disk`; a new job with the same folder resumes where the "
        "previous one was interrupted; null: the run's folder",
    )
    max_restarts: int = setting(
        3,
        "how often each server is restarted, if its state survives it; with `strategy.rest=server` also each worker",
        least=0,
        unit="restarts",
    )
    wire_dtype: str = setting(
        "float32",
        "dtype of products and gradients on the wire",
        words={"float32": "exact", "bfloat16": "half the bytes of products and gradients, not exact"},
    )
    prefetch: int = setting(2, "batches whose rows are sent ahead of the current one", least=0, unit="batches")
    export: str | None = setting(
        None, "folder to write the tables to after training, `<table>.npy` in the order of ids; null: none"
    )
    layers: str = setting("auto", "how convolutions of PyG run", words=LAYERS)

    @property
    def restarts(self) -> int:
        """The number of restarts of a server."""
        return 0 if self.durability == "none" else self.max_restarts

    @property
    def worker_restarts(self) -> int:
        """The number of restarts of a worker."""
        return self.restarts if self.rest == "server" else 0

    @property
    def keeps_replay_buffer(self) -> bool:
        """Whether servers keep a replay buffer for workers that are restarted, in this job or the next."""
        return self.rest == "server" and (self.worker_restarts > 0 or self.durability == "disk")

    @property
    def lag(self) -> int:
        """The number of earlier steps whose updates a step may lack; 0 if workers wait for each other."""
        return self.staleness if self.consistency == "async" else 0


def store_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the store: one part, unless the data's settings say otherwise.

    Every worker reads the whole store. It maps the files of a single part into memory, but must copy the tensors of
    several parts to join them.

    Args:
        config: the composed configuration.
    """
    data = config["data"]
    is_partitioned = data.get("num_parts") or data.get("keep_parts") or data.get("partitioner") in ("file", "given")
    return {} if is_partitioned else {"num_parts": 1}


def make_folder(folder: Path, key: str) -> None:
    """Create the folder that a setting names, unless it exists.

    Raises:
        ConfigError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{key}: the folder {folder} cannot be created: {error.strerror}.", hint="name a writable folder."
        ) from None
