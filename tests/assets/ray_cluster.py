"""A Ray cluster, which prints its address and ends with its standard input: ``ray_cluster.py FOLDER NODES``."""

from __future__ import annotations

import os
import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster()
    for _ in range(int(sys.argv[2])):
        cluster.add_node(num_cpus=8, include_dashboard=False, temp_dir=sys.argv[1])
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
