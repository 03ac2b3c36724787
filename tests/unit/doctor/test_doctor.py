"""``gtrain doctor``: facts against other sources of them, and what each of them is judged to be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from gtrain.doctor import machine, packages, probe, report
from gtrain.doctor.report import GIB, Finding, judge
from gtrain.errors import ConfigError

MISSING_METIS = {"installed": None, "needed": ">=2025.2.2", "ok": False}


def healthy() -> dict[str, Any]:
    """Facts of a machine that nothing is wrong with."""
    place = {"path": "/x", "total": 9 * GIB, "free": 8 * GIB, "writable": True}
    return {
        "packages": {
            "python": "3.11.7",
            "gtrain": "0.1.0",
            "dependencies": {"torch": {"installed": "2.13.0", "needed": "~=2.13.0", "ok": True}},
            "extras": {"dgl": {"missing": ["dgl==1.1.3"], "command": 'pip install "gtrain[dgl]"'}},
        },
        "host": {"name": "h", "system": "Linux"},
        "cores": {"machine": 8, "usable": 8, "limit": None},
        "memory": {"total": 64 * GIB, "available": 32 * GIB, "limit": None},
        "shared_memory": dict(place),
        "temporary_folder": dict(place),
        "open_files": {"limit": 4096},
        "environment": {"OMP_NUM_THREADS": "2"},
        "cluster": {"launcher": "local", "rank": 0, "world_size": None, "ranks_here": None},
        "imports": {"torch": None},
        "failed": {},
        "gpus": {"built_for": None, "devices": []},
        "kernels": {"cache": "/cache", "writable": True},
        "strategies": {
            "single": {
                "from": "gtrain_single:backend",
                "error": None,
                "description": "one",
                "models": None,
                "servers": [],
            }
        },
        "outdated": [],
    }


@pytest.fixture(autouse=True)
def no_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.glob, "glob", lambda pattern: [])


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one fact, by its keys."""

    def change(facts: dict[str, Any]) -> None:
        *keys, last = path.split("/")
        for key in keys:
            facts = facts[key]
        facts[last] = value

    return change


def test_nothing_is_wrong() -> None:
    assert judge(healthy(), 4, "single") == []
    text = list(report.lines(healthy(), []))
    assert text[-1] == "No problems found."
    assert any("missing dgl==1.1.3" in line and 'pip install "gtrain[dgl]"' in line for line in text)


@pytest.mark.parametrize(
    ("change", "essential", "message"),
    [
        (put("packages/gtrain", None), True, "is not installed"),
        (put("packages/dependencies/torch/installed", None), True, "torch is not installed"),
        (put("packages/dependencies/pymetis", MISSING_METIS), False, "data.partitioner=auto is ldg"),
        (put("packages/dependencies/kaminpar", MISSING_METIS), False, "data.partitioner=kaminpar is refused"),
        (put("packages/dependencies/torch/ok", False), False, "torch 2.13.0 is installed; gtrain needs ~=2.13.0"),
        (put("imports/torch", "ImportError: libgomp"), True, "import torch fails: ImportError: libgomp"),
        (put("strategies", {}), True, "no strategy is installed"),
        (put("outdated", ["/here"]), False, "/here has an .egg-info or .dist-info of an older build"),
        (put("strategies/single/error", "no module x"), True, "strategy=single cannot be used: no module x"),
        (
            put("strategies/far", {"from": "far:b", "error": "ImportError: far"}),
            False,
            "strategy=far cannot be used: ImportError: far",
        ),
        (put("shared_memory/free", 64 * 2**20), False, "has 64.0 MiB free"),
        (put("shared_memory/writable", False), False, "cannot share memory"),
        (put("temporary_folder/writable", False), True, "temporary folder /x cannot be written"),
        (put("temporary_folder/free", 1000), False, "temporary folder /x has 1000 B free"),
        (put("kernels", {"cache": None, "writable": False}), False, "compiled kernels cannot be cached"),
        (put("memory/available", GIB), False, "1.0 GiB of memory free for 4 rank(s)"),
        (put("memory/limit", 2 * GIB), False, "2.0 GiB of memory free"),
        (put("environment", {}), False, "OMP_NUM_THREADS is not set: torch uses 2 threads"),
        (put("environment/OMP_NUM_THREADS", "8"), False, "OMP_NUM_THREADS=8 with 4 ranks makes 32 threads on 8 cores"),
        (put("environment/MKL_NUM_THREADS", "3"), False, "MKL_NUM_THREADS=3 with 4 ranks makes 12 threads"),
        (put("environment/KMP_AFFINITY", "compact"), False, "KMP_AFFINITY=compact pins threads"),
        (put("cores/usable", 2), False, "4 ranks share 2 cores"),
        (put("open_files/limit", 256), False, "may open 256 files"),
        (put("failed", {"gpus": "RuntimeError: driver"}), False, "the check of gpus fails: RuntimeError: driver"),
    ],
)
def test_each_problem(change: Callable[[dict[str, Any]], None], essential: bool, message: str) -> None:
    facts = healthy()
    change(facts)
    found = judge(facts, 4, None)
    named = [finding for finding in found if message in finding.message]
    assert len(named) == 1 and named[0].essential is essential and named[0].hint
    assert any(finding.essential for finding in found) is essential
    text = "\n".join(report.lines(facts, found))
    assert message in text and f"HINT: {named[0].hint}" in text


def test_a_device_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    (found,) = judge(healthy(), 1, None)
    assert "torch, built without CUDA, does not see" in found.message
    facts = healthy()
    facts["gpus"] = {"built_for": "12.8", "devices": [{"name": "A", "memory": GIB}]}
    assert judge(facts, 1, None) == []


def test_the_strategy_that_is_asked_for_must_work() -> None:
    facts = healthy()
    facts["strategies"]["far"] = {"from": "far:b", "error": "ImportError: far"}
    assert [finding.essential for finding in judge(facts, 1, "far")] == [True]
    (found,) = judge(healthy(), 1, "sarr")
    assert found == Finding("strategy=sarr is not installed.", "the installed strategies are single.", essential=True)


def test_facts_agree_with_the_system(tmp_path: Path) -> None:
    facts = machine.facts({})
    assert facts["cores"]["usable"] == len(os.sched_getaffinity(0))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert abs(facts["memory"]["total"] - pages) < pages / 100 and facts["memory"]["available"] < pages
    assert machine.folder_state(tmp_path)["writable"] and not list(tmp_path.iterdir())
    missing = machine.folder_state(tmp_path / "missing")
    assert (missing["free"], missing["writable"]) == (0, False)
    assert facts["cluster"]["launcher"] == "local"
    json.dumps(facts)


def test_the_launcher_is_named() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    environment |= {"MASTER_ADDR": "a", "MASTER_PORT": "1", "OMP_NUM_THREADS": "3"}
    facts = machine.facts(environment)
    assert facts["cluster"] == {"launcher": "torchrun", "rank": 5, "world_size": 8, "ranks_here": 4}
    assert facts["environment"] == {"OMP_NUM_THREADS": "3"}


def test_packages() -> None:
    facts = packages.facts()
    assert facts["gtrain"] == version("gtrain")
    (torch,) = [need for need in map(Requirement, requires("gtrain") or []) if need.name == "torch"]
    expected = {"installed": version("torch"), "needed": str(torch.specifier), "ok": True}
    assert facts["dependencies"]["torch"] == expected
    assert packages.state(Requirement("torch<1"))["ok"] is False
    assert packages.state(Requirement("no-such-package"))["installed"] is None
    needed = [Requirement(text) for text in ('numpy; extra == "a"', 'no-such-package>=2; extra == "a"', "torch<1")]
    assert packages._missing("a", needed) == ["no-such-package>=2"]
    needed.append(Requirement('gtrain[a]; extra == "b"'))
    assert packages._missing("b", needed) == ["no-such-package>=2"]


def test_a_crash_is_put_down_to_its_step() -> None:
    done = json.dumps({"step": "import numpy"}) + "\n"
    done += json.dumps({"step": "import numpy", "error": None, "value": "2"}) + "\n"
    begun = "noise\n" + done + json.dumps({"step": "import torch"}) + "\n"
    steps = probe.read(begun, "ended the process with SIGSEGV")
    assert steps["import numpy"] == {"error": None, "value": "2"}
    assert steps["import torch"]["error"] == "ended the process with SIGSEGV"
    assert probe.read("", "exit code 1")["python"]["error"] == "exit code 1"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data=planted", "gtrain doctor was given data=planted; it reads format, strategy"),
        ("format=yaml", "format=yaml was set"),
        ("trainer.devices=0", "trainer.devices=0 was set; it must be an integer above 0"),
    ],
)
def test_bad_arguments(argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        report.read([argument])
    assert message in caught.value.message and caught.value.hint
    assert report.read(["trainer.devices=3"])["trainer.devices"] == 3
