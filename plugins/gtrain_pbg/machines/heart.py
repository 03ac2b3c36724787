"""A partition or parameter server's heartbeats, by which the lock server knows that it is there."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

from gtrain.errors import GtrainError
from gtrain.strategy.server import ServerContext
from gtrain.wire import Client, DeadlineError, PeerRestartedError

BEATS = 4
"""Heartbeats, at least, in the time after which a member of the job is taken for lost."""
TELL_SECONDS = 10.0
"""The terminal is told of a member of the job that is silent for so long, where its lease is longer."""
LONGEST_PAUSE = 1.0
"""Seconds between heartbeats, at most: by their answers a rank learns that the job cannot go on."""


def begin_to_beat(context: ServerContext) -> None:
    """Let the lock server hear of this server, from a thread, until the job is over."""
    threading.Thread(target=_beat, args=(context,), name="gtrain-heart", daemon=True).start()


def _beat(context: ServerContext) -> None:
    seconds: float = context.config["strategy"]["lease_seconds"]
    try:
        with context.client("lock", 0) as lock:
            _join(context, lock)
            while not context.stop.wait(pause(seconds)):
                with suppress(PeerRestartedError, DeadlineError):  # the lock server is restarted, or stands still
                    lock.request("pulse", timeout_seconds=seconds)
    except GtrainError as error:
        if not context.stop.is_set():
            print(f"the lock server is gone: {error.message}", flush=True)


def _join(context: ServerContext, lock: Client) -> None:
    while not context.stop.is_set():
        with suppress(PeerRestartedError, DeadlineError):
            lock.request("serve", {"place": place(), "pid": os.getpid()})
            return


def pause(lease_seconds: float) -> float:
    """Seconds between heartbeats."""
    return min(lease_seconds / BEATS, LONGEST_PAUSE)


def place() -> str:
    """Where process ids mean the same processes."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
