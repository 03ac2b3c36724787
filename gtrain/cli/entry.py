"""The command line: ``gtrain [verb] [key=value ...]``. Light: it imports no torch.

Hydra composes the configuration. This module adds the verbs, the backends' configurations and readable errors, and
executes the verb: it launches a job, starts a server, or creates keys.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from gtrain import __version__, backends, config, messages, targets
from gtrain.cli import auto, explain, inherit, search, sweeps, verb_help
from gtrain.cli.hydra_changes import ComposedOnce, with_lazy_help
from gtrain.errors import ConfigError, GtrainError
from gtrain.launch import launchers
from gtrain.launch.agent import preload
from gtrain.launch.launchers import kubernetes
from gtrain.launch.launchers.external import ExternalLauncher
from gtrain.launch.launchers.manual import Manual
from gtrain.launch.request import JobRequest
from gtrain.object_store import refuse_address
from gtrain.record import events
from gtrain.run import runs

_typed: list[str] = []
"""The command line as the user typed it; Hydra's list of overrides also contains those from a sweeper's file."""
_inherited: dict[str, str] = {}
"""What set each key that comes from the run that ``run`` names."""
_sweep: list[DictConfig] = []
"""The configuration of the sweep whose jobs run; empty if there is none."""


class BackendConfigs(SearchPathPlugin):
    """Adds each backend's ``conf`` package to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for name, backend in backends.usable().items():
            search_path.append(provider=f"gtrain-{name}", path=f"pkg://{backend.conf}")


class RunFolder(Callback):
    """Locks the run folder before Hydra writes to it, so that two runs never share a folder."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Exit on an error, because Hydra turns the exception of a callback into a warning."""
        try:
            _refuse_address(config, "run")
            _lock_folder(config, Path(config.hydra.run.dir))
        except ConfigError as error:
            _exit_with(str(error), 1)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print the table of the sweep's jobs, and write the comparison of its runs."""
        _sweep.clear()
        folder = Path(config.hydra.sweep.dir)
        if not launchers.is_first():
            return
        if config.verb in events.RECORDED:
            from gtrain.reporting import sweep

            sweep.show(folder)
        with _reporting(lambda: folder, _reports(config)):
            pass

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Exit if the sweep's folder is an address."""
        _sweep[:] = [config]
        try:
            _refuse_address(config, "sweep")
        except ConfigError as error:
            _exit_with(str(error), 1)


def _refuse_address(cfg: DictConfig, kind: str) -> None:
    """Refuse an object store as the folder of a run or a ``sweep``."""
    advice = (
        "set callbacks.checkpoint.dirpath to the address: checkpoints can be written there; logs and results are local."
    )
    refuse_address(cfg.hydra[kind].dir, f"hydra.{kind}.dir", advice)


def _lock_folder(cfg: DictConfig, folder: Path) -> None:
    """Lock a run's folder; the machines of a job that is started by hand may share one, which rank 0 locks."""
    launcher = launchers.LAUNCHERS.get(cfg.cluster.kind)
    owns_folder = launcher is None or launcher.owns_run_folder(cfg.cluster)
    if owns_folder and cfg.verb not in ("serve", "key"):
        runs.lock_folder(folder)


def main() -> None:
    """Run the command; exit with 0, or with an error message of a few lines."""
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Hydra then raises the errors that it would print.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Huge pages: page faults cost torch more than most operations.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # OpenMP's threads would spin between two operations, each a whole time slice if other programs use the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # As with python -m: users' models are in the current folder.
    sys.path.insert(0, os.getcwd())
    try:
        if "--version" in sys.argv[1:]:  # Hydra would print its version
            print(version_line())
            return
        if any(len(a) > 2 and "--experimental-rerun".startswith(a.partition("=")[0]) for a in sys.argv[1:]):
            raise ConfigError(
                "--experimental-rerun was given; Hydra would unpickle the file, which can execute any code.",
                hint="type the settings of the run; .hydra/overrides.yaml in its folder lists them.",
            )
        if (verb := verb_help.requested(sys.argv[1:])) is not None:
            print(verb_help.text_of(verb), flush=True)
            return
        arguments = verb_to_override(sys.argv[1:])
        if "verb=doctor" in arguments:
            # Before Hydra is imported, because its installation may be what is broken.
            from gtrain.doctor import report

            sys.exit(report.main([argument for argument in arguments if argument != "verb=doctor"]))
        if "verb=explain" in arguments:
            explain.main([argument for argument in arguments if argument != "verb=explain"])
            # A closed pipe then raises BrokenPipeError here, not at exit.
            sys.stdout.flush()
            return
        if "verb=runs" in arguments:
            from gtrain.reporting import listing

            listing.main([argument for argument in arguments if argument != "verb=runs"])
            return
        if "verb=report" in arguments:
            from gtrain.reporting import command

            command.main(inherit.folders([argument for argument in arguments if argument != "verb=report"]))
            return
        if "verb=trace" in arguments:
            from gtrain.reporting import trace

            trace.main(inherit.folders([argument for argument in arguments if argument != "verb=trace"]))
            return
        if "verb=watch" in arguments:
            from gtrain.reporting import watch

            watch.main(inherit.folders([argument for argument in arguments if argument != "verb=watch"]))
            return
        if "verb=score" in arguments or "verb=neighbors" in arguments:
            from gtrain.kernel_cache import find_cache
            from gtrain.query import command as query

            find_cache()
            verb = "score" if "verb=score" in arguments else "neighbors"
            ask = query.score if verb == "score" else query.neighbors
            ask([argument for argument in arguments if argument != f"verb={verb}"])
            return
        _typed[:] = arguments
        # Of several strategies, as each job of a sweep may have another one.
        several = ("-m", "--multirun", "hydra.mode=MULTIRUN", "verb=plan", "strategy=auto")
        _prepare_hydra(sweep=any(argument in several or argument.startswith("run=") for argument in arguments))
        for folder in backends.installed().outdated:
            problem = "gtrain: the .egg-info or .dist-info of an older build, with other strategies, is in"
            print(f"{problem} {folder}\nHINT: delete it; the installed package's strategies are used.", file=sys.stderr)
        expanded = inherit.inherit(arguments)
        _inherited.update(expanded.inherited)
        for notice in expanded.notices if launchers.is_first() else ():
            print(notice, file=sys.stderr)
        with _rank_arguments(expanded.arguments) as rank_arguments:
            sys.argv[1:] = rank_arguments
            try:
                _hydra_main()
            except Exception:
                # Hydra raises the error of a failed job after the other jobs, and does not end the sweep.
                for unfinished in tuple(_sweep):
                    RunFolder().on_multirun_end(unfinished)
                raise
    except BrokenPipeError:
        # The reader of the pipe, such as head, has closed it.
        # Otherwise the flush at exit fails and prints a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt as interrupt:
        _exit_with("\ngtrain: ".join(["interrupted", *getattr(interrupt, "__notes__", ())]), 130)
    except Exception as error:
        message = messages.readable(error, sys.argv[1:])
        if message is None or show_traceback:
            raise
        _exit_with(message, 1)
    finally:
        _skip_last_collection()


def _skip_last_collection() -> None:
    """Exclude all imported objects from the interpreter's last garbage collection, which would take a second."""
    if "triton" in sys.modules:
        # triton is built with nanobind, which reports objects that stay alive as leaked.
        gc.unfreeze()  # the agent has frozen them
    else:
        gc.freeze()


def version_line() -> str:
    """Return the versions of gtrain, torch and Hydra, the last two from their installed metadata."""
    from gtrain.doctor.packages import installed

    torch, hydra_core = (installed(name) or "not installed" for name in ("torch", "hydra-core"))
    return f"gtrain {__version__} (torch {torch}, Hydra {hydra_core})"


def verb_to_override(arguments: list[str]) -> list[str]:
    """Replace the verb, the one word that is neither ``key=value`` nor a flag nor a flag's value, by ``verb=<verb>``.

    Raises:
        ConfigError: the word is not a verb.
    """
    valued = (
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
    )
    result, previous, taken = [], "", False
    # The verb whose other words are topics or folders; after it, the same word is one of these.
    taking = next((argument for argument in arguments if argument in config.VERBS_WITH_WORDS), None)
    for argument in arguments:
        is_word = not argument.startswith(("-", "~")) and "=" not in argument
        info_value = previous in ("--info", "-i") and argument in messages.INFO_TOPICS
        if is_word and previous not in valued and not info_value:
            if taking is not None and (taken or argument != taking):
                result.append(argument)
                continue
            taken = True
            if argument not in config.VERBS:
                hint = "gtrain --help, or gtrain VERB --help." if argument == "help" else None
                raise ConfigError(
                    f"{argument} was given; the verbs are {', '.join(config.VERBS)}.",
                    hint=hint or messages.did_you_mean(argument, config.VERBS) or "settings have the form key=value.",
                )
            argument = f"verb={argument}"
        result.append(argument)
        previous = argument
    return result


def _prepare_hydra(*, sweep: bool = False) -> None:
    hydra_main = sys.modules["hydra.main"]
    hydra_main.get_args_parser = with_lazy_help(hydra_main.get_args_parser)  # type: ignore[attr-defined]
    Plugins.instance().register(BackendConfigs)
    config.register(sweep=sweep)
    launchers.register()
    sweeps.register()
    search.register()
    composed = ComposedOnce(ConfigLoaderImpl.load_configuration, lambda cfg: targets.check_hydra(cfg.hydra, _typed))
    ConfigLoaderImpl.load_configuration = composed.method()  # type: ignore[method-assign]
    config.register_resolver("gtrain.strategies", backends.descriptions)
    config.register_resolver(
        "gtrain.verbs", lambda: "\n".join(f"  {verb:<12} {text}" for verb, text in config.VERBS.items())
    )


@contextlib.contextmanager
def _rank_arguments(arguments: list[str]) -> Iterator[list[str]]:
    """Give every rank but rank 0 a scratch folder for Hydra's files.

    Under an external launcher every rank runs Hydra, and only rank 0 may create the run folder. The other ranks receive
    its path later.
    """
    if launchers.is_first():
        yield arguments
        return
    with tempfile.TemporaryDirectory(prefix="gtrain-rank-") as scratch:
        quiet = [f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}", "hydra.output_subdir=null"]
        yield [*arguments, *quiet, "hydra.job_logging.handlers.file.filename=" + os.path.join(scratch, "log")]


@hydra.main(config_path="pkg://gtrain.conf", config_name="config", **config.VERSION_BASE)
def _hydra_main(cfg: DictConfig) -> Any:
    """Run one job of the command; return the value that a sweeper optimises (the best monitored score)."""
    try:
        return _job(cfg)
    except GtrainError as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            # Hydra names the job and continues with the others.
            raise
        _exit_with(str(error), 1)


def _job(cfg: DictConfig) -> Any:
    hydra_config = HydraConfig.get()
    _lock_folder(cfg, Path(hydra_config.runtime.output_dir))
    if not launchers.is_first():
        # Delete the scratch folder now: a rank that is killed later would leave it behind.
        shutil.rmtree(hydra_config.sweep.dir, ignore_errors=True)
    overrides = list(hydra_config.overrides.task)
    chosen = _choices(cfg)
    # The first machine's command records the run.
    records = launchers.is_first() and cfg.cluster.rank in (None, 0)
    facts = {**chosen, "overrides": overrides, "num_nodes": cfg.trainer.num_nodes, "devices": cfg.trainer.devices}
    # By which a run that has no summary yet tells which of its scores is the best.
    keys = {"monitor": "callbacks.checkpoint.monitor", "direction": "callbacks.checkpoint.mode"}
    facts["checkpoint"] = {name: _text_of(cfg, key) for name, key in keys.items()}
    verb = cfg.verb if records else ""

    def folder() -> Path:  # that of an earlier attempt, once a restarted job has found it
        return Path(cfg.paths.run)

    names, continues = _job_names()
    report = _reporting(folder, bool(verb) and _reports(cfg))
    with report, events.recording(folder, verb, continues, **facts, **names):
        return _checked_launch(cfg, overrides)


def _job_names() -> tuple[dict[str, str], Callable[[Mapping[str, Any]], bool] | None]:
    """Return the names by which another launcher knows this job, for its record, and what tells them in a record.

    ``job`` is the same in all attempts of the job; so is ``agent``, which also no later job has. A launcher may count
    no attempt when it restarts the ranks of this machine with those of other machines.
    """
    launcher, job, attempt = launchers.detect(), HydraConfig.get().job, 0
    number = 0 if OmegaConf.is_missing(job, "num") else job.num  # in a sweep
    if isinstance(launcher, ExternalLauncher):
        names, attempt = {"job": launcher.job_id(), "agent": launcher.agent_id()}, launcher.attempt()
    elif kubernetes.JOB in os.environ:
        names = {"agent": f"{kubernetes.Kubernetes.name} {os.environ[kubernetes.JOB]}"}
    else:
        return {}, None
    names = {key: f"{name} {number}" for key, name in names.items() if name}

    def continues(start: Mapping[str, Any]) -> bool:
        same = {key for key, name in names.items() if start.get(key) == name}
        return "agent" in same or ("job" in same and attempt > 0)

    return names, continues


def _text_of(cfg: DictConfig, key: str) -> str | None:
    """Return a text of the configuration; None if it has none, or another value."""
    value = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
    return value if isinstance(value, str) else None


def _reports(cfg: DictConfig) -> bool:
    """Whether the job ends with a report; a configuration that an earlier release composed has no such setting."""
    return bool(OmegaConf.select(cfg, "report")) and cfg.verb in events.RECORDED


@contextlib.contextmanager
def _reporting(folder: Callable[[], Path], wanted: bool) -> Iterator[None]:
    """Write the report of a run at its end, also if it fails; a report that fails does not fail the run.

    Args:
        folder: returns the folder of the run or the sweep.
        wanted: whether to write one.

    Raises:
        GtrainError: a package that reports need is not installed.
    """
    if not wanted:
        yield
        return
    from gtrain.reporting.command import check_installed, write_report

    check_installed()
    try:
        yield
    finally:
        if not isinstance(sys.exception(), (KeyboardInterrupt, SystemExit)):
            try:
                print(f"report: {write_report([folder()])}", flush=True)
            except Exception as error:
                print(f"gtrain: the report was not written: {type(error).__name__}: {error}", file=sys.stderr)


def _checked_launch(cfg: DictConfig, overrides: list[str]) -> Any:
    """Fit the configuration to its strategy, and execute its verb; see :func:`launch`."""
    hydra_config = HydraConfig.get()
    typed = [key for key in map(config.key_of, overrides) if key not in _inherited]
    if cfg.verb == "plan":
        preload()
        from gtrain.plan import command

        return command.run(cfg, overrides, hydra_config.runtime.choices.get("experiment"))
    experiment = hydra_config.runtime.choices.get("experiment")
    if cfg.strategy.name == config.AUTO:
        settled = auto.settle(cfg, overrides, _choices(cfg), experiment, launch, _typed)
        targets.settle(settled.cfg, _typed)
        return launch(settled.cfg, settled.choices, settled.overrides)
    sweep = hydra_config.mode == RunMode.MULTIRUN
    notice = config.fit_strategy(cfg, typed, sweep=sweep, experiment=experiment, inherited=_inherited)
    if notice and launchers.is_first():
        print(notice, file=sys.stderr)
    targets.settle(cfg, _typed)
    return launch(cfg, _choices(cfg), overrides)


def _choices(cfg: DictConfig) -> dict[str, str]:
    """Return the names of the chosen ``strategy``, ``data`` and ``model``: options, or targets that replace them."""
    hydra_config = HydraConfig.get()
    options, replaced = hydra_config.runtime.choices, set(map(config.key_of, hydra_config.overrides.task))
    return {
        # A composed configuration, as Hydra leaves it in a run's folder, chooses no options.
        group: str(cfg[group]["_target_"] if f"{group}._target_" in replaced else options.get(group))
        for group in ("strategy", "data", "model")
    }


def launch(cfg: DictConfig, choices: dict[str, str], overrides: list[str]) -> Any:
    """Execute the verb of the configuration.

    Args:
        cfg: the composed configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        overrides: the overrides of the command line.

    Returns:
        The result of rank 0's task, if it ran on this machine.
    """
    launcher = launchers.resolve(cfg.cluster.kind)
    request = JobRequest(cfg, choices, overrides)
    if cfg.verb == "key":
        return make_key(cfg.cluster.key_file)
    if cfg.verb == "serve":
        return Manual().serve(request)
    launcher.check(cfg)
    return launcher.launch(request)


def make_key(file: str | None) -> None:
    """Write the keys of a job into a new file: ``gtrain key``.

    Raises:
        ConfigError: ``file`` is None, or the file exists.
    """
    if file is None:
        raise ConfigError("gtrain key was given, and cluster.key_file is not set.", hint="set cluster.key_file=FILE.")
    path = Path(file).absolute()
    if path.exists():
        raise ConfigError(
            f"cluster.key_file={file} was set; the file already exists.", hint="delete it first to create new keys."
        )
    # Imported here because it loads ZeroMQ, which the other verbs do not need.
    from gtrain.wire import Security

    path.parent.mkdir(parents=True, exist_ok=True)
    Security.create().save(path)
    print(f"{path} contains the keys of a job. Keep it secret; every machine of the job needs a copy.")


def _exit_with(message: str, code: int) -> NoReturn:
    with launchers.detect().printing_once() as prints:
        if prints:
            if sys.stderr.isatty():
                # Ends the progress line, which may still be open.
                print(file=sys.stderr)
            print(f"gtrain: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
