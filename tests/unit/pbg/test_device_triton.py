"""The Triton kernels of pbg's step by Triton's interpreter, against the same in plain torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from helpers import REPO, ok, run

PROGRAM = """
import itertools, os, sys
import torch
from unit.pbg.test_device_step import OnDevice, make_edges, make_model

used = []
def interpreted(train):
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return train()
    finally:
        os.environ["TRITON_INTERPRET"] = "0"

operators = ("none", "translation", "diagonal", "complex_diagonal")
rules = ("sgd", "adagrad", "rowwise_adagrad")
cases = list(itertools.product(operators, ("ranking", "logistic", "softmax")))
for number, (operator, loss) in enumerate(cases):
    rule = rules[(number + number // 3) % 3]
    model = make_model(operator=operator, loss=loss, dimension=(8, 12)[number % 2])
    plain, ours = OnDevice(model, 0.05, rule, rule), OnDevice(model, 0.05, rule, rule)
    for batch in range(2):
        edges = make_edges(20, False, batch, torch.float64, weighted=True)
        wanted, found = plain.train(edges, batch), interpreted(lambda: ours.train(edges, batch))
        assert abs(found / wanted - 1) < 1e-12, (operator, loss, found, wanted)
    torch.testing.assert_close(ours.table.value, plain.table.value, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ours.table.state, plain.table.state, rtol=1e-12, atol=1e-13)
    for name, tensor in plain.common.tensors.items():
        torch.testing.assert_close(ours.common.tensors[name], tensor, rtol=1e-12, atol=1e-13)
    assert not ours.step._operators.gradient.any()
    used.append(operator)
assert "gtrain_pbg.device.triton_kernels" in sys.modules and len(used) == 12

print("equal")
"""


@pytest.mark.slow
def test_triton_kernels_compute_what_torch_does(tmp_path: Path) -> None:
    """In a process of its own: Triton reads the variable when it first sees a kernel."""
    pytest.importorskip("triton", reason="Triton is not installed: torch for CPUs does not bring it")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPO / "tests")}
    done = run([sys.executable, str(program)], cwd=tmp_path, env=env)
    assert ok(done).stdout.strip().endswith("equal")


COMPILES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gtrain_pbg.device import triton_kernels as kernels

INTEGERS = {"ids", "relation", "order", "starts", "distinct", "edges"}
NUMBERS = {"table", "tails", "heads", "weights", "gradients", "by_end", "weight", "lost", "value", "state", "rule"}

def compile_(kernel, full, low, **constants):
    types = {name: "*i32" for name in INTEGERS} | {name: full for name in NUMBERS}
    types |= {name: low for name in ("result", "by_query", "scores", "by_row")}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    values = {(number,): constants[name] for number, name in enumerate(kernel.arg_names) if name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

done = 0
for full, low in (("*fp32", "*fp32"), ("*fp32", "*bf16"), ("*fp64", "*fp64")):
    size = {"BLOCK": 512}
    texts = [compile_(kernels._gather, full, low, ROWS=4, **size)]
    for code in (0, 2, 3):
        operator = {"D": 400, "CODE": code, "BLOCK": 256 if code == 3 else 512}
        texts.append(compile_(kernels._transform, full, low, **operator))
        texts.append(compile_(kernels._transform_backward, full, low, COUNT=4, **operator))
    texts += [compile_(kernels._loss, full, low, margin=0.1, LOSS=loss, BLOCK=2048) for loss in range(3)]
    texts += [compile_(kernels._update_relations, full, low, RULE=rule, **size) for rule in range(3)]
    texts += [compile_(kernels._update_rows, full, low, HAS_ENDS=ends, RULE=2, COUNT=8, **size) for ends in (0, 1)]
    assert all(".target sm_90" in text for text in texts)
    done += len(texts)
print("compiled", done)
"""


@pytest.mark.slow
def test_triton_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """The interpreter does not check types; the compiler does, for any target."""
    pytest.importorskip("triton", reason="Triton is not installed: torch for CPUs does not bring it")
    program = tmp_path / "program.py"
    program.write_text(COMPILES)
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = run([sys.executable, str(program)], cwd=tmp_path, env=env)
    assert ok(done).stdout.strip().endswith("compiled 45")
