"""The kernels for GPUs, without a GPU: by Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gtrain

triton = pytest.importorskip("triton", reason="Triton is not installed")
CASES = Path(__file__).parents[2] / "device_kernel_cases.py"
GTRAIN = Path(gtrain.__file__).parent
SOURCES = [*(GTRAIN / "engine" / "kernels" / "device").glob("*.py"), GTRAIN / "nn" / "dropout_device.py"]
COMPILE = """
from itertools import product
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gtrain.engine.kernels.device import attention, sums
from gtrain.nn import dropout_device

INTS = {"width", "channels", "heads", "words", "count", "programs"}
LONG = {"stream", "threshold"}


def compile_for(kernel, number, **constants):
    kinds = {}
    for name in kernel.arg_names:
        if name in constants:
            kinds[name] = "constexpr"
        elif name in ("rows", "ptr", "ids"):
            kinds[name] = "*i64"
        elif name in ("columns", "edges") and kernel is not dropout_device._drop:
            kinds[name] = "*i32"
        else:
            kinds[name] = "i64" if name in LONG else "i32" if name in INTS | {"columns"} else f"*{number}"
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "local" not in binary.asm["ptx"].replace(".local_", ""), f"{kernel.__name__} spills registers"
    print(kernel.__name__, number)


for number, total in (("fp32", tl.float32), ("fp64", tl.float64), ("bf16", tl.float32)):
    shape = {"SUM": total, "COLUMNS": 64, "GROUP": 16}
    for weighted, single in ((False, True), (True, True), (True, False)):
        compile_for(sums._spmm, number, WEIGHTED=weighted, SINGLE=single, **shape)
    compile_for(dropout_device._drop, number, SCALE=1.25, SUM=total, BLOCK=1024)
    if number == "bf16":
        continue
    compile_for(sums._sddmm, number, **shape)
    compile_for(sums._extreme, number, LARGEST=True, COLUMNS=64, GROUP=16)
    compile_for(sums._extreme_gradient, number, **shape)
    for drops in (False, True):
        for kernel in (attention._forward, attention._backward):
            compile_for(kernel, number, SLOPE=0.2, DROPS=drops, SCALE=1.25, **shape)
        for kernel in (attention._pair_forward, attention._pair_targets, attention._pair_sources):
            for additive in (False, True):
                compile_for(kernel, number, FACTOR=0.2, ADDITIVE=additive, DROPS=drops, SCALE=1.25, **shape)
"""


def run(command: list[str], **variables: str) -> str:
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_kernels_equal_the_plain_ones_by_the_interpreter() -> None:
    """In a process of its own, because Triton asks for the interpreter when it is imported."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not work with numpy {np.__version__}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", str(CASES)]
    assert " passed" in run(command, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kernels_compile(tmp_path: Path) -> None:
    """For an H100, without one: the compiler needs no device."""
    printed = run([sys.executable, "-c", COMPILE], TRITON_CACHE_DIR=str(tmp_path))
    launched = {*re.findall(r"(_\w+)\[(?:grid\]|\()", "".join(path.read_text() for path in SOURCES))}
    assert {line.split()[0] for line in printed.splitlines()} == launched
