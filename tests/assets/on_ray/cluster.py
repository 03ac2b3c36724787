"""A Ray cluster, which prints its address and ends with its standard input: ``cluster.py FOLDER NODES [HIDDEN]``.

Each node claims two GPUs. With HIDDEN, one more node runs in a separate mount namespace, where that folder is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": sys.argv[1]}
    os.makedirs(os.path.join(sys.argv[1], "ray"), exist_ok=True)  # Cluster writes its address there
    cluster = Cluster()
    for _ in range(int(sys.argv[2])):
        cluster.add_node(num_cpus=8, num_gpus=2, include_dashboard=False, temp_dir=sys.argv[1])
    if len(sys.argv) > 3:
        ray = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=8", "--address")
        script = 'mount -t tmpfs none "$0" && exec "$@"'
        command = ("unshare", "--mount", "bash", "-c", script, sys.argv[3], *ray, cluster.address)
        hidden = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    print(cluster.address, flush=True)
    sys.stdin.read()
    if len(sys.argv) > 3:
        hidden.terminate()
        hidden.wait()
    cluster.shutdown()
