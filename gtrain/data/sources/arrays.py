"""A graph from one ``.npz`` file with the arrays of a PyG ``Data``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from gtrain.data.config import ArraysConfig
from gtrain.data.module import GraphDataModule, file_stamp


class ArraysData(GraphDataModule[ArraysConfig]):
    """A graph from one ``.npz`` file: ``edge_index``, ``x``, ``y``, and masks if it has them."""

    name = "arrays"

    def identity(self) -> dict[str, Any]:
        """Return the stamp of the file."""
        return {"file": file_stamp(Path(self.settings.path))}

    def read(self) -> Data:
        """Read the arrays."""
        with np.load(self.settings.path, allow_pickle=False) as arrays:
            return Data(**{name: torch.from_numpy(arrays[name]) for name in arrays.files})
