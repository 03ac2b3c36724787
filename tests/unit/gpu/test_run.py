"""tests/gpu/run: parts run in order within their time, and results survive parts that fail or are cut short."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from helpers import LIMIT, REPO, alive, clean_environment

SCRIPT = REPO / "tests" / "gpu" / "run"
TESTS = """
import pytest

def test_one():
    pass

def test_two():
    assert 1 + 1 == 3, "sums"

@pytest.fixture
def broken():
    raise RuntimeError("fixture")

def test_three(broken):
    pass

def test_four():
    pytest.skip("no reason")
"""
HANGS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print('{"reading": "early", "child": %d}' % child.pid, flush=True)
child.wait()
"""
READS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float)
parser.add_argument("--device", default="cuda")
parser.add_argument("--small", action="store_true")
given = parser.parse_args()
print("some text")
print('{"reading": "ps", "device": "%s", "small": %d}' % (given.device, given.small))
"""


def checkout(folder: Path) -> Path:
    """A checkout with the script, a package named as gtrain, and the tests and benchmarks above."""
    for name, text in {
        "tests/gpu/test_a.py": TESTS,
        "tests/benchmarks/gpu/bench_pyg.py": "raise ValueError('no such thing')",
        "tests/benchmarks/gpu/bench_pbg.py": HANGS,
        "tests/benchmarks/gpu/bench_ps.py": READS,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(REPO / "tests" / "gpu" / "conftest.py", folder / "tests" / "gpu")
    shutil.copy(SCRIPT, folder / "tests" / "gpu")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    return folder


def execute(root: Path, *arguments: str, program: str = "") -> CompletedProcess[str]:
    """Run the script of a checkout, after ``program``, which changes names of its module ``run``."""
    loader = f"""
import importlib.machinery, sys
run = importlib.machinery.SourceFileLoader("run", {str(root / "tests/gpu/run")!r}).load_module()
{program}
sys.exit(run.main(sys.argv[1:]))
"""
    return subprocess.run(
        [sys.executable, "-c", loader, *arguments],
        cwd=root,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


NO_CHECK = 'run._check = lambda *_: {"gtrain": "", "strategies": [], "torch": "2", "gpus": ["one"]}'
ALL_RUN = """
import torch, os
os.environ["PYTEST_ADDOPTS"] = "-p pretend"
os.environ["PYTHONPATH"] = os.getcwd()
"""
PRETEND = "import torch\ntorch.cuda.is_available = lambda: True\n"


@pytest.mark.slow
def test_results_of_all_parts_are_in_the_folder(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / "pretend.py").write_text(PRETEND)
    done = execute(
        root, "--out", "out", "--only", "ps,tests,pyg", "--device", "cpu", "--workers", "2", program=NO_CHECK + ALL_RUN
    )
    assert done.returncode == 1, done.stderr
    found = json.loads((root / "out" / "summary.json").read_text())["parts"]
    tests, pyg, ps = found
    assert [part["part"] for part in found] == ["tests", "pyg", "ps"]
    assert tests["files"] == {"tests/gpu/test_a.py": {"passed": 1, "failed": 1, "error": 1, "skipped": 1}}
    assert {failure["test"]: failure["message"].splitlines()[0] for failure in tests["failures"]} == {
        "tests/gpu/test_a.py::test_two": "AssertionError: sums",
        "tests/gpu/test_a.py::test_three": "RuntimeError: fixture",
    }
    assert pyg["status"] == "failed (1)" and pyg["tail"][-1] == "ValueError: no such thing"
    assert ps["status"] == "passed" and ps["readings"] == [{"reading": "ps", "device": "cpu", "small": 1}]
    assert "FAILED tests/gpu/test_a.py::test_two" in done.stdout


def test_a_part_that_takes_too_long_is_killed_with_its_processes_and_the_next_one_runs(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    done = execute(root, "--out", "out", "--only", "pbg,ps", "--seconds", "6", program=NO_CHECK)
    assert done.returncode == 1, done.stderr
    pbg, ps = json.loads((root / "out" / "summary.json").read_text())["parts"]
    assert pbg["status"] == "cut short" and pbg["readings"][0]["reading"] == "early"
    assert not alive(pbg["readings"][0]["child"])
    assert ps["status"] == "passed" and ps["readings"][0]["device"] == "cuda"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_without_a_gpu_tests_are_skipped_before_their_fixtures(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / "pretend.py").write_text(PRETEND.replace("True", "False"))
    done = execute(root, "--out", "out", "--only", "tests", program=NO_CHECK + ALL_RUN)
    assert done.returncode == 0, done.stdout + done.stderr
    (tests,) = json.loads((root / "out" / "summary.json").read_text())["parts"]
    assert tests["files"] == {"tests/gpu/test_a.py": {"skipped": 4}} and tests["status"] == "skipped"


def test_another_copy_of_gtrain_is_refused(tmp_path: Path) -> None:
    done = execute(checkout(tmp_path), "--only", "ps")
    assert done.returncode == 2
    assert f"import gtrain reads {REPO / 'gtrain'}, not the checkout {tmp_path}." in done.stderr
    assert "HINT: in the checkout, pip install" in done.stderr


def test_a_gtrain_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / "gtrain").mkdir()
    (root / "gtrain" / "__init__.py").write_text("import no_such_package")
    done = execute(root, "--only", "ps")
    assert done.returncode == 2
    assert "cannot import gtrain: ModuleNotFoundError: No module named 'no_such_package'" in done.stderr


@pytest.mark.parametrize("name", ["mesh", "tests,mesh"])
def test_unknown_parts_are_named(name: str, tmp_path: Path) -> None:
    done = execute(checkout(tmp_path), "--only", name)
    assert done.returncode == 2
    assert "--only names mesh; the parts are tests, layers, pyg, pbg, sar, ps" in done.stderr
