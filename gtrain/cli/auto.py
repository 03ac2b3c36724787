"""``strategy=auto``: the recommendation of ``gtrain plan`` takes its place before a job starts. Light.

The plan is made in a short-lived fork, because it imports kernels and may start threads, which do not survive the fork
of the ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf, open_dict

from gtrain import backends, config, targets
from gtrain.errors import ConfigError, GtrainError, restored
from gtrain.launch import launchers, slot
from gtrain.launch.agent import preload
from gtrain.launch.children import die_with_parent, fork_with_pipe, silence
from gtrain.launch.request import PREFLIGHT
from gtrain.launch.templates import keep_templates_in_memory
from gtrain.plan import compose
from gtrain.record.scores import lower_is_better
from gtrain.record.trials import REPORTER

LAUNCHERS = ("local", "ray")
"""Launchers whose command starts all ranks, and so decides for all of them."""
_TIMER = "gtrain.callbacks.race.RaceTimer"
Launch = Callable[[DictConfig, dict[str, str], list[str]], Any]


@dataclass(frozen=True)
class Candidate:
    """A strategy and mode that fit.

    Attributes:
        strategy: its name.
        settings: the overrides that choose the mode.
        seconds: of an epoch, as planned.
        race: the overrides by which it validates as the other candidates do.
    """

    strategy: str
    settings: tuple[str, ...]
    seconds: float
    race: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The settings, as a user types them."""
        return " ".join((f"strategy={self.strategy}", *self.settings))


@dataclass(frozen=True)
class Settled:
    """The job that takes the place of ``strategy=auto``.

    Attributes:
        cfg: its configuration.
        overrides: the overrides of its command line.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
    """

    cfg: DictConfig
    overrides: list[str]
    choices: dict[str, str]


Make = Callable[..., tuple[Settled, str]]
"""Composes the job of a candidate, with further overrides, and returns it and the line about settings left out."""


def settle(
    cfg: DictConfig,
    overrides: Sequence[str],
    choices: dict[str, str],
    experiment: str | None,
    launch: Launch,
    typed: Sequence[str] | None = None,
) -> Settled:
    """Choose the strategy of a job, print it in one line, and race the two best if ``strategy.race_seconds`` is set.

    Args:
        cfg: the composed configuration, with ``strategy=auto``.
        overrides: the overrides of the command line.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        experiment: the experiment of the job.
        launch: runs a job.
        typed: the command line as the user typed it, whose targets are trusted; None: ``overrides``.

    Raises:
        GtrainError: nothing fits, every strategy that fits refuses the job, or the data cannot be read.
    """
    launcher = launchers.resolve(cfg.cluster.kind).name
    if cfg.verb != "train" or launcher not in LAUNCHERS:
        where = f"gtrain {cfg.verb}" if cfg.verb != "train" else f"cluster={launcher}"
        raise ConfigError(
            f"strategy=auto was set with {where}; it chooses for a training whose ranks this command starts.",
            hint="run gtrain plan with the same settings, and name the strategy that it recommends.",
        )
    OmegaConf.to_object(cfg.strategy)  # checks race_seconds
    seconds = float(cfg.strategy.get("race_seconds") or 0)
    if seconds:
        _check_race(cfg)
    compose_job = partial(_settled, cfg, overrides, choices, experiment)
    make = partial(_trusted, compose_job, typed)
    _check(make)
    candidates, reason = _choose(cfg, overrides, experiment)
    if not candidates:
        raise ConfigError(f"strategy=auto was set. {reason}", hint="gtrain plan plan.least=true counts machines.")
    accepted, refused = _accepted(candidates, partial(_refusal, make), 2 if seconds else 1)
    if not accepted:
        raise next(iter(refused.values()))
    best: Candidate = accepted[0]
    extra: list[str] = []
    if len(accepted) > 1:
        best, reason, extra = _race(cfg, (accepted[0], accepted[1]), seconds, make, launch)
    elif best is not candidates[0]:
        reason = _reason_of_next(best, refused)
    print(f"gtrain: strategy=auto: {reason}", file=sys.stderr, flush=True)
    settled, notice = compose_job(best, extra)  # the caller checks its targets
    if notice:
        print(notice, file=sys.stderr)
    with open_dict(settled.cfg):
        settled.cfg.plan.chosen = best.title.removeprefix("strategy=")
    folder = Path(cfg.paths.run, ".hydra")
    if folder.is_dir():
        OmegaConf.save(settled.cfg, folder / "config.yaml")
    return settled


def _settled(
    cfg: DictConfig,
    overrides: Sequence[str],
    choices: dict[str, str],
    experiment: str | None,
    candidate: Candidate,
    extra: Sequence[str] = (),
) -> tuple[Settled, str]:
    """Compose the job of a candidate; also return the line about settings that it leaves out."""
    composed, used, notice = compose.for_strategy(
        cfg, candidate.strategy, overrides, experiment, [*candidate.settings, *extra]
    )
    return Settled(composed, used, {**choices, "strategy": candidate.strategy}), notice


def _trusted(
    make: Make, typed: Sequence[str] | None, candidate: Candidate, extra: Sequence[str] = ()
) -> tuple[Settled, str]:
    """Compose the job of a candidate, and allow the targets that the user typed."""
    settled, notice = make(candidate, extra)
    targets.settle(settled.cfg, settled.overrides if typed is None else typed)
    return settled, notice


# ------------------------------------------------------------------------------------------------------- the plan


def _choose(cfg: DictConfig, overrides: Sequence[str], experiment: str | None) -> tuple[list[Candidate], str]:
    """Return the candidates that fit, the recommended one first, and the reason, one sentence."""
    reply = _in_child(partial(_planned, cfg, overrides, experiment))
    if reply is None:
        raise GtrainError("the process that made the plan for strategy=auto died.", hint="name a strategy.")
    candidates = [
        Candidate(row["strategy"], tuple(row["settings"]), row["seconds"], tuple(row["race"])) for row in reply["rows"]
    ]
    return candidates, reply["reason"]


def _check(make: Make) -> None:
    """Refuse, before data are read, what the preflight checks refuse with every strategy.

    Raises:
        GtrainError: the error that most strategies have.
    """
    _in_child(partial(_checked, make))


def _refusal(make: Make, candidate: Candidate) -> GtrainError | None:
    """Return the error by which the preflight checks refuse a candidate; None if they accept it."""
    try:
        _in_child(partial(_preflight, make, candidate))
    except GtrainError as error:
        return error
    return None


def _accepted(
    candidates: Sequence[Candidate], refusal: Callable[[Candidate], GtrainError | None], wanted: int
) -> tuple[list[Candidate], dict[Candidate, GtrainError]]:
    """Return the best candidates that are not refused, and the errors of those that are.

    Args:
        candidates: the best one first.
        refusal: returns the error by which a candidate is refused.
        wanted: 1, or 2 for a race: the second one is the best of another strategy, or else the next.
    """
    accepted: list[Candidate] = []
    refused: dict[Candidate, GtrainError] = {}
    left = list(candidates)
    while left and len(accepted) < wanted:
        others = [candidate for candidate in left if accepted and candidate.strategy != accepted[0].strategy]
        candidate = (others or left)[0]
        left.remove(candidate)
        if (error := refusal(candidate)) is None:
            accepted.append(candidate)
        else:
            refused[candidate] = error
    return accepted, refused


def _reason_of_next(best: Candidate, refused: Mapping[Candidate, GtrainError]) -> str:
    """Return why a candidate is taken before which others were refused, one sentence."""
    why = "; ".join(f"{candidate.title}: {error.message.rstrip('.')}" for candidate, error in refused.items())
    return f"{best.title} has the shortest planned epoch of those that accept the job, {best.seconds:.3g} s ({why})."


def _in_child(call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Return the value of a function that runs in a child process; None if it ends with an exception.

    Raises:
        GtrainError: that of the function.
    """
    preload()
    pid, read_end = fork_with_pipe(partial(_reply, call))
    with open(read_end, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    reply: dict[str, Any] | None = json.loads(content) if content else None
    if reply is not None and "error" in reply:
        raise restored(reply["error"])
    return reply


def _reply(call: Callable[[], dict[str, Any]], write_end: int) -> NoReturn:
    """Send the value of a function, or its error, to the parent process, and end."""
    try:
        die_with_parent(os.getppid())
        keep_templates_in_memory()
        try:
            reply = call()
        except GtrainError as error:
            reply = {"error": slot.describe(error)}
        with open(write_end, "w", closefd=False) as pipe:
            json.dump(reply, pipe)
    except Exception:
        traceback.print_exc()  # the parent knows only that this process has ended
        sys.stderr.flush()
    finally:
        os._exit(0)


def _planned(cfg: DictConfig, overrides: Sequence[str], experiment: str | None) -> dict[str, Any]:
    """Make the plan; return its rows, and the reason."""
    from gtrain.plan.command import make

    plan, _ = make(cfg, overrides, experiment)
    rows = [
        {
            "strategy": row.strategy,
            "settings": compose.settings_text(row.strategy, dict(row.variant)),
            "seconds": row.seconds,
            "race": compose.settings_text(row.strategy, dict(row.race_settings)),
        }
        for row in plan.ranking
    ]
    return {"rows": rows, "reason": plan.reason}


def _checked(make: Make) -> dict[str, Any]:
    """Run the preflight checks with one strategy after another, until one passes; raise the most frequent error."""
    refusals: dict[str, list[GtrainError]] = {}
    for name in backends.usable():
        try:
            return _preflight(make, Candidate(name, (), 0.0))
        except GtrainError as error:
            refusals.setdefault(error.message, []).append(error)
    raise max(refusals.values(), key=len)[0]


def _preflight(make: Make, candidate: Candidate) -> dict[str, Any]:
    """Run the preflight checks of a candidate; raise its error."""
    check = importlib.import_module(PREFLIGHT).check
    silence()
    try:
        settled, _ = make(candidate)
        config.validate(settled.cfg)
        check(config.plain(settled.cfg), settled.choices, [config.key_of(override) for override in settled.overrides])
    except GtrainError:
        raise
    except Exception:  # it occurs again in the plan or in a rank
        return {}
    return {}


# ------------------------------------------------------------------------------------------------------- the race


def _check_race(cfg: DictConfig) -> None:
    """Refuse a race of a job that has no score.

    Raises:
        ConfigError: it does not validate, or has no checkpoint, which monitors the score.
    """
    if cfg.trainer.limit_val_batches == 0:
        reason, hint = "trainer.limit_val_batches=0", "remove trainer.limit_val_batches=0"
    elif not any(cfg.callbacks.values()):
        reason, hint = "callbacks=none", "remove callbacks=none"
    else:
        return
    raise ConfigError(
        f"strategy.race_seconds={cfg.strategy.race_seconds:g} and {reason} were set; a race compares the validation "
        "scores that the checkpoint monitors.",
        hint=f"{hint}, or strategy.race_seconds: then the plan decides.",
    )


def race_folders(run_dir: Path, racers: tuple[Candidate, Candidate]) -> dict[Candidate, Path]:
    """Return the folder of each candidate: ``race/<strategy>``, with its settings where both have one strategy."""
    alike = racers[0].strategy == racers[1].strategy
    names = ("-".join((racer.strategy, *(racer.settings if alike else ()))).replace("=", "-") for racer in racers)
    return {racer: run_dir / "race" / name for racer, name in zip(racers, names, strict=True)}


def _race(
    cfg: DictConfig,
    racers: tuple[Candidate, Candidate],
    seconds: float,
    make: Make,
    launch: Launch,
) -> tuple[Candidate, str, list[str]]:
    """Train each of two candidates for some seconds; the one with the better score goes on from its checkpoint.

    One that fails has lost.

    Returns:
        The better one, why it is, and the overrides with which it goes on.

    Raises:
        GtrainError: both failed; the error of the first one.
    """
    scores: dict[Candidate, float | None] = {}
    failed: dict[Candidate, GtrainError] = {}
    folders = race_folders(Path(cfg.paths.run), racers)
    for racer, folder in folders.items():
        settled, _ = make(racer, [*racer.race, "trainer.limit_test_batches=0"])
        with open_dict(settled.cfg):
            settled.cfg.paths.run = str(folder)
            settled.cfg.trainer.max_time, settled.cfg.trainer.num_sanity_val_steps = None, 0
            settled.cfg.callbacks.pop(REPORTER, None)  # a trial's epochs are those of the run that goes on
            # Validates when the time is over, also between the epochs in which the job validates.
            settled.cfg.callbacks.race = {"_target_": _TIMER, "duration": _as_time(seconds)}
        folder.mkdir(parents=True, exist_ok=True)
        print(f"gtrain: race: {racer.title} trains for {seconds:g} s", file=sys.stderr, flush=True)
        try:
            launch(settled.cfg, settled.choices, settled.overrides)
        except GtrainError as error:
            failed[racer], scores[racer] = error, None
            print(f"gtrain: race: {racer.title} failed: {error.message}", file=sys.stderr, flush=True)
        else:
            scores[racer] = _score(folder)
    if len(failed) == len(racers):
        raise failed[racers[0]]
    monitored: dict[str, Any] = next(
        (best for folder in folders.values() if (best := _summary(folder).get("best"))), {}
    )
    lower = lower_is_better(str(monitored.get("name")), monitored.get("direction"))
    known = [racer for racer in racers if scores[racer] is not None]
    sign = 1 if lower else -1
    left = known or [racer for racer in racers if racer not in failed]
    best = min(left, key=lambda racer: sign * (scores[racer] or 0.0))
    other = racers[1] if best is racers[0] else racers[0]
    last = folders[best] / "checkpoints" / "last.ckpt"
    extra = [compose.override_of("ckpt_path", str(last))] if last.exists() else []
    if other in failed:
        return best, f"{best.title} goes on; {other.title} failed: {failed[other].message.rstrip('.')}.", extra
    return best, _reason(best, other, scores, seconds), extra


def _reason(best: Candidate, other: Candidate, scores: Mapping[Candidate, float | None], seconds: float) -> str:
    """Return why a candidate goes on, one sentence."""
    name = {racer: f"{score:.4g}" for racer, score in scores.items() if score is not None}
    planned = f"{best.title} has the shorter planned epoch"
    if scores[best] is None:
        reason = f"neither {best.title} nor {other.title} has a score after {seconds:g} s; {planned}"
    elif scores[other] is None:
        reason = f"{best.title} has a score after {seconds:g} s, {name[best]} ({other.title} has none)"
    elif scores[best] == scores[other]:
        reason = f"{planned} of two with equal scores after {seconds:g} s, {name[best]}"
    else:
        reason = f"{best.title} has the better score after {seconds:g} s, {name[best]} ({other.title}: {name[other]})"
    return f"{reason}, and goes on."


def _as_time(seconds: float) -> str:
    """Return seconds in the form of ``trainer.max_time``, DD:HH:MM:SS."""
    minutes, rest = divmod(max(round(seconds), 1), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days:02}:{hours:02}:{minutes:02}:{rest:02}"


def _score(folder: Path) -> float | None:
    """Return the best monitored score of a run; None if it did not validate."""
    best = _summary(folder).get("best") or {}
    value = best.get("value")
    return None if value is None else float(value)


def _summary(folder: Path) -> dict[str, Any]:
    file = folder / "summary.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {}
