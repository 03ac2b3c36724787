"""Settings of the pyg strategy. Light: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gtrain.config import LAYERS, StrategyConfig
from gtrain.errors import ConfigError
from gtrain.settings import setting


@dataclass
class PygConfig(StrategyConfig):
    """Settings of ``strategy=pyg``."""

    halo_hops: Any = setting(
        0,
        "hops beyond its own parts of which a rank stores the edges",
        type="int or str",
        words={
            0: "ranks request the neighbours of remote nodes from their owners",
            1: "the in-edges of the part's halo are copied: one more hop is sampled without a request",
            2: "the in-edges of their sources are copied too",
            "all": "every part's edges are mapped: sampling sends no request",
        },
    )
    cache_bytes: int = setting(
        0,
        "cache of a rank for the features of the remote nodes it is likeliest to need, in bytes; 0: none",
        least=0,
        unit="bytes",
    )
    seeds: str = setting(
        "local",
        "which seeds a rank trains on",
        words={
            "local": "each rank trains on the seeds of its own part",
            "global": "each step's seeds are drawn from all parts",
        },
    )
    transport: str = setting(
        "auto",
        "how a rank reads the parts of other ranks",
        words={
            "auto": "shm",
            "shm": "ranks of a machine map each other's parts of the store into shared memory",
            "tcp": "each rank maps its part only, and requests the others over the network",
        },
    )
    wire_dtype: str = setting(
        "float32",
        "dtype of features on the network",
        words={
            "float32": "as stored",
            "float16": "half the bytes, not exact",
            "bfloat16": "half the bytes, not exact, with float32's range",
        },
    )
    device_cache: Any = setting(
        "auto",
        "rows that a GPU holds for all batches, those that they are likeliest to need, in bytes; 0: none; `auto`: at "
        "most half of the memory that is free when training starts, divided by the ranks that share the GPU",
        type="int or str",
        unit="bytes",
    )
    prefetch: int = setting(
        2,
        "batches prepared ahead of the training step, or copied ahead to the GPU; 0: each on demand",
        least=0,
        unit="batches",
    )
    lookahead: int = setting(
        32,
        "successive batches that request the features of a remote node once, together; fewer if they would take more "
        "memory than the features of one batch",
        least=1,
        unit="batches",
    )
    threads: int | None = setting(
        None,
        "sampling threads of a rank; null: its share of the machine's cores; with a GPU as many as batches need, of "
        "that share less 2 and at most 16",
        least=1,
        unit="threads",
    )
    evaluation: str = setting(
        "sampled",
        "which neighbours validation and test use",
        words={
            "sampled": "they sample neighbours as training does",
            "exact": "they use every neighbour",
        },
    )
    trim: bool = setting(True, "skip in each layer the nodes and edges that the seeds' scores no longer depend on")
    request_seconds: float = setting(300.0, "time limit of one request to another rank", above=0, unit="seconds")
    layers: str = setting("auto", "how convolutions of PyG run", words=LAYERS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device_cache not in ("auto", None) and not str(self.device_cache).isdecimal():
            raise ConfigError(
                f"strategy.device_cache={self.device_cache} was set; it must be auto, or 0 or more bytes.",
                hint="auto is the default.",
            )

    @property
    def device_bytes(self) -> int | None:
        """``device_cache`` as a number; None: ``auto``."""
        return None if self.device_cache in ("auto", None) else int(self.device_cache)

    @property
    def hops(self) -> int | None:
        """``halo_hops`` as a number; None: the edges of all parts."""
        return None if self.halo_hops == "all" else int(self.halo_hops)
