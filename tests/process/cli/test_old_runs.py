"""Stores, checkpoints and run folders of earlier releases: opened, tested, predicted from, exported and resumed.

``assets/releases/write.py`` wrote the archives with these releases, and what they made of them themselves. Numbers are
equal to 1e-6, since other processors add in another order, but for two: ``auc`` of ``model=kg`` compares with negative
edges that are drawn otherwise since 804a58b, and that of several classes leaves out those that do not occur. Two
machines of ``pbg`` exchange parameters when they come to it, so that their losses differ from run to run.
"""

from __future__ import annotations

import json
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from assets.releases.write import contents, result
from forked import gtrain
from helpers import REPO, ok

from gtrain.graph.store import Store

ARCHIVES = sorted((REPO / "tests" / "assets" / "releases").glob("*.tar.xz"))
VERBS = ("test", "predict", "export", "train")
QUICK = {("single", "train"), ("single_names", "test"), ("sar", "train"), ("ps", "train"), ("pbg", "predict")}
OTHER_AUC = ("single_names", "single_weights", "ps_names", "pbg", "pbg_machines")
each_archive = pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.partition(".")[0])


@cache
def expected(archive: Path) -> dict[str, Any]:
    """What the release itself made of its archive."""
    with tarfile.open(archive) as tar:
        file = tar.extractfile("./expected.json")
        assert file is not None
        content: dict[str, Any] = json.load(file)
    return content


def unpack(archive: Path, folder: Path) -> set[str]:
    """Unpack an archive; returns the names of its stores."""
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # which Python 3.11.2, Debian 12's, does not have
        tar.extractall(folder)
    return {path.name for path in (folder / "data" / "stores").iterdir()}


def differences(now: Any, before: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """What differs, by name; a release may add scores."""
    if isinstance(before, dict):
        assert now.keys() >= before.keys()
        pairs = [(now[key], before[key], f"{name}/{key}") for key in before]
    elif isinstance(before, list):
        pairs = [(*both, f"{name}/{number}") for number, both in enumerate(zip(now, before, strict=True))]
    else:
        # The numbers are sums in float32 of terms near 1: also those that are near 0 have their error.
        alike = now == (pytest.approx(before, rel=1e-6, abs=1e-6) if isinstance(before, float) else before)
        return {} if alike else {name: (now, before)}
    return {key: value for pair in pairs for key, value in differences(*pair).items()}


def marks(run: str, verb: str) -> list[Any]:
    """All but a few steps are slow, and questions that only the data change are asked once."""
    if (run, verb) in QUICK:
        return []
    return [pytest.mark.slow] if "_" not in run else [pytest.mark.slow, pytest.mark.exhaustive]


def steps() -> list[Any]:
    """Each run of each archive with each verb."""
    return [
        pytest.param(archive, run, verb, marks=marks(run, verb))
        for archive in ARCHIVES
        for run in expected(archive)["runs"]
        for verb in VERBS
    ]


def as_written(run: str) -> list[str]:
    """Earlier releases ran the layers of single and pyg as PyG wrote them; kernels add in another order."""
    return ["strategy.layers=plain"] if run.partition("_")[0] in ("single", "pyg") else []


@each_archive
def test_stores_of_earlier_releases_open(archive: Path, tmp_path: Path) -> None:
    names, said = unpack(archive, tmp_path), expected(archive)["stores"]
    assert names == set(said) and len(said) >= 10
    for name in said:
        assert contents(tmp_path / "data" / "stores" / name) == said[name]
        weights = Store.open(tmp_path / "data" / "stores" / name).facts.get("edge_weights")
        assert weights == ([1.0, 8.0] if name.startswith("edges-") else None)


@pytest.mark.parametrize(("archive", "run", "verb"), steps(), ids=lambda value: str(value).rpartition("/")[2])
def test_runs_of_earlier_releases_go_on(archive: Path, run: str, verb: str, tmp_path: Path) -> None:
    stores = unpack(archive, tmp_path)
    said = expected(archive)["runs"][run][verb]
    ok(gtrain(*said["arguments"], *as_written(run), cwd=tmp_path))
    assert {path.name for path in (tmp_path / "data" / "stores").iterdir()} == stores, "none is made again"
    found = differences(result(run, verb, tmp_path), said["result"])
    if run in OTHER_AUC:
        found = {name: values for name, values in found.items() if not name.endswith("/auc")}
    if (run, verb) == ("pbg_machines", "train"):
        losses = [values for name, values in found.items() if name.endswith("train/loss")]
        assert all(now == pytest.approx(before, rel=0.01) for now, before in losses)
    else:
        assert not found


@pytest.mark.slow
@each_archive
def test_last_and_best_find_runs_of_earlier_releases(archive: Path, tmp_path: Path) -> None:
    unpack(archive, tmp_path)
    for run, name in (("pbg", "best"), ("single", "last")):
        said = expected(archive)["runs"][run]["test"]
        path = f"ckpt_path=runs/{run}/checkpoints/last.ckpt"
        ok(gtrain(*(f"ckpt_path={name}" if each == path else each for each in said["arguments"]), cwd=tmp_path))
        assert name == "best" or not differences(result(run, "test", tmp_path), said["result"])
    other = gtrain("test", "strategy=single", "ckpt_path=last", "model=sage", cwd=tmp_path)
    assert other.returncode == 1 and "no run under" in other.stderr


@each_archive
@pytest.mark.slow
def test_the_folder_of_an_earlier_release_s_run_has_its_settings(archive: Path, tmp_path: Path) -> None:
    """``run=FOLDER`` in place of the settings."""
    unpack(archive, tmp_path)
    for run, verb in (("single", "test"), ("single", "predict"), ("single", "export"), ("sar", "predict")):
        place = ("ckpt_path=last", f"hydra.run.dir=out/{run}/{verb}")
        ok(gtrain(verb, f"run=runs/{run}", *place, *as_written(run), cwd=tmp_path))
        found = differences(result(run, verb, tmp_path), expected(archive)["runs"][run][verb]["result"])
        assert not found, (run, verb)


@each_archive
@pytest.mark.slow
def test_pbg_begins_with_what_a_run_of_an_earlier_release_learned(archive: Path, tmp_path: Path) -> None:
    unpack(archive, tmp_path)
    arguments = expected(archive)["runs"]["pbg"]["train"]["arguments"][1:]
    new = [each for each in arguments if not each.startswith("ckpt_path=")]
    done = ok(gtrain(*new, "strategy.warm_start=runs/pbg", "strategy.num_partitions=2", cwd=tmp_path))
    assert "16 of 16" in done.stdout + done.stderr


@each_archive
@pytest.mark.slow
def test_questions_to_runs_of_earlier_releases(archive: Path, tmp_path: Path) -> None:
    """``single`` and ``ps`` learned the same vectors, and the checkpoint does not name the strategy."""
    unpack(archive, tmp_path)
    question, answers = ("entity 11,relation 0,?", "k=3", "format=json"), {}
    for run in ("single_names", "ps_names", "pbg"):
        text = ok(gtrain("score", f"run=runs/{run}", *question, cwd=tmp_path)).stdout
        answers[run] = {each["name"]: each["score"] for each in json.loads(text)["answers"]}
    assert answers["single_names"] == pytest.approx(answers["ps_names"], rel=1e-5)
    assert len(answers["pbg"]) == 3 and answers["pbg"].keys() != answers["ps_names"].keys()
