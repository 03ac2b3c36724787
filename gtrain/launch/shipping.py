"""Pickle a rank's function, arguments and return value between processes of one user on one machine.

They pass through anonymous files (``memfd``) that children inherit, never over a network. Neither the wire nor readers
of files import this module. Imports the standard library, and cloudpickle when it is needed.
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
from itertools import accumulate
from pathlib import Path
from typing import Any

from gtrain.errors import GtrainError

# ---------------------------------------------------------------------------------------------------- results


@contextlib.contextmanager
def result_file() -> Iterator[int]:
    """Provide the descriptor of an anonymous file for rank 0's return value."""
    descriptor = os.memfd_create("gtrain-result")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_result(descriptor: int, value: Any) -> None:
    """Write the return value of rank 0's task; print a message instead if it cannot be pickled."""
    try:
        try:
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception:  # a lambda, or a class that was defined in a function
            import cloudpickle

            data = cloudpickle.dumps(value)
    except Exception as error:
        problem = f"rank 0 returned a {type(value).__name__}, which cannot be pickled ({type(error).__name__}: {error})"
        print(f"gtrain: {problem}; run_local returns None.", file=sys.stderr)
        return
    os.ftruncate(descriptor, 0)  # a restarted rank 0 overwrites the value
    with open(f"/proc/self/fd/{descriptor}", "wb") as file:
        file.write(data)


def read_result(descriptor: int) -> Any:
    """Read the value that :func:`write_result` wrote, or None."""
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:
        return pickle.load(file) if os.fstat(descriptor).st_size else None


# ---------------------------------------------------------------------------------------------------- functions


def send_task(
    descriptor: int, settings: Mapping[str, Any], task: str | Callable[..., Any], args: Sequence[Any], reason: str
) -> None:
    """Write a function, its arguments, and the process state that a fork would inherit.

    Objects of ``__main__`` and of modules that a new interpreter cannot import are pickled by value, others by name.

    Args:
        descriptor: descriptor of the file.
        settings: settings for the agent, pickled apart: unpickling the task may start threads, so only ranks do it.
        task: as for :func:`gtrain.run_local`.
        args: its arguments.
        reason: why the ranks are not forks of this process, as a clause.

    Raises:
        GtrainError: names the objects that cannot be pickled.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        """Records the objects of ``__main__`` that it writes, and pickles modules that cannot be imported by value."""

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
                if module is not None and name != "__main__" and not _is_importable(module, name):
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
            pickler.dump(list(pickler.of_main))  # a copy, because pickling extends the list
            pickler.dump(_state())
        except Exception as error:
            raise _pickling_error(task, args, error, cloudpickle.dumps, reason) from error
        finally:
            for module in pickler.by_value:
                cloudpickle.unregister_pickle_by_value(module)


def dump_settings(settings: Mapping[str, Any]) -> bytes:
    """Return settings for an agent on another machine, which reads them with :func:`receive_settings`."""
    import cloudpickle

    return bytes(cloudpickle.dumps(settings))


def _code_of_file(file_name: str, make: Callable[..., types.CodeType], args: tuple[Any, ...]) -> types.CodeType:
    """Return the code object that cloudpickle makes, with the name of its source file."""
    return make(*args).replace(co_filename=file_name)


def receive_settings(descriptor: int) -> tuple[dict[str, Any], int]:
    """Read the settings that :func:`send_task` wrote, and the offset of the rest; called in the agent."""
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:
        return pickle.load(file), file.tell()


def receive_task(descriptor: int, offset: int) -> tuple[str | Callable[..., Any], tuple[Any, ...]]:
    """Read what :func:`send_task` wrote from ``offset`` on, and restore the sender's ``__main__``; called in a rank."""
    main = sys.modules["__main__"]
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:
        file.seek(offset)
        unpickler = pickle.Unpickler(file)
        source = unpickler.load()
        if source["file"] is not None:
            main.__file__ = source["file"]
        for name, lines in source["cells"].items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        task, args = unpickler.load()
        for definition in unpickler.load():  # so that ranks can pickle these by name
            if isinstance(definition, types.FunctionType):
                variables = {name: value for name, value in definition.__globals__.items() if not name.startswith("__")}
                vars(main).update(variables)
            if "." not in definition.__qualname__:
                setattr(main, definition.__name__, definition)
        _restore(unpickler.load())
    return task, args


def _is_importable(module: types.ModuleType, name: str) -> bool:
    """Whether a new interpreter with this one's ``sys.path`` imports the same module by this name."""
    origin = getattr(module, "__file__", None)
    # Of the interpreter itself, such as the classes of __spec__ and __loader__; ``os.path`` is ``posixpath``.
    if any(
        importlib.machinery.FrozenImporter.find_spec(known) is not None
        for known in (name, getattr(module, "__name__", name))
    ):
        return True
    if name in sys.builtin_module_names or not (origin or "x.py").endswith(".py") or (origin is None and "." in name):
        return True  # a compiled module, or a namespace package: it can only be imported
    path: Sequence[str] | None = None
    spec: importlib.machinery.ModuleSpec | None = None
    for part in accumulate(name.split("."), "{}.{}".format):
        finders: list[Any] = [importlib.machinery.PathFinder, *sys.meta_path[::-1]]
        specs = (finder.find_spec(part, path) for finder in finders if _is_in_every_interpreter(finder))
        spec = next((candidate for candidate in specs if candidate is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    assert spec is not None
    return origin is None or spec.origin is None or os.path.realpath(spec.origin) == os.path.realpath(origin)


def _is_in_every_interpreter(finder: Any) -> bool:
    """Whether a new interpreter has this finder too: its own, or one of an editable installation."""
    return finder is importlib.machinery.PathFinder or getattr(finder, "__module__", "").startswith("__editable__")


def _cells() -> dict[str, list[str]]:
    """Return source lines without a file, such as those of notebook cells, by file name of their code objects."""
    return {
        name: list(entry[2])
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not Path(name).exists()
    }


def _pickling_error(
    task: str | Callable[..., Any], args: Sequence[Any], error: Exception, dumps: Callable[[Any], bytes], reason: str
) -> GtrainError:
    """Return an error that names the arguments or variables that cannot be pickled."""
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
    """Return the state that a fork would inherit: random numbers, settings of torch, warnings and logging."""
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
