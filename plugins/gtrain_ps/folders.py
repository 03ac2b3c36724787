"""Folders that settings name."""

from __future__ import annotations

from pathlib import Path

from gtrain.errors import ConfigError


def make_folder(folder: Path, key: str) -> None:
    """Make the folder that a setting names, unless it is there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{key}: the folder {folder} cannot be made: {error.strerror}.", hint="name one that can be written to."
        ) from None
