"""The walls between the parts of the project, read from the imports that the source files make."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from helpers import REPO, ok, run

from gtrain.config import StrategyConfig

PLUGINS = ("gtrain_single", "gtrain_sar", "gtrain_pyg", "gtrain_ps", "gtrain_pbg")
EXAMPLE = "gtrain_example"
LIGHT = (
    "gtrain",
    "gtrain.__main__",
    "gtrain.backends",
    "gtrain.cli",
    "gtrain.cli.auto",
    "gtrain.cli.earlier_run",
    "gtrain.cli.entry",
    "gtrain.cli.explain",
    "gtrain.cli.hydra_changes",
    "gtrain.cli.inherit",
    "gtrain.cli.search",
    "gtrain.cli.sweeps",
    "gtrain.cli.verb_help",
    "gtrain.config",
    "gtrain.data.config",
    "gtrain.errors",
    "gtrain.files",
    "gtrain.keys",
    "gtrain.lazy",
    "gtrain.launch.agent",
    "gtrain.launch.children",
    "gtrain.launch.cuda",
    "gtrain.launch.interpreter",
    "gtrain.launch.job",
    "gtrain.launch.keeper",
    "gtrain.launch.launchers",
    "gtrain.launch.launchers.base",
    "gtrain.launch.launchers.external",
    "gtrain.launch.launchers.kubernetes",
    "gtrain.launch.launchers.local",
    "gtrain.launch.launchers.manual",
    "gtrain.launch.launchers.mpi",
    "gtrain.launch.launchers.ray",
    "gtrain.launch.launchers.slurm",
    "gtrain.launch.launchers.torchrun",
    "gtrain.launch.links",
    "gtrain.launch.logs",
    "gtrain.launch.rendezvous",
    "gtrain.launch.request",
    "gtrain.launch.shipping",
    "gtrain.launch.slot",
    "gtrain.launch.sockets",
    "gtrain.launch.templates",
    "gtrain.memory.limits",
    "gtrain.messages",
    "gtrain.model.config",
    "gtrain.moved",
    "gtrain.object_store",
    "gtrain.plan.compose",
    "gtrain.plan.machine",
    "gtrain.query.options",
    "gtrain.record.events",
    "gtrain.record.run",
    "gtrain.record.scores",
    "gtrain.record.trials",
    "gtrain.run.runs",
    "gtrain.settings",
    "gtrain.targets",
)
"""Modules that the command imports before a rank exists; each imports the standard library, hydra and each other."""
LIGHT_PACKAGES = (
    "gtrain.data",
    "gtrain.launch",
    "gtrain.memory",
    "gtrain.model",
    "gtrain.plan",
    "gtrain.query",
    "gtrain.record",
    "gtrain.run",
)  # these import at most gtrain.lazy
LATE = {
    "gtrain.cli.auto": {"gtrain.plan.command"},
    "gtrain.cli": {"gtrain.cli.entry"},
    "gtrain.cli.entry": {
        "gtrain.doctor.packages",
        "gtrain.doctor.report",
        "gtrain.kernel_cache",
        "gtrain.plan.command",
        "gtrain.query.command",
        "gtrain.reporting.command",
        "gtrain.reporting.listing",
        "gtrain.reporting.sweep",
        "gtrain.reporting.trace",
        "gtrain.reporting.watch",
        "gtrain.wire",
    },
    "gtrain.cli.search": {"optuna", "optuna.distributions", "optuna.trial"},
    "gtrain.record.trials": {"optuna"},
    "gtrain.launch.cuda": {"torch"},
    "gtrain.object_store": {"fsspec.core"},
    "gtrain.launch.interpreter": {"gtrain.kernel_cache"},
    "gtrain.launch.shipping": {"cloudpickle", "numpy", "torch"},
    "gtrain.launch.templates": {
        "jinja2",
        "torch_geometric.nn.conv.message_passing",
        "torch_geometric.nn.sequential",
    },
    "gtrain.launch.links": {
        "cryptography",
        "cryptography.hazmat.primitives",
        "cryptography.hazmat.primitives.asymmetric.ed25519",
    },
    "gtrain.launch.launchers.base": {"lightning.fabric.plugins.environments"},
    "gtrain.launch.launchers.mpi": {"gtrain.launch.key_value", "gtrain.launch.rank_environment"},
    "gtrain.launch.launchers.slurm": {"gtrain.launch.rank_environment", "lightning.fabric.plugins.environments"},
    "gtrain.launch.launchers.torchrun": {"lightning.fabric.plugins.environments", "torch.distributed"},
}
"""Imported inside a function: where the process is a rank already or becomes no launcher, or where keys are in use."""
PLUGIN_MAY_USE = (
    "strategy",
    "engine",
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
    "plan",
    "protocols",
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


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


@pytest.fixture(scope="module", autouse=True)
def trees_are_freed() -> Iterator[None]:
    """Forget the syntax trees after the last test of this file: all of them together are a million objects."""
    yield
    parsed.cache_clear()


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
    for node, at_once in _statements(parsed(path), typing):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the walls"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [sub if sub in known else str(node.module) for sub in below]
        for imported in names:
            yield Import(name, imported, f"{path.relative_to(REPO)}:{node.lineno}", at_once)


def _statements(
    node: ast.AST, typing: bool, at_once: bool = True
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements below a node, and whether each runs when the file is imported."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node, at_once
    elif isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):  # no expression imports
        if not typing and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        below = at_once and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.iter_child_nodes(node):
            yield from _statements(inner, typing, below)


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


# ------------------------------------------------------------------------------------------------ the contract


def trees() -> Iterator[tuple[str, str, ast.Module]]:
    """Module name, path and syntax tree of every source file of the framework, our plugins and the example."""
    for package in ("gtrain", *PLUGINS, EXAMPLE):
        for name, path in sources(package).items():
            yield name, str(path.relative_to(REPO)), parsed(path)


def room(module: str) -> str:
    """The part of the project that a module belongs to: a package of the framework, or a plugin."""
    return ".".join(module.split(".")[:2]) if top(module) == "gtrain" else top(module)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_made(tree: ast.AST) -> set[str]:
    """Names that a file defines: functions, classes, arguments, variables and attributes that it sets."""
    made = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            made.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
    return made


def test_nothing_private_crosses_a_wall() -> None:
    """A private name of ours is used in the room that defines it alone; other libraries' private names are theirs."""
    files = list(trees())
    made: dict[str, set[str]] = {}
    for name, _, tree in files:
        made.setdefault(room(name), set()).update(filter(is_private, names_made(tree)))
    ours = set().union(*made.values())
    wrong = []
    for name, path, tree in files:
        for node in ast.walk(tree):
            used = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and within(str(node.module), "gtrain", *PLUGINS, EXAMPLE):
                used = [alias.name for alias in node.names]
            wrong += [
                f"{path}:{node.lineno}: {each}"
                for each in used
                if is_private(each) and each in ours - made[room(name)] and each not in FOREIGN
            ]
    assert wrong == []
    assert "_shards" in ours and len(ours) > 300, "private names of base and all; has the test lost sight of them?"


FOREIGN = {"_collect", "_fields", "_indices", "_replace", "_results", "_values"}
"""Names of PyG, torch, namedtuple and Lightning that some room of ours has for something of its own as well."""


@pytest.mark.parametrize("name", ["pbg", "ps", "pyg", "sar", "single"])
def test_a_strategy_overrides_nothing_private(name: str) -> None:
    """Names of methods and attributes that begin with an underscore are the base's own, and may change."""
    from gtrain import backends

    strategy = backends.get(name).load_strategy()
    rooms: dict[str, set[str]] = {}
    for cls in strategy.__mro__:
        rooms.setdefault(room(cls.__module__), set()).update(filter(is_private, vars(cls)))
    own = rooms.pop(f"gtrain_{name}") - {"_abc_impl"}
    assert not own & set().union(*rooms.values())


def members() -> set[str]:
    """The members of all protocols of ``gtrain/protocols.py``, and names that it has functions for."""
    tree = ast.parse((REPO / "gtrain" / "protocols.py").read_text())
    found = {"network", "datamodule", "_trainer"}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            found |= {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
    return found


def test_the_contract_is_known_by_protocols() -> None:
    """What base, models and backends know of each other is not looked up by a name in quotes."""
    contract = members() - {"source", "target", "rank", "size", "first", "rows"}  # of Spread, which a batch carries
    assert {"row_table", "encodes_nodes", "layers_in_turn", "deal", "recipe", "open_store"} <= contract
    wrong = []
    for _, path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("getattr", "hasattr"):
                continue
            of, key = ast.unparse(node.args[0]).rpartition(".")[2], node.args[1]
            name = key.value if isinstance(key, ast.Constant) else None
            if name in contract or of in ("batch", "lightning_module", "pl_module", "datamodule"):
                wrong.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """The text in a file, docstrings left out."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented)]
    docs = {
        id(item.value) for body in bodies for item in body if isinstance(item, ast.Expr)
    }  # of attributes and constants too
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node


def test_the_core_names_no_setting_of_a_backend() -> None:
    """A backend declares keys, limits and shortcuts in ``gtrain.backends.Backend``, from which messages are made.

    The text that explains a setting (``config`` modules of data and models) is documentation, and may name strategies.
    """
    from gtrain import backends

    installed = {name: backends.get(name) for name in ("pbg", "ps", "pyg", "sar", "single")}
    shared = {field.name for field in dataclasses.fields(StrategyConfig)}
    keys = {field.name for each in installed.values() for field in dataclasses.fields(each.load_config())} - shared
    shortcuts = {key for each in installed.values() for key in each.shortcuts}
    assert {"halo_hops", "num_partitions", "servers"} <= keys and shortcuts == {"mode"}
    pattern = re.compile(rf"\bstrategy\.({'|'.join(keys)})\b|\bstrategy=({'|'.join(set(installed) - {'single'})})\b")
    wrong = []
    for name, path, tree in trees():
        if top(name) != "gtrain" or within(name, "gtrain.testing", "gtrain.data.config", "gtrain.model.config"):
            continue
        for text in strings(tree):
            light = name in LIGHT and text.value in shortcuts
            if light or pattern.search(text.value):
                wrong.append(f"{path}:{text.lineno}: {text.value}")
    assert wrong == []


# ------------------------------------------------------------------------------------------------- unpickling


def calls(name: str, path: Path) -> Iterator[tuple[str, ast.Call, str]]:
    """Dotted name of each function that a file calls, the call, and its place."""
    for node in ast.walk(parsed(path)):
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
    """``data/readers/unpickling.py`` restricts PyG's readers, and explains what torch.load refused;
    ``data/tables/graph.py`` writes functions to identify them, and reads none.
    """
    found = {found.importer for found in everything if top(found.imported) in ("pickle", "cloudpickle", "dill")}
    assert found == {*UNPICKLERS, "gtrain.data.readers.unpickling", "gtrain.data.tables.graph"}
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
