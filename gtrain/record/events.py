"""The record of a run: the folder ``record`` in the run's folder, and the events of the whole job. Light.

The command and the agents append events, one JSON object per line. ``docs/formats.md`` specifies the files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gtrain import __version__
from gtrain.errors import GtrainError

FOLDER = "record"
EVENTS = "events.jsonl"
SUMMARY = "summary.json"
"""The results of a run that is complete, in its folder."""
PROFILE = "profile"
"""The folder of the timelines of ``debug=profile``, in the run's folder."""
RECORDED = ("train", "test")
"""The verbs whose runs have a record."""


def record_folder(run_dir: Path) -> Path:
    """Return the folder of a run's record."""
    return run_dir / FOLDER


def identity(run_dir: Path) -> str:
    """Return the first event, by which two machines know whether they see the same folder; empty if it has none."""
    with contextlib.suppress(OSError), open(record_folder(run_dir) / EVENTS) as file:
        return file.readline()
    return ""


def append(run_dir: Path, event: str, **fields: Any) -> None:
    """Append an event with its time; a run goes on if it cannot be written.

    Args:
        run_dir: the run's folder; nothing is written if it has no record.
        event: name of the event.
        fields: plain values.
    """
    line = json.dumps({"event": event, "time": time.time(), **fields}) + "\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(record_folder(run_dir) / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            # One write, which other processes do not interleave.
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def recording(
    run_dir: Callable[[], Path], verb: str, continues: Callable[[Mapping[str, Any]], bool] | None = None, **fields: Any
) -> Iterator[None]:
    """Record the start of a run, and how it ended; the record and results of an earlier run in this folder are deleted.

    Args:
        run_dir: returns the run's folder, which is another one once the job :func:`resumes` an earlier attempt.
        verb: of the command; other verbs than :data:`RECORDED` record nothing.
        continues: returns whether the event ``start`` of a record is that of an earlier attempt of this job, whose
            record is kept; None: this is the first attempt.
        fields: of the event ``start``.
    """
    if verb not in RECORDED:
        yield
        return
    first: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        first = json.loads(identity(run_dir()))
    with contextlib.suppress(OSError):
        if continues is None or first.get("verb") != verb or not continues(first):
            shutil.rmtree(record_folder(run_dir()), ignore_errors=True)
            for path in (run_dir() / PROFILE).glob("spans-*.json"):
                path.unlink(missing_ok=True)
        record_folder(run_dir()).mkdir(parents=True, exist_ok=True)
        (run_dir() / SUMMARY).unlink(missing_ok=True)
    append(run_dir(), "start", verb=verb, host=socket.gethostname(), gtrain=__version__, **fields)
    try:
        yield
    except BaseException as error:
        append(run_dir(), "end", **_ending(error))
        raise
    append(run_dir(), "end", status="complete")


def resumes(earlier: Path, new: Path, number: int, message: str) -> None:
    """Continue the record of an earlier attempt of the job in place of the one that this attempt has started.

    Args:
        earlier: the run's folder.
        new: the folder in which this attempt started; may be the same.
        number: of earlier attempts.
        message: for people.
    """
    if new.resolve() != earlier.resolve():
        shutil.rmtree(record_folder(new), ignore_errors=True)
    append(earlier, "job restarted", number=number, limit=None, message=message)


def _ending(error: BaseException) -> Mapping[str, Any]:
    """Return the fields of the event ``end`` for the exception that ended the command."""
    if isinstance(error, KeyboardInterrupt):
        return {"status": "interrupted", "message": "interrupted by Ctrl-C"}
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        ended = code - 128 if code > 128 else 0
        name = signal.Signals(ended).name if ended in set(signal.Signals) else f"exit code {code}"
        return {"status": "interrupted" if code else "complete", "message": f"ended by {name}"}
    message = error.message if isinstance(error, GtrainError) else str(error)
    hint = error.hint if isinstance(error, GtrainError) else None
    return {"status": "failed", "type": type(error).__name__, "message": message, "hint": hint}
