"""Settings of the pyg strategy. Light: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gtrain.config import StrategyConfig
from gtrain.errors import ConfigError

HALO_HOPS = {
    "0": "each rank asks the owners of remote nodes for their neighbours",
    "1": "the in-edges of the part's halo are copied, so that one hop more is sampled without asking",
    "2": "those of their sources too",
    "all": "every part's edges are mapped, and nothing is asked for",
}
SEEDS = {"local": "each rank trains on the seeds of its own part", "global": "each step's seeds are drawn from all"}
TRANSPORTS = {
    "auto": "shm",
    "shm": "ranks of a machine read each other's parts of the store, which they share in memory",
    "tcp": "each rank reads its own part alone, and asks the others over the network",
}
WIRE_DTYPES = {
    "float32": "features travel as they are",
    "float16": "half the bytes, not exact",
    "bfloat16": "half the bytes, not exact, with float32's range",
}
EVALUATIONS = {
    "sampled": "validation and test draw neighbours, as training does",
    "exact": "validation and test use every neighbour",
}
_WORDS = {"seeds": SEEDS, "transport": TRANSPORTS, "wire_dtype": WIRE_DTYPES, "evaluation": EVALUATIONS}
_LEAST = {"cache_bytes": (0, "bytes"), "prefetch": (0, "batches"), "lookahead": (1, "batches")}


@dataclass
class PygConfig(StrategyConfig):
    """``strategy`` group of ``strategy=pyg``.

    Attributes:
        halo_hops: hops beyond its parts within which a rank keeps the structure; see :data:`HALO_HOPS`.
        cache_bytes: memory of a rank for the features of remote nodes that are asked for most often, in bytes; 0: none.
        seeds: which seeds a rank trains on; see :data:`SEEDS`.
        transport: how a rank comes by what it does not own; see :data:`TRANSPORTS`.
        wire_dtype: type in which features travel; see :data:`WIRE_DTYPES`.
        prefetch: batches that are made ahead of the one in training; 0: each when it is needed.
        lookahead: successive batches that ask for the features of a remote node once, together; fewer where that would
            keep more than the features of one batch.
        threads: threads of a rank that sample and gather; None: its share of the machine's cores.
        evaluation: how validation and test score; see :data:`EVALUATIONS`.
        trim: leave out of each layer the nodes and edges that the seeds' scores no longer depend on.
        request_seconds: how long a rank waits for the answer to one request before it gives up.
    """

    halo_hops: Any = 0
    cache_bytes: int = 0
    seeds: str = "local"
    transport: str = "auto"
    wire_dtype: str = "float32"
    prefetch: int = 2
    lookahead: int = 32
    threads: int | None = None
    evaluation: str = "sampled"
    trim: bool = True
    request_seconds: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_word("halo_hops", str(self.halo_hops), HALO_HOPS)
        for key, options in _WORDS.items():
            check_word(key, getattr(self, key), options)
        for key, (least, unit) in _LEAST.items():
            check_least(key, getattr(self, key), least, unit)
        if self.threads is not None:
            check_least("threads", self.threads, 1, "threads")
        if not self.request_seconds > 0:
            raise ConfigError(
                f"strategy.request_seconds={self.request_seconds} was set; it must be above 0.",
                hint="60 is the default.",
            )

    @property
    def hops(self) -> int | None:
        """``halo_hops`` as a number; None: all structure is hosted."""
        return None if self.halo_hops == "all" else int(self.halo_hops)


def check_word(key: str, value: Any, options: dict[str, str]) -> None:
    """Raise unless the value of ``strategy.<key>`` is one of the options.

    Raises:
        ConfigError: lists what there is.
    """
    if value not in options:
        listed = "; ".join(f"{word}: {text}" for word, text in options.items())
        raise ConfigError(f"strategy.{key}={value} was set.", hint=f"choose {listed}.")


def check_least(key: str, value: int, least: int, unit: str) -> None:
    """Raise unless the value of ``strategy.<key>`` is at least ``least``.

    Raises:
        ConfigError: says how many there must be.
    """
    if value < least:
        raise ConfigError(
            f"strategy.{key}={value} was set; it must be {least} or more {unit}.", hint=f"set strategy.{key}={least}."
        )
