"""Composes the configuration of a job for another strategy than the one that the command line names. Light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose
from hydra._internal.grammar.utils import escape_special_characters
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, open_dict

from gtrain import backends, config
from gtrain.settings import as_typed

_OWN = ("strategy", "verb", *(f"strategy.{name}" for name in config.AUTO_SETTINGS))
"""Keys of the command line that do not go over to another strategy."""


def override_of(key: str, value: Any) -> str:
    """Return the override that sets a key to a value of a configuration file."""
    return f"{key}={_quoted(value)}"


def _quoted(value: Any) -> str:
    if isinstance(value, str):
        return QuotedString(value, Quote.single).with_quotes()
    if isinstance(value, dict):
        # Hydra's grammar has no quotes around keys.
        pairs = (f"{escape_special_characters(as_typed(name))}:{_quoted(inner)}" for name, inner in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_quoted, value)) + "]"
    return as_typed(value)


def for_strategy(
    cfg: DictConfig, name: str, overrides: Sequence[str], experiment: str | None = None, extra: Sequence[str] = ()
) -> tuple[DictConfig, list[str], str]:
    """Compose a job's settings for a strategy, without the settings that it does not serve.

    Args:
        cfg: the composed configuration of the command line, whose verb and run folder are kept.
        name: the strategy.
        overrides: the overrides of the command line.
        experiment: the experiment of the job.
        extra: further overrides.

    Returns:
        The configuration, the overrides that it was composed from, and one line about the settings that were left out.

    Raises:
        ConfigError: a setting is unknown to every strategy.
    """
    shared = [override for override in overrides if config.key_of(override) not in _OWN]
    composed = [f"strategy={name}", *shared, *extra]
    # a program has no command line
    other = compose(HydraConfig.get().job.config_name if HydraConfig.initialized() else "config", composed)
    with open_dict(other):
        other.verb, other.paths.run = cfg.verb, cfg.paths.run
    notice = config.fit_strategy(
        other,
        [config.key_of(override) for override in shared],
        sweep=True,
        experiment=experiment,
        setter="for other strategies",
    )
    return other, composed, notice


def settings_text(name: str, variant: Mapping[str, Any]) -> list[str]:
    """Return the overrides that choose a variant of a strategy, as a user types them."""
    shortcuts = backends.get(name).shortcuts
    return [f"{key if key in shortcuts else f'strategy.{key}'}={as_typed(value)}" for key, value in variant.items()]
