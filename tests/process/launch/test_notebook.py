"""``run_local`` in a Jupyter kernel, which always has threads."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from helpers import LIMIT, REPO, alive, clean_environment, until

jupyter_client, nbclient, nbformat = (
    pytest.importorskip(name, reason="install gtrain[test] to run notebooks")
    for name in ("jupyter_client", "nbclient", "nbformat")
)
NOTEBOOK = REPO / "examples" / "two_ranks.ipynb"
pytestmark = pytest.mark.slow

PRODUCT = "import torch\na = torch.rand(600, 600) @ torch.rand(600, 600)"
OWN_LAYER = """
import inspect
from torch_geometric.nn import MessagePassing
from gtrain import run_local
class Double(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)
    def message(self, x_j):
        return 2 * x_j
seen = Double()(torch.ones(3, 1), torch.tensor([[0, 1], [1, 2]]))
def use():
    import pickle, sys
    print("said by rank 0")
    print("an error of rank 0", file=sys.stderr)
    layer = pickle.loads(pickle.dumps(Double()))
    return inspect.getsource(use), layer(torch.ones(3, 1), torch.tensor([[0, 1], [1, 2]])), Double
source, found, cls = run_local(use, num_nodes=2)
print("RESULT", "said by rank 0" in source, torch.equal(found, seen), cls is Double)
"""
WAITING = """
import os, signal
from pathlib import Path
def wait():
    from gtrain.launch import slot
    Path(f"pid-{slot.current().slot.rank}").write_text(str(os.getpid()))
    signal.pause()
run_local(wait, num_nodes=2)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Any]:
    """A client of a kernel that runs in ``tmp_path`` with two threads for OpenMP."""
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path), env=clean_environment({"OMP_NUM_THREADS": "2"}))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=LIMIT)
    client.kernel = manager
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def execute(client: Any, code: str) -> dict[str, str]:
    """Run a cell; returns its ``stdout``, ``stderr`` and ``error``."""
    return collect(client, client.execute(code))


def collect(client: Any, request: str) -> dict[str, str]:
    said = {"stdout": "", "stderr": "", "error": ""}
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            message = client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
        except Empty:
            raise AssertionError(f"the cell did not end in {LIMIT} s: {said}") from None
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        if message["msg_type"] == "stream":
            said[content["name"]] += content["text"]
        elif message["msg_type"] == "error":
            said["error"] += f"{content['ename']}: {content['evalue']}"
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            return said


def test_the_example_runs_after_a_threaded_product_and_equals_one_process(tmp_path: Path) -> None:
    """With ipywidgets a progress bar of a forked kernel broke off nbclient: ranks are not kernels."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    (train,) = [source for source in sources if "def train" in source]
    alone = train.replace("SarStrategy(mode=1)", "SingleStrategy()").replace("num_nodes=2,", "num_nodes=1,")
    new = nbformat.v4.new_code_cell
    notebook.cells.insert(0, new(PRODUCT))
    notebook.cells.append(
        new(f"from gtrain import SingleStrategy\n{alone}\nprint('POINTS', points, run_local(train), sep='|')")
    )
    client = nbclient.NotebookClient(notebook, timeout=int(LIMIT), resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=clean_environment({"OMP_NUM_THREADS": "2"}))
    said = "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
    several, one = (ast.literal_eval(points) for points in said.partition("POINTS|")[2].strip().split("|"))
    assert len(several) == len(one) == 40
    assert [loss for loss, _ in several] == pytest.approx([loss for loss, _ in one], rel=1e-4)
    figures = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(figures) == 1


def test_classes_of_cells_work_in_ranks_and_an_interrupt_ends_them(kernel: Any, tmp_path: Path) -> None:
    execute(kernel, PRODUCT)
    said = execute(kernel, OWN_LAYER)
    assert "RESULT True True True" in said["stdout"], said
    assert said["stdout"].count("said by rank 0") == 1
    assert "an error of rank 0" in said["stderr"]
    request = kernel.execute(WAITING)
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    until(lambda: all(file.exists() and file.read_text() for file in files), tmp_path)
    ranks = [int(file.read_text()) for file in files]
    kernel.kernel.interrupt_kernel()
    assert "KeyboardInterrupt" in collect(kernel, request)["error"]
    assert not any(map(alive, ranks))
    assert execute(kernel, "print(run_local(lambda: os.getpid()) != os.getpid())")["stdout"] == "True\n"
