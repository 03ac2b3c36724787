"""Machines without a shared folder: machine 0 prepares the store, and the others fetch the files that they read.

Rank 0 publishes the name of the store, the checksum of its manifest and the address of a
:class:`~gtrain.launch.file_server.FileServer` in the job's key-value store. A machine whose own folder has the same
store opens that one, so machines that do share a folder fetch nothing.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain.data.module import GraphDataModule
from gtrain.graph.store import Store
from gtrain.graph.store.files import file_crc
from gtrain.graph.store.replica import MANIFEST, Replica
from gtrain.launch.environment import WaitReport
from gtrain.launch.file_server import FileServer, ServedFolder
from gtrain.launch.job_store import POLL_SECONDS, JobNetwork, job_network, job_store
from gtrain.launch.key_value import KeyValueStore

_servers: list[FileServer] = []
"""They serve as long as this process lives."""
_shared = 0
"""Stores that this process has shared or opened so far: the key of the next one, equal on all ranks."""
_shared_modules: weakref.WeakSet[GraphDataModule] = weakref.WeakSet()
"""Data modules of these stores: a strategy prepares a data module again that the task has prepared."""


def prepare_shared(data: GraphDataModule, environment: ClusterEnvironment) -> None:
    """Prepare the store on machine 0, and open it or a replica of it on the others.

    All ranks call this in the same order of data modules; later calls for the same one change nothing.

    Raises:
        GtrainError: see :meth:`~gtrain.data.module.GraphDataModule.prepare_data`.
        PeerLostError: rank 0 ended.
    """
    network, rank = job_network(environment), environment.global_rank()
    if not network.spans_hosts or data.has_store or data in _shared_modules:
        data.prepare_data()
        return
    global _shared
    _shared += 1
    _shared_modules.add(data)
    on_first = network.machine_of(rank) == 0
    if on_first:
        data.prepare_data()
    published = _PublishedStore(environment, network, str(_shared))
    if rank == 0:
        published.serve(data.open_store())
    elif not on_first:
        data.use_store(published.open(data))


@dataclass
class _PublishedStore:
    """A store that rank 0 publishes."""

    environment: ClusterEnvironment
    network: JobNetwork
    key: str

    def serve(self, store: Store) -> None:
        """Serve the files of a store and publish it; called on rank 0."""
        assert self.network.own_address is not None and self.network.key_file is not None
        names = {*store.manifest.sizes, MANIFEST}
        server = FileServer(store.path, names, self.network.own_address, self.network.key_file)
        _servers.append(server)
        entry = {"name": store.path.name, "crc": file_crc(store.path / MANIFEST), "address": server.address}
        self._registry.set(self.key, json.dumps(entry))

    def open(self, data: GraphDataModule) -> Store:
        """Open the store that rank 0 published, or a replica of it; called on the other machines."""
        entry = self._wait()
        own = data.store / entry["name"]
        if (own / MANIFEST).is_file() and file_crc(own / MANIFEST) == entry["crc"]:
            return Store.open(own)
        return Replica.of(self, data.store, entry["name"])

    @property
    def address(self) -> str:
        """The address of the store, for messages."""
        return f"the store of {self.network.name_of(0)}"

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the contents of a file; see :class:`gtrain.graph.store.replica.Origin`."""
        assert self.network.key_file is not None
        # The address is looked up for each file: a restarted rank 0 serves at another one.
        return ServedFolder(self._wait()["address"], self.network.key_file).read(name)

    @property
    def _registry(self) -> KeyValueStore:
        """The part of the job's key-value store in which stores are published."""
        return job_store(self.environment).prefixed("gtrain-data")

    def _wait(self) -> dict[str, Any]:
        """Wait until rank 0 has published the store, which takes as long as it prepares the store."""
        registry, report = self._registry, WaitReport(f"{self.network.name_of(0)} to prepare the data")
        while (value := registry.poll(self.key, POLL_SECONDS)) is None:
            report()
        return dict(json.loads(value))
