"""A partition or parameter server's heartbeats, by which the lock server knows that it is there."""

from __future__ import annotations

import os
import socket
import threading

from gtrain.errors import GtrainError
from gtrain.strategy.server import ServerContext

BEATS = 4
"""Heartbeats, at least, in the time after which a member of the job is taken for lost."""
LONGEST_PAUSE = 1.0
"""Seconds between heartbeats, at most: by their answers a rank learns that the job cannot go on."""


def begin_to_beat(context: ServerContext) -> None:
    """Let the lock server hear of this server, from a thread, until the job is over."""
    threading.Thread(target=_beat, args=(context,), name="gtrain-heart", daemon=True).start()


def _beat(context: ServerContext) -> None:
    seconds: float = context.config["strategy"]["lease_seconds"]
    try:
        with context.client("lock", 0) as lock:
            lock.request("serve", {"place": place(), "pid": os.getpid()})
            while not context.stop.wait(pause(seconds)):
                lock.request("pulse", timeout_seconds=seconds)
    except GtrainError as error:  # the job ends without the lock server, and this server with the job
        if not context.stop.is_set():
            print(f"the lock server is gone: {error.message}", flush=True)


def pause(lease_seconds: float) -> float:
    """Seconds between heartbeats."""
    return min(lease_seconds / BEATS, LONGEST_PAUSE)


def place() -> str:
    """Where process ids mean the same processes."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
