"""A local copy of a store that is elsewhere: each file is fetched when it is first read."""

from __future__ import annotations

import contextlib
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from gtrain.errors import StoreError
from gtrain.graph.store.lock import file_lock
from gtrain.graph.store.manifest import Manifest
from gtrain.graph.store.store import Store
from gtrain.object_store import AddressedFolder

MANIFEST = "manifest.json"


class Origin(Protocol):
    """The place that a replica fetches its files from."""

    @property
    def address(self) -> str:
        """The address of the store, for messages."""

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the contents of a file, piece by piece.

        Args:
            name: path of the file relative to the store.

        Raises:
            StoreError: the file cannot be read.
        """


class Replica(Store):
    """A store whose files are fetched from an :class:`Origin` when they are first read.

    Any number of processes may share the folder of a replica: a file is fetched by one of them, into a temporary file
    that is checked against the manifest and then renamed.
    """

    def __init__(self, path: Path, manifest: Manifest, origin: Origin) -> None:
        super().__init__(path, manifest)
        self._origin = origin

    @classmethod
    def of(cls, origin: Origin, folder: Path, name: str) -> Replica:
        """Open the replica of a store.

        Args:
            origin: the store.
            folder: folder of the stores on this machine.
            name: name of the store's folder. That of the replica ends in the checksum of the manifest, so that the
                files of another store are never used.

        Raises:
            StoreError: the manifest cannot be read.
        """
        text = b"".join(origin.read(MANIFEST))
        path = folder / f"{name}.replica-{zlib.crc32(text):08x}"
        manifest = Manifest.from_json(text, origin.address)
        for entry in (*manifest.sizes, *manifest.checksums):
            if entry.startswith("/") or ".." in entry.split("/"):  # it would be written outside the replica
                raise StoreError(
                    f"{origin.address}: manifest.json names a file outside the store: {entry}",
                    hint="gtrain wrote no such manifest; do not use this store.",
                )
        file = path / MANIFEST
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with _renamed(file) as target:
                target.write(text)
        return cls(path, manifest, origin)._with_all_facts()

    def _file(self, name: str) -> Path:
        file = super()._file(name)
        if not file.exists():
            with file_lock(file.with_name(f"{file.name}.lock"), _ignore):
                if not file.exists():
                    self._fetch(name, file)
        return file

    def _fetch(self, name: str, file: Path) -> None:
        with _renamed(file) as target:
            crc = 0
            for piece in self._origin.read(name):
                crc = zlib.crc32(piece, crc)
                target.write(piece)
            if crc != self.manifest.checksums[name]:
                raise StoreError(
                    f"{self._origin.address}/{name} is damaged: its checksum differs from the manifest's",
                    hint="prepare the store again with gtrain partition.",
                )


class RemoteFolder:
    """A store in an object store or a remote folder, read by fsspec.

    Args:
        url: the store's folder: ``s3://bucket/stores/NAME``, ``gs://...``, ``file:///...``.
    """

    def __init__(self, url: str) -> None:
        self._files = AddressedFolder(url, "data.remote_store", StoreError)

    @property
    def address(self) -> str:
        """The address of the store."""
        return self._files.address

    @property
    def name(self) -> str:
        """The name of the store's folder."""
        return self.address.rpartition("/")[2]

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the contents of a file; see :meth:`Origin.read`."""
        try:
            yield from self._files.read(name)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self.address} has no {name}",
                hint=f"write the store there with gtrain partition data.remote_store={self.address}",
            ) from error

    def write(self, store: Store) -> None:
        """Copy a store there, unless it is there already. The manifest is written last: no process sees a part of it.

        Raises:
            StoreError: another store is there, whose files jobs may be reading; or a file cannot be written.
        """
        manifest = (store.path / MANIFEST).read_bytes()
        if self._files.exists(MANIFEST):
            if b"".join(self._files.read(MANIFEST)) == manifest:
                return
            raise StoreError(
                f"{self.address} has another store, which jobs may be reading",
                hint="set data.remote_store to a new address, or delete that store first.",
            )
        for name in store.manifest.sizes:
            self._files.put(store.path / name, name)
        self._files.put_bytes(MANIFEST, manifest)


@contextlib.contextmanager
def _renamed(file: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``file`` that is renamed to it at the end, and deleted after an error."""
    # Machines that share the folder may have equal process ids.
    scratch = file.with_name(f"{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        with scratch.open("wb", buffering=0) as target:
            yield target
        scratch.rename(file)
    finally:
        scratch.unlink(missing_ok=True)


def _ignore(_: str) -> None:
    """Take the place of the log: fetching a file is not reported."""
