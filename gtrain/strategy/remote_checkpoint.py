"""Checkpoints in an object store, which cannot rename: every rank writes its own objects, and rank 0 the manifest last.

::

    s3://bucket/prefix/last.ckpt/
        manifest.json       names the folder of the objects; replaced in one step
        writing.json        while a checkpoint is written: the folder of its objects, and the run that writes it
        <16 hex digits>/    the files of a checkpoint's folder, see gtrain.strategy.checkpoint
            entries-<r>.json    names, sizes and checksums of the files that rank r wrote

A reader that sees the manifest sees a complete checkpoint. The objects of its predecessor are deleted after the
manifest was replaced; a reader that still needs them starts again with the new one.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain.errors import CheckpointError, ConfigError, PeerLostError
from gtrain.graph.store.files import file_crc
from gtrain.launch.job_store import job_network, job_store
from gtrain.object_store import AddressedFolder

MANIFEST = "manifest.json"
_MARKER = "writing.json"
_OBJECTS = re.compile("[0-9a-f]{16}")
_SECONDS = 1800.0
"""How long to wait for the rank that downloads a checkpoint; one that ends sooner ends the wait."""
_DOWNLOADS = 3
"""How often a download starts again because the checkpoint was replaced meanwhile."""
_SERVED = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "file", "local")
"""Protocols by which a file is replaced in one step."""
_DIRPATH = "callbacks.checkpoint.dirpath"

_started: set[tuple[str, str]] = set()
"""Addresses of the checkpoints that this process has started to write, each with the writer."""


def check_dirpath(address: str) -> None:
    """Refuse a folder of checkpoints that cannot be written to; writes a small file and deletes it.

    Raises:
        ConfigError: the protocol is not served, its package is not installed, or writing fails.
    """
    files = AddressedFolder(address, _DIRPATH, CheckpointError)
    if files.protocol not in _SERVED:
        raise ConfigError(
            f"{_DIRPATH}={address} was set; {files.protocol}:// cannot replace a checkpoint in one step.",
            hint="set a local folder, or an address of s3://, gs://, az:// or file://.",
        )
    name = f".gtrain-{secrets.token_hex(8)}"
    try:
        files.put_bytes(name, b"gtrain tests whether it can write here")
        files.remove(name)
    except CheckpointError as error:
        reason = error.message.partition(f"{name} ")[2]
        raise ConfigError(f"{_DIRPATH}={address} was set; a file there {reason}", hint=error.hint) from error


class RemoteCheckpoint:
    """A checkpoint at an address of fsspec.

    Args:
        address: of the checkpoint's folder, ``s3://bucket/prefix/last.ckpt``, or of a single file that Lightning wrote.
        writer: identity of the run that writes it, the same on all ranks.
        setting: the setting that names it, for messages.
    """

    def __init__(self, address: str, writer: str = "", setting: str = "ckpt_path") -> None:
        self._files = AddressedFolder(address, setting, CheckpointError)
        self._setting = setting
        self.address = self._files.address
        self._writer = writer

    # ------------------------------------------------------------------------------------------------ write

    def begin(self) -> None:
        """Announce on rank 0 that the checkpoint is written, before the others :meth:`add` their files.

        Raises:
            CheckpointError: another run writes to the same address since this one started.
        """
        manifest = self._json(MANIFEST) or {}
        writer = (self._json(_MARKER) or manifest).get("writer", self._writer)
        if (self.address, self._writer) in _started and writer != self._writer:
            raise self._other_writer(writer)
        for name in self._files.sizes():
            if _OBJECTS.fullmatch(name) and name != manifest.get("objects"):
                self._files.remove(name)  # a killed run left it
        marker = {"objects": secrets.token_hex(8), "writer": self._writer}
        self._files.put_bytes(_MARKER, json.dumps(marker).encode())
        _started.add((self.address, self._writer))

    def add(self, folder: Path, rank: int) -> None:
        """Write the files of a local folder, those of one rank, into the checkpoint that rank 0 started."""
        objects, entries = self._objects(), {}
        for file in sorted(folder.iterdir()):
            self._files.put(file, f"{objects}/{file.name}")
            entries[file.name] = {"bytes": file.stat().st_size, "crc32": file_crc(file)}
        self._files.put_bytes(f"{objects}/entries-{rank}.json", json.dumps(entries).encode())

    @property
    def is_written(self) -> bool:
        """Whether the checkpoint was started and is not finished."""
        return self._files.exists(_MARKER)

    def added(self) -> dict[str, Any]:
        """Return the entries of the manifest that describe the files which all ranks have added."""
        objects = self._objects()
        names = [name for name in self._files.sizes(objects) if name.startswith("entries-")]
        files = [(self._json(f"{objects}/{name}") or {}).items() for name in names]
        return {
            "objects": objects,
            "writer": self._writer,
            "files": dict(sorted(entry for entries in files for entry in entries)),
        }

    def finish(self, manifest: str) -> None:
        """Replace the manifest on rank 0, after all ranks have added their files, and delete the predecessor."""
        before = self._json(MANIFEST)
        self._files.put_bytes(MANIFEST, manifest.encode())
        if before is not None:
            self._remove_files(before, json.loads(manifest))
        self._files.remove(_MARKER)

    def remove(self) -> None:
        """Delete the checkpoint, its manifest first."""
        if (manifest := self._json(MANIFEST)) is not None:
            self._files.remove(MANIFEST)
            self._remove_files(manifest, {})
        self._files.remove(_MARKER)

    def preserve(self, name: str) -> None:
        """Copy the checkpoint to another name in the same folder; no process sees a part of it.

        A checkpoint of this run that has the name is kept, one of another run is replaced.
        """
        other = RemoteCheckpoint(f"{self.address.rpartition('/')[0]}/{name}")
        target, text = other._files, self.manifest_text()
        manifest = json.loads(text)
        if target.exists(MANIFEST):
            if json.loads(other.manifest_text()).get("writer") == manifest.get("writer"):
                return
            other.remove()
        for name in manifest["files"]:
            self._files.copy(_path(manifest, name), target, _path(manifest, name))
        target.put_bytes(MANIFEST, text.encode())

    # ------------------------------------------------------------------------------------------------ read

    def exists(self) -> bool:
        """Whether there is a complete checkpoint, or a file."""
        return self._files.exists(MANIFEST) or self.is_file

    @property
    def is_file(self) -> bool:
        """Whether the address is that of a single file."""
        return self._files.exists("")

    def manifest_text(self) -> str:
        """Return the text of the manifest.

        Raises:
            CheckpointError: there is no checkpoint; the message lists those in the same folder.
        """
        try:
            return b"".join(self._files.read(MANIFEST)).decode()
        except FileNotFoundError as error:
            folder, _, name = self.address.rpartition("/")
            near = {of: _checkpoints(of) for of in (folder, self.address)}
            where, names = next(((of, names) for of, names in near.items() if names), (folder, []))
            listed = f"; {where} has {', '.join(names)}." if names else "."
            raise CheckpointError(
                f"{self._setting}={self.address} was set; no such checkpoint exists{listed}",
                hint=f"give the address of a checkpoint, such as {where}/{names[0] if names else name or 'last.ckpt'}.",
            ) from error

    def check_complete(self, manifest: Mapping[str, Any]) -> None:
        """Check that all files of the manifest exist and have its sizes, without reading them.

        Raises:
            CheckpointError: a file is missing or has another size.
        """
        sizes = self._files.sizes(manifest.get("objects", ""))
        for name, entry in manifest["files"].items():
            if sizes.get(name) != entry["bytes"]:
                state = "is missing" if name not in sizes else f"has {sizes[name]} bytes instead of {entry['bytes']}"
                raise CheckpointError(
                    f"{self.address} is not a complete checkpoint: {name} {state}.", hint="use another checkpoint."
                )

    def fetch(self, target: Path) -> None:
        """Copy the checkpoint to a local folder, or the single file to a local file.

        Raises:
            CheckpointError: it is missing or incomplete.
        """
        if not self._files.exists(MANIFEST) and self.is_file:
            self._files.get("", target)
            return
        text = self.manifest_text()
        for _ in range(_DOWNLOADS):
            manifest = json.loads(text)
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            try:
                for name in manifest["files"]:
                    self._files.get(_path(manifest, name), _inside(target, name))
            except FileNotFoundError as error:
                before, text = text, self.manifest_text()
                if text != before:  # it was replaced meanwhile
                    continue
                raise CheckpointError(
                    f"{self.address} is not a complete checkpoint: {name} is missing.", hint="use another checkpoint."
                ) from error
            (target / MANIFEST).write_text(text)
            return
        raise CheckpointError(
            f"{self.address} was replaced {_DOWNLOADS} times while it was read.",
            hint="wait until the run that writes it has ended, or read its best checkpoint.",
        )

    # ------------------------------------------------------------------------------------------------ inside

    def _objects(self) -> str:
        """Return the folder of the checkpoint that rank 0 started.

        Raises:
            CheckpointError: another run has started to write to the same address since.
        """
        marker = self._json(_MARKER) or {"writer": None}
        if marker["writer"] != self._writer:
            raise self._other_writer(marker["writer"])
        return str(marker["objects"])

    def _other_writer(self, writer: str | None) -> CheckpointError:
        return CheckpointError(
            f"{self.address} is written by another run, {writer or 'which has removed that of this run'}.",
            hint=f"give each run a separate {_DIRPATH}, such as 's3://bucket/${{now:%Y-%m-%d-%H-%M-%S}}'.",
        )

    def _json(self, name: str) -> dict[str, Any] | None:
        """Return the contents of a JSON file; None if it does not exist or is damaged."""
        try:
            content = json.loads(b"".join(self._files.read(name)))
        except (FileNotFoundError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def _remove_files(self, manifest: Mapping[str, Any], successor: Mapping[str, Any]) -> None:
        objects = manifest.get("objects")
        if objects is not None and objects == successor.get("objects"):
            return
        # A checkpoint that was copied from a disk has its files beside the manifest.
        for name in manifest.get("files", ()) if objects is None else (objects,):
            self._files.remove(name)


class LocalCopies:
    """Temporary copies of remote checkpoints on this machine, one for all its ranks.

    Args:
        environment: Lightning's cluster environment of this process; None: a single process.
    """

    def __init__(self, environment: ClusterEnvironment | None = None) -> None:
        self._environment = environment
        self._numbers: dict[str, int] = {}  # loads of each address so far, equal on all ranks
        self._copies: list[tempfile.TemporaryDirectory[str]] = []

    @contextlib.contextmanager
    def readable(self, address: str, run_folder: Path | None) -> Iterator[Path]:
        """Provide a local copy; all ranks call this together. It exists until :meth:`close`.

        Args:
            address: of the checkpoint.
            run_folder: folder of the run, in which the copy is made if this machine has it.

        Raises:
            CheckpointError: it is missing or incomplete; errors within the context name the address.
            PeerLostError: the rank that downloads it is gone.
        """
        path = self._shared(address, run_folder)
        try:
            yield path
        except CheckpointError as error:
            message, hint = (text and text.replace(str(path), address) for text in (error.message, error.hint))
            raise CheckpointError(str(message), hint=hint) from error

    def own(self, address: str, run_folder: Path | None, setting: str) -> Path:
        """Return a copy that this rank alone makes and reads; ``setting`` names the address."""
        return self._download(address, run_folder, 0, setting)

    def close(self) -> None:
        """Delete the copies that this rank made."""
        while self._copies:
            self._copies.pop().cleanup()

    def _shared(self, address: str, run_folder: Path | None) -> Path:
        environment = self._environment
        if environment is None or environment.world_size() == 1:
            return self._download(address, run_folder, 0)
        network, rank = job_network(environment), environment.global_rank()
        first = rank - rank % network.ranks_of_machine if network.spans_hosts else 0
        number = self._numbers[address] = self._numbers.get(address, 0) + 1
        entries, key = job_store(environment).prefixed("gtrain-copies"), f"{address}/{first}/{number}"
        if rank != first:
            if not (path := entries.get(key, _SECONDS).decode()):
                raise PeerLostError(f"{network.name_of(first)} could not read {address}")
            return Path(path)
        try:
            copy = self._download(address, run_folder, first)
        except BaseException:
            entries.set(key, "")
            raise
        entries.set(key, str(copy))
        return copy

    def _download(self, address: str, run_folder: Path | None, first: int, setting: str = "ckpt_path") -> Path:
        prefix, parent = f"checkpoint-copy-{first}-", None
        if run_folder is not None and run_folder.is_dir():
            parent = run_folder
            for left in parent.glob(f"{prefix}*") if not self._copies else ():  # by a killed run
                shutil.rmtree(left, ignore_errors=True)
        self._copies.append(tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True))
        path = Path(self._copies[-1].name, address.rstrip("/").rpartition("/")[2])
        RemoteCheckpoint(address, setting=setting).fetch(path)
        return path


def _path(manifest: Mapping[str, Any], name: str) -> str:
    """Return the path of a checkpoint's file in its folder."""
    objects = manifest.get("objects")
    return name if objects is None else f"{objects}/{name}"


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a local folder, which the name must not leave."""
    if name in ("", "..") or "/" in name:
        raise CheckpointError(
            f"a manifest names the file {name!r}, which is outside of the checkpoint.",
            hint="gtrain wrote no such manifest; do not use this checkpoint.",
        )
    return folder / name


def _checkpoints(address: str) -> list[str]:
    """Return the names of the checkpoints in a folder."""
    return sorted(name for name in AddressedFolder(address, "ckpt_path", CheckpointError).sizes() if ".ckpt" in name)
