"""``hydra/sweeper=optuna``: search for the settings with the best score, by Optuna's ask and tell. Light."""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from gtrain import messages
from gtrain.cli.sweeps import SideBySide
from gtrain.errors import ConfigError
from gtrain.plan.compose import override_of
from gtrain.record.run import RunRecord
from gtrain.record.scores import lower_is_better
from gtrain.record.trials import PRUNED, PRUNERS, REPORTER, make_pruner
from gtrain.run import runs

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, TrialState

log = logging.getLogger(__name__)
DATABASE = "optuna.db"
_FOLDER = "folder"  # of the trial's job; until the job has ended, the one that it has by default
_JOB = "job"  # its number in the sweep
_REPEATED = "repeated"  # another trial has the same values
_REPETITION = "repetition"  # of a trial that a killed command or job left
_SCORE = "score"  # of the study: the name of its score
_SAMPLERS = ("tpe", "random")
_DIRECTIONS = ("maximize", "minimize")


class OptunaSweeper(Sweeper):
    """Runs the trials of a study of Optuna, each as a job of the sweep.

    A setting is searched where the command line or ``hydra.sweeper.params`` gives several values in Hydra's grammar:
    ``choice(32,64)``, ``range(1,4)``, ``interval(0,0.7)``, ``tag(log,interval(1e-4,1e-1))``.

    Args:
        trials: how many jobs the study has at its end, with those of an earlier command that are finished.
        jobs: how many jobs the launcher is given at a time.
        params: settings in Hydra's grammar, by key; the command line comes before them.
        direction: ``maximize`` or ``minimize`` the score; None: as is better for the score of the first job. That of a
            study does not change.
        sampler: ``tpe`` or ``random``.
        pruner: ends trials early that are worse than others were at that epoch: ``median``, ``hyperband`` or ``none``.
        seed: of the sampler; with a storage, the folder of the sweep also changes the random numbers.
        storage: database of the study, as a URL of SQLAlchemy, which several commands may share; None: ``optuna.db`` in
            the folder of the sweep.
        study: name of the study; one that the storage has is continued.
    """

    def __init__(
        self,
        trials: int,
        jobs: int,
        params: dict[str, Any] | None,
        direction: str | None,
        sampler: str,
        pruner: str,
        seed: int | None,
        storage: str | None,
        study: str,
    ) -> None:
        for name, number in (("trials", trials), ("jobs", jobs)):
            if number < 1:
                raise ConfigError(f"hydra.sweeper.{name}={number} was set; it must be 1 or more.", hint="try 20.")
        for name, value, options in (
            ("sampler", sampler, _SAMPLERS),
            ("pruner", pruner, PRUNERS),
            ("direction", direction or _DIRECTIONS[0], _DIRECTIONS),
        ):
            if value not in options:
                raise ConfigError(
                    f"hydra.sweeper.{name}={value} was set; it is one of {', '.join(options)}.",
                    hint=f"leave out hydra.sweeper.{name} for the default.",
                )
        self._trials, self._jobs, self._params, self._direction = trials, jobs, params or {}, direction
        self._sampler, self._pruner, self._seed, self._storage, self._name = sampler, pruner, seed, storage, study

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what the search needs; Hydra calls this before :meth:`sweep`.

        Raises:
            ConfigError: the storage is not a URL, or Optuna is not installed.
        """
        if self._storage is not None and "://" not in self._storage:
            raise ConfigError(
                f"hydra.sweeper.storage={self._storage} was set; it is not a URL of SQLAlchemy.",
                hint=f"for a file: hydra.sweeper.storage=sqlite:///{self._storage}.",
            )
        try:
            import optuna
        except ModuleNotFoundError as error:
            raise ConfigError(
                "hydra/sweeper=optuna was set, and Optuna is not installed.", hint="pip install 'gtrain[optuna]'."
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._context, self._folder = hydra_context, Path(str(config.hydra.sweep.dir))
        self._config = config
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> float | None:
        """Run trials until the study has as many as were set.

        Returns:
            The best score; None if no trial has one.

        Raises:
            ConfigError: no setting has several values, another command uses the folder of the sweep, or the study was
                made with other values, another score or another direction.
            Exception: that of the first job, if every one of the first jobs failed; that of the launcher.
        """
        import optuna

        texts = [f"{key}={value}" for key, value in self._params.items()] + arguments
        parsed = OverridesParser.create(config_loader=self._context.config_loader).parse_overrides(texts)
        settings = {override.get_key_element(): override for override in parsed}  # the last one of a key counts
        space = {key: distribution(each) for key, each in settings.items() if each.is_sweep_override()}
        fixed = [
            str(each.input_line) if each.is_delete() else f"{key}={each.get_value_element_as_str()}"
            for key, each in settings.items()
            if key not in space
        ]
        if not space:
            raise ConfigError(
                "hydra/sweeper=optuna was set, and no setting has several values.",
                hint="for example model.dropout='interval(0,0.7)', or a ready search: hparams_search=optuna.",
            )
        runs.lock_folder(self._folder, "sweep")
        OmegaConf.save(self._config, self._folder / "multirun.yaml")
        storage = self._storage or f"sqlite:///{self._folder.absolute() / DATABASE}"
        study, number = self._continued(storage), 0
        while (left := self._trials - _finished(study)) > 0:
            # Before a job has ended, nobody knows its score and whether less of it is better.
            asked = optuna.create_study(sampler=self._new_sampler(self._next_job(None))) if study is None else study
            try:
                trials = [asked.ask(space) for _ in range(min(left, self._jobs))]
            except ValueError as error:
                raise ConfigError(
                    f"the study {self._name} in {storage} has other values: {error}",
                    hint="set hydra.sweeper.study to a new name, or hydra.sweep.dir to a new folder.",
                ) from error
            number = max(number, self._next_job(study))
            jobs = [[*fixed, *(f"{key}={value}" for key, value in trial.params.items())] for trial in trials]
            if study is not None:
                for offset, (trial, job) in enumerate(zip(trials, jobs, strict=True)):
                    for name, value in self._facts(number + offset).items():
                        trial.set_user_attr(name, value)
                    job += self._reporting(storage, trial)
            try:
                results = self._launcher.launch(jobs, initial_job_idx=number)
            except BaseException:  # such as that of submitit for a job that was killed
                self._keep(study, storage, trials, number)
                raise
            scores = [_score(result) for result in results]
            facts = [self._facts(number + offset, result) for offset, result in enumerate(results)]
            if study is None:
                if all(score is None for score in scores):
                    _raise_first(results)
                study = self._first(storage, trials, facts, scores)
            else:
                for trial, of_job in zip(trials, facts, strict=True):
                    trial.set_user_attr(_FOLDER, of_job[_FOLDER])
                self._tell_jobs(study, storage, trials, facts, scores)
            if not isinstance(self._launcher, SideBySide):  # which logs failures itself
                for number_of_job, result in enumerate(results, start=number):
                    _log_failure(number_of_job, result)
            number += len(jobs)
        assert study is not None
        return self._best(study)

    def _new_sampler(self, done: int) -> optuna.samplers.BaseSampler:
        """Return the sampler of a study with this many trials, which repeats none of their random numbers."""
        import optuna

        seed = None if self._seed is None else self._seed + done
        if seed is not None and self._storage is not None:
            # Commands that share a study, each in another folder, search different values.
            seed = (seed + zlib.crc32(os.fsencode(os.path.abspath(self._folder)))) % 2**32
        if self._sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=self._jobs > 1)

    def _continued(self, storage: str) -> optuna.Study | None:
        """Return the study that the storage has, None if there is none; repeat once what a killed command left."""
        import optuna

        study = self._load(storage)
        if study is None:
            return None
        self._check(study, storage, self._direction, None)
        study.sampler = self._new_sampler(max(len(study.get_trials(deepcopy=False)), self._next_job(study)))
        for trial in self._collect(study):
            repeats = _REPETITION not in trial.user_attrs
            if repeats:
                optuna.trial.Trial(study, trial._trial_id).set_user_attr(_REPEATED, True)
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            if repeats:
                study.enqueue_trial(trial.params, user_attrs={_REPETITION: True})
            else:
                log.warning(
                    "job %s ended without a result, like an earlier job with its values: giving up", _job(trial)
                )
        log.info("the study %s goes on after %d trials", self._name, _finished(study))
        return study

    def _load(self, storage: str) -> optuna.Study | None:
        """Return the study that the storage has, None if there is none.

        Raises:
            ConfigError: the database cannot be opened or read.
        """
        import optuna

        for attempt in range(2):
            try:
                return optuna.load_study(study_name=self._name, storage=storage, pruner=make_pruner(self._pruner))
            except KeyError:
                return None
            except Exception as error:
                if attempt == 0 and "already exists" in str(error):
                    continue  # Another command was making the tables of the database.
                cause = next(iter(str(error).splitlines()), type(error).__name__)
                raise ConfigError(
                    f"the study {self._name} cannot be read from hydra.sweeper.storage={storage}: {cause}",
                    hint="set hydra.sweeper.storage to a URL of SQLAlchemy, such as sqlite:///study.db.",
                ) from error
        raise AssertionError

    def _check(self, study: optuna.Study, storage: str, direction: str | None, score: str | None) -> None:
        """Refuse a study with another direction or another score; None is not checked.

        Raises:
            ConfigError: it has another one.
        """
        hint = "set hydra.sweeper.study to a new name, or hydra.sweep.dir to a new folder"
        theirs, known = study.direction.name.lower(), study.user_attrs.get(_SCORE)
        if direction not in (None, theirs):
            raise ConfigError(
                f"the direction of this search is {direction}; the study {self._name} in {storage} has {theirs}.",
                hint=f"leave out hydra.sweeper.direction, or {hint}.",
            )
        if None not in (score, known) and score != known:
            raise ConfigError(
                f"the score of this search is {score}; that of the study {self._name} in {storage} is {known}.",
                hint=f"set model.score={known}, or {hint}.",
            )

    def _collect(self, study: optuna.Study) -> list[FrozenTrial]:
        """Tell the study the results of jobs of this sweep that have ended; return its other running trials."""
        from optuna.trial import TrialState

        left, known = [], study.user_attrs.get(_SCORE)
        for trial in filter(self._is_mine, study.get_trials(deepcopy=False, states=[TrialState.RUNNING])):
            complete, best = _result(trial.user_attrs)
            if complete:
                is_known = best is not None and known in (None, best["name"])
                _tell(study, [trial], [_finite(best["value"]) if best is not None and is_known else None])
            else:
                left.append(trial)
        return left

    def _keep(self, study: optuna.Study | None, storage: str, trials: Sequence[optuna.Trial], number: int) -> None:
        """Keep the scores of a batch whose launcher failed; the next command repeats its jobs without a result."""
        from optuna.trial import TrialState

        if study is not None:
            self._collect(study)
            return
        facts = [self._facts(number + offset) for offset in range(len(trials))]
        results = [_result(of_job) for of_job in facts]
        scores = [_finite(best["value"]) if complete and best is not None else None for complete, best in results]
        if any(score is not None for score in scores):
            self._first(storage, trials, facts, scores, without_score=TrialState.RUNNING)

    def _tell_jobs(
        self,
        study: optuna.Study,
        storage: str,
        trials: Sequence[optuna.Trial],
        facts: Sequence[dict[str, Any]],
        scores: Sequence[float | None],
    ) -> None:
        """Tell the study the scores of a batch; refuse those that are of another score."""
        try:
            for of_job in facts:
                self._check(study, storage, None, (_result(of_job)[1] or {}).get("name"))
        except ConfigError:
            _tell(study, trials, [None] * len(trials))
            raise
        _tell(study, trials, scores)

    def _first(
        self,
        storage: str,
        trials: Sequence[optuna.Trial],
        facts: Sequence[dict[str, Any]],
        scores: Sequence[float | None],
        without_score: TrialState | None = None,
    ) -> optuna.Study:
        """Make the study once the first jobs have ended, and add them to it.

        Another command that shares the storage may have made it meanwhile.

        Args:
            storage: database of the study.
            trials: as they were asked for.
            facts: what each keeps of its job.
            scores: of each, None if it has none.
            without_score: state of the trials without a score; None: failed.
        """
        import optuna

        best = next((best for of_job in facts if (best := _result(of_job)[1]) is not None), None)
        if best is None and self._direction is None:
            log.warning("no job left the name of its score: the highest is the best, or set hydra.sweeper.direction")
        lower = best is not None and lower_is_better(best["name"], best.get("direction"))
        direction = self._direction or ("minimize" if lower else "maximize")
        study = optuna.create_study(
            storage=storage,
            study_name=self._name,
            direction=direction,  # type: ignore[arg-type]  # a Literal
            sampler=self._new_sampler(facts[0][_JOB] + len(trials)),
            pruner=make_pruner(self._pruner),
            load_if_exists=True,
        )
        self._check(study, storage, direction, None if best is None else best["name"])
        if best is not None:
            study.set_user_attr(_SCORE, best["name"])
        failed = optuna.trial.TrialState.FAIL if without_score is None else without_score
        for trial, score, of_job in zip(trials, scores, facts, strict=True):
            study.add_trial(
                optuna.trial.create_trial(
                    params=trial.params,
                    distributions=trial.distributions,
                    value=score,
                    state=failed if score is None else optuna.trial.TrialState.COMPLETE,
                    user_attrs=of_job,
                )
            )
        return study

    def _facts(self, number: int, result: JobReturn | None = None) -> dict[str, Any]:
        """Return what a trial keeps of its job: the number and the folder, which is certain once the job has ended."""
        known = None if result is None or result.hydra_cfg is None else result.hydra_cfg
        folder = None if known is None else OmegaConf.select(known, "hydra.runtime.output_dir")
        return {_JOB: number, _FOLDER: str(folder or (self._folder / str(number)).absolute())}

    def _next_job(self, study: optuna.Study | None) -> int:
        """Return the first number after those of the sweep's jobs, by the study and by the folders with numbers."""
        trials = [] if study is None else filter(self._is_mine, study.get_trials(deepcopy=False))
        numbers = [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        numbers += [int(trial.user_attrs[_JOB]) for trial in trials if _JOB in trial.user_attrs]
        return 1 + max(numbers, default=-1)

    def _is_mine(self, trial: FrozenTrial) -> bool:
        """Whether the job of a trial is of this sweep, which may share the study with others."""
        folder = trial.user_attrs.get(_FOLDER)
        return folder is not None and Path(os.path.abspath(folder)).is_relative_to(os.path.abspath(self._folder))

    def _reporting(self, storage: str, trial: optuna.Trial) -> list[str]:
        """Return the settings by which a job reports its epochs, for the pruner."""
        if self._pruner == "none":
            return []
        of_trial = {"storage": storage, "study": self._name, "number": trial.number, "pruner": self._pruner}
        node = {"_target_": "gtrain.callbacks.trial.TrialReporter", **of_trial}
        key, names = f"callbacks.{REPORTER}", "hydra.job.config.override_dirname.exclude_keys"
        # A folder that is named by the job's settings would get the slashes of the database's path.
        excluded = [*OmegaConf.select(self._config, names), key]
        return [override_of(f"+{key}", node), override_of(names, excluded)]

    def _best(self, study: optuna.Study) -> float | None:
        import optuna

        if not study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE]):
            return None
        best = study.best_trial
        settings = " ".join(f"{key}={value}" for key, value in best.params.items())
        log.info("best of %d trials: %g by job %s: %s", _finished(study), best.value, _job(best), settings)
        return best.value


def distribution(override: Override) -> BaseDistribution:
    """Return the distribution of Optuna for the values of an override.

    Raises:
        ConfigError: Optuna has none.
    """
    try:
        return _distribution(override)
    except ValueError as error:
        raise ConfigError(
            f"{override.input_line} was set; it cannot be searched: {error}",
            hint="for example interval(0,0.7), tag(log,interval(1e-4,0.1)) or tag(log,range(1,1000)).",
        ) from error


def _distribution(override: Override) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        low, high, in_log = value.start, value.end, "log" in value.tags
        if isinstance(low, int) and isinstance(high, int) and not isinstance(low, bool):
            return IntDistribution(low, high, log=in_log)
        return FloatDistribution(float(low or 0), float(high or 0), log=in_log)
    if isinstance(value, RangeSweep):
        start, stop, step = (float(number or 0) for number in (value.start, value.stop, value.step))
        count = math.ceil((stop - start) / step) if step > 0 else 0
        if count < 1:
            raise ConfigError(
                f"{override.input_line} was set; a search takes ranges that rise.", hint="range(1,4) is 1, 2 and 3."
            )
        last, in_log = start + (count - 1) * step, "log" in value.tags
        if all(isinstance(number, int) for number in (value.start, value.stop, value.step)):
            return IntDistribution(int(start), int(last), log=in_log, step=int(step))
        return FloatDistribution(start, last, log=in_log, step=step)
    return CategoricalDistribution([*override.sweep_string_iterator()])


def _finished(study: optuna.Study | None) -> int:
    """Return the number of finished trials, without those that a killed command left, which are repeated."""
    trials = [] if study is None else study.get_trials(deepcopy=False)
    return sum(trial.state.is_finished() and _REPEATED not in trial.user_attrs for trial in trials)


def _score(result: JobReturn) -> float | None:
    """Return the score of a job, None if it failed or has no score."""
    if result.status != JobStatus.COMPLETED or result.return_value is None:
        return None
    return _finite(result.return_value)


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _result(facts: dict[str, Any]) -> tuple[bool, dict[str, Any] | None]:
    """Return whether the run of a job is complete, and the best score that its summary has."""
    run = RunRecord(Path(facts[_FOLDER]))
    return run.summary is not None and run.status == "complete", (run.summary or {}).get("best") or None


def _raise_first(results: Sequence[JobReturn]) -> NoReturn:
    """Raise the error of the first of these jobs that failed.

    Raises:
        ConfigError: none failed; they have no scores.
    """
    for result in results:
        _ = result.return_value  # raises the error of a job that failed
    raise ConfigError(
        "the first jobs ended without a score, so there is nothing to search for.",
        hint="a search needs validation: see trainer.limit_val_batches and the data's validation split.",
    )


def _log_failure(job: int, result: JobReturn) -> None:
    """Log why a job failed, which Hydra's launchers keep to themselves; nothing if it did not fail."""
    error = None if result.status == JobStatus.COMPLETED else vars(result)["_return_value"]  # the property raises it
    if isinstance(error, BaseException):
        text = messages.readable(error, [])
        cause = f"{type(error).__name__}: {error}" if text is None else text
        log.warning("job %d failed: %s", job, cause, exc_info=error if text is None else None)


def _tell(study: optuna.Study, trials: Sequence[optuna.Trial | FrozenTrial], scores: Sequence[float | None]) -> None:
    from optuna.trial import TrialState

    told = study.get_trials(deepcopy=False)
    for trial, score in zip(trials, scores, strict=True):
        if score is None:
            study.tell(trial.number, state=TrialState.FAIL)
        elif told[trial.number].user_attrs.get(PRUNED):
            study.tell(trial.number, state=TrialState.PRUNED)
        else:
            study.tell(trial.number, score)


def _job(trial: FrozenTrial) -> str:
    return str(trial.user_attrs.get(_JOB, Path(str(trial.user_attrs.get(_FOLDER, "?"))).name))


def register() -> None:
    """Register the sweeper with Hydra, which creates plugins of the package ``hydra_plugins`` only."""
    name = f"hydra_plugins.gtrain.{OptunaSweeper.__name__}"
    Plugins.instance().class_name_to_class[name] = OptunaSweeper
    node = {
        "_target_": name,
        "trials": 20,
        "jobs": 1,
        "params": None,
        "direction": None,
        "sampler": "tpe",
        "pruner": "median",
        "seed": 0,
        "storage": None,
        "study": "gtrain",
    }
    ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=node, provider="gtrain")
