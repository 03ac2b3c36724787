"""Checkpoints and predictions of machines without a shared folder: rank 0 collects their files, and sends its own.

All ranks write the files of a checkpoint into one folder. A rank that does not see the folder that rank 0 made writes
into a temporary one, from which rank 0 fetches the files before it writes the manifest. To load a checkpoint, such a
rank fetches rank 0's files into a temporary folder. The job's key-value store has the addresses; a
:class:`~gtrain.launch.file_server.FileServer` sends the files.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain.graph.store.files import file_crc
from gtrain.launch.file_server import FileServer, ServedFolder
from gtrain.launch.job_store import JobNetwork, broadcast_text, job_network, job_store
from gtrain.launch.key_value import KeyValueStore
from gtrain.object_store import is_address

_SECONDS = 1800.0
"""How long to wait for another rank to announce its files; a rank that ends sooner ends the wait."""
_POLL_SECONDS = 0.05


def agreed_path(environment: ClusterEnvironment, find: Callable[[], Path | str | None]) -> Path | str | None:
    """Return the path or address of the checkpoint that rank 0 finds, on all ranks of a job of several hosts.

    The other machines may not see the folders of earlier runs.

    Args:
        environment: Lightning's cluster environment of this process.
        find: finds the checkpoint on this machine.
    """
    if not job_network(environment).spans_hosts:
        return find()
    path = find() if environment.global_rank() == 0 else None
    text = broadcast_text(environment, "" if path is None else str(path))
    if is_address(text):
        return text
    return Path(text) if text else None


class FolderSharing:
    """Moves the files of checkpoints between the machines of a job. It does nothing in a job of one machine.

    Args:
        environment: Lightning's cluster environment of this process; None: a job of one machine.
    """

    def __init__(self, environment: ClusterEnvironment | None = None) -> None:
        self._environment = environment
        network = None if environment is None else job_network(environment)
        self._network: JobNetwork | None = network if network is not None and network.spans_hosts else None
        self._servers: dict[str, FileServer] = {}
        self._own: Path | None = None
        self._loads: dict[Path, int] = {}

    # ------------------------------------------------------------------------------------------------ write

    def announce(self, folder: Path) -> None:
        """Announce on rank 0 that it made a folder, before the others write into it."""
        if self._network is not None:
            self._entries.set(f"{folder}", secrets.token_hex(8))

    def target(self, folder: Path, marker: str) -> Path:
        """Return the folder that this rank writes into: that of rank 0, or a temporary one.

        Args:
            folder: the folder that rank 0 made.
            marker: a file that rank 0 wrote into it, by which another machine recognises it.
        """
        if self._network is None or (folder / marker).exists():
            return folder
        self._own = Path(tempfile.mkdtemp(prefix="gtrain-"))
        return self._own

    def offer(self, folder: Path) -> None:
        """Offer rank 0 the files that this rank wrote into a temporary folder."""
        if self._machine > 0:
            names = [] if self._own is None else [path.name for path in self._own.iterdir()]
            entry = self._serve(str(folder), self._own or folder, names)
            self._entries.set(f"{self._token(folder)}/{self._rank}", json.dumps(entry))

    def collect(self, folder: Path) -> None:
        """Fetch into rank 0's folder the files that ranks of other machines :meth:`offer`; called after a barrier.

        A rank that has offered nothing by then is lost, and the job continues without it.

        Raises:
            PeerLostError: a rank is gone.
        """
        network = self._network
        if network is None:
            return
        for rank in range(network.ranks_of_machine, network.machines * network.ranks_of_machine):
            key = f"{self._token(folder)}/{rank}"
            if not self._entries.check([key]):
                continue
            entry = json.loads(self._entries.get(key, _SECONDS))
            for name in entry["names"]:
                self._fetch(entry, name, folder / name)

    def withdraw(self, folder: Path) -> None:
        """Delete this rank's temporary folder after rank 0 has collected its files."""
        if self._own is not None:
            if (server := self._servers.pop(str(folder), None)) is not None:
                server.close()
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None

    # ------------------------------------------------------------------------------------------------ read

    @contextlib.contextmanager
    def readable(self, path: Path, manifest: str) -> Iterator[Path]:
        """Provide the checkpoint of rank 0 within the context: its own path, or a temporary copy of it.

        Args:
            path: folder of the checkpoint, or the only file of one; the same on all ranks.
            manifest: name of the file that identifies a folder's contents.

        Raises:
            PeerLostError: rank 0 is gone.
        """
        if self._network is None:
            yield path
            return
        key, number = f"{path}/read", self._loads.get(path, 0) + 1
        self._loads[path] = number
        if not path.exists() and path.with_name(f"{path.name}.old").exists():  # killed while it was replaced
            path = path.with_name(f"{path.name}.old")
        identity = path / manifest if path.is_dir() else path
        if self._rank == 0:
            entry: dict[str, Any] = {"names": []}  # without a checkpoint rank 0 raises the error
            if identity.is_file():
                names = [f"{path.name}/{file.name}" for file in path.iterdir()] if path.is_dir() else [path.name]
                entry = {**self._serve(key, path.parent, names), "crc": file_crc(identity)}
            self._entries.set(key, json.dumps({**entry, "number": number}))
            yield path
            return
        entry = self._entry_of_load(key, number)
        if not entry["names"] or (identity.is_file() and file_crc(identity) == entry["crc"]):
            yield path
            return
        with tempfile.TemporaryDirectory(prefix="gtrain-") as scratch:
            for name in entry["names"]:
                (Path(scratch) / name).parent.mkdir(exist_ok=True)
                self._fetch(entry, name, Path(scratch) / name)
            # the name that rank 0 serves: its path may end in .old
            yield Path(scratch) / entry["names"][0].partition("/")[0]

    def _entry_of_load(self, key: str, number: int) -> dict[str, Any]:
        """Wait for the entry of the ``number``-th time that rank 0 loads a checkpoint.

        A restarted rank counts from 1 again, and takes the entry of the last time.
        """
        while True:
            entry: dict[str, Any] = json.loads(self._entries.get(key, _SECONDS))
            if entry["number"] >= number:
                return entry
            time.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------------------------------------------ inside

    @property
    def _rank(self) -> int:
        return 0 if self._environment is None else self._environment.global_rank()

    @property
    def _machine(self) -> int:
        return 0 if self._network is None else self._network.machine_of(self._rank) or 0

    @property
    def _entries(self) -> KeyValueStore:
        assert self._environment is not None
        return job_store(self._environment).prefixed("gtrain-folders")

    def _token(self, folder: Path) -> str:
        """The identity of this time that the folder is written."""
        return self._entries.get(f"{folder}", _SECONDS).decode()

    def _serve(self, key: str, folder: Path, names: Collection[str]) -> dict[str, Any]:
        """Serve files of a folder instead of those served under the same key; return the address and the names."""
        if (before := self._servers.pop(key, None)) is not None:
            before.close()
        if not names:
            return {"names": []}
        network = self._network
        assert network is not None and network.own_address is not None and network.key_file is not None
        self._servers[key] = FileServer(folder, names, network.own_address, network.key_file)
        return {"names": list(names), "address": self._servers[key].address}

    def _fetch(self, entry: dict[str, Any], name: str, file: Path) -> None:
        assert self._network is not None and self._network.key_file is not None
        with file.open("wb", buffering=0) as target:
            for piece in ServedFolder(entry["address"], self._network.key_file).read(name):
                target.write(piece)
