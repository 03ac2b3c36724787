"""``hydra/sweeper=optuna`` with a launcher that computes the score of its jobs from their settings."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf

from gtrain import config
from gtrain.callbacks.trial import TrialReporter
from gtrain.cli import auto, entry, search, sweeps
from gtrain.errors import ConfigError
from gtrain.launch.children import fork_with_pipe

optuna = pytest.importorskip("optuna", reason="the extra optuna is not installed")

LR = "model.optimizer.lr=tag(log,interval(1e-4,1))"


class Launcher:
    """Runs jobs by a function of their settings, which may raise."""

    said: ClassVar[dict[str, str]] = {}
    """What else summaries say of the best score."""

    def __init__(self, folder: Path, score: Callable[[dict[str, str]], float | None], name: str) -> None:
        self.folder, self.score, self.name = folder, score, name
        self.jobs: dict[int, dict[str, str]] = {}

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        return [self.run(number, job) for number, job in enumerate(job_overrides, start=initial_job_idx)]

    def run(self, number: int, overrides: Sequence[str]) -> JobReturn:
        assert number not in self.jobs
        self.jobs[number] = dict(override.partition("=")[::2] for override in overrides)
        folder = self.folder / str(number)
        folder.mkdir(parents=True)
        try:
            value = self.score(self.jobs[number])
        except ArithmeticError as error:
            return JobReturn(status=JobStatus.FAILED, _return_value=error)
        best = value and {"name": self.name, "value": value, **self.said}
        (folder / "summary.json").write_text(json.dumps({"best": best}))
        return JobReturn(status=JobStatus.COMPLETED, _return_value=value)


@pytest.fixture
def sweeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A function that makes a sweeper, with its settings, and its launcher."""
    Plugins.instance().register(entry.BackendConfigs)
    config.register()
    search.register()
    GlobalHydra.instance().clear()

    def make(
        score: Callable[[dict[str, str]], float | None], *overrides: str, name: str = "val/acc"
    ) -> tuple[search.OptunaSweeper, Launcher]:
        sweep_dir = f"hydra.sweep.dir={tmp_path / 'sweep'}"
        cfg = compose("config", ["hydra/sweeper=optuna", sweep_dir, *overrides], return_hydra_config=True)
        settings = {key: value for key, value in cfg.hydra.sweeper.items() if key != "_target_"}
        made, launcher = search.OptunaSweeper(**settings), Launcher(Path(cfg.hydra.sweep.dir), score, name)
        monkeypatch.setattr(Plugins.instance(), "instantiate_launcher", lambda **_: launcher)
        loader = GlobalHydra.instance().config_loader()
        made.setup(hydra_context=SimpleNamespace(config_loader=loader), task_function=None, config=cfg)  # type: ignore[arg-type]
        return made, launcher

    with initialize_config_module("gtrain.conf", **config.VERSION_BASE):
        yield make


def distance(job: dict[str, str]) -> float:
    """Best at a learning rate of 0.01."""
    return abs(math.log10(float(job["model.optimizer.lr"])) + 2)


@pytest.mark.parametrize(
    ("score", "name"), [(lambda job: 1 - distance(job) / 4, "val/acc"), (lambda job: distance(job), "val/loss")]
)
def test_the_best_is_found_whatever_is_better(sweeper: Any, score: Any, name: str) -> None:
    made, launcher = sweeper(score, "hydra.sweeper.trials=25", name=name)
    best = made.sweep(["seed=3", LR, "model.hidden_channels=choice(16,32)"])
    assert len(launcher.jobs) == 25 and {job["seed"] for job in launcher.jobs.values()} == {"3"}
    assert {job["model.hidden_channels"] for job in launcher.jobs.values()} == {"16", "32"}
    assert min(map(distance, launcher.jobs.values())) < 0.2
    values = [score(job) for job in launcher.jobs.values()]
    assert best == (min(values) if name == "val/loss" else max(values))
    assert len({job["model.optimizer.lr"] for job in launcher.jobs.values()}) == 25, "no trial is asked for twice"


def test_the_mode_of_the_checkpoint_says_what_is_better(sweeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launcher, "said", {"direction": "min"})
    made, launcher = sweeper(distance, "hydra.sweeper.trials=3", name="val/surprise")
    assert made.sweep([LR]) == min(map(distance, launcher.jobs.values()))


def test_deletions_reach_the_jobs_as_typed(sweeper: Any) -> None:
    made, launcher = sweeper(lambda job: -distance(job), "hydra.sweeper.trials=1")
    made.sweep(["~callbacks.checkpoint", "~model.norm=none", LR])
    job = launcher.jobs[0]
    assert job["~callbacks.checkpoint"] == "" and job["~model.norm"] == "none"


def test_a_study_goes_on_where_it_was(sweeper: Any) -> None:
    made, launcher = sweeper(lambda job: -distance(job), "hydra.sweeper.trials=4", "hydra.sweeper.jobs=2")
    made.sweep([LR])
    assert sorted(launcher.jobs) == [0, 1, 2, 3]
    made, launcher = sweeper(lambda job: -distance(job), "hydra.sweeper.trials=7", "hydra.sweeper.jobs=2")
    made.sweep([LR])
    assert sorted(launcher.jobs) == [4, 5, 6], "folders of jobs are not used twice, and four trials are done"
    made, launcher = sweeper(lambda job: -distance(job), "hydra.sweeper.trials=9")
    with pytest.raises(ConfigError, match=r"has other values.*\nHINT: set hydra\.sweeper\.study"):
        made.sweep(["model.optimizer.lr=choice(0.1,0.2)"])


def test_a_trial_that_a_killed_command_left_is_repeated(sweeper: Any, tmp_path: Path) -> None:
    def killed(job: dict[str, str]) -> float:
        if "+callbacks.trial" in job:
            raise KeyboardInterrupt
        return -distance(job)

    made, launcher = sweeper(killed, "hydra.sweeper.trials=3")
    with pytest.raises(KeyboardInterrupt):
        made.sweep([LR])
    assert "+callbacks.trial" not in launcher.jobs[0], "the first job's score decides what is better"
    left = launcher.jobs[1]["model.optimizer.lr"]
    made, launcher = sweeper(lambda job: -distance(job), "hydra.sweeper.trials=3")
    made.sweep([LR])
    assert launcher.jobs[2]["model.optimizer.lr"] == left
    study = optuna.load_study(study_name="gtrain", storage=f"sqlite:///{tmp_path / 'sweep' / 'optuna.db'}")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


@pytest.mark.parametrize("study_exists", [True, False])
def test_a_batch_whose_launcher_fails_keeps_its_scores(sweeper: Any, tmp_path: Path, study_exists: bool) -> None:
    """As submitit's raises if one of the jobs was killed."""

    class Raising(Launcher):
        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
            results = super().launch(job_overrides, initial_job_idx)
            if any(result.status != JobStatus.COMPLETED for result in results):
                raise RuntimeError("job has not produced any output")
            return results

    killed: set[str] = set()

    def score(job: dict[str, str]) -> float:
        if job["model.optimizer.lr"] in killed or (len(made._launcher.jobs) == 2 and not killed):
            killed.add(job["model.optimizer.lr"])
            raise ArithmeticError
        return -distance(job)

    if study_exists:
        sweeper(lambda job: -distance(job), "hydra.sweeper.trials=1")[0].sweep([LR])
    done, states = int(study_exists), []
    for _ in range(3):
        made, launcher = sweeper(score, f"hydra.sweeper.trials={done + 5}", "hydra.sweeper.jobs=3")
        made._launcher = launcher = Raising(launcher.folder, score, launcher.name)
        try:
            made.sweep([LR])
        except RuntimeError:
            states.append([trial.state.name for trial in _study(tmp_path).trials][done:])
    assert states == [
        ["COMPLETE", "RUNNING", "COMPLETE"],
        ["COMPLETE", "FAIL", "COMPLETE", "RUNNING", "COMPLETE", "COMPLETE"],
    ], "the values of the job that was killed are tried once more"
    assert len(killed) == 1 and launcher.jobs == {}, "the third command finds all trials done"
    last = [trial.state.name for trial in _study(tmp_path).trials][done:]
    assert last == ["COMPLETE", "FAIL", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


def _study(tmp_path: Path, file: str = "sweep/optuna.db") -> Any:
    return optuna.load_study(study_name="gtrain", storage=f"sqlite:///{tmp_path / file}")


def test_a_first_job_that_fails_is_followed_by_other_values(sweeper: Any) -> None:
    def fails(job: dict[str, str]) -> float:
        raise ArithmeticError

    made, first = sweeper(fails)
    with pytest.raises(ArithmeticError):
        made.sweep([LR])
    made, second = sweeper(lambda job: -distance(job), "hydra.sweeper.trials=3")
    made.sweep([LR])
    values = [job["model.optimizer.lr"] for job in (*first.jobs.values(), *second.jobs.values())]
    assert len(set(values)) == 4


def test_two_commands_share_a_storage(sweeper: Any, tmp_path: Path) -> None:
    shared = (f"hydra.sweeper.storage=sqlite:///{tmp_path / 'shared.db'}", "hydra.sweeper.trials=4")
    other, other_launcher = sweeper(distance, *shared, f"hydra.sweep.dir={tmp_path / 'other'}", name="val/loss")

    def score(job: dict[str, str]) -> float:
        if len(launcher.jobs) == 1:  # the other command starts and ends during the first job
            other.sweep([LR])
        return distance(job)

    made, launcher = sweeper(score, *shared, name="val/loss")
    best = made.sweep([LR])
    jobs = [*other_launcher.jobs.values(), *launcher.jobs.values()]
    assert len(other_launcher.jobs) == 4 and len(launcher.jobs) == 1
    assert len({job["model.optimizer.lr"] for job in jobs}) == 5, "they search different values"
    assert best == min(map(distance, jobs)) and len(_study(tmp_path, "shared.db").trials) == 5


def test_a_second_command_in_the_folder_of_a_search_is_refused(sweeper: Any, tmp_path: Path) -> None:
    made, launcher = sweeper(distance)
    (tmp_path / "sweep").mkdir()
    descriptor = os.open(tmp_path / "sweep", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir=.*another sweep is still writing to this folder"):
            made.sweep([LR])
    finally:
        os.close(descriptor)
    assert not launcher.jobs and not (tmp_path / "sweep" / "optuna.db").exists()


def test_a_study_keeps_its_direction_and_its_score(sweeper: Any, tmp_path: Path) -> None:
    sweeper(distance, "hydra.sweeper.trials=1", name="val/loss")[0].sweep([LR])
    made, launcher = sweeper(distance, "hydra.sweeper.trials=2", "hydra.sweeper.direction=maximize", name="val/loss")
    with pytest.raises(ConfigError, match=r"is maximize; the study gtrain in .* has minimize.*\nHINT: leave out"):
        made.sweep([LR])
    assert not launcher.jobs
    with pytest.raises(ConfigError, match=r"score of this search is val/mae; .* is val/loss.*\nHINT: set model\.score"):
        sweeper(distance, "hydra.sweeper.trials=2", name="val/mae")[0].sweep([LR])
    assert [trial.state.name for trial in _study(tmp_path).trials] == ["COMPLETE", "FAIL"]
    made, launcher = sweeper(distance, "hydra.sweeper.trials=3", "hydra.sweeper.direction=minimize", name="val/loss")
    made.sweep([LR])
    assert len(launcher.jobs) == 1


def test_racers_report_nothing_to_the_trial(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def make(_racer: auto.Candidate, overrides: Sequence[str]) -> tuple[auto.Settled, str]:
        callbacks = {"checkpoint": {"monitor": "auto"}, "trial": {"number": 3}}
        cfg = OmegaConf.create({"paths": {"run": None}, "trainer": {}, "callbacks": callbacks})
        OmegaConf.set_struct(cfg, True)
        return auto.Settled(cfg, [*overrides], {}), ""

    racers = (auto.Candidate("single", (), 1.0), auto.Candidate("sar", (), 2.0))
    cfg = OmegaConf.create({"paths": {"run": str(tmp_path)}})
    auto._race(cfg, racers, 1.0, make, lambda cfg, *_: seen.append(set(cfg.callbacks)))
    assert seen == [{"checkpoint", "race"}] * 2


def test_a_job_whose_trial_was_ended_goes_on_without_reports(tmp_path: Path) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'optuna.db'}", study_name="gtrain")
    trial = study.ask()
    reporter = TrialReporter(f"sqlite:///{tmp_path / 'optuna.db'}", "gtrain", trial.number, "median")
    trainer = SimpleNamespace(
        checkpoint_callback=ModelCheckpoint(monitor="val/acc"), callback_metrics={"val/acc": 0.5}, current_epoch=0
    )
    assert not reporter._report(trainer)  # type: ignore[arg-type]
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    trainer.current_epoch = 1
    assert not reporter._report(trainer)  # type: ignore[arg-type]
    assert study.trials[0].intermediate_values == {0: 0.5}


def test_jobs_that_fail_are_trials_without_a_score(sweeper: Any) -> None:
    def fails(job: dict[str, str]) -> float | None:
        if float(job["model.optimizer.lr"]) > 0.01:
            raise ArithmeticError("too large")
        return -distance(job)

    made, launcher = sweeper(fails, "hydra.sweeper.trials=12", "hydra.sweeper.seed=1", "hydra.sweeper.jobs=3")
    assert made.sweep([LR]) <= 0 and len(launcher.jobs) == 12
    made, _ = sweeper(lambda job: 1 / 0, "hydra.sweeper.study=other")
    with pytest.raises(ArithmeticError):
        made.sweep([LR])
    made, _ = sweeper(lambda job: None, "hydra.sweeper.study=none")
    with pytest.raises(ConfigError, match="ended without a score"):
        made.sweep([LR])


def test_the_cause_of_a_failed_trial_is_logged_once(sweeper: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fails(job: dict[str, str]) -> float | None:
        if "+callbacks.trial" in job:
            raise ArithmeticError("too large")
        return -distance(job)

    sweeper(fails, "hydra.sweeper.trials=2")[0].sweep([LR])
    (record,) = [record for record in caplog.records if "failed" in record.getMessage()]
    assert record.getMessage() == "job 1 failed: ArithmeticError: too large" and record.exc_info, "with its traceback"


@pytest.mark.parametrize("folder", ["größe", "it's \\'here", "a\\", 'b"c', "d e,f=[1]{2}"])
def test_a_job_reads_the_address_of_the_study_as_it_is(sweeper: Any, folder: str) -> None:
    made, _ = sweeper(lambda job: None)
    storage = f"sqlite:////tmp/{folder}/optuna.db"
    reporter, excluded = made._reporting(storage, SimpleNamespace(number=3))
    (override,) = OverridesParser.create().parse_overrides([reporter])
    node = compose("config", [reporter]).callbacks.trial
    assert override.get_key_element() == "+callbacks.trial"
    assert (node.storage, node.study, node.number, node.pruner) == (storage, "gtrain", 3, "median")
    assert "callbacks.trial" in excluded, "a folder that is named by the settings has no database's path in it"


def test_jobs_in_folders_with_other_names_have_their_numbers_and_their_score(sweeper: Any, tmp_path: Path) -> None:
    """As with ``hydra.sweep.subdir=${hydra.job.override_dirname}``."""

    class Named(Launcher):
        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
            results = super().launch(job_overrides, initial_job_idx)
            for number, result in enumerate(results, start=initial_job_idx):
                folder = self.folder / f"lr/{number}th"
                folder.parent.mkdir(exist_ok=True)
                (self.folder / str(number)).rename(folder)
                result.hydra_cfg = search.OmegaConf.create({"hydra": {"runtime": {"output_dir": str(folder)}}})
            return results

    for trials in (3, 5):  # the second command goes on with the study
        made, _ = sweeper(distance, f"hydra.sweeper.trials={trials}", name="val/loss")
        made._launcher = launcher = Named(tmp_path / "sweep", distance, "val/loss")
        made.sweep([LR])
        assert sorted(launcher.jobs) == ([0, 1, 2] if trials == 3 else [3, 4])
    study = optuna.load_study(study_name="gtrain", storage=f"sqlite:///{tmp_path / 'sweep' / 'optuna.db'}")
    assert study.direction.name == "MINIMIZE"
    assert [Path(trial.user_attrs["folder"]).name for trial in study.trials] == ["0th", "1th", "2th", "3th", "4th"]


def test_a_job_beside_others_names_its_folder_as_those_of_hydra_do(tmp_path: Path) -> None:
    def run(write_end: int) -> None:
        os.write(write_end, b'{"value": 0.5}')
        os._exit(0)

    pid, pipe = fork_with_pipe(run)
    job = sweeps._Job(3, [], pid, pipe, tmp_path / "lr=1" / sweeps.TERMINAL)
    while job.read():
        pass
    result = job.result()
    assert result.return_value == 0.5 and result.hydra_cfg is not None
    assert result.hydra_cfg.hydra.runtime.output_dir == str(tmp_path / "lr=1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("interval(0,0.7)", ("FloatDistribution", 0.0, 0.7, False)),
        ("tag(log,interval(1e-4,1e-1))", ("FloatDistribution", 1e-4, 0.1, True)),
        ("int(tag(log,interval(16,256)))", ("IntDistribution", 16, 256, True)),
        ("range(1,4)", ("IntDistribution", 1, 3, False)),
        ("range(0,1,0.25)", ("FloatDistribution", 0.0, 0.75, False)),
        ("tag(log,range(1,1000))", ("IntDistribution", 1, 999, True)),
    ],
)
def test_values_in_hydras_grammar(text: str, expected: tuple[Any, ...]) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"key={text}"])
    made = search.distribution(override)
    assert (type(made).__name__, made.low, made.high, made.log) == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["choice(1,[2,3],none)", "1,[2,3],none"])
def test_choices_are_values_as_users_type_them(text: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"key={text}"])
    made = search.distribution(override)
    assert made.choices == ("1", "[2,3]", "none")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "arguments", "expected"),
    [
        (["hydra.sweeper.trials=0"], [LR], "trials=0 was set; it must be 1 or more"),
        (["hydra.sweeper.pruner=best"], [LR], "pruner=best was set; it is one of median, hyperband, none"),
        (["hydra.sweeper.direction=up"], [LR], "direction=up was set; it is one of maximize, minimize"),
        ([], ["seed=1"], "no setting has several values"),
        ([], ["seed=range(3,1)"], "takes ranges that rise"),
        (
            [],
            ["model.optimizer.lr=tag(log,interval(0,0.1))"],
            r"lr=tag\(log,interval\(0,0\.1\)\) was set; it cannot be",
        ),
        ([], ["model.dropout=interval(0.7,0)"], r"dropout=interval\(0\.7,0\) was set; it cannot be searched: .*low"),
        ([], ["model.hidden_channels=tag(log,range(16,256,16))"], "cannot be searched: .*step"),
        ([], ["model.dropout=tag(log,range(0.1,0.8,0.1))"], "cannot be searched: .*step"),
        (["hydra.sweeper.storage=study.db"], [LR], r"not a URL.*\nHINT: .*storage=sqlite:///study\.db"),
        (
            ["hydra.sweeper.storage=sqlite:////no/such/study.db"],
            [LR],
            r"from hydra\.sweeper\.storage=sqlite:.*unable to",
        ),
        (["hydra.sweeper.storage=nosuch://study"], [LR], r"read from hydra\.sweeper\.storage=nosuch://study: "),
    ],
)
def test_mistakes(sweeper: Any, settings: list[str], arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        sweeper(distance, *settings)[0].sweep(arguments)


@pytest.mark.parametrize("name", ["optuna", "optuna_link", "optuna_kg", "optuna_sparse"])
def test_ready_searches_name_settings_that_exist(sweeper: Any, name: str) -> None:
    group = {"optuna_link": ["model=link_sage"], "optuna_kg": ["experiment=umls"], "optuna_sparse": ["experiment=a9a"]}
    cfg = compose("config", [f"hparams_search={name}", *group.get(name, [])], return_hydra_config=True)
    for key in cfg.hydra.sweeper.params:
        assert search.OmegaConf.select(cfg, key) is not None, key
