"""Acts on a Ray job from outside of it: ``act.py NAME ...`` kills actors, ``act.py drain NAME`` drains an actor's node.

Prints the names of the actors that lived before.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import ray
from ray.util import list_named_actors


def drain(name: str, namespace: str) -> None:
    """Tell Ray that the node of a machine's actor is about to be preempted."""
    _, node = ray.get(ray.get_actor(name, namespace).node.remote())
    address = ray.get_runtime_context().gcs_address
    reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test")
    command = (sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address, "--node-id", node)
    subprocess.run([*command, *reason, "--deadline-remaining-seconds", "600"], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
    actors = {each["name"]: each["namespace"] for each in list_named_actors(all_namespaces=True)}
    if sys.argv[1:2] == ["drain"]:
        drain(sys.argv[2], actors[sys.argv[2]])
    else:
        for name in sys.argv[1:]:
            ray.kill(ray.get_actor(name, actors[name]), no_restart=False)
    print(json.dumps(sorted(actors)))
