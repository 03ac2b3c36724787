"""Being asked to end: SIGTERM and Ctrl-C as an event that a server's loop looks at."""

from __future__ import annotations

import signal
import threading

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_event() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets; a second one ends the process. To be called before any thread is.

    The signals are blocked and a thread waits for them: a handler would run between any two instructions of the main
    thread, and to set an event whose lock that thread holds is a deadlock.
    """
    event = threading.Event()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # threads that start later inherit it

    def wait() -> None:
        signal.sigwait(_SIGNALS)
        event.set()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # of this thread, which takes the second
        signal.pause()

    threading.Thread(target=wait, name="gtrain-stop", daemon=True).start()
    return event
