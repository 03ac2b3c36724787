"""gtrain.launch.cuda: ranks are forked before CUDA's driver is in use, or by another process where it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LIMIT, REPO, clean_environment, rest_exhaustive

from gtrain.launch import cuda, interpreter

TESTS = REPO / "tests"
QUIETLY = """
import torch

asked = []
torch._C._show_config = lambda: asked.append(1) or {shown!r}
{imports}
import torch_geometric.typing
print(len(asked), torch_geometric.typing.NO_MKL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "asks"),
    rest_exhaustive(
        [
            ("", 1),
            ("from gtrain import PlantedData", 0),
            ("from gtrain.launch.agent import preload; preload()", 0),
            ("import forked; forked.load()", 0),
        ],
        ("", 1),
        ("from gtrain.launch.agent import preload; preload()", 0),
    ),
)
def test_torch_geometric_is_imported_without_the_driver(imports: str, asks: int) -> None:
    """Its import asks what torch was built with, and a torch for GPUs answers with what the driver says, too."""
    import torch

    shown = torch.__config__.show()
    program = QUIETLY.format(shown=shown, imports=imports)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, cwd=TESTS)
    assert done.stdout.split() == [str(asks), str("USE_MKL=OFF" in shown)], done.stderr


def test_what_shows_the_configuration_is_put_back() -> None:
    import torch

    cuda.import_torch_geometric()
    assert "PyTorch built with" in torch.__config__.show()


def test_a_driver_that_is_not_loaded_is_not_in_use() -> None:
    assert not cuda.in_use()
    assert "libcuda.so" not in Path("/proc/self/maps").read_text()


def test_a_process_that_uses_the_driver_forks_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "in_use", lambda: True)
    assert interpreter.fork_obstacle() == "it uses CUDA"


IMPORTS = """
import importlib, os, sys, tempfile
made = []
sys.addaudithook(lambda event, args: made.append(os.fsdecode(args[0])) if event == "os.mkdir" else None)
from gtrain.launch.agent import preload; preload()
print([path for path in made if path.startswith(tempfile.gettempdir())], "scipy.signal" in sys.modules)
print(importlib.import_module("scipy.signal").hilbert.__name__)
"""


def test_the_imports_of_the_agent_make_no_temporary_folder_and_leave_out_scipy_signal(tmp_path: Path) -> None:
    """A folder that is made and removed would stay behind if the command were killed in between."""
    environment = {**clean_environment(), "TMPDIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=LIMIT, env=environment
    )
    assert done.stdout.split() == ["[]", "False", "hilbert"], done.stdout + done.stderr
