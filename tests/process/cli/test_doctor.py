"""``gtrain doctor`` as a command, beside strategies that cannot be imported."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers import gtrain, ok
from namespaces import network

from gtrain.wire import Security

BACKEND = """
from gtrain.backends import Backend
backend = Backend("fails late", "gtrain.config:StrategyConfig", "late_strategy:Strategy", "gtrain.conf")
"""


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """The environment with two more strategies: one's package is missing, the other's strategy ends the process."""
    folder = tmp_path / "packages"
    info = folder / "strategies_of_tests-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strategies-of-tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[gtrain.backends]\nabsent = no_such_package:backend\nzlate = late:backend\n"
    )
    (folder / "late.py").write_text(BACKEND)
    (folder / "late_strategy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    return {"PYTHONPATH": str(folder)}


def test_a_report_for_programs(tmp_path: Path, broken: dict[str, str]) -> None:
    """Broken strategies are named with the reason, and do not make the others, or the command, fail."""
    cwd = tmp_path / "empty"
    cwd.mkdir()
    facts = json.loads(ok(gtrain("doctor", "format=json", cwd=cwd, env=broken)).stdout)
    assert list(cwd.iterdir()) == [], "no run's folder is made"
    assert facts["packages"]["dependencies"]["torch"]["installed"] == version("torch")
    assert facts["imports"]["torch"] is None and facts["kernels"]["writable"]
    strategies = facts["strategies"]
    assert [name for name, state in strategies.items() if state["error"] is None] == [
        "pbg",
        "ps",
        "pyg",
        "sar",
        "single",
    ]
    assert strategies["sar"]["models"] == ["message-passing"]
    assert "No module named 'no_such_package'" in strategies["absent"]["error"]
    assert strategies["zlate"]["error"] == "ended the process with SIGSEGV"
    named = [problem for problem in facts["problems"] if "strategy=" in problem["message"]]
    assert len(named) == 2 and not any(problem["essential"] for problem in named)


@pytest.mark.slow
def test_a_report_for_people_about_a_broken_strategy(tmp_path: Path, broken: dict[str, str]) -> None:
    result = gtrain("doctor", "strategy=absent", "trainer.num_nodes=64", cwd=tmp_path, env=broken)
    assert result.returncode == 1
    assert "BROKEN: strategy=absent cannot be used" in result.stdout
    assert "HINT: reinstall the package that provides no_such_package:backend." in result.stdout
    assert "NOTE: 64 ranks share" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_an_argument_of_another_verb(tmp_path: Path) -> None:
    result = gtrain("doctor", "data=planted", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("gtrain: gtrain doctor was given data=planted; it reads format")


@pytest.mark.slow
def test_the_rates_between_machines(tmp_path: Path) -> None:
    """Over links of 100 Mbit/s, which are 12.5 MB/s, with headers, encrypted, and in bursts of 256 KB."""
    Security.create().save(tmp_path / "job.key")
    with network(2, "100mbit") as machines:
        common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
        meeting = {"MASTER_ADDR": machines.address(0), "MASTER_PORT": "29500"}
        ranks = [{"RANK": str(rank), "GROUP_RANK": str(rank), **common, **meeting} for rank in range(2)]
        command = ("gtrain", "doctor", "format=json", "cluster.key_file=job.key")
        started = [machines.run(number, tmp_path, *command, env=env) for number, env in enumerate(ranks)]
        first, second = (ok(each.end()) for each in started)
    assert second.stdout == ""
    measured = json.loads(first.stdout)["network"]
    assert measured["error"] is None and measured["encrypted"]
    (connection,) = measured["connections"]
    assert connection["rank"] == 1 and 1e-6 < connection["latency"] < 0.1
    for direction in ("to", "from"):
        assert 6e6 < connection[direction] < 13.5e6


@pytest.mark.slow
def test_constants_of_plan_are_measured_and_kept(tmp_path: Path) -> None:
    """Nothing is known of their values here but that they are rates and times of a machine that computes."""
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    facts = json.loads(ok(gtrain("doctor", "calibrate=true", "format=json", cwd=tmp_path, env=cache)).stdout)
    assert facts["calibration"]["error"] is None
    (kept,) = json.loads((tmp_path / "cache" / "gtrain" / "machine.json").read_text()).values()
    rates = (
        "flops",
        "flops_bfloat16",
        "gather",
        "attention",
        "sampling",
        "stream",
        "bandwidth",
        "fresh",
        "disk",
        "link",
    )
    assert all(kept[name] > 1e6 for name in rates)
    assert all(0 <= kept[name] < 1 for name in ("logit", "dispatch", "wake", "layer", "step"))
    assert 0 < kept["together"] <= 1 and 0 <= kept.get("threads", 0) <= 1
    done = ok(gtrain("plan", "format=json", "hydra.run.dir=plan", cwd=tmp_path, env=cache))
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["machine"]["flops"] == kept["flops"], done.stdout
