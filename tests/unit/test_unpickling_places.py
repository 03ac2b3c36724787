"""Nothing that comes from a socket is unpickled: the few places that unpickle at all, found by reading the tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helpers import REPO

UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
"""Modules that turn bytes into objects of any class."""
ALLOWED = {
    "gtrain/data/unpickling.py": {"pickle"},  # data sets' pickles: arrays and plain containers alone
    "gtrain/launch/shipping.py": {"pickle", "cloudpickle"},  # inherited descriptors between run_local and its ranks
}
OBJECTS = {
    "recv_pyobj",
    "send_pyobj",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
}
"""Functions of zmq and torch.distributed that unpickle what comes from a socket (ours are called otherwise)."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for top in ("gtrain", "plugins"):
        for path in sorted((REPO / top).rglob("*.py")):
            yield path.relative_to(REPO).as_posix(), ast.parse(path.read_text(), str(path))


def imports(tree: ast.Module) -> set[str]:
    """First parts of the names of all imported modules, those within functions included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def faults(name: str, tree: ast.Module) -> Iterator[str]:
    """What in a file could unpickle bytes of a stranger."""
    for module in sorted(imports(tree) & UNPICKLERS - ALLOWED.get(name, set())):
        yield f"{name} imports {module}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called == "torch.load" and settings.get("weights_only") != "True":
            yield f"{name}:{node.lineno} calls torch.load without weights_only=True"
        if settings.get("allow_pickle", "False") != "False":
            yield f"{name}:{node.lineno} calls {called} with allow_pickle"
        if called.split(".")[-1] in OBJECTS and called.split(".")[0] in {"dist", "torch", "zmq", "socket"}:
            yield f"{name}:{node.lineno} calls {called}"


def test_files_that_unpickle_are_few() -> None:
    assert [fault for name, tree in sources() for fault in faults(name, tree)] == []


def test_what_unpickles_has_no_socket() -> None:
    networks = {"socket", "zmq", "ssl", "asyncio", "http", "urllib", "socketserver"}
    trees = dict(sources())
    for name in ALLOWED:
        assert imports(trees[name]) & networks == set(), name


def test_the_search_finds_faults() -> None:
    text = (
        "def read(zmq, torch, np, path):\n"
        "    import pickle\n"
        "    from cloudpickle import loads\n"
        "    torch.load(path)\n"
        "    np.load(path, allow_pickle=True)\n"
        "    torch.distributed.all_gather_object([], path)\n"
    )
    assert list(faults("gtrain/new.py", ast.parse(text))) == [
        "gtrain/new.py imports cloudpickle",
        "gtrain/new.py imports pickle",
        "gtrain/new.py:4 calls torch.load without weights_only=True",
        "gtrain/new.py:5 calls np.load with allow_pickle",
        "gtrain/new.py:6 calls torch.distributed.all_gather_object",
    ]
