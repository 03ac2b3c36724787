"""What a launcher is asked to run: a composed configuration, and what every launcher needs of it.

Light: torch is imported in ranks and servers alone.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import select
import signal
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig

from gtrain import backends, config, errors, keys
from gtrain.backends import RolePlan
from gtrain.errors import ConfigError, GtrainError, PeerLostError, RankFailedError
from gtrain.launch.agent import preload
from gtrain.launch.children import PRELOAD, die_with_parent
from gtrain.run import runs

TASK = "gtrain.run.task:run"
PREFLIGHT = "gtrain.run.preflight"
_PREFLIGHT_SECONDS = 120.0


@dataclass
class JobRequest:
    """A job, as the command line sets it.

    Attributes:
        cfg: the composed configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        given: the overrides of the command line.
    """

    cfg: DictConfig
    choices: dict[str, str]
    given: Sequence[str]

    @property
    def log_dir(self) -> Path:
        """Folder of the logs."""
        return Path(self.cfg.paths.run, "logs").absolute()

    def settled(self) -> DictConfig:
        """A resolved and validated copy of the configuration.

        Raises:
            ConfigError: see :func:`gtrain.config.validate`.
        """
        settled = copy.deepcopy(self.cfg)
        config.validate(settled)
        return settled

    def plans(self) -> tuple[RolePlan, ...]:
        """The job's servers, and how often a worker is restarted."""
        return () if self.cfg.verb == "partition" else backends.get(self.cfg.strategy.name).plan(self.cfg)

    def key_file(self) -> str | None:
        """``cluster.key_file``, absolute, or what stands for it with ``cluster.isolated``.

        Raises:
            ConfigError: the file is not there, or others may read it.
        """
        cluster = self.cfg.cluster
        if cluster.isolated:
            print(
                "gtrain: cluster.isolated=true: no key protects this job; "
                "whoever reaches its network can take part in it"
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
                f"cluster.key_file={cluster.key_file} was set; there is no such file.",
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
        """Refuse what needs no data, in a short-lived process: it may start threads and use CUDA, unlike the agent.

        Args:
            cfg: resolved and validated.

        Raises:
            GtrainError: as it was raised there.
        """
        preload()
        sys.stdout.flush()
        sys.stderr.flush()
        reports, to_report = os.pipe()
        pid = os.fork()
        if pid == 0:
            _report_refusal(to_report, cfg, self.choices, self.given)
        os.close(to_report)
        content = b""
        try:
            with open(reports, "rb", buffering=0) as pipe:
                while select.select([pipe], [], [], _PREFLIGHT_SECONDS)[0] and (some := pipe.read(1 << 16)):
                    content += some
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # where it hangs; else it has ended
            os.waitpid(pid, 0)
        if content:
            refusal = json.loads(content)
            raise getattr(errors, refusal["type"], GtrainError)(refusal["message"], hint=refusal["hint"])

    @contextlib.contextmanager
    def hinting_at_resume(self) -> Iterator[None]:
        """After a kill or a signal, say how to resume; machine 0 knows the run's folder."""
        cfg = self.cfg
        trains = cfg.verb == "train" and cfg.cluster.rank in (None, 0)
        try:
            yield
        except (RankFailedError, PeerLostError) as error:
            if trains:
                error.add_hint(runs.how_to_resume(Path(cfg.paths.run)))
            raise
        except SystemExit as error:
            by_lightning = type(error).__name__ == "SIGTERMException"  # has no code, and Lightning isn't imported here
            code = 128 + signal.SIGTERM if by_lightning else error.code
            if trains and isinstance(code, int) and code > 128:
                print(f"gtrain: {runs.how_to_resume(Path(cfg.paths.run))}", file=sys.stderr, flush=True)
            sys.exit(code)
        except KeyboardInterrupt as error:
            if trains:
                error.add_note(runs.how_to_resume(Path(cfg.paths.run)))
            raise


def _report_refusal(to_report: int, cfg: DictConfig, choices: dict[str, str], given: Sequence[str]) -> NoReturn:
    """The life of that process. Whatever else goes wrong goes wrong in a rank too, which has a log for it."""
    try:
        die_with_parent(os.getppid())
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        sys.modules[PRELOAD].keep_templates_in_memory()
        typed = [override.lstrip("+~").partition("=")[0] for override in given]
        importlib.import_module(PREFLIGHT).check(config.plain(cfg), choices, typed)
    except GtrainError as error:
        refusal = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        with open(to_report, "wb", closefd=False) as pipe:
            pipe.write(json.dumps(refusal).encode())
    finally:
        os._exit(0)
