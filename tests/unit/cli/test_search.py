"""``hydra/sweeper=optuna`` with a launcher that computes the score of its jobs from their settings."""

from __future__ import annotations

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

from gtrain import config
from gtrain.cli import entry, search, sweeps
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
        made, launcher = search.OptunaSweeper(**settings), Launcher(tmp_path / "sweep", score, name)
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
