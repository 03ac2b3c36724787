"""The process of a Ray cluster that a command starts for its job: ``python -m gtrain.launch.ray.own_cluster OPTIONS``.

It runs in a new process group, so that Ctrl-C and other signals to the command's group do not reach Ray before the
command has ended its job. Its standard input closes when the command ends or dies; then it stops Ray and removes its
files.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from typing import Any

import ray

_OBJECT_STORE = 256 << 20  # bytes; ranks and servers exchange their data without it


def main() -> None:
    """Start the cluster, print its address, and serve until the standard input ends."""
    options = json.loads(sys.argv[1])
    folder = tempfile.mkdtemp(prefix="gtrain-ray-", dir=options.pop("folder"))
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
        sys.stdin.read()
    finally:
        ray.shutdown(wait_for_processes=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
