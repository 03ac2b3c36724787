"""Settings of the pyg strategy. Light: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gtrain.config import StrategyConfig
from gtrain.settings import setting


@dataclass
class PygConfig(StrategyConfig):
    """Settings of ``strategy=pyg``."""

    halo_hops: Any = setting(
        0,
        "hops beyond its parts within which a rank keeps the structure",
        type="int or str",
        words={
            0: "each rank asks the owners of remote nodes for their neighbours",
            1: "the in-edges of the part's halo are copied, so that one hop more is sampled without asking",
            2: "those of their sources too",
            "all": "every part's edges are mapped, and nothing is asked for",
        },
    )
    cache_bytes: int = setting(
        0,
        "memory of a rank for the features of remote nodes that are likeliest to be needed, in bytes; 0: none",
        least=0,
        unit="bytes",
    )
    seeds: str = setting(
        "local",
        "which seeds a rank trains on",
        words={
            "local": "each rank trains on the seeds of its own part",
            "global": "each step's seeds are drawn from all",
        },
    )
    transport: str = setting(
        "auto",
        "how a rank comes by what it does not own",
        words={
            "auto": "shm",
            "shm": "ranks of a machine read each other's parts of the store, which they share in memory",
            "tcp": "each rank reads its own part alone, and asks the others over the network",
        },
    )
    wire_dtype: str = setting(
        "float32",
        "type in which features travel",
        words={
            "float32": "features travel as they are",
            "float16": "half the bytes, not exact",
            "bfloat16": "half the bytes, not exact, with float32's range",
        },
    )
    prefetch: int = setting(
        2, "batches that are made ahead of the one in training; 0: each when it is needed", least=0, unit="batches"
    )
    lookahead: int = setting(
        32,
        "successive batches that ask for the features of a remote node once, together; fewer where that would keep "
        "more than the features of one batch",
        least=1,
        unit="batches",
    )
    threads: int | None = setting(
        None,
        "threads of a rank that sample and gather; null: its share of the machine's cores",
        least=1,
        unit="threads",
    )
    evaluation: str = setting(
        "sampled",
        "how validation and test score",
        words={
            "sampled": "validation and test draw neighbours, as training does",
            "exact": "validation and test use every neighbour",
        },
    )
    trim: bool = setting(True, "leave out of each layer the nodes and edges that the seeds' scores no longer depend on")
    request_seconds: float = setting(
        60.0, "how long a rank waits for the answer to one request before it gives up", above=0, unit="seconds"
    )

    @property
    def hops(self) -> int | None:
        """``halo_hops`` as a number; None: all structure is hosted."""
        return None if self.halo_hops == "all" else int(self.halo_hops)
