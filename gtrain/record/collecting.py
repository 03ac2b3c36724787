"""Brings the record of ranks on other machines to rank 0."""

from __future__ import annotations

from pathlib import Path

from gtrain.record.events import record_folder
from gtrain.strategy.base import GraphStrategy


def collect_record(strategy: GraphStrategy, run_dir: Path, hosts: list[str]) -> None:
    """Copy the files of ranks of other machines to rank 0's folder; all ranks call this at the end of a run.

    Args:
        strategy: its group has the ranks.
        run_dir: the run's folder, whose path is the same on all machines.
        hosts: machine of each rank; nothing is sent if they are the same.
    """
    if len(set(hosts)) == 1:
        return
    folder, content = record_folder(run_dir), {}
    if strategy.global_rank and hosts[strategy.global_rank] != hosts[0]:
        own = folder.glob(f"*rank-{strategy.global_rank}.*") if folder.is_dir() else ()
        content = {path.name: path.read_bytes() for path in own}
    for files in strategy.group.all_gather_object(content):
        for name, data in files.items() if strategy.is_global_zero else ():
            path = folder / Path(name).name
            if not path.exists():  # else the machines share the folder
                path.write_bytes(data)
