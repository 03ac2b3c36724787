"""Lightning's cluster environment of a rank whose launcher has none in Lightning."""

from __future__ import annotations

from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain.launch.launchers.base import RankInfo


class RankEnvironment(ClusterEnvironment):
    """The environment of a rank that another launcher started.

    Args:
        rank_info: the rank.
        main_address: how this process reaches the machine of rank 0.
        main_port: the port of the job's key-value store there; 0 if it has none.
    """

    def __init__(self, rank_info: RankInfo, main_address: str, main_port: int) -> None:
        self._rank_info, self._main_address, self._main_port = rank_info, main_address, main_port

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._main_address

    @property
    def main_port(self) -> int:
        return self._main_port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._rank_info.size

    def set_world_size(self, size: int) -> None:
        """Ignored: the launcher sets it."""

    def global_rank(self) -> int:
        return self._rank_info.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the launcher sets it."""

    def local_rank(self) -> int:
        return self._rank_info.local

    def node_rank(self) -> int:
        return self._rank_info.machine
