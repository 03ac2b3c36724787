"""Compare release and settings of ranks that different commands started, before any of them reads data.

Rank 0 publishes its settings in the job's key-value store, and every other rank compares its own with them. A rank
whose settings differ reports it in one line and ends; the others, which wait for it, print the same line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtrain import __version__
from gtrain.config import plain
from gtrain.errors import ConfigError
from gtrain.launch.job_store import await_key
from gtrain.launch.key_value import KeyValueStore

CHECK_SECONDS = 1.0
"""How often a rank that waits for another rank calls :func:`check_refused`."""
READ_SECONDS = 10.0
"""How long rank 0, with which the store may end, waits until the others have read a refusal."""
_POLL_SECONDS = 0.02
_HERE, _READ = "ranks here", "ranks that read the refusal"
"""Keys of the numbers of ranks that called :func:`check_same`, and of those that end because of a refusal."""
_RELEASE = "gtrain"
_MACHINE_SPECIFIC = ("cluster", "logger", "output", "paths", "role", "run")
"""Groups and keys that may differ between machines."""
_FOLDERS = ("data.root", "data.store")
_PATH = "/"
"""Replaces values with a slash: paths may differ between machines."""
_SHOWN = 3


def comparable(cfg: DictConfig) -> dict[str, str]:
    """Return the release of gtrain and the settings that all ranks of a job must share, as text by key.

    Settings that interpolate another setting are left out; those that interpolate an environment variable are not.
    """
    settings = {_RELEASE: __version__}
    raw = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(raw, dict)
    for group, node in plain(cfg).items():
        if group not in _MACHINE_SPECIFIC:
            _flatten(str(group), node, raw[group], settings)
    return settings


def check_same(job: KeyValueStore, rank: int, name: str, settings: Mapping[str, str]) -> None:
    """Publish the settings of rank 0, or compare those of another rank with them.

    Args:
        job: the job's store.
        rank: this rank.
        name: its name in messages.
        settings: see :func:`comparable`.

    Raises:
        ConfigError: a setting or the release differs; the message has the key and both values.
    """
    store = job.prefixed("gtrain-settings")
    store.add(_HERE, 1)
    if rank == 0:
        store.set("rank 0", json.dumps({"name": name, "settings": settings}))
        return
    first = json.loads(await_key(store, "rank 0", "rank 0 (machine 0)"))
    different = _differences(settings, first["settings"])
    if different:
        error = _refusal(f"{name} has {_listed(different, 0)}, and {first['name']} has {_listed(different, 1)}.")
        store.set("refused", error.message)
        store.add(_READ, 1)
        raise error


def check_release(job: KeyValueStore, name: str) -> None:
    """Compare the release of a server that was started by hand with that of rank 0.

    Raises:
        ConfigError: the releases differ; the message has both.
    """
    first = json.loads(await_key(job.prefixed("gtrain-settings"), "rank 0", "rank 0 (machine 0)"))
    release = first["settings"][_RELEASE]
    if release != __version__:
        raise _refusal(f"{name} has gtrain={__version__}, and {first['name']} has gtrain={release}.")


def check_refused(job: KeyValueStore, rank: int) -> None:
    """Raise the error of a rank whose settings differ.

    The store may end with rank 0. So rank 0 raises once all other ranks that came have read the error, or after
    :data:`READ_SECONDS`.

    Raises:
        ConfigError: the error that :func:`check_same` raised in that rank.
    """
    store = job.prefixed("gtrain-settings")
    if not store.check(["refused"]):
        return
    error, deadline = _refusal(store.get("refused").decode()), time.monotonic() + READ_SECONDS
    read = store.add(_READ, 1)
    while rank == 0 and read < store.add(_HERE, 0) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        read = store.add(_READ, 0)
    raise error


def _refusal(message: str) -> ConfigError:
    return ConfigError(
        message, hint="give all machines of a job the same settings, and install the same release of gtrain on them."
    )


def _flatten(key: str, node: Any, raw: Any, settings: dict[str, str]) -> None:
    """Add a setting or the settings of a group; ``raw`` has the interpolations whose values ``node`` has."""
    derived = isinstance(raw, str) and "${" in raw and "oc.env" not in raw
    if derived or key in _FOLDERS:
        return
    if isinstance(node, dict) and isinstance(raw, dict):
        for name, value in node.items():
            _flatten(f"{key}.{name}", value, raw[name], settings)
    else:
        text = node if isinstance(node, str) else json.dumps(node, default=str)
        settings[key] = _PATH if "/" in text else text


def _differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return both values of each differing setting as ``key=value``; only the releases, if these differ."""
    keys = [key for key in {**theirs, **mine} if _PATH not in (mine.get(key), theirs.get(key))]
    different = [key for key in keys if mine.get(key) != theirs.get(key)]
    shown = [_RELEASE] if _RELEASE in different else different
    return [(f"{key}={mine.get(key, '(absent)')}", f"{key}={theirs.get(key, '(absent)')}") for key in shown]


def _listed(different: list[tuple[str, str]], side: int) -> str:
    more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    return ", ".join(pair[side] for pair in different[:_SHOWN]) + more
