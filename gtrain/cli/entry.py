"""The command line: ``gtrain [verb] [key=value ...]``. Light: it imports no torch.

Hydra composes the configuration; this module adds the verbs, the backends' configurations and readable errors.
:mod:`gtrain.cli.command` does what the configuration says.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig

from gtrain import __version__, backends, config, messages, targets
from gtrain.cli import command, explain
from gtrain.errors import ConfigError, GtrainError, RankFailedError
from gtrain.launch import launchers
from gtrain.run import runs

_typed: list[str] = []
"""The command line as the user typed it; Hydra's own list of overrides also holds those that a sweeper's file sets."""


class BackendConfigs(SearchPathPlugin):
    """Adds each backend's ``conf`` package to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for name, backend in backends.usable().items():
            search_path.append(provider=f"gtrain-{name}", path=f"pkg://{backend.conf}")


class RunFolder(Callback):
    """Keeps two runs out of one folder: Hydra calls this before it writes to the folder."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Hydra reports what a callback raises as a warning, so that this leaves."""
        try:
            _hold_folder(config, Path(config.hydra.run.dir))
        except ConfigError as error:
            _leave(str(error), 1)


def _hold_folder(cfg: DictConfig, folder: Path) -> None:
    """Lock a run's folder, which the machines of a job that is started by hand may share: rank 0 holds it."""
    launcher = launchers.LAUNCHERS.get(cfg.cluster.kind)
    owns = launcher is None or launcher.owns_run_folder(cfg.cluster)
    if owns and cfg.verb not in ("serve", "key"):
        runs.hold(folder)


def main() -> None:
    """Entry point of the command; ends the process with 0, or with what went wrong in a few lines."""
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would have printed, and we print it
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: page faults cost torch more than most operations
    sys.path.insert(0, os.getcwd())  # as with python -m: a model of the user's own lies in the current folder
    try:
        if "--version" in sys.argv[1:]:  # Hydra would print its own
            print(version_line())
            return
        if any(len(a) > 2 and "--experimental-rerun".startswith(a.partition("=")[0]) for a in sys.argv[1:]):
            raise ConfigError(
                "--experimental-rerun was given; Hydra would unpickle the file, which runs what it holds.",
                hint="type the settings of the run; .hydra/overrides.yaml in its folder lists them.",
            )
        arguments = verb_to_override(sys.argv[1:])
        if "verb=doctor" in arguments:  # before Hydra, which may be part of what is broken
            from gtrain.doctor import report

            sys.exit(report.main([argument for argument in arguments if argument != "verb=doctor"]))
        if "verb=explain" in arguments:
            explain.main([argument for argument in arguments if argument != "verb=explain"])
            sys.stdout.flush()  # a closed pipe is noticed here
            return
        _typed[:] = arguments
        _prepare_hydra(sweep=any(a in ("-m", "--multirun", "hydra.mode=MULTIRUN") for a in arguments))
        for folder in backends.installed().outdated:
            said = "gtrain: the .egg-info or .dist-info of an older build, with other strategies, is in"
            print(f"{said} {folder}\nHINT: delete it; the installed package's strategies are used.", file=sys.stderr)
        with _rank_arguments(arguments) as rank_arguments:
            sys.argv[1:] = rank_arguments
            _hydra_main()
    except BrokenPipeError:  # the reader of a pipe, such as head, has all that it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush fails
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt as interrupt:
        _leave("\ngtrain: ".join(["interrupted", *getattr(interrupt, "__notes__", ())]), 130)
    except Exception as error:
        message = messages.readable(error, sys.argv[1:])
        if message is None or show_traceback:
            raise
        _leave(message, exit_code(error))
    finally:
        _skip_last_collection()


def _skip_last_collection() -> None:
    """Keep the interpreter from searching all that was imported for garbage as it ends, which takes a second."""
    if "triton" in sys.modules:  # triton is built with nanobind, which would report all its objects as leaked
        gc.unfreeze()  # what the agent froze
    else:
        gc.freeze()


def version_line() -> str:
    """The versions of gtrain, and of torch and Hydra from the metadata of what is installed."""
    versions = [__version__]
    for name in ("torch", "hydra-core"):
        try:
            versions.append(version(name))
        except PackageNotFoundError:
            versions.append("not installed")
    return "gtrain {} (torch {}, Hydra {})".format(*versions)


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
    explains = "explain" in arguments
    for argument in arguments:
        is_word = not argument.startswith("-") and "=" not in argument and not argument.startswith("~")
        info_value = previous in ("--info", "-i") and argument in messages.INFO_TOPICS
        if is_word and previous not in takes_value and not info_value:
            if explains and argument != "explain":
                result.append(argument)  # a topic
                continue
            if argument not in config.VERBS:
                raise ConfigError(
                    f"{argument} was given; the verbs are {', '.join(config.VERBS)}.",
                    hint=messages.did_you_mean(argument, config.VERBS) or "settings have the form key=value.",
                )
            argument = f"verb={argument}"
        result.append(argument)
        previous = argument
    return result


def _prepare_hydra(*, sweep: bool = False) -> None:
    hydra_main = sys.modules["hydra.main"]
    hydra_main.get_args_parser = _with_lazy_help(hydra_main.get_args_parser)  # type: ignore[attr-defined]
    Plugins.instance().register(BackendConfigs)
    config.register(sweep=sweep)
    launchers.register()
    schemas = ConfigStore.instance()  # nobody changes it from here on, yet Hydra copies it for each group in --help
    schemas.__deepcopy__ = lambda memo: schemas  # type: ignore[attr-defined]
    ConfigLoaderImpl.load_configuration = _with_check(ConfigLoaderImpl.load_configuration)  # type: ignore[method-assign]
    config.register_resolver("gtrain.strategies", backends.descriptions)
    config.register_resolver(
        "gtrain.verbs", lambda: "\n".join(f"  {verb:<12} {text}" for verb, text in config.VERBS.items())
    )


def _with_check(load: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    """Check Hydra's own settings as soon as they are composed: its callbacks and loggers are made right after that."""

    def load_and_check(*args: Any, **keywords: Any) -> DictConfig:
        cfg = load(*args, **keywords)
        targets.check_hydra(cfg.hydra, _typed)
        return cfg

    return load_and_check


def _with_lazy_help(make_parser: Callable[[], argparse.ArgumentParser]) -> Callable[[], argparse.ArgumentParser]:
    """Let Hydra 1.3 build its parser on Python 3.14, where argparse expands each help text when it is added.

    The help of ``--shell-completion`` is not a string but an object that renders itself when it is printed.
    """
    check = getattr(argparse.ArgumentParser, "_check_help", None)  # since Python 3.14
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


@contextlib.contextmanager
def _rank_arguments(arguments: list[str]) -> Iterator[list[str]]:
    """Under another launcher every rank runs Hydra; only rank 0 may make the run's folder, the others get it told."""
    if launchers.is_first():
        yield arguments
        return
    with tempfile.TemporaryDirectory(prefix="gtrain-rank-") as scratch:
        quiet = [f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}", "hydra.output_subdir=null"]
        yield [*arguments, *quiet, "hydra.job_logging.handlers.file.filename=" + os.path.join(scratch, "log")]


@hydra.main(config_path="pkg://gtrain.conf", config_name="config", **config.VERSION_BASE)
def _hydra_main(cfg: DictConfig) -> Any:
    """One job of the command; returns the value that a sweeper optimises (the best monitored score)."""
    try:
        return _job(cfg)
    except GtrainError as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # Hydra names the job and goes on with the others
        _leave(str(error), exit_code(error))


def _job(cfg: DictConfig) -> Any:
    hydra_config = HydraConfig.get()
    _hold_folder(cfg, Path(hydra_config.runtime.output_dir))
    if not launchers.is_first():  # nothing is written to it any more, and a rank that is killed leaves nothing behind
        shutil.rmtree(hydra_config.sweep.dir, ignore_errors=True)
    overrides = list(hydra_config.overrides.task)
    typed = [override.lstrip("+~").partition("=")[0].partition("@")[0] for override in overrides]
    sweep = hydra_config.mode == RunMode.MULTIRUN
    left_out = config.fit_strategy(cfg, typed, sweep=sweep, experiment=hydra_config.runtime.choices.get("experiment"))
    if left_out and launchers.is_first():
        print(left_out, file=sys.stderr)
    targets.settle(cfg, _typed)
    choices = {group: str(hydra_config.runtime.choices[group]) for group in ("strategy", "data", "model")}
    return command.launch(cfg, choices, overrides)


def exit_code(error: Exception) -> int:
    """What the command ends with after this error."""
    return error.exit_code if isinstance(error, RankFailedError) else 1


def _leave(message: str, code: int) -> NoReturn:
    with launchers.detect().printing_once() as prints:
        if prints:
            if sys.stderr.isatty():
                print(file=sys.stderr)  # the live line may still be open
            print(f"gtrain: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
