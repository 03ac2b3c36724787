"""The key file of a job, which admits its processes to the job's network. Imports the standard library only."""

from __future__ import annotations

import json
from pathlib import Path

from gtrain.errors import ConfigError

ISOLATED = "isolated network"
"""Takes the place of a key file with ``cluster.isolated=true``: its key is public, so any process can connect."""
_ISOLATED_SECRET = "every process of an isolated network has this key"


def secret_of(key_file: str) -> str:
    """Return the secret of a key file that :meth:`gtrain.wire.Security.save` wrote, or of :data:`ISOLATED`.

    Raises:
        ConfigError: the file cannot be read, or contains no secret.
    """
    if key_file == ISOLATED:
        return _ISOLATED_SECRET
    try:
        content = json.loads(Path(key_file).read_bytes())
        return "/".join((content["server_secret"], content["client_secret"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the key file {key_file} cannot be read: {error}", hint="copy the key file of the job to this machine"
        ) from error
