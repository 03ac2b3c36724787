"""A server that was started by hand and has to leave, as before its node is drained, asks the ranks to save and end."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable

from gtrain.errors import GtrainError
from gtrain.launch.key_value import KeyValueStore

_KEY = "gtrain-leaving"
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 60.0


def announce(server: str, address: str, key_file: str | None) -> None:
    """Tell rank 0 that a server has to leave; without effect if the job is over.

    Args:
        server: name of the server.
        address: address of the job's key-value store.
        key_file: path of the job's key file.
    """
    with contextlib.suppress(GtrainError, OSError):
        KeyValueStore(address, key_file, _CONNECT_SECONDS).set(_KEY, server)


def watch(address: str, key_file: str | None, end: Callable[[], None]) -> None:
    """Call ``end`` in a thread once a server has announced that it leaves.

    Args:
        address: address of the job's key-value store.
        key_file: path of the job's key file.
        end: asks the ranks to save a checkpoint and to end.
    """
    threading.Thread(target=_wait, args=(address, key_file, end), name="leaving servers", daemon=True).start()


def _wait(address: str, key_file: str | None, end: Callable[[], None]) -> None:
    with contextlib.suppress(GtrainError, OSError):  # the job is over
        store = KeyValueStore(address, key_file, _POLL_SECONDS)
        while (server := store.poll(_KEY, _POLL_SECONDS)) is None:
            pass
        text = f"{server.decode()} received SIGTERM; the ranks save a checkpoint after their step and end"
        print(f"gtrain: {text}", file=sys.stderr, flush=True)
        end()
