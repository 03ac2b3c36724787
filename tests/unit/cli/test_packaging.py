"""What pyproject.toml promises: platforms, versions of Python, and ranges whose two ends are those that are tested."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from helpers import REPO
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

CONTENT = tomllib.loads((REPO / "pyproject.toml").read_text())
PROJECT = CONTENT["project"]
NEEDED = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = ("entities", "hdf5", "index", "ray")
OPTIONAL = [Requirement(line) for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra]]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
UNIX = {"sys_platform": "linux", "os_name": "posix", "platform_system": "Linux"}


def pins(name: str) -> dict[str, Version]:
    """The releases that a file of constraints names, by distribution."""
    lines = [line.partition("#")[0].strip() for line in (REPO / "constraints" / name).read_text().splitlines()]
    found = {}
    for requirement in (Requirement(line) for line in lines if line):
        (pin,) = requirement.specifier
        assert pin.operator == "==" and requirement.name not in found, requirement
        found[requirement.name] = Version(pin.version)
    return found


def names(machine: str, python: str, extra: str = "") -> set[str]:
    """Distributions that pip installs on a platform."""
    environment = {**UNIX, "platform_machine": machine, "python_version": python, "extra": extra}
    lines = PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else [])
    needed = [Requirement(line) for line in lines]
    return {need.name for need in needed if need.marker is None or need.marker.evaluate(environment)}


@pytest.mark.parametrize("need", [*NEEDED, *OPTIONAL], ids=lambda need: need.name)
def test_each_range_begins_with_the_lowest_release_that_is_tested(need: Requirement) -> None:
    (lowest,) = [spec.version for spec in need.specifier if spec.operator == ">="]
    tested = pins("lowest.txt")[need.name]
    assert need.specifier.contains(tested)
    # a bound may name the series of a release: >=2.0 is tested with 2.0.2 where that is its first with wheels
    assert tested.release[: len(Version(lowest).release)] == Version(lowest).release


@pytest.mark.parametrize("need", [*NEEDED, *OPTIONAL], ids=lambda need: need.name)
def test_each_range_holds_the_newest_release_that_is_tested(need: Requirement) -> None:
    newest = pins("newest.txt")[need.name]
    assert need.specifier.contains(newest) and newest >= pins("lowest.txt")[need.name]
    upper = [spec.version for spec in need.specifier if spec.operator in ("<", "<=", "~=", "==")]
    assert upper in ([], [str(newest.major + 1)]), "no upper end but the next major release"


def test_the_constraints_name_every_dependency() -> None:
    known = {need.name for need in [*NEEDED, *OPTIONAL]}
    assert set(pins("lowest.txt")) == set(pins("newest.txt")) >= known
    development = {Requirement(line).name for line in PROJECT["optional-dependencies"]["dev"]}
    assert known | development >= set(pins("ci.txt"))


def test_ci_takes_its_own_releases() -> None:
    ci = (REPO / ".ci" / "run").read_text()
    assert 'PIP_CONSTRAINT="$PWD/constraints/ci.txt"' in ci
    assert pins("ci.txt")["torch"] == Version("2.13.0")


def test_compromised_releases_are_excluded() -> None:
    (lightning,) = [need for need in NEEDED if need.name == "lightning"]
    assert not any(lightning.specifier.contains(release) for release in ("2.6.2", "2.6.3"))
    assert lightning.specifier.contains("2.6.4")


def test_without_wheels_nothing_is_installed() -> None:
    """pymetis and DGL have wheels for x86-64 alone, DGL for Python 3.11 alone, kaminpar for Python before 3.14."""
    for python in PYTHONS:
        assert "pymetis" in names("x86_64", python) and "pymetis" not in names("aarch64", python)
        for machine in ("x86_64", "aarch64"):
            assert ("kaminpar" in names(machine, python)) == (python != "3.14")
        assert "kaminpar" not in names("ppc64le", python)
        assert "dgl" not in names("aarch64", python, "dgl")
        assert ("dgl" in names("x86_64", python, "dgl")) == (python == "3.11")
    assert names("x86_64", "3.12") - names("aarch64", "3.12") == {"pymetis"}


def test_the_versions_of_python_agree() -> None:
    listed = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert listed == PYTHONS
    example = tomllib.loads((REPO / "plugins" / "example_backend" / "pyproject.toml").read_text())["project"]
    assert example["requires-python"] == PROJECT["requires-python"]
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert [f"3.{minor}" for minor in range(5, 30) if allowed.contains(f"3.{minor}.1")] == PYTHONS
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS
    workflow = (REPO / ".github" / "workflows" / "tests.yml").read_text()
    assert re.findall(r'python: \["(.+)"\]', workflow)[0].split('", "') == PYTHONS
    assert "(3, 11) <= sys.version_info[:2] < (3, 15)" in (REPO / ".ci" / "run").read_text()
    assert "Python 3.11 to 3.14" in (REPO / "README.md").read_text()


def test_the_workflow_runs_both_ends_by_the_script() -> None:
    workflow = (REPO / ".github" / "workflows" / "tests.yml").read_text()
    script = (REPO / ".ci" / "versions").read_text()
    for end in ("lowest", "newest"):
        assert Path(REPO, "constraints", f"{end}.txt").is_file() and f"\n          - end: {end}\n" in workflow
    assert ".ci/versions ${{ matrix.end }}" in workflow and "constraints/$end.txt" in script


def test_the_listed_packages_are_those_of_the_tree() -> None:
    """A package that is listed and missing keeps a fresh clone from being installed."""
    folders = CONTENT["tool"]["setuptools"]["package-dir"]
    roots = [
        REPO / folders[name]
        for name in ("gtrain", "gtrain_single", "gtrain_sar", "gtrain_pyg", "gtrain_ps", "gtrain_pbg")
    ]
    tree = {
        ".".join((root.name, *file.parent.relative_to(root).parts))
        for root in roots
        for file in root.rglob("__init__.py")
    }
    assert set(CONTENT["tool"]["setuptools"]["packages"]) - {"gtrain.conf"} == tree
