"""Python programs in tests, each a fork of one process that has imported what ranks start with.

Importing torch, Lightning and PyG takes longer than most of the runs that tests make. A program starts here as the
agent starts a rank: as a fork of a process that has imported :data:`gtrain.launch.children.PRELOAD`, which starts no
thread. It has a session, folder, environment, arguments and ``__main__`` of its own all the same. Whether the command
works in a process of its own, and what it imports there, is for tests that use :mod:`helpers` alone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NoReturn

from helpers import LIMIT, clean_environment, descendants, logs, ok, show, summary

_LONGEST_ORDER = 1 << 20  # bytes


def gtrain(
    *args: str, cwd: Path, timeout: float = LIMIT, env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """``python -m gtrain ARGS`` in ``cwd``; as :func:`helpers.gtrain`."""
    return python("-m", "gtrain", *args, cwd=cwd, timeout=timeout, env=env)


def sweep(folder: Path, *overrides: str, timeout: float = LIMIT) -> list[dict[str, Any]]:
    """Run a sweep and return the summaries of its jobs in their order.

    Args:
        folder: of the sweep; the command runs in the one above.
        overrides: of ``gtrain --multirun``.
        timeout: seconds.
    """
    ok(gtrain("--multirun", *overrides, f"hydra.sweep.dir={folder}", cwd=folder.parent, timeout=timeout))
    jobs = sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    assert jobs
    return [summary(job) for job in jobs]


def python(
    *args: str, cwd: Path, timeout: float = LIMIT, env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """``python ARGS`` in ``cwd``, ARGS being ``-m MODULE`` or a file, and arguments; as :func:`helpers.run`."""
    return Program(*args, cwd=cwd, env=env).end(timeout)


def command(folder: Path) -> Path:
    """Put a ``gtrain`` into a folder, for scripts that call it by name: it says all that it has to say at its end."""
    path = folder / "gtrain"
    path.write_text(_COMMAND.format(python=sys.executable, address=_parent()))
    path.chmod(0o755)
    return path


_COMMAND = """#!{python} -I
import json, os, shutil, signal, socket, sys, tempfile

if "PMI_RANK" in os.environ:  # ranks of MPICH recognise their job by their parent process
    os.execv({python!r}, [{python!r}, "-m", "gtrain", *sys.argv[1:]])
with tempfile.TemporaryDirectory() as folder:
    order = {{"args": ["-m", "gtrain", *sys.argv[1:]], "cwd": os.getcwd(), "env": dict(os.environ), "folder": folder}}
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect({address!r})
    line.send(json.dumps(order).encode())
    pid = int(line.recv(100))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(line.recv(100))
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        with open(os.path.join(folder, name), errors="replace") as said:
            shutil.copyfileobj(said, stream)
sys.exit(code if code >= 0 else 128 - code)
"""


class Program:
    """``python ARGS``, running.

    Args:
        args: ``-m MODULE`` or a file, and arguments.
        cwd: where it runs.
        env: variables to set besides those of :func:`helpers.clean_environment`.

    Attributes:
        pid: of the process, which leads a group of its own.
    """

    def __init__(self, *args: str, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        self._args, self._cwd, self._said = args, cwd, tempfile.TemporaryDirectory()
        order = {"args": args, "cwd": os.path.abspath(cwd), "env": clean_environment(env), "folder": self._said.name}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(_parent())
        self._socket.send(json.dumps(order).encode())
        self.pid, self._ended = int(self._socket.recv(100)), False
        _RUNNING.add(self)

    def errors(self) -> str:
        """What it has written to the standard error stream so far."""
        path = Path(self._said.name, "err")
        return path.read_text(errors="replace") if path.exists() else ""

    def end(self, timeout: float = LIMIT) -> CompletedProcess[str]:
        """Wait until it has ended.

        Raises:
            AssertionError: it did not in time, and was killed with all that it had started.
        """
        in_time = False
        try:
            in_time = bool(select.select([self._socket], [], [], timeout)[0])
        finally:
            if not in_time:
                self.kill()
            code, self._ended = int(self._socket.recv(100)), True
            _RUNNING.discard(self)
            self._socket.close()
            out, err = (Path(self._said.name, name).read_text(errors="replace") for name in ("out", "err"))
            self._said.cleanup()
        done = CompletedProcess([sys.executable, *self._args], code, out, err)
        assert in_time, f"not ended after {timeout:g} s, killed\n{show(done)}\n{logs(self._cwd)}"
        return done

    def kill(self) -> None:
        """Kill the process and all that it has started, if it has not ended."""
        for pid in () if self._ended else (*descendants(self.pid), self.pid):
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)


def lasting(folder: Path, *arguments: str, run: str = "run", program: tuple[str, ...] = ("-m", "gtrain")) -> Program:
    """``gtrain ARGUMENTS`` that trains until :func:`enough`: it does not end before a test has disturbed it."""
    until = f"+callbacks.until={{_target_:train_until.TrainUntil,folder:{folder}/until}}"
    more = (until, "trainer.max_epochs=100000", f"hydra.run.dir={run}")
    env = {"PYTHONPATH": str(Path(__file__).with_name("assets"))}
    return Program(*program, *arguments, *more, cwd=folder, env=env)


def enough(folder: Path) -> None:
    """Have a run that is :func:`lasting` stop soon."""
    (folder / "until" / "enough").touch()


_RUNNING: set[Program] = set()


def kill_running() -> None:
    """Kill the programs that a test has not waited for, as one that failed: they would train on beside the others."""
    while _RUNNING:
        _RUNNING.pop().kill()


@cache
def _parent() -> bytes:
    """The address of the process that forks; it ends with its input, and so with the tests."""
    process = subprocess.Popen(
        [sys.executable, __file__], env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    atexit.register(process.kill)
    assert process.stdout is not None
    return b"\0" + process.stdout.readline().strip()


# ---------------------------------------------------------------------------------------------------- over there


def serve() -> dict[str, Any]:
    """Fork for each order, and say the pid and the exit code; returns in the children, with the order."""
    from gtrain.data import config

    load()
    config.register()  # schemas, which take a tenth of a second; those of strategies depend on what is installed
    gc.freeze()  # or each child would copy all of the memory that its garbage collector looks through
    address = f"gtrain-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + address)
        listener.listen()
        print(address, flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return _mind(client)
            client.close()
    sys.exit()


_IN_RANKS = (
    *("gtrain_sar.strategy", "gtrain_pyg.strategy", "gtrain_single.strategy", "gtrain.callbacks.checkpoint"),
    *("gtrain_ps.strategy", "gtrain_ps.server.service", "gtrain_pbg.strategy", "gtrain_pbg.machines"),
    *("gtrain.data.planted", "gtrain.data.planted.kg", "gtrain.data.planted.sparse", "gtrain.data.sources.edges"),
    *("gtrain.model.kg.embedding", "gtrain.model.classification", "gtrain.model.link_predictor"),
)


def load() -> None:
    """Do once what each rank does in its own time, which is longer than most of the runs that tests make.

    It uses no GPU, or the programs, being forks, could use none. That a strategy's modules can be imported in a
    rank is held by the commands that :mod:`helpers` starts.
    """
    from gtrain.launch import agent

    agent.preload()  # before torch_geometric, whose own import begins to use CUDA
    import torch_geometric.nn as pyg
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import grammar_parser

    from gtrain import backends
    from gtrain.kernel_cache import find_cache
    from gtrain.launch import preload
    from gtrain.launch.templates import keep_templates_in_memory

    preload.share_compiler()
    keep_templates_in_memory()  # of programs' parents too: their folder would fill
    find_cache()  # before kernels are imported, which keep the folder that they find
    for name in _IN_RANKS:
        importlib.import_module(name)
    backends.installed.cache_clear()  # what is installed is another matter in each program
    for convolution in (pyg.GCNConv, pyg.SAGEConv, pyg.GATConv):
        convolution(1, 1)  # PyG writes code for each class
    OverridesParser.create().parse_overrides(["a.b=c", "+a={b:1.5,c:null}", "a='b c'", "~a", "a=1,2", "a=/x/y.z"])
    for text in ("${a}", "${a.b}/${c:%Y-%m-%d}", "${a:b,${c}}", "x${.y}"):
        grammar_parser.parse(text)


def _mind(client: socket.socket) -> dict[str, Any]:
    order: dict[str, Any] = json.loads(client.recv(_LONGEST_ORDER))
    pid = os.fork()
    if pid == 0:
        client.close()
        return order
    client.send(str(pid).encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # nobody waits for it any more
        client.send(str(code).encode())
    os._exit(0)


def become(order: dict[str, Any]) -> None:
    """Be a new process as far as a program can see, and run it."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has its background jobs ignore
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, "out", os.O_CREAT), (2, "err", os.O_CREAT)):
        file = os.open(os.path.join(order["folder"], name), flags | (os.O_WRONLY if number else 0))
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    tempfile.tempdir = None
    is_module = order["args"][0] == "-m"
    name, *arguments = order["args"][1:] if is_module else order["args"]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path[1:]]
    sys.path[:1] = [os.getcwd() if is_module else os.path.dirname(os.path.abspath(name)), *added]
    sys.argv[:] = [name, *arguments]
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
        _leave(0)
    except SystemExit as wish:
        if wish.code is None or isinstance(wish.code, int):
            _leave(wish.code or 0)
        raise


def _leave(code: int) -> NoReturn:
    """End as the interpreter does, but for taking apart all that was imported: that takes longer than most programs."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    become(serve())
