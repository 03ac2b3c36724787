"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[1]
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for GPUs does not begin to use CUDA: tests fork
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads of two workers on two cores wait for each other


def pytest_configure() -> None:
    """Keep kernels that tests compile where the commands that tests run look for them."""
    from gtrain.kernel_cache import find_cache

    find_cache()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while tests are imported, which takes 40 % of the time, nor among what was imported later."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let Python free what was imported at its exit, or nanobind prints what Triton has left."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let workers of pytest-xdist, where it is used, take over what waits for others.

    By default the first worker would be dealt all tests of several processes, which take nearly all of the time.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(autouse=True)
def generated_code_in_memory() -> None:
    """Have PyG compile the code of convolutions without a file in the temporary folder, where tests use PyG."""
    if "torch_geometric" in sys.modules:
        from gtrain.launch.templates import keep_templates_in_memory

        keep_templates_in_memory()


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """End what a failed test has left running."""
    yield
    if (forked := sys.modules.get("forked")) is not None:
        forked.kill_running()


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """Return a function that finds a piece of the real data, or skips the test where it is absent.

    The data are looked for in the folder ``GTRAIN_TEST_DATA``, or else in ``../shared/data`` beside the repository.
    """

    def find(name: str) -> Path:
        folder = Path(os.environ.get("GTRAIN_TEST_DATA") or REPO.parent / "shared" / "data")
        if not (folder / name).exists():
            pytest.skip(f"real data: there is no {folder / name}; set GTRAIN_TEST_DATA to the folder that has {name}")
        return folder / name

    return find
