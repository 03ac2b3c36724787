"""The walls between the parts of the project, read from the imports that the source files make."""

from __future__ import annotations

import ast
import graphlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import REPO, ok, run

PLUGINS = ("gtrain_single", "gtrain_sar", "gtrain_pyg", "gtrain_ps", "gtrain_pbg")
EXAMPLE = "gtrain_example"
LIGHT = (
    "gtrain",
    "gtrain.__main__",
    "gtrain.backends",
    "gtrain.cli",
    "gtrain.cli.command",
    "gtrain.cli.entry",
    "gtrain.cli.explain",
    "gtrain.config",
    "gtrain.data.config",
    "gtrain.errors",
    "gtrain.keys",
    "gtrain.launch.agent",
    "gtrain.launch.blame",
    "gtrain.launch.children",
    "gtrain.launch.cuda",
    "gtrain.launch.interpreter",
    "gtrain.launch.job",
    "gtrain.launch.keeper",
    "gtrain.launch.launchers",
    "gtrain.launch.launchers.base",
    "gtrain.launch.launchers.external",
    "gtrain.launch.launchers.local",
    "gtrain.launch.launchers.manual",
    "gtrain.launch.launchers.slurm",
    "gtrain.launch.launchers.torchrun",
    "gtrain.launch.links",
    "gtrain.launch.logs",
    "gtrain.launch.rendezvous",
    "gtrain.launch.request",
    "gtrain.launch.roles",
    "gtrain.launch.shipping",
    "gtrain.launch.slot",
    "gtrain.launch.sockets",
    "gtrain.messages",
    "gtrain.model.config",
    "gtrain.moved",
    "gtrain.run.runs",
    "gtrain.settings",
    "gtrain.targets",
)
"""Modules that the command imports before a rank exists; each imports the standard library, hydra and each other."""
LIGHT_PACKAGES = ("gtrain.data", "gtrain.launch", "gtrain.model", "gtrain.run")  # their __init__ imports nothing
LATE = {
    "gtrain.cli": {"gtrain.cli.entry"},
    "gtrain.cli.command": {"gtrain.wire"},
    "gtrain.cli.entry": {"gtrain.doctor.report"},
    "gtrain.launch.cuda": {"torch"},
    "gtrain.launch.interpreter": {"gtrain.kernel_cache"},
    "gtrain.launch.shipping": {"cloudpickle", "numpy", "torch"},
    "gtrain.launch.links": {
        "cryptography",
        "cryptography.hazmat.primitives",
        "cryptography.hazmat.primitives.asymmetric.ed25519",
    },
    "gtrain.launch.launchers.base": {"lightning.fabric.plugins.environments"},
    "gtrain.launch.launchers.slurm": {"lightning.fabric.plugins.environments"},
    "gtrain.launch.launchers.torchrun": {"lightning.fabric.plugins.environments", "torch.distributed"},
}
"""Imported inside a function: where the process is a rank already or becomes no launcher, or where keys are in use."""
PLUGIN_MAY_USE = (
    "strategy",
    "graph",
    "data",
    "nn",
    "kernels",
    "memory",
    "wire",
    "config",
    "settings",
    "errors",
    "backends",
    "launch.environment",
    "launch.job_store",
    "launch.sockets",
)


@dataclass(frozen=True)
class Import:
    """One imported module: who imports what, where, and whether it happens when the importer is imported."""

    importer: str
    imported: str
    place: str
    at_once: bool


def sources(package: str) -> dict[str, Path]:
    """Source files of an import package by dotted module name."""
    folders = {"gtrain": REPO / "gtrain", EXAMPLE: REPO / "plugins" / "example_backend" / EXAMPLE}
    folder = folders.get(package, REPO / "plugins" / package)
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = (package, *path.relative_to(folder).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    assert found, f"no source files under {folder}"
    return found


def imports(name: str, path: Path, known: set[str], *, typing: bool = False) -> Iterator[Import]:
    """Every import that a file makes, also inside functions; those in ``if TYPE_CHECKING:`` blocks if ``typing``."""
    tree = ast.parse(path.read_text(), str(path))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if not typing and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the walls"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [sub if sub in known else str(node.module) for sub in below]
        else:
            continue
        for imported in names:
            yield Import(name, imported, f"{path.relative_to(REPO)}:{node.lineno}", id(node) not in inside)


@pytest.fixture(scope="module")
def everything() -> list[Import]:
    """The imports of the framework, our plugins and the example."""
    files = {name: path for package in ("gtrain", *PLUGINS, EXAMPLE) for name, path in sources(package).items()}
    return [found for name, path in files.items() for found in imports(name, path, set(files))]


def top(module: str) -> str:
    """The first word of a dotted name."""
    return module.partition(".")[0]


def within(module: str, *packages: str) -> bool:
    """Whether a module is one of these or lies below one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def places(wrong: list[Import]) -> list[str]:
    """What to print of imports that cross a wall."""
    return [f"{found.place} imports {found.imported}" for found in wrong]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for type checking count. A package's ``__init__`` hands on names of its files and is left out."""
    files = {name: path for package in ("gtrain", *PLUGINS, EXAMPLE) for name, path in sources(package).items()}
    modules = {name: path for name, path in files.items() if path.name != "__init__.py"}
    graph = {
        name: {found.imported for found in imports(name, path, set(files), typing=True)} & modules.keys()
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files of a circle


def test_no_folder_has_more_files_than_a_reader_takes_in() -> None:
    folders = Counter(path.parent for root in ("gtrain", "plugins", "tests") for path in (REPO / root).rglob("*.py"))
    assert {str(folder.relative_to(REPO)): count for folder, count in folders.items() if count > 25} == {}


def test_what_the_command_imports_is_light(everything: list[Import]) -> None:
    """Standard library, hydra, omegaconf, and each other; so that a mistake is answered before torch is loaded."""
    allowed = {*sys.stdlib_module_names, "hydra", "omegaconf"}
    wrong = [
        found
        for found in everything
        if found.importer in (*LIGHT, *LIGHT_PACKAGES)
        and top(found.imported) not in allowed
        and found.imported not in (*LIGHT, *LIGHT_PACKAGES)
        and not (not found.at_once and found.imported in LATE.get(found.importer, ()))
    ]
    assert places(wrong) == []
    assert {found.importer for found in everything} >= set(LIGHT) - {"gtrain"}, "a light module has gone; amend LIGHT"


def test_the_light_part_of_each_plugin_is_light(everything: list[Import]) -> None:
    """A plugin's ``__init__`` and ``config`` are read by ``gtrain --help``."""
    allowed = {*sys.stdlib_module_names, "omegaconf"}
    light = {f"{plugin}{part}" for plugin in (*PLUGINS, EXAMPLE) for part in ("", ".config", ".conf")}
    wrong = [
        found
        for found in everything
        if found.importer in light
        and top(found.imported) not in allowed
        and found.imported not in {"gtrain.backends", "gtrain.config", "gtrain.errors", "gtrain.settings"} | light
    ]
    assert places(wrong) == []


def test_data_and_models_know_no_strategy(everything: list[Import]) -> None:
    wrong = [
        found
        for found in everything
        if within(found.importer, "gtrain.graph", "gtrain.nn", "gtrain.model", "gtrain.data")
        and within(found.imported, "gtrain.strategy", "gtrain.launch", *PLUGINS, EXAMPLE)
    ]
    assert places(wrong) == []


def test_the_framework_imports_no_plugin(everything: list[Import]) -> None:
    wrong = [found for found in everything if top(found.importer) == "gtrain" and within(found.imported, *PLUGINS)]
    wrong += [found for found in everything if top(found.importer) != EXAMPLE and within(found.imported, EXAMPLE)]
    assert places(wrong) == []


def test_our_plugins_use_the_framework_and_not_each_other(everything: list[Import]) -> None:
    public = [f"gtrain.{part}" for part in PLUGIN_MAY_USE]
    wrong = [
        found
        for found in everything
        if top(found.importer) in PLUGINS
        and within(found.imported, "gtrain", *PLUGINS, EXAMPLE)
        and not within(found.imported, top(found.importer), *public)
    ]
    assert places(wrong) == []


def test_the_example_uses_what_an_outsider_may(everything: list[Import]) -> None:
    public = [f"gtrain.{part}" for part in PLUGIN_MAY_USE]
    mine = [found for found in everything if top(found.importer) == EXAMPLE]
    wrong = [
        found
        for found in mine
        if within(found.imported, "gtrain", *PLUGINS) and not within(found.imported, "gtrain_sar", *public)
    ]
    assert places(wrong) == []
    assert any(within(found.imported, "gtrain_sar") for found in mine), "the example shows how to build on a backend"


def test_one_file_makes_objects_from_the_configuration(everything: list[Import]) -> None:
    found = {found.importer for found in everything if within(found.imported, "hydra.utils")}
    assert found == {"gtrain.run.build"}


# ------------------------------------------------------------------------------------------------- unpickling


def calls(name: str, path: Path) -> Iterator[tuple[str, ast.Call, str]]:
    """Dotted name of each function that a file calls, the call, and its place."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            yield ast.unparse(node.func), node, f"{path.relative_to(REPO)}:{node.lineno}"


def keyword(call: ast.Call, name: str) -> object:
    """The constant that a call gives a keyword, or None."""
    values = [kw.value for kw in call.keywords if kw.arg == name]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


UNPICKLERS = {"gtrain.launch.shipping"}


SENDS_OBJECTS = {
    "send_pyobj",
    "recv_pyobj",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "dist.all_gather_object",
    "torch.distributed.all_gather_object",
}
"""Functions of zmq and torch.distributed that unpickle what comes from a socket."""


def test_nothing_unpickles_files_or_messages() -> None:
    """Unpickled is what a parent and its children pass on in memory; nothing that comes from a socket or a file."""
    wrong, loads = [], 0
    unpicklers = ("pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "dill", "joblib.load")
    for package in ("gtrain", *PLUGINS, EXAMPLE):
        for name, path in sources(package).items():
            for function, call, place in calls(name, path):
                if function == "torch.load":
                    loads += 1
                    if keyword(call, "weights_only") is not True:
                        wrong.append(f"{place}: torch.load without weights_only=True")
                elif (
                    function.startswith(unpicklers)
                    and name not in UNPICKLERS
                    or function.rpartition(".")[2] in SENDS_OBJECTS
                    or function.endswith("dist.all_gather_object")
                ):
                    wrong.append(f"{place}: {function}")
                elif function in ("np.load", "numpy.load") and keyword(call, "allow_pickle"):
                    wrong.append(f"{place}: numpy.load with allow_pickle=True")
    assert wrong == []
    assert loads >= 2, "the checkpoint and data.features=FILE.pt read with torch.load; has the test lost sight of them?"


def test_pickle_is_imported_in_few_files(everything: list[Import]) -> None:
    """``data/unpickling.py`` restricts PyG's readers, and explains what torch.load refused."""
    found = {found.importer for found in everything if top(found.imported) in ("pickle", "cloudpickle", "dill")}
    assert found == {*UNPICKLERS, "gtrain.data.readers.unpickling"}
    networks = {"socket", "zmq", "ssl", "asyncio", "http", "urllib", "socketserver"}
    assert places([one for one in everything if one.importer in found and top(one.imported) in networks]) == []


def test_the_wire_stands_alone(everything: list[Import]) -> None:
    """It trusts nothing that arrives, so what it can call is kept small; and servers load no more than they need."""
    allowed = {*sys.stdlib_module_names, "zmq", "msgpack", "torch", "numpy"} - {"pickle", "marshal", "shelve"}
    mine = [found for found in everything if within(found.importer, "gtrain.wire")]
    wrong = [
        found
        for found in mine
        if top(found.imported) not in allowed
        and not within(found.imported, "gtrain.wire", "gtrain.errors", "gtrain.keys")
    ]
    assert places(wrong) == []
    assert len({found.importer for found in mine}) > 10


# ------------------------------------------------------------------------------------------------- at run time


def modules_after(statement: str, cwd: Path) -> set[str]:
    """Names of all modules that are loaded after a statement, in a process of its own."""
    listing = "print(json.dumps(sorted(sys.modules)))"
    result = ok(run([sys.executable, "-c", f"{statement}\nimport json, sys\n{listing}"], cwd=cwd))
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_the_command_starts_without_torch(tmp_path: Path) -> None:
    """The configurations of all backends included."""
    statement = "from gtrain.cli import entry; entry._prepare_hydra(); entry.backends.descriptions()"
    heavy = {"torch", "lightning", "torch_geometric", "numpy", "numba", "pyarrow", "pymetis"}
    assert modules_after(statement, tmp_path) & heavy == set()


def test_the_agent_forks_without_kernels_or_threads(everything: list[Import], tmp_path: Path) -> None:
    """A thread pool does not survive a fork, and a compiled kernel of ours may start one when it is imported.

    PyG imports numba where it is installed, and compiles nothing until it is called. Arrow's allocator has a thread
    that tidies up, which it ends before a fork and starts again after it.
    """
    statement = """
import importlib, pathlib
from gtrain.launch import agent
importlib.import_module(agent.PRELOAD)
names = [task.joinpath("comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
names.remove(pathlib.Path("/proc/self/comm").read_text().strip())
assert set(names) <= {"jemalloc_bg_thd"}, names
"""
    loaded = modules_after(statement, tmp_path)
    assert {"torch", "lightning", "torch_geometric"} <= loaded
    assert loaded & set(PLUGINS) == set()
    ours = loaded - {"gtrain.kernel_cache"}  # numba's cache, not a kernel
    kernels = [found for found in everything if found.importer in ours and within(found.imported, "numba")]
    assert places([found for found in kernels if found.at_once]) == []
