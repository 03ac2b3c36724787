"""``cluster=slurm``: ranks that ``srun`` started."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from gtrain.launch.launchers.base import RankInfo
from gtrain.launch.launchers.external import ExternalLauncher, RankVariables
from gtrain.launch.slot import LOOPBACK

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment

_INTERACTIVE = ("bash", "interactive")  # job names of an interactive shell, which is not a rank


class Slurm(ExternalLauncher):
    """SLURM's srun started the ranks."""

    name = "slurm"
    restart_hint = "leave out cluster.max_restarts: sbatch --requeue restarts the job."
    even_hint = "place them evenly: srun --ntasks-per-node=N, without --distribution=cyclic."
    variables = RankVariables(
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_NODEID", "SLURM_NNODES")
    )
    step_variables: ClassVar[Mapping[str, str]] = {
        "SLURM_STEP_NUM_TASKS": "SLURM_NTASKS",
        "SLURM_STEP_NUM_NODES": "SLURM_NNODES",
        "SLURM_STEP_TASKS_PER_NODE": "SLURM_NTASKS_PER_NODE",
    }
    """Variables of a step, and those of its job, or of its options, that they take the place of."""
    attempt_variable = "SLURM_RESTART_COUNT"
    job_variables = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID")

    def detect(self, environ: Mapping[str, str] = os.environ) -> bool:
        ranks = "SLURM_NTASKS" in environ and "SLURM_PROCID" in environ
        return ranks and environ.get("SLURM_JOB_NAME") not in _INTERACTIVE

    def rank_info(self, environ: Mapping[str, str] = os.environ) -> RankInfo:
        """The place in the step, which may have fewer ranks than its job has room for."""
        step = {job: environ[name] for name, job in self.step_variables.items() if name in environ}
        # Numbers of ranks are such as 4(x2): 4 on each of 2 machines. Of 4,3 the first is that of not all machines.
        return super().rank_info({**environ, **{name: re.split(r"[(,]", value)[0] for name, value in step.items()}})

    def job_id(self, environ: Mapping[str, str] = os.environ) -> str:
        """One job may run several steps, each a training. A requeued job numbers its steps from 0 again."""
        return f"{self.name} {environ.get('SLURM_JOB_ID', '')}/{environ.get('SLURM_STEP_ID', '')}"

    def environment(self) -> ClusterEnvironment:
        """Lightning's environment refuses ``--ntasks``; only its reader of lists of nodes is used."""
        from lightning.fabric.plugins.environments import SLURMEnvironment

        from gtrain.launch.rank_environment import RankEnvironment

        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST") or LOOPBACK
        address = os.environ.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(nodes)
        return RankEnvironment(self.rank_info(), address, int(os.environ.get("MASTER_PORT") or _port()))


def _port(environ: Mapping[str, str] = os.environ) -> int:
    """Return a port that steps of a job, and of jobs with near numbers, hardly ever share."""
    job, step = (int(environ.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 15000 + (job + 2731 * step) % 10000  # 2731 has no common factor with 10000
