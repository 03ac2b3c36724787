"""The counter: a server that keeps numbers, in a file so that they outlive it."""

from __future__ import annotations

import json
import os
import signal

from gtrain.strategy.server import ServerContext
from gtrain.wire import Caller, Message


def main(context: ServerContext) -> None:
    """Count until asked to end; print what was counted."""
    file = context.run_dir / f"counted-{context.slot.rank}.json"
    counted: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
    context.run_dir.mkdir(parents=True, exist_ok=True)
    (context.run_dir / f"counter-{context.slot.rank}.pid").write_text(str(os.getpid()))

    def count(message: Message, caller: Caller) -> Message:
        name = message.fields["name"]
        counted[name] = counted.get(name, 0) + 1
        file.write_text(json.dumps(counted))
        return Message({"count": counted[name]})

    def echo(message: Message, caller: Caller) -> Message:
        return Message(message.fields, message.tensors)

    def die(message: Message, caller: Caller) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    context.serve({"count": count, "echo": echo, "die": die})
    print("counted", json.dumps(counted), "in life", context.restarts, flush=True)
