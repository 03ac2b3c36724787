"""The request that a launcher runs: a composed configuration, and the values that every launcher derives from it.

Light: only ranks and servers import torch.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from omegaconf import DictConfig

from gtrain import backends, config, keys
from gtrain.backends import RolePlan
from gtrain.errors import ConfigError, GtrainError, PeerLostError, RankFailedError, restored
from gtrain.launch import slot
from gtrain.launch.agent import preload
from gtrain.launch.children import die_with_parent, fork_with_pipe, silence
from gtrain.launch.sockets import wait_readable
from gtrain.launch.templates import keep_templates_in_memory
from gtrain.record import events
from gtrain.run import runs

TASK = "gtrain.run.task:run"
PREFLIGHT = "gtrain.run.preflight"
_PREFLIGHT_SECONDS = 120.0
_SAY_SECONDS = 10.0  # after which the terminal says what the command waits for


@dataclass
class JobRequest:
    """A job as the command line configures it.

    Attributes:
        cfg: the composed configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        overrides: the overrides of the command line.
    """

    cfg: DictConfig
    choices: dict[str, str]
    overrides: Sequence[str]

    @property
    def log_dir(self) -> Path:
        """Folder of the logs."""
        return Path(self.cfg.paths.run, "logs").absolute()

    def resolved(self) -> DictConfig:
        """Return a resolved and validated copy of the configuration.

        Raises:
            ConfigError: see :func:`gtrain.config.validate`.
        """
        copied = copy.deepcopy(self.cfg)
        config.validate(copied)
        return copied

    def plans(self) -> tuple[RolePlan, ...]:
        """Return the job's roles: its servers, and how often a worker is restarted."""
        return () if self.cfg.verb in config.PREPARING else backends.get(self.cfg.strategy.name).plan(self.cfg)

    def key_file(self) -> str | None:
        """Return the absolute path of ``cluster.key_file``, or the constant that replaces it with ``cluster.isolated``.

        Raises:
            ConfigError: the file does not exist, or other users may read it.
        """
        cluster = self.cfg.cluster
        if cluster.isolated:
            print(
                "gtrain: cluster.isolated=true: no key protects this job; "
                "any process that reaches its network can take part in it"
            )
            return keys.ISOLATED
        if cluster.key_file is None:
            return None
        path = Path(cluster.key_file).absolute()
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"cluster.key_file={cluster.key_file} was set; it is not a regular file.",
                hint="make a key file with gtrain key cluster.key_file=job.key.",
            )
        if not path.is_file():
            raise ConfigError(
                f"cluster.key_file={cluster.key_file} was set; the file does not exist.",
                hint=f"make it once with gtrain key cluster.key_file={cluster.key_file}, and copy it to every machine.",
            )
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"cluster.key_file={cluster.key_file} has mode {mode:04o}: other users may read or change it.",
                hint=f"chmod 600 {cluster.key_file}; make new keys if others may have read them.",
            )
        return str(path)

    def preflight(self, cfg: DictConfig) -> None:
        """Run the checks that need no data, in a short-lived process, which may start threads and use CUDA.

        The job starts without the checks if their process is killed or takes too long.

        Args:
            cfg: the resolved and validated configuration.

        Raises:
            GtrainError: a check failed.
        """
        preload()
        pid, read_end = fork_with_pipe(partial(_run_preflight, cfg, self.choices, self.overrides, os.getpid()))
        content, ended = b"", False
        try:
            with open(read_end, "rb", buffering=0) as pipe:
                while not ended and _await_preflight(pipe):
                    piece = pipe.read(1 << 16)
                    content, ended = content + piece, not piece
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # in case it hangs
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}" if ended else f"took {_PREFLIGHT_SECONDS:g} s"
            text = f"gtrain: the process of the preflight checks {how}; the job starts without them"
            print(text, file=sys.stderr, flush=True)
        elif content:
            raise restored(json.loads(content))

    def run_restarting(self, run: Callable[[int], Any]) -> Any:
        """Run the job; if a rank is killed, run it again from its last checkpoint, ``cluster.max_restarts`` times.

        Args:
            run: runs the job with ``self.cfg``; its argument is the number of earlier attempts.

        Returns:
            The value of ``run``.
        """
        run_dir, limit = Path(self.cfg.paths.run), self.cfg.cluster.max_restarts
        with self.hinting_at_resume():
            for attempt in itertools.count():
                try:
                    return run(attempt)
                except RankFailedError as error:
                    if not error.external or attempt >= limit or self.cfg.verb != "train":
                        raise
                    origin = runs.resume(self.cfg, run_dir)
                    text = f"{error.message.rstrip('.')}; restarting the job from {origin} ({attempt + 1}/{limit})"
                    print(f"gtrain: {text}", file=sys.stderr, flush=True)
                    events.append(run_dir, "job restarted", number=attempt + 1, limit=limit, message=text)
        return None

    @contextlib.contextmanager
    def hinting_at_resume(self) -> Iterator[None]:
        """After a kill or a signal, print how to resume; machine 0 knows the run's folder."""
        cfg = self.cfg
        trains = cfg.verb == "train" and cfg.cluster.rank in (None, 0)
        try:
            yield
        except (RankFailedError, PeerLostError) as error:
            if trains:
                error.add_hint(runs.how_to_resume(Path(cfg.paths.run)))
            raise
        except SystemExit as error:
            # Lightning's exception carries no exit code. Compare its name: this module must not import Lightning.
            by_lightning = type(error).__name__ == "SIGTERMException"
            code = 128 + signal.SIGTERM if by_lightning else error.code
            if trains and isinstance(code, int) and code > 128:
                print(f"gtrain: {runs.how_to_resume(Path(cfg.paths.run))}", file=sys.stderr, flush=True)
            sys.exit(code)
        except KeyboardInterrupt as error:
            if trains:
                error.add_note(runs.how_to_resume(Path(cfg.paths.run)))
            raise


def _await_preflight(pipe: IO[bytes]) -> bool:
    """Wait until the process of the checks writes or ends, and report a long wait; return False if it is too long."""
    if wait_readable([pipe.fileno()], _SAY_SECONDS):
        return True
    print(f"gtrain: waiting for the preflight checks, {_SAY_SECONDS:g} s", file=sys.stderr, flush=True)
    return bool(wait_readable([pipe.fileno()], _PREFLIGHT_SECONDS - _SAY_SECONDS))


def _run_preflight(
    cfg: DictConfig, choices: dict[str, str], overrides: Sequence[str], parent: int, write_end: int
) -> NoReturn:
    """Run the checks and report a refusal; any other error occurs again in a rank, which has a log."""
    try:
        die_with_parent(parent)
        silence()
        keep_templates_in_memory()
        typed = [config.key_of(override) for override in overrides]
        importlib.import_module(PREFLIGHT).check(config.plain(cfg), choices, typed)
    except GtrainError as error:
        with open(write_end, "w", closefd=False) as pipe:
            json.dump(slot.describe(error), pipe)
    finally:
        os._exit(0)
