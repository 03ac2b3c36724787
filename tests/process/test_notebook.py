"""``run_local`` in a Jupyter kernel, which always has threads."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from helpers import REPO, alive, clean_environment, until

jupyter_client = pytest.importorskip("jupyter_client", reason="install the extra test to run notebooks")
NOTEBOOK = REPO / "docs" / "examples" / "own_module.ipynb"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

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
import os, time
from pathlib import Path
def wait():
    from gtrain.launch import slot
    Path(f"pid-{slot.current().slot.rank}").write_text(str(os.getpid()))
    time.sleep(600)
run_local(wait, num_nodes=2)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Any]:
    """A client of a kernel that runs in ``tmp_path`` with two threads for OpenMP."""
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path), env=clean_environment({"OMP_NUM_THREADS": "2"}))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    client.kernel = manager
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def execute(client: Any, code: str) -> dict[str, str]:
    """Run a cell; returns its ``stdout``, ``stderr`` and ``error``."""
    return collect(client, client.execute(code))


def collect(client: Any, request: str, seconds: float = 200) -> dict[str, str]:
    said = {"stdout": "", "stderr": "", "error": ""}
    deadline = time.monotonic() + seconds
    while True:
        try:
            message = client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
        except Empty:
            raise AssertionError(f"the cell did not end in {seconds} s: {said}") from None
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        if message["msg_type"] == "stream":
            said[content["name"]] += content["text"]
        elif message["msg_type"] == "error":
            said["error"] += f"{content['ename']}: {content['evalue']}"
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            return said


def test_the_notebook_of_the_docs_runs_after_a_threaded_product(kernel: Any) -> None:
    """Its cells are those of the README's example, and what they print is what the loss of one process leads to."""
    cells = ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    example = re.findall(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.S)[0]
    assert "\n".join(cells).split() == example.replace('if __name__ == "__main__":', "").split()
    assert execute(kernel, PRODUCT)["error"] == ""
    for cell in cells:
        said = execute(kernel, cell)
        assert said["error"] == "", said
    several = float(said["stdout"].rsplit("sum of norms ", 1)[1])
    alone = "SarStrategy = type('S', (), {'__new__': lambda cls, **_: __import__('gtrain').SingleStrategy()})\n"
    main = cells[-2].replace("num_nodes=2, devices", "num_nodes=1, devices")
    said = execute(kernel, f"{alone}{main}\nprint('alone', run_local(main))")
    assert float(said["stdout"].rsplit("alone ", 1)[1]) == pytest.approx(several, rel=1e-4), said


def test_classes_of_cells_work_in_ranks_and_an_interrupt_ends_them(kernel: Any, tmp_path: Path) -> None:
    execute(kernel, PRODUCT)
    said = execute(kernel, OWN_LAYER)
    assert "RESULT True True True" in said["stdout"], said
    assert said["stdout"].count("said by rank 0") == 1
    assert "an error of rank 0" in said["stderr"]
    request = kernel.execute(WAITING)
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    until(lambda: all(file.exists() and file.read_text() for file in files), 100, tmp_path)
    ranks = [int(file.read_text()) for file in files]
    kernel.kernel.interrupt_kernel()
    assert "KeyboardInterrupt" in collect(kernel, request)["error"]
    assert not any(map(alive, ranks))
    assert execute(kernel, "print(run_local(lambda: os.getpid()) != os.getpid())")["stdout"] == "True\n"
