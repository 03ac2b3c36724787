"""The layer engine on a GPU: the tests of one process, with the tensors that they make on the GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import run
from torch_geometric.nn import GATConv, GraphSAGE

from gtrain.engine.kernels import threads
from gtrain.engine.local import LocalEngine

_CASES = Path(__file__).parents[1] / "unit" / "engine" / "test_local.py"
_OF_THE_CPU = {
    # The GPU stops the process: see test_an_edge_to_no_node_stops_the_process.
    "test_an_edge_to_no_node_is_an_error",
    "test_edges_that_name_no_node_are_refused",
    "test_float16_runs_as_written",  # autocast of the CPU
    "test_in_bfloat16_a_convolution_equals_its_own_to_rounding",
    "test_sums_of_bfloat16_do_not_stop_at_256",
}
_spec = importlib.util.spec_from_file_location("engine_cases", _CASES)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["engine_cases"] = _module  # where PyG looks up the classes that it defines
_spec.loader.exec_module(_module)
globals().update(
    {name: value for name, value in vars(_module).items() if name.startswith("test_") and name not in _OF_THE_CPU}
)
engine = _module.engine
WRONG_EDGE = """
import torch
from torch_geometric.nn import SAGEConv
from gtrain.engine.local import LocalEngine

conv, engine = SAGEConv(4, 5).cuda(), LocalEngine()
engine.install(conv)
conv(torch.randn(6, 4, device="cuda"), torch.tensor([[0, 6], [0, 1]], device="cuda"))
torch.cuda.synchronize()
"""


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def test_an_edge_to_no_node_stops_the_process(tmp_path: Path) -> None:
    """After a failed assertion, a process cannot use the device: in this one, all later tests would fail."""
    done = run([sys.executable, "-c", WRONG_EDGE], cwd=tmp_path, timeout=60)
    assert done.returncode != 0 and "'edge_index' names nodes that do not exist" in done.stderr


def test_layers_run_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by plain torch: the tests above would pass with it, too."""
    calls: list[str] = []
    kernels = threads.device_kernels()
    for name in ("spmm", "attention_forward", "attention_backward"):
        function = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, f=function, n=name: (calls.append(n), f(*args))[1])
    network, data = torch.nn.ModuleList([GraphSAGE(8, 8, 2), GATConv(8, 8)]), _module.graph()
    engine = LocalEngine()
    engine.install(network)
    x = network[0](data["x"].float(), data["edge_index"])
    network[1](x, data["edge_index"]).sum().backward()
    assert {*calls} == {"spmm", "attention_forward", "attention_backward"}


@pytest.mark.parametrize("constant", [False, True])
def test_a_step_does_not_wait_for_the_gpu(constant: bool) -> None:
    network, data = GraphSAGE(8, 8, 2).cuda(), _module.graph()
    engine = LocalEngine(constant=constant)
    engine.install(network)
    x = data["x"].float()
    network(x, data["edge_index"]).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        network(x, data["edge_index"].clone()).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
