"""Checkpoints as directories: what all ranks share, what each rank holds, and a manifest written last.

::

    last.ckpt/
        manifest.json   format, release, world size, model, numbering of its rows, checksums; written last
        trainer.pt      Lightning's checkpoint: weights, optimizers, schedulers, loops, callbacks
        rank-<r>.pt     that rank's random number generators and shard state
        ...             files that the strategy writes itself, for what is larger than memory

Everything loads with ``weights_only=True``: no object is ever unpickled. A checkpoint is written beside its place and
renamed, so that a killed run leaves the one before intact.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn import Module

from gtrain import __version__
from gtrain.data.readers.unpickling import foreign_content
from gtrain.errors import CheckpointError, disk_full, naming
from gtrain.graph.store import Store
from gtrain.graph.store.entities import feature_kind
from gtrain.graph.store.files import names_file
from gtrain.nn import TableSpec, tables
from gtrain.nn.table import BLOCK_ROWS
from gtrain.protocols import ReturnsNodeIds, network_of
from gtrain.strategy.group import Group

FORMAT = 1
MANIFEST = "manifest.json"
TRAINER = "trainer.pt"
_PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.Size)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint read back: Lightning's part and this rank's shard state."""

    checkpoint: dict[str, Any]
    shard: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedRows:
    """The rows of a table in a checkpoint, which may be larger than memory.

    Attributes:
        count: rows, n.
        pieces: goes through all of them once, some at a time: ids int64 [m] and rows [m, d]. A piece is valid until the
            next is asked for, and is not to be written to.
    """

    count: int
    pieces: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def save(
    group: Group,
    path: Path,
    checkpoint: dict[str, Any],
    shard: dict[str, Any],
    module: Module,
    write_files: Callable[[Path], None] = lambda folder: None,
    numbering: Mapping[str, Any] | None = None,
    strategy: str | None = None,
) -> None:
    """Write a checkpoint; every rank calls it with the same path.

    Args:
        group: the ranks.
        path: the folder that it becomes.
        checkpoint: Lightning's part.
        shard: what this rank alone holds.
        module: the model.
        write_files: writes files of the strategy's own into the folder that it is given.
        numbering: of the data, see :func:`numbering_of`.
        strategy: the name of the strategy that writes it.

    Raises:
        CheckpointError: the checkpoint holds an object that could only be read back by unpickling it.
        DiskFullError: names the file that did not fit.
    """
    temporary = path.with_name(path.name + ".part")
    if group.rank == 0 and not group.passed():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with _writing(temporary / TRAINER, path):
            torch.save(_plain(checkpoint, "checkpoint"), temporary / TRAINER)
    group.barrier()
    if not group.passed():
        with _writing(temporary / f"rank-{group.rank}.pt", path):
            torch.save({"rng": rng_state(), "shard": _plain(shard, "shard")}, temporary / f"rank-{group.rank}.pt")
        with _writing(temporary, path):
            write_files(temporary)
    group.barrier()
    if group.rank == 0 and not group.passed() and temporary.exists():  # else a former life had renamed it and no more
        with _writing(temporary / MANIFEST, path):
            _write_manifest(temporary, group.size, checkpoint, module, numbering, strategy)
        _swap(temporary, path)
    group.barrier()


def load(
    group: Group, path: Path, module: Module, *, restore_rng: bool, numbering: Mapping[str, Any] | None = None
) -> Loaded:
    """Read a checkpoint back and check that it belongs to ``module``, and its learned rows to the data.

    Args:
        group: the ranks; each reads its own shard.
        path: a checkpoint directory, or a single file that Lightning wrote.
        module: the model whose parameters must agree in name and shape.
        restore_rng: also set this rank's random number generators (a run that goes on, not a test).
        numbering: of the data, see :func:`numbering_of`; None: nothing is compared.

    Raises:
        CheckpointError: missing, incomplete, damaged, of another model, or with rows of other nodes or features.
    """
    path = find(path)
    if path.is_file():
        checkpoint = _read(path)
        _check_parameters(path, _shapes(checkpoint.get("state_dict", {})), module)
        return Loaded(checkpoint)
    manifest = read_manifest(path)
    _check_parameters(path, manifest["model"]["tensors"], module)
    if numbering is not None:
        _check_numbering(path, manifest.get("numbering"), numbering)
    _verify(path, manifest, TRAINER)
    checkpoint = _read(path / TRAINER)
    if manifest["world_size"] != group.size:
        if restore_rng:
            rank_zero_warn(
                f"{path} was written by {manifest['world_size']} ranks and is read by {group.size}: "
                "random numbers go on differently (dropout with strategy.dropout=torch)."
            )
        return Loaded(checkpoint)
    name = f"rank-{group.rank}.pt"
    _verify(path, manifest, name)
    mine = _read(path / name)
    if restore_rng:
        set_rng_state(mine["rng"])
    return Loaded(checkpoint, mine["shard"])


def load_other(
    path: Path, module: Module, read_table: Callable[[Path, str, TableSpec], SavedRows] | None, numbering: Any
) -> tuple[dict[str, Any], dict[str, SavedRows]]:
    """Read the parameters of a checkpoint of another strategy, which may keep the rows of tables elsewhere.

    Args:
        path: the checkpoint's folder.
        module: the model.
        read_table: finds the rows of a table that the writer kept elsewhere.
        numbering: see :func:`load`.

    Returns:
        Lightning's part, with the module's own (perhaps empty) weights of tables, and the rows of each table by name.

    Raises:
        CheckpointError: it is damaged, or of another model.
    """
    manifest = read_manifest(path)
    check_model(path, module)
    if numbering is not None:
        _check_numbering(path, manifest.get("numbering"), numbering)
    for name in manifest["files"]:
        _verify(path, manifest, name)
    checkpoint = _read(path / TRAINER, mapped=True)
    state, rows = checkpoint["state_dict"], {}
    for name, layer in tables(module):
        weight = state[f"{name}.weight"]
        saved = SavedRows(weight.size(0), partial(_pieces, weight))
        if not saved.count and layer.table.rows and read_table is not None:
            saved = read_table(path, name, layer.table)
        if saved.count != layer.table.rows:
            raise CheckpointError(
                f"ckpt_path={path}: its table {name} has {saved.count} rows, and the data {layer.table.rows}.",
                hint="choose the data settings that the checkpoint was trained with.",
            )
        rows[name], state[f"{name}.weight"] = saved, layer.weight.detach()
    return checkpoint, rows


def writer_of_tables(path: Path, module: Module, strategy: str, elsewhere: bool) -> str | None:
    """The other strategy that wrote a checkpoint, if one of the two keeps rows of the model's tables elsewhere.

    Args:
        path: the checkpoint's folder.
        module: the model.
        strategy: that reads it.
        elsewhere: whether that one keeps rows elsewhere.
    """
    manifest = read_manifest(path)
    writer, shapes = manifest.get("strategy"), manifest["model"]["tensors"]
    saved = [shapes.get(f"{name}.weight") for name, layer in tables(module) if layer.table.rows]
    if writer in (None, strategy) or not saved:
        return None
    there = any(shape is not None and shape[0] == 0 for shape in saved)
    return str(writer) if elsewhere or there else None


def refuse_training(path: Path, writer: str, strategy: str) -> CheckpointError:
    """The error for training that would continue with another strategy."""
    return CheckpointError(
        f"ckpt_path={path} was written by strategy={writer}; strategy={strategy} reads its parameters to test, predict "
        "and export, and cannot continue the training: the optimizer's state of tables is kept in another form.",
        hint=f"set strategy={writer} to continue.",
    )


def numbering_of(module: Module, store: Store) -> dict[str, Any] | None:
    """What says which node, relation or feature each learned row of a module belongs to; None: it has no such rows.

    Returns:
        By kind of names, their number and a checksum of them in their order, from the store's manifest; and the fact
        ``numbering`` of the store: the parameters of a generator, the first feature id, the order of columns. Nodes
        without names, in data that says nothing more, are numbered by the ids of the data themselves.
    """
    kinds: set[str] = set()
    layers = [layer for _, layer in tables(module)]
    for layer in layers:
        if layer.table.ids == "orig_id":
            kinds |= {layer.table.name, feature_kind(layer.table.name), "relation"}
    if any(isinstance(each, ReturnsNodeIds) and each.returns_node_ids for each in module.modules()):
        kinds |= {*store.node_types, "relation"}
    if not layers and not kinds:
        return None
    manifest = store.manifest
    names: dict[str, Any] = {}
    for kind in sorted(kinds & set(manifest.names)):
        sums = "".join(f"{manifest.checksums[names_file(kind, name)]:08x}" for name in ("bytes", "offsets"))
        names[f"names of {kind}"] = f"{manifest.names[kind]} (checksum {sums})"
    return {"names": names, "data": store.facts.get("numbering")}


def find(path: Path) -> Path:
    """The checkpoint at ``path``; its predecessor if a run was killed between the two renames of a replacement.

    Raises:
        CheckpointError: there is none; names those in the same folder.
    """
    old = path.with_name(path.name + ".old")
    if not path.exists() and old.exists():
        return old
    if not path.exists():
        found = sorted(p.name for p in path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
        raise CheckpointError(
            f"ckpt_path={path} was set; there is no such checkpoint"
            + (f"; the folder holds {', '.join(found)}." if found else "."),
            hint="give the path of a checkpoint, or ckpt_path=last or best.",
        )
    if path.exists() and not path.is_dir() and not _is_saved(path):
        raise CheckpointError(
            f"ckpt_path={path} was set, which is neither a checkpoint folder nor a file of torch.save.",
            hint="give the path of a checkpoint, such as <run>/checkpoints/last.ckpt, or ckpt_path=last or best.",
        )
    inside = sorted((path / "checkpoints").glob("*.ckpt"))
    if inside and not (path / MANIFEST).exists():
        raise CheckpointError(
            f"ckpt_path={path} was set, which is the folder of a run.",
            hint=f"set ckpt_path={' or '.join(map(str, inside))}.",
        )
    return path


def _is_saved(path: Path) -> bool:
    """Whether a file begins as torch.save's do: a ZIP archive, or (before torch 1.6) a pickle."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(1) == b"\x80" or zipfile.is_zipfile(file)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint directory.

    Raises:
        CheckpointError: it is absent or of a format that this version does not read.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        version = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no complete checkpoint: {MANIFEST} is missing or damaged ({error}).",
            hint="use another checkpoint of the run; this one was not finished.",
        ) from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {version}; gtrain {__version__} reads format {FORMAT}.",
            hint=f"use the version of gtrain that wrote it: {manifest.get('gtrain', 'an earlier one')}.",
        )
    checksum = manifest.pop("checksum", None)
    if checksum != _checksum(manifest) and (checksum is not None or set(manifest) - _UNSIGNED):
        raise CheckpointError(
            f"{path / MANIFEST} is damaged: its checksum is not that of its contents.", hint="use another checkpoint."
        )
    return manifest


def check_complete(folder: Path) -> None:
    """Check that a checkpoint has all of its files, in their sizes, without reading them.

    Raises:
        CheckpointError: one is missing or of another size.
    """
    for name, entry in read_manifest(folder)["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{folder} is not a complete checkpoint: {name} is missing or has another size.",
                hint="use another checkpoint.",
            )


def check_model(folder: Path, module: Module) -> None:
    """Check that a checkpoint is of a model, whose tables may have no rows yet, by the names and widths of tensors.

    Raises:
        CheckpointError: it is of another model.
    """
    wanted = {name for name, _ in tables(module)}
    saved, here = read_manifest(folder)["model"]["tensors"], _shapes(module.state_dict())
    for name in here:
        if name.removesuffix(".weight") in wanted and len(saved.get(name, ())) == 2:
            here[name] = [saved[name][0], here[name][1]]
    _check_shapes(folder, saved, here, module)


def verify_files(folder: Path) -> None:
    """Check the files that a strategy wrote itself, which :func:`load` does not read.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    manifest = read_manifest(folder)
    for name in manifest["files"]:
        if name != TRAINER and not name.startswith("rank-"):
            _verify(folder, manifest, name)


def remove(path: Path) -> None:
    """Delete a checkpoint, directory or file, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- random numbers


def rng_state() -> dict[str, Any]:
    """State of torch's, numpy's and Python's generators as tensors, numbers and strings."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    version, words, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(words), gauss_next],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what :func:`rng_state` took."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))


# ---------------------------------------------------------------------------------------------------- inside


def _plain(value: Any, where: str) -> Any:
    """A copy made of tensors, numbers, strings and containers alone: what ``weights_only=True`` reads back."""
    if isinstance(value, Mapping):
        keep = {
            k: v for k, v in value.items() if not where.endswith("hyper_parameters") or _is_plain(v, f"{where}.{k}")
        }
        return {k: _plain(v, f"{where}.{k}") for k, v in keep.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which could only be read back by unpickling it.",
        hint="keep tensors, numbers, strings, lists and dictionaries in the state of modules and callbacks.",
    )


def _is_plain(value: Any, where: str) -> bool:
    """Whether a hyper-parameter can be kept; one that cannot is left out, with a warning."""
    try:
        _plain(value, where)
    except CheckpointError as error:
        rank_zero_warn(f"left out of the checkpoint: {error.message}")
        return False
    return True


@contextlib.contextmanager
def _writing(file: Path, checkpoint: Path) -> Iterator[None]:
    """Name the file, and the disk being full, where a part of a checkpoint cannot be written; its rest is removed.

    torch's writer says that a position in the file was not expected; why, a write of our own finds out.
    """
    try:
        with naming(file):
            yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else _write_error(file)
        newest = find_newest(checkpoint.parent)
        kept = f" {newest} is complete: resume with ckpt_path={newest}." if newest is not None else ""
        advice = f"free space on that disk, or write to another (hydra.run.dir).{kept}"
        if cause is None or (full := disk_full(cause, advice)) is None:
            raise
        shutil.rmtree(file.parent if file.suffix != ".part" else file, ignore_errors=True)
        raise full from error


def _write_error(file: Path) -> OSError | None:
    """What the system answers to a write beside a file; None where it is possible."""
    try:
        with naming(file), tempfile.TemporaryFile(dir=file.parent) as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        error.filename = str(file)
        return error
    return None


def find_newest(folder: Path) -> Path | None:
    """The complete checkpoint of a run's folder of checkpoints that was written last; None where there is none."""
    complete = [path for path in folder.glob("*.ckpt*") if path.suffix != ".part" and (path / MANIFEST).is_file()]
    return max(complete, key=lambda path: (path / MANIFEST).stat().st_mtime, default=None)


def _write_manifest(
    folder: Path,
    world_size: int,
    checkpoint: Mapping[str, Any],
    module: Module,
    numbering: Mapping[str, Any] | None,
    strategy: str | None,
) -> None:
    files = {
        p.name: {"bytes": p.stat().st_size, "crc32": _crc32(p)} for p in sorted(folder.iterdir()) if p.name != MANIFEST
    }
    manifest = {
        "format": FORMAT,
        "gtrain": __version__,
        "strategy": strategy,
        "world_size": world_size,
        "epoch": checkpoint.get("epoch"),
        "global_step": checkpoint.get("global_step"),
        "model": {"class": _model_name(module), "tensors": _shapes(checkpoint["state_dict"])},
        "numbering": numbering,
        "files": files,
    }
    with open(folder / MANIFEST, "w") as handle:
        json.dump({**manifest, "checksum": _checksum(manifest)}, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())


def _checksum(manifest: Mapping[str, Any]) -> int:
    """CRC-32 of the entries, in an order and form of their own: that of the file's text may differ."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


_UNSIGNED = {"format", "strategy", "world_size", "epoch", "global_step", "model", "numbering", "files"}
"""Entries of a manifest without a checksum, as earlier versions wrote it: another one is a damaged ``checksum``."""


def _swap(temporary: Path, path: Path) -> None:
    """Put the new checkpoint in its place. :func:`find` covers a kill between the renames."""
    old = path.with_name(path.name + ".old")
    if path.exists():
        remove(old)
        os.rename(path, old)
    os.rename(temporary, path)
    remove(old)


def _pieces(weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for begin in range(0, len(weight), BLOCK_ROWS):
        end = min(begin + BLOCK_ROWS, len(weight))
        yield torch.arange(begin, end), weight[begin:end]


def _read(path: Path, mapped: bool = False) -> dict[str, Any]:
    """Read a file of plain tensors, or leave these in the file, where nothing is to overwrite it."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        if (found := foreign_content(path, error)) is not None:
            raise CheckpointError(
                f"{path} holds {found}: tensors, numbers, texts and plain containers are read, and other objects "
                "are never unpickled, since that would run their code.",
                hint="save it again with plain values, such as torch.save({'state_dict': model.state_dict()}, file).",
            ) from error
        raise CheckpointError(
            f"{path} cannot be read: it is damaged, or not a checkpoint.", hint="use another checkpoint."
        ) from error
    return content


def _verify(folder: Path, manifest: dict[str, Any], name: str) -> None:
    entry = manifest["files"].get(name)
    path = folder / name
    if entry is None or not path.is_file():
        raise CheckpointError(f"{folder} is no complete checkpoint: {name} is missing.", hint="use another checkpoint.")
    if path.stat().st_size != entry["bytes"] or _crc32(path) != entry["crc32"]:
        raise CheckpointError(f"{path} is damaged: its checksum is not the manifest's.", hint="use another checkpoint.")


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as handle:
        while chunk := handle.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value


def _shapes(state_dict: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in state_dict.items() if isinstance(value, torch.Tensor)}


def _model_name(module: Module) -> str:
    return type(network_of(module) or module).__name__


def _check_parameters(path: Path, saved: Mapping[str, list[int]], module: Module) -> None:
    _check_shapes(path, saved, _shapes(module.state_dict()), module)


def _check_shapes(path: Path, saved: Mapping[str, list[int]], wanted: Mapping[str, list[int]], module: Module) -> None:
    differences = [
        f"{name}: {_shape(saved, name)} there, {_shape(wanted, name)} here"
        for name in [*wanted, *(n for n in saved if n not in wanted)]
        if saved.get(name) != wanted.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"ckpt_path={path} holds another model than {_model_name(module)}: {_first_few(differences)}.",
            hint="choose the model and data settings that the checkpoint was trained with.",
        )


def _first_few(differences: list[str]) -> str:
    more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
    return "; ".join(differences[:3]) + more


def _check_numbering(path: Path, saved: Mapping[str, Any] | None, numbering: Mapping[str, Any]) -> None:
    """Refuse learned rows that belong to other nodes, relations or features than those of the data."""
    if saved is None:
        rank_zero_warn(
            f"{path} was written by an earlier version of gtrain and does not say which nodes its learned rows belong "
            "to; they are taken for those of the data."
        )
        return
    there, here = dict(saved["names"]), dict(numbering["names"])
    if saved["data"] and numbering["data"]:  # a store of an earlier version says nothing
        there, here = {**there, **saved["data"]}, {**here, **json.loads(json.dumps(numbering["data"]))}
    differences = [
        f"{name} {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
        for name in [*here, *(name for name in there if name not in here)]
        if there.get(name) != here.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"ckpt_path={path} was trained on other data: {_first_few(differences)}. Its learned rows would "
            "be taken for other nodes or features.",
            hint="choose the data settings that the checkpoint was trained with, or train on this data.",
        )


def _shape(shapes: Mapping[str, list[int]], name: str) -> str:
    return str(shapes[name]) if name in shapes else "absent"
