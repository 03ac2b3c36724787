"""``gtrain doctor``: facts against other sources of them, and what each of them is judged to be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LIMIT, clean_environment
from packaging.requirements import Requirement

from gtrain.doctor import devices, machine, packages, probe, report
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
        "gpus": {"built_for": None, "driver": None, "devices": [], "nccl": None},
        "triton": None,
        "kernels": {"cache": "/cache", "writable": True},
        "strategies": {
            "single": {
                "from": "gtrain_single:backend",
                "error": None,
                "description": "one",
                "models": None,
                "servers": [],
                "gpu": "all of it",
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
        (put("shared_memory/free", 64 * 2**20), False, "has 64 MiB free"),
        (put("shared_memory/writable", False), False, "cannot share memory"),
        (put("temporary_folder/writable", False), True, "temporary folder /x cannot be written"),
        (put("temporary_folder/free", 1000), False, "temporary folder /x has 1,000 B free"),
        (put("kernels", {"cache": None, "writable": False}), False, "compiled kernels cannot be cached"),
        (put("memory/available", GIB), False, "1 GiB of memory free for 4 rank(s)"),
        (put("memory/limit", 2 * GIB), False, "2 GiB of memory free"),
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
    facts["gpus"] = with_gpus()["gpus"]
    assert judge(facts, 1, None) == []


def with_gpus(count: int = 1) -> dict[str, Any]:
    """Facts of a machine with GPUs that nothing is wrong with."""
    gpu = {"name": "A9", "memory": 80 * GIB, "free": 78 * GIB, "capability": "9.0", "bfloat16": True}
    facts = healthy()
    facts["gpus"] = {"built_for": "13.0", "driver": "13.1", "devices": [gpu] * count, "nccl": "2.28.3"}
    facts["triton"] = {"error": None, "value": {"version": "3.6.0", "compiled": count}}
    facts["strategies"]["far"] = {**facts["strategies"]["single"], "gpu": None}
    return facts


def test_gpus_and_what_strategies_do_on_them() -> None:
    facts = with_gpus()
    assert judge(facts, 1, None) == []
    text = "\n".join(report.lines(facts, []))
    for line in (
        "cuda:0           A9, 78 GiB free of 80 GiB, compute capability 9.0, bfloat16",
        "CUDA             torch is built for 13.0, the driver supports 13.1",
        "Triton           3.6.0, compiles kernels",
        "NCCL             2.28.3",
        "single           all of it",
        "far              not used: trains on CPUs",
    ):
        assert f"\n  {line}\n" in text


def test_more_ranks_than_gpus() -> None:
    (found,) = [finding for finding in judge(with_gpus(2), 3, None) if "GPU" in finding.message]
    assert "3 ranks share 2 GPU(s)" in found.message and not found.essential and "start 2 rank(s)" in found.hint
    assert not any("share 2 GPU" in finding.message for finding in judge(with_gpus(2), 2, None))


@pytest.mark.parametrize("error", ["ImportError: No module named 'triton'", "ended the process with SIGSEGV"])
def test_triton_that_compiles_nothing(error: str) -> None:
    facts = with_gpus()
    facts["triton"] = {"error": error, "value": None}
    (found,) = judge(facts, 1, None)
    assert f"Triton cannot be used: {error}." in found.message and not found.essential
    assert "Triton           CANNOT BE USED" in "\n".join(report.lines(facts, [found]))


class Properties:
    """What torch says of a device."""

    name, major, minor = "A9", 8, 6


def test_facts_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (number * GIB, 8 * GIB))
    monkeypatch.setattr(devices, "nccl_version", lambda: "2.28.3")
    facts = devices.facts()
    assert [gpu["free"] for gpu in facts["devices"]] == [0, GIB] and facts["nccl"] == "2.28.3"
    assert facts["devices"][0]["capability"] == "8.6" and facts["devices"][0]["bfloat16"] is True
    monkeypatch.setattr(Properties, "major", 7)
    assert devices.facts()["devices"][0]["bfloat16"] is False


def test_facts_without_devices() -> None:
    assert devices.facts()["devices"] == [] and devices.facts()["nccl"] is None


def test_the_kernel_computes(tmp_path: Path) -> None:
    """By Triton's interpreter, which needs no GPU."""
    pytest.importorskip("triton", reason="Triton is not installed")
    program = "from gtrain.doctor.device_kernel import check; check(0, 'cpu'); print('computed')"
    environment = {**clean_environment(), "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, env=environment
    )
    assert done.stdout == "computed\n", done.stderr


def test_the_strategy_that_is_asked_for_must_work() -> None:
    facts = healthy()
    facts["strategies"]["far"] = {"from": "far:b", "error": "ImportError: far"}
    assert [finding.essential for finding in judge(facts, 1, "far")] == [True]
    (found,) = judge(healthy(), 1, "sarr")
    assert found == Finding("strategy=sarr is not installed.", "the installed strategies are single.", essential=True)
    assert judge(healthy(), 1, "auto") == [], "which chooses among those that are installed"


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
