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


def test_triton_kernels_compute_what_torch_does(tmp_path: Path) -> None:
    """In a process of its own: Triton reads the variable when it first sees a kernel."""
    pytest.importorskip("triton", reason="Triton is not installed: torch for CPUs does not bring it")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPO / "tests")}
    done = run([sys.executable, str(program)], cwd=tmp_path, env=env)
    assert ok(done).stdout.strip().endswith("equal")
