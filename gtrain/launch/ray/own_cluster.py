"""The process of a Ray cluster that a command starts for its job: ``python -m gtrain.launch.ray.own_cluster OPTIONS``.

It runs in a new process group, so that Ctrl-C and other signals to the command's group do not reach Ray before the
command has ended its job. Its standard input closes when the command ends or dies; then it stops Ray and removes its
files. If a process of Ray ends, it says so and ends too, which the command notices.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import sys
import tempfile
from typing import Any

import ray

_OBJECT_STORE = 256 << 20  # bytes; ranks and servers exchange their data without it
_POLL_SECONDS = 0.5


def main() -> None:
    """Start the cluster, print its folder and its address, and serve until the standard input ends."""
    options = json.loads(sys.argv[1])
    folder = tempfile.mkdtemp(prefix="gtrain-ray-", dir=options.pop("parent"))
    print(json.dumps(folder), flush=True)
    try:
        context: Any = ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
            _system_config={"prestart_worker_first_driver": False},  # this process runs no actors
            **options,
        )
        print(json.dumps(context.address_info["gcs_address"]), flush=True)
        node: Any = ray._private.worker._global_node
        while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            if dead := node.dead_processes():
                name, process = dead[0]
                status = process.returncode
                how = f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
                print(f"Ray's {name} {how}", file=sys.stderr, flush=True)
                # What is left of Ray waits for that process; it ends with this one.
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)
    finally:
        ray.shutdown(wait_for_processes=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
