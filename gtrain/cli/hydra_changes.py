"""What the command changes in Hydra."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

_RUN = "hydra.mode=RUN"
"""What Hydra adds to the overrides of a single run."""


class ComposedOnce:
    """Hydra's composition of the configuration, checked as soon as it is made, and made once for a single run.

    Before a run Hydra composes the configuration to see ``hydra.mode``, and then composes it again with that mode set,
    which takes as long. The second composition returns the first one with the mode. A sweep composes as Hydra does.

    Args:
        load: ``ConfigLoaderImpl.load_configuration``.
        check: raises an error for a configuration that is not allowed, before Hydra creates its callbacks and loggers.
    """

    def __init__(self, load: Callable[..., DictConfig], check: Callable[[DictConfig], None]) -> None:
        self._load, self._check = load, check
        self._first: tuple[str | None, list[str], DictConfig] | None = None

    def method(self) -> Callable[..., DictConfig]:
        """Return the method that replaces ``load``."""

        def load_configuration(loader: Any, *args: Any, **keywords: Any) -> DictConfig:
            cfg = None
            if not args and {"config_name", "overrides", "run_mode"} <= set(keywords):
                looking = keywords.get("validate_sweep_overrides") is False
                cfg = self._look(loader, **keywords) if looking else self._again(loader, **keywords)
            if cfg is None:
                cfg = self._load(loader, *args, **keywords)
            self._check(cfg)
            return cfg

        return load_configuration

    def _look(self, loader: Any, **keywords: Any) -> DictConfig | None:
        """Compose as for a run, to see the mode; return None if that fails, as it may where a sweep would not."""
        try:
            cfg = self._load(loader, **{**keywords, "run_mode": RunMode.RUN})
        except Exception:  # Hydra's own call reports it
            return None
        self._first = keywords["config_name"], [*keywords["overrides"]], cfg
        return cfg

    def _again(self, loader: Any, **keywords: Any) -> DictConfig | None:
        """Return the first configuration for the run that it was composed for; else None."""
        first, self._first = self._first, None
        overrides = keywords["overrides"]
        if first is None or keywords["run_mode"] != RunMode.RUN:
            return None
        name, given, cfg = first
        if name != keywords["config_name"] or overrides not in (given, [*given, _RUN]):
            return None
        parsed = OverridesParser.create().parse_overrides(overrides)
        loader.validate_sweep_overrides_legal(
            overrides=parsed, run_mode=RunMode.RUN, from_shell=keywords.get("from_shell", True)
        )
        if overrides != given:
            with open_dict(cfg.hydra):
                cfg.hydra.mode = RunMode.RUN
            cfg.hydra.overrides.hydra.append(_RUN)
        return cfg


def with_lazy_help(make_parser: Callable[[], argparse.ArgumentParser]) -> Callable[[], argparse.ArgumentParser]:
    """Allow Hydra 1.3 to build its parser on Python 3.14, where argparse formats each help text when it is added.

    Hydra's help of ``--shell-completion`` is an object that renders itself when it is printed, not a string.
    """
    check = getattr(argparse.ArgumentParser, "_check_help", None)  # exists since Python 3.14
    if check is None:
        return make_parser

    def check_strings(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
        if isinstance(action.help, str):
            check(parser, action)

    def make() -> argparse.ArgumentParser:
        argparse.ArgumentParser._check_help = check_strings  # type: ignore[attr-defined]
        try:
            return make_parser()
        finally:
            del argparse.ArgumentParser._check_help  # type: ignore[attr-defined]

    return make
