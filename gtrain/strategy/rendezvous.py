"""The job's key-value store: where ranks meet before they are a group."""

from __future__ import annotations

import os
from datetime import timedelta

from lightning.fabric.plugins.environments import ClusterEnvironment
from torch.distributed import PrefixStore, Store, TCPStore

from gtrain.launch.environment import AgentEnvironment

_store: Store | None = None
_agreed = 0


def job_store(environment: ClusterEnvironment, timeout: timedelta = timedelta(minutes=30)) -> Store:
    """This process's connection to the job's store, made once; rank 0 serves it unless the launcher already does."""
    global _store
    if _store is None:
        descriptor = environment.context.store_fd if isinstance(environment, AgentEnvironment) else None
        launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        served_here = environment.global_rank() == 0 and (descriptor is not None or not launcher_serves)
        _store = TCPStore(
            environment.main_address,
            environment.main_port,
            environment.world_size(),
            served_here,
            timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    return _store


def agree(environment: ClusterEnvironment, text: str) -> str:
    """Rank 0's text, on every rank; all ranks call it the same number of times, in the same order."""
    global _agreed
    _agreed += 1
    store = PrefixStore("gtrain-agreed", job_store(environment))
    if environment.global_rank() == 0:
        store.set(str(_agreed), text)
    return store.get(str(_agreed)).decode()
