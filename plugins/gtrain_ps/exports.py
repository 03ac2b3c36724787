"""Tables as files, row by row in the order of their ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from gtrain_ps.worker.home import CHUNK_BYTES, ServedHome


def export(folder: Path, homes: Mapping[str, ServedHome]) -> None:
    """Write each table as ``<name>.npy`` into a folder, piece by piece."""
    for name, home in homes.items():
        kind = torch.empty(0, dtype=home.dtype).numpy().dtype
        shape = home.table.rows, home.table.dim
        out = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", kind, shape)
        step = max(1, CHUNK_BYTES // max(1, shape[1] * kind.itemsize))
        for begin in range(0, shape[0], step):
            end = min(begin + step, shape[0])
            out[begin:end] = home.read(begin, end).numpy()
        out.flush()
        print(f"written: {folder / f'{name}.npy'}", flush=True)
