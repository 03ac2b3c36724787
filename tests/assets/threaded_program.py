"""A program with threads of OpenMP's that starts ranks; what they find is what forks would have found.

Run as ``threaded_program.py WHAT``; without a guard against being imported, for nothing imports it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import random
import signal
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gtrain import run_local
from gtrain.errors import GtrainError
from gtrain.launch import slot

FACTOR = torch.full((2, 2), 3.0)


@dataclass
class Box:
    """A class of ``__main__``."""

    value: Any


class Mistake(Exception):
    """An exception of the program's own."""


def product() -> torch.Tensor:
    return torch.rand(600, 600) @ torch.rand(600, 600)


def by_path(name: str, text: str, folder: Path) -> Any:
    """A module that is in ``sys.modules`` and on no path."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def everything() -> None:
    """One job that returns whatever may differ, compared with what this process has."""
    here = Path("elsewhere").absolute()
    here.mkdir()
    (here / "beside.py").write_text("def three():\n    return 3\n")
    sys.path.insert(0, str(here))
    import beside

    (here / "hidden").mkdir()
    hidden = by_path("hidden_module", "N = 4\ndef four():\n    return N\n", here / "hidden")
    os.environ["OF_THE_USER"] = "set late"
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore", "told to be silent")
    logging.basicConfig(level=logging.INFO, format="logged %(message)s", stream=sys.stdout)
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    scale = 5

    def task(box: Box, *rest: Any) -> dict[str, Any]:
        import pickle

        warnings.warn("told to be silent", stacklevel=1)
        logging.getLogger("mine").info("by rank %s", slot.current().slot.rank)
        return {
            "random": (float(torch.rand(())), random.random(), float(np.random.rand())),
            "box": pickle.loads(pickle.dumps(Box(box.value * scale))),
            "array": np.arange(3),
            "tensor": FACTOR * 2,
            "modules": (beside.three(), hidden.four()),
            "settings": (os.environ["OF_THE_USER"], torch.get_default_dtype(), torch.get_num_threads(), sys.argv),
            7: (lambda x: x + 1),
            "folder": os.getcwd(),
            "product": product().shape,
        }

    given = run_local(functools.partial(task, Box(2)), "rest", num_nodes=2, log_dir="logs")
    checks = {
        "random": given["random"] == (float(torch.rand(())), random.random(), float(np.random.rand())),
        "box": given["box"] == Box(10),
        "array": bool((given["array"] == np.arange(3)).all()),
        "tensor": torch.equal(given["tensor"], FACTOR * 2),
        "modules": given["modules"] == (3, 4),
        "settings": given["settings"] == ("set late", torch.float64, torch.get_num_threads(), sys.argv),
        "function": given[7](1) == 2,
        "folder": given["folder"] == os.getcwd(),
    }
    print("CHECKS", json.dumps(checks), flush=True)


def errors() -> None:
    """What a rank raises, and what cannot be copied."""

    def fail() -> None:
        raise Mistake("own type")

    lock = threading.Lock()
    for task in (fail, lambda: lock):
        try:
            run_local(task, num_nodes=2, log_dir="logs")
        except GtrainError as error:
            print("RAISED", type(error).__name__, error, flush=True)


def wait() -> None:
    def task() -> None:
        Path(f"pid-{slot.current().slot.rank}").write_text(str(os.getpid()))
        signal.pause()

    run_local(task, num_nodes=2, log_dir="logs")


torch.set_num_threads(2)
product()
{"everything": everything, "errors": errors, "wait": wait}[sys.argv[1]]()
