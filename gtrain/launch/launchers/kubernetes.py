"""``cluster=kubernetes``: the pods of an Indexed Job, which a JobSet or Kubeflow Trainer created."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from gtrain.errors import ConfigError
from gtrain.launch import slot
from gtrain.launch.children import resolve
from gtrain.launch.launchers.manual import Manual
from gtrain.launch.request import JobRequest
from gtrain.launch.slot import ServerRoster

INDEX = "JOB_COMPLETION_INDEX"
"""The number of a pod in its Indexed Job, which Kubernetes sets."""
JOB, ATTEMPT = "JOBSET_UID", "JOBSET_RESTART_ATTEMPT"
"""Set by the manifest from the pod's labels ``jobset.sigs.k8s.io/jobset-uid`` and ``.../restart-attempt``."""
RESUME = "gtrain.launch.joining:resume_earlier_attempt"


class Kubernetes(Manual):
    """One pod of an Indexed Job per machine; the pods meet at cluster.rendezvous."""

    name = "kubernetes"
    restart_hint = "leave out cluster.max_restarts: failurePolicy.maxRestarts of the JobSet restarts the job."

    def check(self, cfg: DictConfig) -> None:
        """Set the machine's number to that of the pod."""
        super().check(cfg)
        index = _index()
        if index is None:
            raise ConfigError(
                f"cluster=kubernetes was set, and the environment variable {INDEX} is absent.",
                hint="set completionMode: Indexed in the Job of the ranks; see examples/kubernetes/jobset.yaml.",
            )
        if cfg.cluster.rank is not None and cfg.cluster.rank != index:
            raise ConfigError(
                f"cluster.rank={cfg.cluster.rank} was set; this pod has the completion index {index}.",
                hint="leave out cluster.rank.",
            )
        cfg.cluster.rank = index

    def owns_run_folder(self, cluster: Any) -> bool:
        return _index() in (None, 0)

    def continue_job(self, request: JobRequest) -> int:
        """Machine 0 resumes from the last checkpoint of this JobSet after a restart or a suspension."""
        cfg, restarts = request.cfg, int(os.environ.get(ATTEMPT) or 0)
        if JOB not in os.environ or cfg.cluster.rank != 0 or cfg.verb != "train":
            return restarts
        slot.set_roster(ServerRoster(), max(1, restarts))  # an earlier attempt is looked up by the JobSet's id
        new = cfg.paths.run
        resolve(RESUME)(cfg, f"{self.name} {os.environ[JOB]}")
        return max(restarts, int(cfg.paths.run != new))

    def wait_seconds(self, cfg: DictConfig) -> float:
        """A pod may start before its name is in the cluster's DNS."""
        return float(cfg.cluster.timeout_seconds)


def _index(environ: Mapping[str, str] = os.environ) -> int | None:
    index = environ.get(INDEX)
    return int(index) if index else None
