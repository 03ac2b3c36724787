"""Pickling between processes of one user on one machine: a rank's function on its way in, its result on the way out.

Both travel through anonymous files (``memfd``) that a parent hands to its children, never over a network. Nothing here
is imported by the wire or by what reads files. Imports the standard library, and cloudpickle when it is needed.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import inspect
import linecache
import logging
import os
import pickle
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtrain.errors import GtrainError

# ---------------------------------------------------------------------------------------------------- results


@contextlib.contextmanager
def result_file() -> Iterator[int]:
    """The descriptor of an anonymous file for what rank 0 returns."""
    descriptor = os.memfd_create("gtrain-result")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_result(descriptor: int, value: Any) -> None:
    """Write what rank 0's task returned to its file; what cannot be pickled is left out, with a message."""
    try:
        try:
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception:  # a lambda, or a class that was defined in a function
            import cloudpickle

            data = cloudpickle.dumps(value)
    except Exception as error:
        said = f"gtrain: rank 0 returned a {type(value).__name__}, which cannot be pickled"
        print(f"{said} ({type(error).__name__}: {error}); run_local returns None.", file=sys.stderr)
        return
    os.ftruncate(descriptor, 0)  # of a rank 0 that was here before
    with open(f"/proc/self/fd/{descriptor}", "wb") as file:
        file.write(data)


def read_result(descriptor: int) -> Any:
    """What :func:`write_result` wrote, or None."""
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:
        return pickle.load(file) if os.fstat(descriptor).st_size else None


# ---------------------------------------------------------------------------------------------------- functions


def send_task(
    descriptor: int, settings: Mapping[str, Any], task: str | Callable[..., Any], args: Sequence[Any], reason: str
) -> None:
    """Write a function, its arguments and the state of this process that a fork would have had.

    What ``__main__`` and modules that a new interpreter would not find define goes by value, anything else by its
    module's name.

    Args:
        descriptor: the file.
        settings: what the agent needs to know, which leaves the rest to its ranks: unpickling may start threads.
        task: as for :func:`gtrain.run_local`.
        args: its arguments.
        reason: why the ranks are not forks of this process, a clause.

    Raises:
        GtrainError: names what cannot be pickled.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        """Notes what of ``__main__`` it writes, and adds modules that are not found by their names."""

        def __init__(self, to: Any) -> None:
            super().__init__(to, pickle.HIGHEST_PROTOCOL)
            self.of_main: list[Any] = []
            self.by_value: list[types.ModuleType] = []
            self._seen: set[str] = set()

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType):  # cloudpickle 3.1.3 drops the file, by which source lines are looked up
                return _code_of_file, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))
            name = None
            if isinstance(obj, types.ModuleType):
                name = obj.__name__
            elif isinstance(obj, (type, types.FunctionType)):
                name = getattr(obj, "__module__", None)
                if name == "__main__":
                    self.of_main.append(obj)
            if isinstance(name, str) and name not in self._seen:
                self._seen.add(name)
                module = sys.modules.get(name)
                if module is not None and name != "__main__" and not _is_found(module, name):
                    self.by_value.append(module)
                    cloudpickle.register_pickle_by_value(module)
            return super().reducer_override(obj)

    main = sys.modules["__main__"]
    with open(f"/proc/self/fd/{descriptor}", "wb") as file:
        cloudpickle.dump(settings, file)
        pickler = Pickler(file)
        try:
            pickler.dump({"file": getattr(main, "__file__", None), "cells": _cells()})
            pickler.dump((task, tuple(args)))
            pickler.dump(list(pickler.of_main))  # a copy: it grows
            pickler.dump(_state())
        except Exception as error:
            raise _not_sent(task, args, error, cloudpickle.dumps, reason) from error
        finally:
            for module in pickler.by_value:
                cloudpickle.unregister_pickle_by_value(module)


def _code_of_file(file_name: str, make: Callable[..., types.CodeType], args: tuple[Any, ...]) -> types.CodeType:
    """A code object as cloudpickle makes it, with the name of the file that it was compiled from."""
    return make(*args).replace(co_filename=file_name)


def receive_settings(descriptor: int) -> tuple[dict[str, Any], int]:
    """In the agent, the settings that :func:`send_task` wrote, and the offset at which the rest begins."""
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:
        return pickle.load(file), file.tell()


def receive_task(descriptor: int, offset: int) -> tuple[str | Callable[..., Any], tuple[Any, ...]]:
    """In a rank, what :func:`send_task` wrote from ``offset`` on; this process's ``__main__`` becomes the sender's."""
    main = sys.modules["__main__"]
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:
        file.seek(offset)
        unpickler = pickle.Unpickler(file)
        given = unpickler.load()
        if given["file"] is not None:
            main.__file__ = given["file"]
        for name, lines in given["cells"].items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        task, args = unpickler.load()
        for one in unpickler.load():  # what is pickled in ranks by its name, such as a model, is found by it
            if isinstance(one, types.FunctionType):
                here = {name: value for name, value in one.__globals__.items() if not name.startswith("__")}
                vars(main).update(here)
            if "." not in one.__qualname__:
                setattr(main, one.__name__, one)
        _restore(unpickler.load())
    return task, args


def _is_found(module: types.ModuleType, name: str) -> bool:
    """Whether a new interpreter with this one's ``sys.path`` imports the same module by this name."""
    origin = getattr(module, "__file__", None)
    if name in sys.builtin_module_names or not (origin or "x.py").endswith(".py") or (origin is None and "." in name):
        return True  # compiled, and so of a package that can only be imported
    path: Sequence[str] | None = None
    spec: importlib.machinery.ModuleSpec | None = None
    for part in _parents(name):
        finders: list[Any] = [importlib.machinery.PathFinder, *sys.meta_path[::-1]]
        ours = [finder for finder in finders if _is_everywhere(finder)]
        spec = next((found for finder in ours if (found := finder.find_spec(part, path)) is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    assert spec is not None
    return origin is None or spec.origin is None or os.path.realpath(spec.origin) == os.path.realpath(origin)


def _parents(name: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``."""
    parts = name.split(".")
    yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _is_everywhere(finder: Any) -> bool:
    """Whether it is the interpreter's own, or that of an editable installation: not one that a program has put in."""
    return finder is importlib.machinery.PathFinder or getattr(finder, "__module__", "").startswith("__editable__")


def _cells() -> dict[str, list[str]]:
    """Source lines that are in no file, such as those of a notebook's cells, by the name that code objects have."""
    return {
        name: list(entry[2])
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not Path(name).exists()
    }


def _not_sent(
    task: str | Callable[..., Any], args: Sequence[Any], error: Exception, dumps: Callable[[Any], bytes], reason: str
) -> GtrainError:
    """Say which argument or variable it was that could not be pickled."""
    named: dict[str, Any] = {f"its argument {index}": value for index, value in enumerate(args)}
    if inspect.isfunction(task):
        variables = inspect.getclosurevars(task)
        for scope in (variables.nonlocals, variables.globals):
            named |= {f"the variable {name}": value for name, value in scope.items()}
    culprits = []
    for name, value in named.items():
        try:
            dumps(value)
        except Exception:
            culprits.append(f"{name} ({type(value).__name__})")
    what = getattr(task, "__qualname__", str(task))
    return GtrainError(
        f"run_local({what}) cannot copy {' and '.join(culprits) or 'the function'} to the ranks: "
        f"{type(error).__name__}: {error}",
        hint=f"create such objects inside the function; the ranks are not forks of this process, because {reason}.",
    )


# ---------------------------------------------------------------------------------------------------- state


def _state() -> dict[str, Any]:
    """What a forked child would have of this process: random numbers, settings of torch, warnings and logging."""
    state: dict[str, Any] = {
        "random": random.getstate(),
        "warnings": list(warnings.filters),
        "levels": {
            name: logger.level
            for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger) and logger.level
        },
        "root": logging.root.level,
        "handlers": [
            (handler.stream is sys.stdout, handler.level, handler.formatter)
            for handler in logging.root.handlers
            if type(handler) is logging.StreamHandler and handler.stream in (sys.stdout, sys.stderr)
        ],
    }
    if "numpy" in sys.modules:
        import numpy as np

        state["numpy"] = np.random.get_state()
    if "torch" in sys.modules:
        import torch

        state["torch"] = {
            "random": torch.get_rng_state().numpy(),
            "dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
            "precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        }
    return state


def _restore(state: Mapping[str, Any]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(state["warnings"]):
        texts = [pattern if isinstance(pattern, str) else pattern.pattern for pattern in (message or "", module or "")]
        warnings.filterwarnings(action, texts[0], category, texts[1], line)
    for name, level in state["levels"].items():
        logging.getLogger(name).setLevel(level)
    logging.root.setLevel(state["root"])
    for is_out, level, formatter in state["handlers"]:
        handler = logging.StreamHandler(sys.stdout if is_out else sys.stderr)
        handler.setLevel(level)
        handler.setFormatter(formatter)
        logging.root.addHandler(handler)
    if "torch" in state:
        import torch

        given = state["torch"]
        torch.set_default_dtype(given["dtype"])
        torch.set_num_threads(given["threads"])
        torch.set_float32_matmul_precision(given["precision"])
        torch.use_deterministic_algorithms(given["deterministic"], warn_only=given["warn_only"])
        torch.set_rng_state(torch.from_numpy(given["random"].copy()))
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    random.setstate(state["random"])
