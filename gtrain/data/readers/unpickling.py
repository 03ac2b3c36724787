"""Unpickle arrays, sparse matrices and plain containers, and refuse all other objects.

A pickle is a program: it imports the functions that it names and calls them. Some published data sets are pickles
(Planetoid's raw files, the object arrays in some ``.npz``), and the readers of PyG and numpy unpickle any file.
:func:`plain_pickles` replaces ``pickle.load`` by :class:`PlainUnpickler` while such a reader runs.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import functools
import importlib
import io
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import DataError

_reconstruct = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
NUMPY_GLOBALS: list[Any] = [
    (_reconstruct, "numpy.core.multiarray._reconstruct"),
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    np.ndarray,
    np.dtype,
    codecs.encode,
    *(type(np.dtype(kind)) for kind in ("i8", "i4", "i2", "i1", "u1", "f8", "f4", "?")),
]
"""The ``safe_globals`` with which ``torch.load(weights_only=True)`` reads arrays of numbers in a ``.pt`` file."""

_ALLOWED = "arrays, scipy's sparse matrices and plain containers"
_TORCH_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_TORCH_FOREIGN = re.compile(r"not an allowed global|blocklist|is blocked|call reduce|unsupported class|allowlisted")
_HINT = "delete the file and get the data set again, from a source that you trust."


class PlainUnpickler(pickle._Unpickler):
    """An unpickler for arrays, scipy's sparse matrices and plain containers.

    The unpickler looks up the globals of a pickle in a table and imports nothing. Functions that check their arguments
    replace numpy's and scipy's classes, since a forged ``numpy.dtype`` state or column index would make C code read and
    write outside of an array.

    Args:
        file: the pickle.
        path: the file for messages; by default the name of ``file``.
        **options: ``encoding`` and others of ``pickle.load``.
    """

    dispatch = pickle._Unpickler.dispatch.copy()
    stack: list[Any]

    def __init__(self, file: Any, path: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__(file, **options)
        self._path = path if path is not None else getattr(file, "name", "a pickle")

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a global of the pickle.

        Raises:
            DataError: the global is not in the table; names the file and the global.
        """
        table = _sparse_classes() if module.startswith("scipy.sparse.") else _TABLE
        try:
            return table[module, name]
        except KeyError:
            raise refusal(self._path, f"{module}.{name}") from None

    def load_build(self) -> None:
        """Set the state of an array, a dtype or a sparse matrix; the state of anything else is refused."""
        state, instance = self.stack.pop(), self.stack[-1]
        if isinstance(instance, np.dtype):
            _set_dtype(instance, state)
        elif type(instance) is np.ndarray:
            _set_array(instance, state)
        elif type(instance).__name__ in _SPARSE_NAMES and type(instance).__module__.startswith("scipy.sparse."):
            _set_sparse(instance, state)
        else:
            raise refusal(self._path, f"the state of a {type(instance).__name__}")

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]


def refusal(path: str | os.PathLike[str], content: str) -> DataError:
    """Return the error for a pickle with objects that could run code."""
    return DataError(
        f"{path} holds {content}; only {_ALLOWED} are unpickled, since other objects can run code", hint=_HINT
    )


def foreign_content(path: Path, error: Exception) -> str | None:
    """Return the content that torch's safe loader refused in a file; None if the file is damaged instead.

    Args:
        path: the file.
        error: the error of ``torch.load(path, weights_only=True)``.
    """
    if not isinstance(error, pickle.UnpicklingError):
        return None
    if named := _TORCH_GLOBAL.search(str(error)):
        return named.group(1)
    if _TORCH_FOREIGN.search(str(error)):
        return "objects"
    with open(path, "rb") as file:
        head = file.read(2)
    if "Unsupported operand" in str(error) and head[:1] == pickle.PROTO and 2 < head[1] <= pickle.HIGHEST_PROTOCOL:
        return f"a pickle of protocol {head[1]}, not what torch.save writes by default"
    return None


@contextlib.contextmanager
def plain_pickles(root: str | os.PathLike[str]) -> Iterator[None]:
    """Restrict unpickling in this thread: ``pickle.load`` and ``loads`` are :class:`PlainUnpickler`'s.

    An audit hook stops every other unpickler (``pickle.Unpickler``, ``torch.load(weights_only=False)``, pandas) at its
    first global. Other threads are not affected.

    Args:
        root: the folder of the files; messages name the file that was opened last, with links resolved.

    Raises:
        DataError: a pickle held other objects; raised even if the reader caught the first error.
    """
    _install()
    outer = _reading.__dict__.copy()
    _reading.__dict__.update(root=os.path.join(os.fspath(root), ""), file=None, refused=None)
    try:
        yield
    except Exception as error:
        refused = _reading.refused or _as_refusal(error)
        if refused is not None and error is not refused:
            raise refused from error
        raise
    else:
        if _reading.refused is not None:
            raise _reading.refused
    finally:
        _reading.__dict__.clear()
        _reading.__dict__.update(outer)


# ---------------------------------------------------------------------------------------------------- the restriction


class _Reading(threading.local):
    """State of this thread: the folder, the file that was opened last, the first refusal."""

    root: str | None = None
    file: str | None = None
    refused: DataError | None = None


_reading = _Reading()
_installed: list[Callable[..., Any]] = []
_install_lock = threading.Lock()


def _install() -> None:
    """Wrap ``pickle.load`` and ``loads`` and add the audit hook, once; both do nothing outside of the context."""
    with _install_lock:
        if _installed:
            return
        load, loads = pickle.load, pickle.loads

        def plain_load(file: IO[bytes], **options: Any) -> Any:
            return load(file, **options) if _reading.root is None else _load(file, options)

        def plain_loads(data: bytes, /, **options: Any) -> Any:
            return loads(data, **options) if _reading.root is None else _load(io.BytesIO(data), options)

        pickle.load, pickle.loads = plain_load, plain_loads  # type: ignore[assignment]
        sys.addaudithook(_audit)
        _installed.extend((load, loads))


def _load(file: Any, options: dict[str, Any]) -> Any:
    try:
        return PlainUnpickler(file, _current_file(), **options).load()
    except DataError as error:
        _reading.refused = _reading.refused or error
        raise


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _reading.root is None:
        return
    if event == "pickle.find_class":
        _refuse(".".join(map(str, arguments)))
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        name = os.fspath(arguments[0])
        if isinstance(name, str) and name.startswith(_reading.root):
            _reading.file = name


def _refuse(content: str) -> NoReturn:
    error = refusal(_current_file(), content)
    _reading.refused = _reading.refused or error
    raise error


def _as_refusal(error: Exception) -> DataError | None:
    """Return our error for a refusal by torch's safe loader, which advises to disable it; None for other errors."""
    content = None if _reading.file is None else foreign_content(Path(_reading.file), error)
    return None if content is None else refusal(_current_file(), content)


def _current_file() -> str:
    return "a pickle" if _reading.file is None else str(Path(_reading.file).resolve())


# ---------------------------------------------------------------------------------------------------- the table


class _ArrayClass:
    """Replaces ``numpy.ndarray``, which pickles name only as an argument of ``_reconstruct``."""


def _new_array(*_: object) -> NDArray[Any]:
    """Replace ``numpy.core.multiarray._reconstruct``; shape and contents are in the state."""
    return np.empty(0, np.int8)


def _array_of(buffer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> NDArray[Any]:
    """Replace ``numpy._core.numeric._frombuffer`` of pickle's protocol 5; numpy refuses objects."""
    flat: NDArray[Any] = np.frombuffer(buffer, _checked(dtype)).copy()
    return flat.reshape(shape, order="F" if order == "F" else "C")


def _scalar(dtype: np.dtype[Any], content: bytes | str) -> Any:
    """Replace ``numpy.core.multiarray.scalar``."""
    raw = content.encode("latin1") if isinstance(content, str) else content
    return np.frombuffer(raw, _checked(dtype), count=1)[0]


def _new_dtype(code: str, *_: object) -> np.dtype[Any]:
    """Replace ``numpy.dtype`` for numbers, texts or objects without fields; a copy, since its state is set later."""
    dtype = np.dtype(code, align=False, copy=True) if isinstance(code, str) else None
    if dtype is None or dtype.kind not in "biufcSUO" or dtype.fields is not None or dtype.subdtype is not None:
        raise pickle.UnpicklingError(f"numpy.dtype({code!r})")
    return dtype


def _checked(dtype: object) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype):
        raise pickle.UnpicklingError(f"{type(dtype).__name__} instead of a numpy.dtype")
    return dtype


def _encode(text: str, encoding: str, errors: str = "strict") -> bytes:
    """Replace ``_codecs.encode``, with which protocol 2 stores bytes."""
    if encoding != "latin1" or not isinstance(text, str):
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1", errors)


def _no_bytes() -> bytes:
    """Replace ``bytes()``, with which protocol 2 stores empty bytes."""
    return b""


@functools.cache
def _sparse_classes() -> dict[tuple[str, str], type]:
    """Return replacements of scipy's sparse classes by module and name. They create an object without attributes, whose
    state is set later. scipy is not a dependency; it is imported only for files with sparse matrices.

    Raises:
        DataError: scipy is not installed.
    """
    try:
        scipy_sparse = importlib.import_module("scipy.sparse")
    except ImportError as error:
        raise DataError("the file holds sparse matrices of scipy, which is not installed", hint=_SCIPY) from error
    stand_ins: dict[tuple[str, str], type] = {}
    for name in _SPARSE_NAMES:
        cls = getattr(scipy_sparse, name)
        stand_in = type(name, (), {"__new__": lambda _, cls=cls: object.__new__(cls)})
        stand_ins |= {(f"scipy.sparse.{prefix}{name[:3]}", name): stand_in for prefix in ("", "_")}
    return stand_ins


def _reconstructed(cls: Any, *_: object) -> Any:
    """Replace ``copyreg._reconstructor`` of protocols 0 and 1; return an object without its state."""
    if cls not in _sparse_classes().values():
        raise pickle.UnpicklingError(f"an object of {getattr(cls, '__name__', cls)}")
    return cls()


_SCIPY = "pip install scipy"
_SPARSE_NAMES = tuple(f"{layout}_{kind}" for layout in ("csr", "csc", "coo") for kind in ("matrix", "array"))
_TABLE: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ArrayClass,
    ("numpy", "dtype"): _new_dtype,
    ("_codecs", "encode"): _encode,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{
        (f"numpy.{core}.{module}", name): function
        for core in ("core", "_core")
        for module, name, function in (
            ("multiarray", "_reconstruct", _new_array),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _array_of),
        )
    },
    **{
        (builtins, kind.__name__): kind
        for builtins in ("builtins", "__builtin__")
        for kind in (list, dict, set, frozenset, complex)
    },
    **{(builtins, "bytes"): _no_bytes for builtins in ("builtins", "__builtin__")},
    # Only an argument of copyreg._reconstructor.
    **{(builtins, "object"): None for builtins in ("builtins", "__builtin__")},
    **{(module, "_reconstructor"): _reconstructed for module in ("copyreg", "copy_reg")},
}
"""The replacement of each allowed global of a pickle, by module and name; safe to call with any arguments."""


# ---------------------------------------------------------------------------------------------------- states


def _set_dtype(instance: np.dtype[Any], state: Any) -> None:
    """Set the byte order, the only part of the state of a dtype without fields that its code lacks."""
    plain = isinstance(state, tuple) and len(state) == 8 and state[0] == 3 and state[2:5] == (None, None, None)
    sizes = ((instance.itemsize, instance.alignment), (-1, -1))
    if not plain or state[1] not in ("<", ">", "=", "|") or state[5:7] not in sizes or state[7] != instance.flags:
        raise pickle.UnpicklingError(f"the state {state!r} of a numpy.dtype")
    instance.__setstate__(state)  # type: ignore[attr-defined]


def _set_array(instance: NDArray[Any], state: Any) -> None:
    """Set shape, dtype and contents; numpy checks that their sizes agree."""
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], np.dtype):
        raise pickle.UnpicklingError("the state of a numpy.ndarray")
    if isinstance(state[4], list) != state[2].hasobject:
        raise pickle.UnpicklingError(f"a {type(state[4]).__name__} as the contents of an array of {state[2]}")
    instance.__setstate__(state)


def _set_sparse(instance: Any, state: Any) -> None:
    """Fill a sparse matrix from the arrays of its state after checking all indices."""
    if not isinstance(state, dict):
        raise pickle.UnpicklingError(f"the state of a {type(instance).__name__}")
    shape = state.get("_shape", state.get("shape"))
    if instance.format == "coo":
        row, column = state["coords"] if "coords" in state else (state["row"], state["col"])
        parts: Any = (state["data"], (row, column))
    else:
        parts = tuple(state[name] for name in ("data", "indices", "indptr"))
    checked = type(instance)(parts, shape=shape)  # of coo this checks the coordinates
    if instance.format != "coo":
        checked.check_format(full_check=True)
    instance.__dict__.update(checked.__dict__)
