"""The command line: ``gtrain [verb] [key=value ...]``. Light: it imports no torch.

Hydra composes the configuration; this module adds the verbs, the backends' configurations and readable errors, and
hands the job to the agent, or to this very process where another launcher started it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from gtrain import backends, config, messages
from gtrain.errors import ConfigError, GtrainError, RankFailedError
from gtrain.launch import cluster
from gtrain.launch.agent import run_local
from gtrain.launch.logs import capture, log_path

TASK = "gtrain.task:run"


class BackendConfigs(SearchPathPlugin):
    """Adds each backend's ``conf`` package to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for name, backend in backends.usable().items():
            search_path.append(provider=f"gtrain-{name}", path=f"pkg://{backend.conf}")


def main() -> None:
    """Entry point of the command; ends the process with 0, or with what went wrong in a few lines."""
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would have printed, and we print it
    sys.path.insert(0, os.getcwd())  # as with python -m: a model of the user's own lies in the current folder
    try:
        arguments = verb_to_override(sys.argv[1:])
        _prepare_hydra()
        with _rank_arguments(arguments) as rank_arguments:
            sys.argv[1:] = rank_arguments
            _hydra_main()
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except Exception as error:
        message = messages.readable(error, sys.argv[1:])
        if message is None or show_traceback:
            raise
        _leave(message, exit_code(error))


def verb_to_override(arguments: list[str]) -> list[str]:
    """Turn the verb, the one word without ``=`` that is no flag or flag's value, into ``verb=<verb>``.

    Raises:
        ConfigError: the word is no verb.
    """
    takes_value = {
        "--config-dir",
        "-cd",
        "--config-name",
        "-cn",
        "--config-path",
        "-cp",
        "--cfg",
        "-c",
        "--package",
        "-p",
    }
    result, previous = [], ""
    for argument in arguments:
        is_word = not argument.startswith("-") and "=" not in argument and not argument.startswith("~")
        info_value = previous in ("--info", "-i") and argument in messages.INFO_TOPICS
        if is_word and previous not in takes_value and not info_value:
            if argument not in config.VERBS:
                raise ConfigError(
                    f"{argument} was given; the verbs are {', '.join(config.VERBS)}.",
                    hint=messages.did_you_mean(argument, config.VERBS) or "settings have the form key=value.",
                )
            argument = f"verb={argument}"
        result.append(argument)
        previous = argument
    return result


def _prepare_hydra() -> None:
    Plugins.instance().register(BackendConfigs)
    config.register()
    OmegaConf.register_new_resolver("gtrain.strategies", backends.descriptions, replace=True)
    OmegaConf.register_new_resolver(
        "gtrain.verbs", lambda: "\n".join(f"  {verb:<12} {text}" for verb, text in config.VERBS.items()), replace=True
    )


@contextlib.contextmanager
def _rank_arguments(arguments: list[str]) -> Iterator[list[str]]:
    """Under another launcher every rank runs Hydra; only rank 0 may make the run's folder, the others get it told."""
    kind = cluster.detect()
    if kind == cluster.LOCAL or cluster.external_rank_and_size(kind)[0] == 0:
        yield arguments
        return
    with tempfile.TemporaryDirectory(prefix="gtrain-rank-") as scratch:
        quiet = [f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}", "hydra.output_subdir=null"]
        yield [*arguments, *quiet, "hydra.job_logging.handlers.file.filename=" + os.path.join(scratch, "log")]


@hydra.main(version_base="1.3", config_path="pkg://gtrain.conf", config_name="config")
def _hydra_main(cfg: DictConfig) -> Any:
    """One job of the command; returns the value that a sweeper optimises (the best monitored score)."""
    try:
        return _job(cfg)
    except GtrainError as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # Hydra names the job and goes on with the others
        _leave(str(error), exit_code(error))


def _job(cfg: DictConfig) -> Any:
    launcher = cluster.resolve(cfg.cluster.kind)
    hydra_config = HydraConfig.get()
    choices = {group: str(hydra_config.runtime.choices[group]) for group in ("strategy", "data", "model")}
    if launcher != cluster.LOCAL:
        from gtrain import task  # this process is a rank already, so it may import torch

        _take_world(cfg, launcher)
        cfg.paths.run = task.shared_run_dir(cfg.paths.run)
        config.validate(cfg)
        rank = cluster.external_rank_and_size(launcher)[0]
        capture(log_path(Path(cfg.paths.run, "logs"), f"rank {rank}"), terminal=True)
        return task.run(cfg, choices)
    config.validate(cfg)
    ranks = (1, 1) if cfg.verb == "partition" else (cfg.trainer.num_nodes, cfg.trainer.devices)
    logs = Path(cfg.paths.run, "logs")
    return run_local(TASK, cfg, choices, num_nodes=ranks[0], devices=ranks[1], log_dir=logs)


def _take_world(cfg: DictConfig, launcher: str) -> None:
    """Take the number of ranks from the launcher that started them, unless the command names another.

    Raises:
        ConfigError: the command and the launcher contradict each other.
    """
    _, size = cluster.external_rank_and_size(launcher)
    nodes, devices = cfg.trainer.num_nodes, cfg.trainer.devices
    if nodes * devices == size:
        return
    overrides = HydraConfig.get().overrides.task
    if any(override.startswith(("trainer.num_nodes=", "trainer.devices=")) for override in overrides):
        raise ConfigError(
            f"trainer.num_nodes {nodes} * trainer.devices {devices} = {nodes * devices} ranks were set, "
            f"but {launcher} started {size}.",
            hint=f"set numbers whose product is {size}, or neither.",
        )
    with open_dict(cfg):
        cfg.trainer.num_nodes, cfg.trainer.devices = size, 1


def exit_code(error: Exception) -> int:
    """What the command ends with after this error."""
    return error.exit_code if isinstance(error, RankFailedError) else 1


def _leave(message: str, code: int) -> NoReturn:
    if sys.stderr.isatty():
        print(file=sys.stderr)  # the live line may still be open
    print(f"gtrain: {message}", file=sys.stderr)
    sys.exit(code)
