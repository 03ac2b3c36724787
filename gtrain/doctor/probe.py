"""The checks of ``gtrain doctor`` that may crash: imports, GPUs, strategies, compiled kernels. Runs in a child process.

Each step prints a JSON line at its start and one at its end, so that the parent knows the step that crashed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

METIS, KAMINPAR = "pymetis", "kaminpar"
MODULES = (
    "numpy",
    "torch",
    "torch_geometric",
    "lightning.pytorch",
    "numba",
    "pyarrow",
    METIS,
    KAMINPAR,
    "zmq",
    "msgpack",
    "rich",
)
TIMEOUT_SECONDS = 180


def facts() -> dict[str, dict[str, Any]]:
    """Run the steps in a child process; return ``error`` (None on success) and ``value`` of each step."""
    command = [sys.executable, "-m", "gtrain.doctor.probe"]
    # The child finds the same packages, even if this program has changed sys.path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        lines, failure = child.stdout, _failure(child.returncode, child.stderr)
    except subprocess.TimeoutExpired as error:
        output, failure = error.stdout or "", f"did not finish within {TIMEOUT_SECONDS} s"
        lines = output.decode(errors="replace") if isinstance(output, bytes) else output
    return read(lines, failure)


def read(lines: str, failure: str) -> dict[str, dict[str, Any]]:
    """Parse the output of the child process.

    Args:
        lines: its output.
        failure: the error of the step that it did not finish.
    """
    steps: dict[str, dict[str, Any]] = {}
    for line in lines.splitlines():
        if line.startswith('{"step": '):
            entry = json.loads(line)
            steps[entry.pop("step")] = entry
    if not steps:  # the interpreter itself failed
        steps["python"] = {}
    return {name: result or {"error": failure, "value": None} for name, result in steps.items()}


def main() -> None:
    """Run every step; the entry point of the child process."""
    for name in MODULES:
        if name in (METIS, KAMINPAR) and importlib.util.find_spec(name) is None:
            # Optional, because they are not built for every platform and release of Python.
            continue
        _step(f"import {name}", lambda name=name: getattr(importlib.import_module(name), "__version__", None))  # type: ignore[misc]
    gpus = _step("gpus", lambda: importlib.import_module("gtrain.doctor.devices").facts())
    _step("kernels", _kernels)
    from gtrain import backends

    for name in backends.installed():
        _step(f"strategy {name}", lambda name=name: _strategy(name))  # type: ignore[misc]
    if gpus is not None and gpus["devices"]:
        count = len(gpus["devices"])
        _step("triton", lambda: importlib.import_module("gtrain.doctor.devices").triton_facts(count))


def _step(name: str, check: Callable[[], Any]) -> Any:
    """Print a step's start and its result, and return the value; None if it failed."""
    print(json.dumps({"step": name}), flush=True)
    try:
        result = {"error": None, "value": check()}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", "value": None}
    print(json.dumps({"step": name, **result}), flush=True)
    return result["value"]


def _kernels() -> dict[str, Any]:
    """Load kernels as ranks do, and return the folder of their cache."""
    from gtrain import kernel_cache

    folder = os.environ.get("NUMBA_CACHE_DIR") or kernel_cache.user_cache_folder()
    kernel_cache.find_cache()
    try:
        importlib.import_module("gtrain.graph.sampling.spans")
    except RuntimeError:
        # Numba: "cannot cache function: no locator available".
        folder = None
    return {"cache": folder, "writable": folder is not None}


def _strategy(name: str) -> dict[str, Any]:
    """Import a strategy, and return its description, its models and its servers."""
    from gtrain import backends

    backend = backends.get(name)
    backend.load_config()
    backend.load_strategy()
    return {
        "description": backend.description,
        "models": None if backend.serves.models is None else sorted(backend.serves.models),
        "servers": backend.server_roles,
        "gpu": backend.gpu if _runs_on_gpus(backend) else None,
    }


def _runs_on_gpus(backend: Any) -> bool:
    limit = backend.serves.limits.get("trainer.accelerator")
    return limit is None or "gpu" in limit.allowed


def _failure(code: int, errors: str) -> str:
    if code < 0:
        return f"ended the process with {signal.Signals(-code).name}"
    last = errors.strip().splitlines()[-1:] or ["no message"]
    return f"ended the process with exit code {code}: {last[0]}"


if __name__ == "__main__":
    main()
