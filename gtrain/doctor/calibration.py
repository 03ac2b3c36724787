"""The constants of ``gtrain plan`` on this machine: measured in a child process, kept in the user's cache."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from gtrain.plan import machine

TIMEOUT_SECONDS = 600


def facts(*, measure: bool) -> dict[str, Any]:
    """Return the constants by key, the file that has them, and why they could not be measured.

    Args:
        measure: measure them first; otherwise the kept ones are returned.
    """
    error, kept = None, machine.calibration_file()
    if measure:
        try:
            error = _measure()
        except subprocess.TimeoutExpired:
            error = f"did not finish within {TIMEOUT_SECONDS} s"
    constants = machine.calibration()
    return {"constants": constants or None, "file": str(kept) if constants else None, "error": error}


def _measure() -> str | None:
    """Measure the constants and keep them; return what went wrong, or None."""
    command = [sys.executable, "-m", "gtrain.plan.calibrate"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if child.returncode:
        return (child.stderr.strip().splitlines()[-1:] or ["ended without a message"])[0]
    constants = json.loads(child.stdout.splitlines()[-1])
    return None if machine.keep(constants) is not None else "the user's cache folder cannot be written"
