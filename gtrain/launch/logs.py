"""One log file a process."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO


def log_path(log_dir: Path, label: str) -> Path:
    """``rank-2.log`` for the label ``rank 2``."""
    return log_dir / f"{label.replace(' ', '-')}.log"


STACKS_SIGNAL = signal.SIGUSR2
"""On it a captured process writes the stacks of all its threads to its log, even if it is stuck in compiled code."""
_log: TextIO | None = None


def write_stacks() -> None:
    """Write the stacks of all threads to this process's log, or to the terminal if it has none."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(_log or sys.stderr)


def capture(path: Path, *, terminal: bool, append: bool = False) -> None:
    """Send this process's output to its log file.

    Args:
        path: the file.
        terminal: also let what Python prints through to the terminal; else the file alone gets it, and what compiled
            code prints as well.
        append: go on with the file of the process that was in this place before; else the file is written anew.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    global _log
    log = _log = open(path, "a" if append else "w", buffering=1)  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(STACKS_SIGNAL, file=log, all_threads=True)
    if terminal:
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(sys.stdout, log), _Tee(sys.stderr, log)  # type: ignore[assignment]
        for handler in logging.getLogger().handlers:  # these keep the streams that they were made with
            if isinstance(handler, logging.StreamHandler) and handler.stream in before:
                handler.setStream(sys.stdout if handler.stream is before[0] else sys.stderr)
        return
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log


class _Tee:
    """A text stream that writes to the terminal and to the log."""

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self._terminal, self._log = terminal, log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk: what fails for want of space says so
            self._log.write(text)
        return self._terminal.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._log.flush()
        self._terminal.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)
