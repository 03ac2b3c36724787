"""``cluster=slurm``: ranks that ``srun`` started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

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
    attempt_variable = "SLURM_RESTART_COUNT"
    job_variables = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID")

    def detect(self, environ: Mapping[str, str] = os.environ) -> bool:
        ranks = "SLURM_NTASKS" in environ and "SLURM_PROCID" in environ
        return ranks and environ.get("SLURM_JOB_NAME") not in _INTERACTIVE

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
    """Return a port that the step shares with no other step of its job, nor with a neighbouring job."""
    job, step = (int(environ.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 15000 + (job + 2731 * step) % 10000  # 2731 has no common factor with 10000
