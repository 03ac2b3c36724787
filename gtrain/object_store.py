"""Files at an address of fsspec: an object store such as ``s3://bucket/prefix``, or a folder as ``file:///path``.

Light: imports fsspec when a file is accessed.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtrain.errors import ConfigError, GtrainError

_PIECE = 1 << 20  # bytes per read of a remote file
_LOCAL = ("file", "local")
_MISSING = (FileNotFoundError, NotADirectoryError)
POINTER = "manifest.json"
"""File in a run's folder of a checkpoint that is elsewhere: its entry ``address`` says where."""


def is_address(location: object) -> bool:
    """Return whether a text is an address of fsspec, and not a local path."""
    return "://" in str(location)


def refuse_address(location: object, setting: str, advice: str) -> None:
    """Refuse an address where only a local path can be used; as a path it would name a folder ``s3:``.

    Args:
        location: the value; None is no address.
        setting: the setting that has it.
        advice: what to do instead, for the message.

    Raises:
        ConfigError: ``location`` is an address.
    """
    if is_address(location):
        raise ConfigError(f"{setting}={location} was set; this setting takes a local path.", hint=advice)


def followed(path: Path) -> Path | str:
    """Return the address of a checkpoint whose local folder only points to it; ``path`` if the folder has its files."""
    try:
        address = json.loads((path / POINTER).read_text())["address"]
    except (OSError, ValueError, KeyError, TypeError):
        return path
    return str(address)


class AddressedFolder:
    """A folder at an address of fsspec. Names are paths in the folder.

    Args:
        address: ``s3://bucket/prefix``, ``gs://...``, ``file:///...``.
        setting: the setting that names it, for messages.
        error: class of the errors of :meth:`put` and the other methods.
    """

    def __init__(self, address: str, setting: str, error: type[GtrainError]) -> None:
        self.address = address.rstrip("/")
        self.protocol = address.partition("://")[0]
        self._setting, self._error = setting, error

    # ------------------------------------------------------------------------------------------------ read

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the contents of a file, piece by piece.

        Raises:
            FileNotFoundError: there is no such file.
        """
        files, path = self._opened()
        with self._messages(name, "read"), files.open(f"{path}/{name}", "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def get(self, name: str, target: Path) -> None:
        """Copy a file to a local one.

        Raises:
            FileNotFoundError: there is no such file.
        """
        files, path = self._opened()
        with self._messages(name, "read"):
            files.get_file(f"{path}/{name}".rstrip("/"), str(target))

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name; ``""``: whether the address is that of a file."""
        files, path = self._opened()
        with self._messages(name, "read"):
            try:  # not isfile(), which is false without credentials too
                return bool(files.info(f"{path}/{name}".rstrip("/"))["type"] == "file")
            except _MISSING:
                return False

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the entries of a folder in it by name, with the bytes of each; empty if there is none."""
        files, path = self._opened()
        with self._messages(folder, "read"):
            try:
                entries = files.ls(f"{path}/{folder}".rstrip("/"), detail=True)
            except _MISSING:
                return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: int(entry["size"] or 0) for entry in entries}

    # ------------------------------------------------------------------------------------------------ write

    def put(self, source: Path, name: str) -> None:
        """Copy a local file there."""
        files, path = self._opened()
        with self._messages(name, "written", missing=True):
            files.put_file(str(source), f"{path}/{name}")

    def put_bytes(self, name: str, content: bytes) -> None:
        """Write a file at once: no process ever sees a part of it."""
        files, path = self._opened()
        with self._messages(name, "written", missing=True):
            if self.protocol in _LOCAL:
                scratch = f"{path}/{name}.{secrets.token_hex(4)}.tmp"
                files.pipe_file(scratch, content)
                files.mv(scratch, f"{path}/{name}")
            else:
                files.pipe_file(f"{path}/{name}", content)

    def copy(self, name: str, target: AddressedFolder, target_name: str) -> None:
        """Copy a file to another folder of the same store."""
        files, path = self._opened()
        with target._messages(target_name, "written", missing=True):
            files.cp_file(f"{path}/{name}", f"{target._opened()[1]}/{target_name}")

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with its files, if it exists."""
        files, path = self._opened()
        with self._messages(name, "deleted"), contextlib.suppress(FileNotFoundError):
            files.rm(f"{path}/{name}", recursive=True)

    # ------------------------------------------------------------------------------------------------ inside

    def _opened(self) -> tuple[Any, str]:
        """Return fsspec's file system, which caches its connections, and the path in it.

        Raises:
            ConfigError: the protocol is unknown, or its package is not installed.
        """
        import fsspec.core

        options: dict[str, Any] = {"auto_mkdir": True} if self.protocol in _LOCAL else {"use_listings_cache": False}
        try:
            files, path = fsspec.core.url_to_fs(self.address, **options)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{self._setting}={self.address} was set: {error}.",
                hint="install fsspec's package for this protocol: s3fs for s3://, gcsfs for gs://.",
            ) from error
        return files, path

    @contextlib.contextmanager
    def _messages(self, name: str, action: str, missing: bool = False) -> Iterator[None]:
        """Turn the errors of fsspec and of its clients into this folder's class of errors.

        Args:
            name: the file.
            action: participle of what is done to it.
            missing: whether FileNotFoundError is turned too, such as that of a bucket that does not exist.
        """
        try:
            yield
        except GtrainError:
            raise
        except Exception as error:  # fsspec's clients share no base class of errors
            if isinstance(error, _MISSING) and not missing:
                raise FileNotFoundError(str(error)) from error
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise self._error(
                f"{self.address}/{name}".rstrip("/") + f" cannot be {action}: {reason}",
                hint=f"check the address, the bucket and the credentials ({self._setting}).",
            ) from error
