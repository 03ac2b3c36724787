"""One log file per process, and stacks on demand."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, TextIO


def log_path(log_dir: Path, label: str) -> Path:
    """``rank-2.log`` for the label ``rank 2``."""
    return log_dir / f"{label.replace(' ', '-')}.log"


STACKS_SIGNAL = signal.SIGUSR2
"""On this signal a process writes the stacks of all threads to its log."""
_log: TextIO | None = None
_watcher: threading.Thread | None = None

# Stacks are written by Python code, which holds the interpreter lock, so that no frame changes meanwhile.
# faulthandler.register would write them in the signal's handler, beside threads that run: a process that was stopped,
# and had the signal pending when it continued, read frames that were gone and crashed. The price: compiled code that
# holds the interpreter lock delays the stacks until it returns.


def write_stacks() -> None:
    """Write the stacks of all threads to this process's log, or to the terminal if it has none."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(_log or sys.stderr)


def watch_stacks_signal() -> None:
    """Wait for :data:`STACKS_SIGNAL` in a thread, so that the main thread may be in compiled code when it arrives.

    Call it in the main thread before others start: they inherit that the signal is blocked. Without this call the main
    thread writes the stacks, once it runs Python code. A process with this thread must not fork ranks.
    """
    global _watcher
    if _log is None or _watcher is not None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})
    _watcher = threading.Thread(target=_write_on_signals, name="gtrain-stacks", daemon=True)
    _watcher.start()


def _write_on_signals() -> None:
    while True:
        signal.sigwait({STACKS_SIGNAL})
        write_stacks()


def capture(path: Path, *, terminal: bool, append: bool = False, title: str = "") -> None:
    """Send this process's output to its log file.

    Args:
        path: the log file.
        terminal: whether Python's output also goes to the terminal; otherwise the file receives it alone, together with
            the output of compiled code.
        append: append to the log of the process that this one replaces, instead of overwriting it.
        title: first line of the log, which the terminal does not get: it names the process, because some launchers
            report a killed rank by its process id alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    global _log
    log = _log = open(path, "a" if append else "w", buffering=1)  # noqa: SIM115 - open as long as the process lives
    if title:
        log.write(f"{title}\n")
    signal.signal(STACKS_SIGNAL, lambda *_: write_stacks())
    if terminal:
        terminal_streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(sys.stdout, log), _Tee(sys.stderr, log)  # type: ignore[assignment]
        for handler in logging.getLogger().handlers:  # handlers keep the streams that they were made with
            if isinstance(handler, logging.StreamHandler) and handler.stream in terminal_streams:
                handler.setStream(sys.stdout if handler.stream is terminal_streams[0] else sys.stderr)
        return
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log


class _Tee:
    """A text stream that writes to the terminal and to the log."""

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self._terminal, self._log = terminal, log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk; other writes report it
            self._log.write(text)
        return self._terminal.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._log.flush()
        self._terminal.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)
