"""Files that are replaced as a whole, and the folder of those that outlast a run. Light."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file so that readers see the old content or the new one; several processes may do so at once.

    They may be on several machines that share the folder, where process ids repeat.

    Raises:
        OSError: the folder does not exist, or the file cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    part.write_text(text)
    os.replace(part, path)


def user_cache() -> Path:
    """Return gtrain's folder in the user's cache folder, ``XDG_CACHE_HOME`` or ``~/.cache``; it may not exist.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gtrain"
