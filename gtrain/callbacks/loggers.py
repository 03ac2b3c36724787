"""The loggers of a run: rank 0 makes them, and gives them the configuration and the figures of all ranks."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger
from lightning.pytorch.loggers.logger import DummyLogger

from gtrain.callbacks.metrics_file import MetricsFile
from gtrain.errors import ConfigError
from gtrain.files import replace_text, user_cache
from gtrain.graph.store.lock import file_lock

FIGURES = ("bytes_sent", "bytes_received", "comm_bound_bytes", "peak_rss_bytes", "peak_anonymous_bytes", "wait_seconds")
"""What is logged of each rank and server at the end of a run, by the names of ``summary.json``."""

_RUN_ID = {"MLFlowLogger": "run_id", "WandbLogger": "id"}
"""The argument that continues an existing run, by class."""
_IDS = "loggers.json"


def make_loggers(
    nodes: Mapping[str, Any], make: Callable[[dict[str, Any], str], Any], folder: Path, *, continues: bool = False
) -> list[Logger]:
    """Return the loggers that the group ``logger`` names, connected to where they write.

    Commands that start at the same time connect one after the other: each would create the tables of a new database.

    Args:
        nodes: the group ``logger``: a ``_target_`` with its arguments by name, or None.
        make: makes the object of a node; its second argument is the node's key for messages.
        folder: of the run; a job that restarts finds there which runs of the trackers it continues.
        continues: whether the job restarted.

    Raises:
        ConfigError: the library of a logger is not installed, or the logger cannot connect.
    """
    named = {name: dict(node) for name, node in nodes.items() if node}
    file = folder / _IDS
    ids: dict[str, str] = json.loads(file.read_text()) if continues and file.is_file() else {}
    loggers: dict[str, Logger] = {}
    with _one_command_at_a_time() if set(named) - {"csv"} else contextlib.nullcontext():
        for name, node in named.items():
            argument = _RUN_ID.get(str(node.get("_target_")).rpartition(".")[2])
            if argument is not None and name in ids:
                node[argument] = ids[name]
            elif str(node.get("_target_")).endswith("MLFlowLogger") and node.get("run_name") is None:
                # MLflow draws names from Python's generator, whose seed runs have in common.
                node["run_name"] = "/".join(folder.absolute().parts[-2:])
            loggers[name] = _connected(name, node, make)
            if argument is not None:
                ids[name] = str(loggers[name].version)
    if ids:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(ids) + "\n")
    return list(loggers.values())


def silent_loggers(nodes: Mapping[str, Any]) -> list[Logger]:
    """Return what the other ranks have in place of rank 0's loggers: it writes nothing."""
    return [DummyLogger() for node in nodes.values() if node]


@contextlib.contextmanager
def _one_command_at_a_time() -> Iterator[None]:
    with contextlib.ExitStack() as held:
        # Without a home folder, one that can be written to, or locks on files, commands connect as they come.
        with contextlib.suppress(RuntimeError, OSError):
            held.enter_context(file_lock(user_cache() / "loggers.lock", lambda _: None))
        yield


def _connected(name: str, node: dict[str, Any], make: Callable[[dict[str, Any], str], Any]) -> Logger:
    try:
        logger: Logger = make(node, f"logger.{name}")
        getattr(logger, "experiment", None)  # connects, and creates what is missing
    except Exception as error:  # each library has its own classes
        missing = error if isinstance(error, ImportError) else error.__cause__
        if isinstance(missing, ImportError):
            raise ConfigError(
                f"logger={name} was set, and its library is not installed: {missing}",
                hint=f"pip install 'gtrain[{name}]', or choose logger=csv.",
            ) from error
        if isinstance(error, ConfigError):
            raise
        lines = str(error).strip().splitlines()
        raise ConfigError(
            f"logger={name} could not connect: {lines[0] if lines else type(error).__name__}", hint=_hint(name)
        ) from error
    return logger


def _hint(name: str) -> str:
    if name == "wandb":
        return "logger.wandb.offline=true keeps the run in its folder, for wandb sync; wandb login stores a key."
    return "logger=csv needs no connection."


def log_configuration(loggers: Sequence[Logger], config: Mapping[str, Any]) -> None:
    """Log the composed configuration as hyperparameters; the folder of the run has it for ``metrics.csv``."""
    for logger in loggers:
        if isinstance(logger, MLFlowLogger):
            # A restarted job has another ckpt_path, perhaps other machines, and MLflow refuses to change a parameter.
            known = logger.experiment.get_run(str(logger.run_id)).data.params
            logger.log_hyperparams({name: value for name, value in _flat(config) if name not in known})
        elif not isinstance(logger, MetricsFile):
            logger.log_hyperparams(dict(config))


def _flat(config: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings by the names that Lightning's logger gives them in MLflow, such as ``model/lr``."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{group}{key}/")
        elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            yield from _flat(dict(enumerate(value)), f"{group}{key}/")  # type: ignore[arg-type]
        else:
            yield f"{group}{key}", value


def log_ranks(loggers: Sequence[Logger], ranks: Sequence[Mapping[str, Any]], step: int) -> None:
    """Log the bytes, the memory and the waiting of each rank and server, such as ``rank_1/bytes_sent``; write all out.

    Args:
        loggers: of the run.
        ranks: rows of ``summary.json``, which has these figures for ``metrics.csv``.
        step: optimizer steps of the run.
    """
    figures: dict[str, float] = {}
    for row in ranks:
        name = f"rank_{row['rank']}" if row["role"] == "worker" else f"{row['role']}_{row['rank']}"
        figures |= {f"{name}/{key}": float(row[key]) for key in FIGURES if row.get(key) is not None}
    for logger in loggers:
        if not isinstance(logger, MetricsFile):
            logger.log_metrics(figures, step)
            logger.finalize("success")


def end_wandb(exit_code: int) -> None:
    """End the process's run of Weights & Biases, if it has one; ranks end without the exit handler that would do it."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code)
