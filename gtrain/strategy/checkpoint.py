"""Sharded checkpoints: a folder that all ranks write together.

::

    last.ckpt/
        manifest.json   format, release, world size, model, numbering of its rows, checksums; written last
        trainer.pt      Lightning's checkpoint: weights, optimizers, schedulers, loops, callbacks
        rank-<r>.pt     that rank's random number generators and shard state
        ...             files of the strategy, for state that is larger than memory

All files load with ``weights_only=True``: no object is ever unpickled. A checkpoint is written under a temporary name
and renamed, so that a killed run leaves the previous one intact. A checkpoint whose path is an address of fsspec, such
as ``s3://bucket/prefix/last.ckpt``, is written as :mod:`gtrain.strategy.remote_checkpoint` describes; a folder in the
run's folder then points to it. To a checkpoint in another local folder, a symbolic link there points. docs/formats.md
specifies the format.
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
from functools import cached_property, partial
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
from gtrain.graph.store.files import file_crc, names_file
from gtrain.nn import TableSpec, tables
from gtrain.nn.changed_rows import compact, has_compact, num_rows, pieces, restored
from gtrain.object_store import POINTER, followed, is_address
from gtrain.protocols import ReturnsNodeIds, network_of
from gtrain.strategy.folder_sharing import FolderSharing
from gtrain.strategy.group import Group
from gtrain.strategy.remote_checkpoint import RemoteCheckpoint
from gtrain.strategy.tensor_files import keep

FORMAT = 2
"""Of checkpoints with tables of which only changed rows are stored; others have format 1."""
MANIFEST = "manifest.json"
TRAINER = "trainer.pt"
_PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.Size)


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint.

    Attributes:
        checkpoint: Lightning's checkpoint, ``trainer.pt``.
        shard: the state that only this rank holds; empty if another number of ranks wrote the checkpoint.
    """

    checkpoint: dict[str, Any]
    shard: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedRows:
    """The rows of a table in a checkpoint, which may be larger than memory.

    Attributes:
        count: number of rows, n.
        pieces: yields all rows once, in pieces: ids int64 ``[m]`` and rows ``[m, d]``. A piece is read-only, and valid
            until the next one is yielded.
    """

    count: int
    pieces: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def located(path: Path | str) -> Path | str:
    """Return where a checkpoint is: a local path, or an address, also of one that a folder of a run points to."""
    return str(path) if is_address(path) else followed(Path(path))


def save(
    group: Group,
    path: Path | str,
    checkpoint: dict[str, Any],
    shard: dict[str, Any],
    module: Module,
    write_files: Callable[[Path], None] = lambda folder: None,
    numbering: Mapping[str, Any] | None = None,
    strategy: str | None = None,
    sharing: FolderSharing | None = None,
    run_folder: Path | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint. All ranks call this together, with the same path.

    Args:
        group: the ranks.
        path: folder of the checkpoint, or its address.
        checkpoint: Lightning's checkpoint; rank 0 writes it.
        shard: the state that only this rank holds.
        module: the model.
        write_files: writes further files of the strategy into a folder.
        numbering: of the data, see :func:`numbering_of`.
        strategy: name of the strategy that writes the checkpoint.
        sharing: collects the files of machines that do not see rank 0's folder; None: all see it.
        run_folder: folder of the run; that of rank 0 points to a checkpoint at an address or in another folder.
        training: what the checkpoint records of its data, see :func:`~gtrain.data.module.training_of`.

    Raises:
        CheckpointError: the state contains an object that only unpickling could restore, or the address cannot be
            written to.
        DiskFullError: a file did not fit; the message names it.
    """
    contents = _Contents(group, checkpoint, shard, module, write_files, numbering, strategy, training)
    if is_address(path):
        _save_remote(contents, RemoteCheckpoint(str(path), str(run_folder or "")), run_folder)
    else:
        _save_local(contents, Path(path), sharing or FolderSharing(), run_folder)


@dataclass(frozen=True)
class _Contents:
    """What a checkpoint contains; the fields are arguments of :func:`save`."""

    group: Group
    checkpoint: dict[str, Any]
    shard: dict[str, Any]
    module: Module
    write_files: Callable[[Path], None]
    numbering: Mapping[str, Any] | None
    strategy: str | None
    training: Mapping[str, Any] | None

    @property
    def within_epoch(self) -> bool:
        """Whether an epoch had started and not ended."""
        loops = self.checkpoint.get("loops")
        epochs = loops["fit_loop"]["epoch_progress"]["current"] if loops else {"started": 0, "processed": 0}
        return bool(epochs["processed"] < epochs["started"])

    @cached_property
    def stored(self) -> dict[str, Any]:
        """Lightning's checkpoint as it is written: tables have only the rows that training has changed."""
        return compact(self.checkpoint, self.module)

    def write_trainer(self, folder: Path, near: Path) -> None:
        """Write rank 0's file; ``near`` is a checkpoint beside which earlier ones may be, for messages."""
        with _writing(folder / TRAINER, folder, near):
            torch.save(_plain(self.stored, "checkpoint"), folder / TRAINER)

    def write_rank(self, folder: Path, near: Path) -> None:
        """Write this rank's files."""
        name = f"rank-{self.group.rank}.pt"
        with _writing(folder / name, folder, near):
            torch.save({"rng": rng_state(), "shard": _plain(self.shard, "shard")}, folder / name)
        with _writing(folder, folder, near):
            self.write_files(folder)

    def manifest(self, **entries: Any) -> str:
        """Return the text of the manifest; ``entries`` has ``files``, and further fields."""
        manifest = {
            "format": FORMAT if has_compact(self.stored) else 1,
            "gtrain": __version__,
            "strategy": self.strategy,
            "world_size": self.group.size,
            "epoch": self.checkpoint.get("epoch"),
            "global_step": self.checkpoint.get("global_step"),
            "within_epoch": self.within_epoch,
            "model": {"class": _model_name(self.module), "tensors": _shapes(self.checkpoint["state_dict"])},
            "numbering": self.numbering,
            "training": self.training,
            **entries,
        }
        return json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1)


def _save_local(contents: _Contents, path: Path, sharing: FolderSharing, run_folder: Path | None) -> None:
    # Three phases with barriers: rank 0 creates the folder, all ranks write into it, rank 0 writes the manifest and
    # renames. `group.passed()` is true in a restarted rank that catches up with a phase which the group has finished.
    group, temporary = contents.group, path.with_name(path.name + ".part")
    if group.rank == 0 and not group.passed():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        contents.write_trainer(temporary, path)
        sharing.announce(temporary)
    group.barrier()
    if not group.passed():
        contents.write_rank(sharing.target(temporary, TRAINER), path)
        sharing.offer(temporary)
    group.barrier()
    # a folder that is missing was renamed before this rank was restarted
    if group.rank == 0 and not group.passed() and temporary.exists():
        with _writing(temporary, temporary, path):
            sharing.collect(temporary)
        with _writing(temporary / MANIFEST, temporary, path):
            files = {
                p.name: {"bytes": p.stat().st_size, "crc32": file_crc(p)}
                for p in sorted(temporary.iterdir())
                if p.name != MANIFEST
            }
            _write_synced(temporary / MANIFEST, contents.manifest(files=files))
        _swap(temporary, path)
        if run_folder is not None:
            lead_to(run_folder / "checkpoints" / path.name, path.absolute())
    group.barrier()
    sharing.withdraw(temporary)


def _save_remote(contents: _Contents, remote: RemoteCheckpoint, run_folder: Path | None) -> None:
    # The phases of _save_local. Ranks learn where to write from the object store, not from each other.
    group = contents.group
    pointer = (run_folder or Path()) / "checkpoints" / remote.address.rpartition("/")[2]
    if group.rank == 0 and not group.passed():
        remote.begin()
    group.barrier()
    if not group.passed():
        with _scratch(run_folder, group.rank) as folder:
            if group.rank == 0:
                contents.write_trainer(folder, pointer)
            contents.write_rank(folder, pointer)
            remote.add(folder, group.rank)
    group.barrier()
    # a checkpoint that is not being written was finished before this rank was restarted
    if group.rank == 0 and not group.passed() and remote.is_written:
        remote.finish(contents.manifest(**remote.added()))
        if run_folder is not None:
            reached = {name: contents.checkpoint.get(name) for name in ("epoch", "global_step")}
            _point(pointer, {"address": remote.address, **reached, "within_epoch": contents.within_epoch})
    group.barrier()


@contextlib.contextmanager
def _scratch(run_folder: Path | None, rank: int) -> Iterator[Path]:
    """Make a temporary folder for the files of a rank: in the run's folder if this machine has it."""
    if run_folder is None or not run_folder.is_dir():
        with tempfile.TemporaryDirectory(prefix="gtrain-") as folder:
            yield Path(folder)
        return
    path = run_folder / f"checkpoint-rank-{rank}.part"
    shutil.rmtree(path, ignore_errors=True)  # a killed run left it
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _point(pointer: Path, content: Mapping[str, Any]) -> None:
    """Replace a checkpoint in the run's folder by a pointer to one that is elsewhere."""
    temporary = pointer.with_name(pointer.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _write_synced(temporary / POINTER, json.dumps(content, indent=1))
    _swap(temporary, pointer)


def lead_to(pointer: Path, path: Path) -> None:
    """Make a checkpoint outside of the run's folder known there. Its readers follow the link and copy nothing.

    Args:
        pointer: the link, in the run's folder.
        path: of the checkpoint, absolute.
    """
    if pointer.parent.resolve() == path.parent.resolve() or (pointer.is_symlink() and pointer.readlink() == path):
        return
    if pointer.is_symlink() or followed(pointer) != pointer:
        remove(pointer)
    if pointer.exists():  # a checkpoint that another callback wrote there
        return
    with contextlib.suppress(OSError):  # a file system without links
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.symlink_to(path)


def load(
    group: Group, path: Path, module: Module, *, restore_rng: bool, numbering: Mapping[str, Any] | None = None
) -> Loaded:
    """Load a checkpoint after checking that its parameters match ``module`` and its learned rows match the data.

    Args:
        group: the ranks; each reads its shard.
        path: folder of a checkpoint, or a single file that Lightning wrote.
        module: the model. The names and shapes of its parameters must be those of the checkpoint.
        restore_rng: also restore the state of this rank's random number generators, to continue a training run.
        numbering: of the data, see :func:`numbering_of`; None skips the comparison.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, damaged, of another model, or has rows of other nodes
            or features.
    """
    path = find(path)
    if path.is_file():
        checkpoint = restored(_read(path))
        _check_shapes(path, _shapes(checkpoint.get("state_dict", {})), _shapes(module.state_dict()), module)
        return Loaded(checkpoint)
    manifest = read_manifest(path)
    _check_shapes(path, manifest["model"]["tensors"], _shapes(module.state_dict()), module)
    _check_numbering(path, manifest.get("numbering"), numbering)
    _check_file(path, manifest, TRAINER)
    # A test copies the parameters, and reads no optimizer state; a run that continues trains these tensors.
    checkpoint = restored(_read(path / TRAINER, mmap=not restore_rng))
    if manifest["world_size"] != group.size:
        if restore_rng:
            rank_zero_warn(
                f"{path} was written by {manifest['world_size']} ranks and is loaded by {group.size}: random number "
                "generators are not restored, which changes the masks of strategy.dropout=torch."
            )
        return Loaded(checkpoint)
    name = f"rank-{group.rank}.pt"
    _check_file(path, manifest, name)
    rank_state = _read(path / name)
    if restore_rng:
        set_rng_state(rank_state["rng"])
    return Loaded(checkpoint, rank_state["shard"])


def load_other(
    path: Path, module: Module, read_table: Callable[[Path, str, TableSpec], SavedRows] | None, numbering: Any
) -> tuple[dict[str, Any], dict[str, SavedRows]]:
    """Load the parameters of a checkpoint of another strategy, which may store the rows of tables in other files.

    Args:
        path: folder of the checkpoint.
        module: the model.
        read_table: returns the rows of a table that the writer stored outside of ``trainer.pt``.
        numbering: see :func:`load`.

    Returns:
        Lightning's checkpoint, with ``module``'s present (possibly empty) weights of tables, and each table's rows by
        the layer's name.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    manifest = read_manifest(path)
    check_model(path, module)
    _check_numbering(path, manifest.get("numbering"), numbering)
    for name in manifest["files"]:
        _check_file(path, manifest, name)
    # Mapped: tables and their optimizer state may exceed memory.
    checkpoint = _read(path / TRAINER, mmap=True)
    state, rows = checkpoint["state_dict"], {}
    for name, layer in tables(module):
        weight = state[f"{name}.weight"]
        saved = SavedRows(num_rows(weight), partial(pieces, weight))
        if not saved.count and layer.table.rows and read_table is not None:
            saved = read_table(path, name, layer.table)
        if saved.count != layer.table.rows:
            raise CheckpointError(
                f"ckpt_path={path} was set; its table {name} has {saved.count} rows, but the data needs "
                f"{layer.table.rows}.",
                hint="choose the data settings that the checkpoint was trained with.",
            )
        rows[name], state[f"{name}.weight"] = saved, layer.weight.detach()
    return checkpoint, rows


def writer_of_tables(path: Path | str, module: Module, strategy: str, elsewhere: bool) -> str | None:
    """Return the strategy that wrote a checkpoint if its table rows must be converted for the strategy that loads it.

    Args:
        path: folder of the checkpoint, or its address.
        module: the model.
        strategy: name of the strategy that loads the checkpoint.
        elsewhere: whether that strategy stores table rows outside of the module.

    Returns:
        The writer's name if it is another strategy and either of the two stores table rows outside of the module;
        otherwise None.
    """
    manifest = read_manifest(path)
    writer, shapes = manifest.get("strategy"), manifest["model"]["tensors"]
    saved = [shapes.get(f"{name}.weight", [1]) for name, layer in tables(module) if layer.table.rows]
    if writer in (None, strategy) or not saved:
        return None
    return str(writer) if elsewhere or any(shape[0] == 0 for shape in saved) else None


def refuse_training(path: Path | str, writer: str, strategy: str) -> CheckpointError:
    """Return the error for continuing a training run with another strategy."""
    return CheckpointError(
        f"ckpt_path={path} was written by strategy={writer}; strategy={strategy} reads its parameters to test, predict "
        "and export, and cannot continue the training: the optimizer state of tables has another layout.",
        hint=f"set strategy={writer} to continue.",
    )


def numbering_of(module: Module, store: Store) -> dict[str, Any] | None:
    """Return the identity of the node, relation or feature that each learned row of a module belongs to.

    Returns:
        ``names``: the number and checksum of the names in each of the store's string dictionaries that the module's
        rows are numbered by. ``data``: the fact ``numbering`` of the store, such as the parameters of a generator, the
        first feature id or the order of columns. Nodes without names are numbered by the ids of the data. None if the
        module has no such rows.
    """
    layers = [layer for _, layer in tables(module)]
    keys: set[str] = set()
    for layer in layers:
        if layer.table.ids == "orig_id":
            keys |= {layer.table.name, feature_kind(layer.table.name), "relation"}
    if any(isinstance(layer, ReturnsNodeIds) and layer.returns_node_ids for layer in module.modules()):
        keys |= {*store.node_types, "relation"}
    if not layers and not keys:
        return None
    manifest, names = store.manifest, {}
    for key in sorted(keys & set(manifest.names)):
        sums = "".join(f"{manifest.checksums[names_file(key, name)]:08x}" for name in ("bytes", "offsets"))
        names[f"names of {key}"] = f"{manifest.names[key]} (checksum {sums})"
    return {"names": names, "data": store.facts.get("numbering")}


def training_data(checkpoint: Path | str) -> dict[str, Any] | None:
    """Return what a checkpoint records of the data of its training.

    Args:
        checkpoint: its path or address.

    Returns:
        See :func:`~gtrain.data.module.training_of`; None if an earlier release, or Lightning, wrote the checkpoint, or
        if this machine does not have it.
    """
    if isinstance(checkpoint, Path):
        try:
            checkpoint = find(checkpoint)
        except CheckpointError:
            return None
        if not checkpoint.is_dir():
            return None
    elif RemoteCheckpoint(checkpoint).is_file:
        return None
    training: dict[str, Any] | None = read_manifest(checkpoint).get("training")
    return training


def find(path: Path) -> Path:
    """Return the checkpoint at ``path``, or its predecessor if the run was killed between the two renames of a
    replacement.

    Raises:
        CheckpointError: ``path`` is not a checkpoint; the message lists those in the same folder.
    """
    if not path.exists():
        target = path.readlink() if path.is_symlink() else path
        old = target.with_name(target.name + ".old")
        if old.exists():
            return old
        names = sorted(p.name for p in path.parent.glob("*.ckpt"))
        raise CheckpointError(
            f"ckpt_path={path} was set; no such checkpoint exists"
            + (f"; the folder contains {', '.join(names)}." if names else "."),
            hint="give the path of a checkpoint, or ckpt_path=last or best.",
        )
    if not path.is_dir() and not _is_saved(path):
        raise CheckpointError(
            f"ckpt_path={path} was set, which is neither a checkpoint folder nor a file of torch.save.",
            hint="give the path of a checkpoint, such as <run>/checkpoints/last.ckpt, or ckpt_path=last or best.",
        )
    checkpoints = sorted((path / "checkpoints").glob("*.ckpt"))
    if checkpoints and not (path / MANIFEST).exists():
        raise CheckpointError(
            f"ckpt_path={path} was set, which is the folder of a run.",
            hint=f"set ckpt_path={' or '.join(map(str, checkpoints))}.",
        )
    return path


def _is_saved(path: Path) -> bool:
    """Return whether torch.save may have written a file: a ZIP archive, or (before torch 1.6) a pickle."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(1) == b"\x80" or zipfile.is_zipfile(file)


def read_manifest(path: Path | str) -> dict[str, Any]:
    """Return the manifest of a checkpoint's folder, or of the checkpoint at an address.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of a format that this version does not read.
    """
    try:
        text = RemoteCheckpoint(path).manifest_text() if isinstance(path, str) else (path / MANIFEST).read_text()
        manifest: dict[str, Any] = json.loads(text)
        version = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {MANIFEST} is missing or damaged ({error}).",
            hint="use another checkpoint of the run; this one was not finished.",
        ) from error
    if version not in (1, FORMAT):
        raise CheckpointError(
            f"{path} has checkpoint format {version}; gtrain {__version__} reads formats 1 and {FORMAT}.",
            hint=f"use the version of gtrain that wrote it: {manifest.get('gtrain', 'an earlier one')}.",
        )
    checksum = manifest.pop("checksum", None)
    if checksum != _checksum(manifest) and (checksum is not None or set(manifest) - _UNSIGNED):
        raise CheckpointError(
            f"{path}/{MANIFEST} is damaged: its checksum differs from that of its contents.",
            hint="use another checkpoint.",
        )
    if isinstance(path, Path) and not (path / TRAINER).exists() and (path / str(manifest.get("objects"))).is_dir():
        raise CheckpointError(
            f"ckpt_path={path} was set, which is a checkpoint in the layout of object stores.",
            hint=f"set ckpt_path=file://{path.absolute()}.",
        )
    return manifest


def check_complete(folder: Path | str) -> None:
    """Check that all files of a checkpoint exist and have the manifest's sizes, without reading them.

    Raises:
        CheckpointError: a file is missing or has another size.
    """
    manifest = read_manifest(folder)
    if isinstance(folder, str):
        RemoteCheckpoint(folder).check_complete(manifest)
        return
    for name in manifest["files"]:
        _check_file(folder, manifest, name, contents=False)


def check_model(folder: Path | str, module: Module) -> None:
    """Check that a checkpoint belongs to a model, by names and shapes of tensors; numbers of table rows are ignored.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    saved, present = read_manifest(folder)["model"]["tensors"], _shapes(module.state_dict())
    for name in (f"{layer}.weight" for layer, _ in tables(module)):
        if name in present and len(saved.get(name, ())) == 2:
            present[name] = [saved[name][0], present[name][1]]
    _check_shapes(folder, saved, present, module)


def verify_files(folder: Path) -> None:
    """Check the files of the strategy, which :func:`load` does not read.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    manifest = read_manifest(folder)
    for name in manifest["files"]:
        if name != TRAINER and not name.startswith("rank-"):
            _check_file(folder, manifest, name)


def exists(path: Path | str) -> bool:
    """Return whether there is a checkpoint at a local path, or at an address."""
    return RemoteCheckpoint(str(path)).exists() if is_address(path) else Path(path).exists()


def remove(path: Path | str) -> None:
    """Delete a checkpoint, folder or file, if it exists."""
    if isinstance(path, str):
        RemoteCheckpoint(path).remove()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def link(path: Path, target: Path) -> None:
    """Make ``target`` the checkpoint at ``path``: hard links to its files, or copies of them on another disk.

    Raises:
        CheckpointError: ``path`` is not a checkpoint.
        DataError: the files cannot be created.
    """
    path, temporary = find(path), target.with_name(target.name + ".part")
    remove(temporary)
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, temporary, copy_function=lambda source, copy: keep(Path(source), Path(copy)))
    else:
        keep(path, temporary)
    # The rename makes the copy visible at once and complete.
    _swap(temporary, target)


# ---------------------------------------------------------------------------------------------------- random numbers


def rng_state() -> dict[str, Any]:
    """Return the state of torch's, numpy's and Python's generators as tensors, numbers and strings."""
    algorithm, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    version, words, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        # A process that computes on the CPU must not initialise CUDA for it.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [str(algorithm), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(words), gauss_next],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state that :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_initialized() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    algorithm, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))


# ---------------------------------------------------------------------------------------------------- inside


def _plain(value: Any, where: str) -> Any:
    """Return a copy that consists of the types that ``torch.load(..., weights_only=True)`` reads.

    Args:
        value: the state.
        where: path of ``value`` in the checkpoint, for messages.
    """
    match value:
        case Mapping():
            # Hyper-parameters may be arbitrary objects that no one reads back; they are left out with a warning.
            every = not where.endswith("hyper_parameters")
            return {k: _plain(v, f"{where}.{k}") for k, v in value.items() if every or _is_plain(v, f"{where}.{k}")}
        case list() | tuple():
            items = [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        case os.PathLike():
            return os.fspath(value)
        case np.generic():
            return value.item()
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which only unpickling could restore.",
        hint="use tensors, numbers, strings, lists and dictionaries in the state of modules and callbacks.",
    )


def _is_plain(value: Any, where: str) -> bool:
    """Return whether a hyper-parameter can be stored; warn if it cannot."""
    try:
        _plain(value, where)
    except CheckpointError as error:
        rank_zero_warn(f"left out of the checkpoint: {error.message}")
        return False
    return True


@contextlib.contextmanager
def _writing(file: Path, folder: Path, checkpoint: Path) -> Iterator[None]:
    """Convert errors of a full disk to ``DiskFullError``, which names ``file``, and remove the unfinished ``folder``.

    On a full disk torch's writer raises a RuntimeError without the cause ("unexpected pos"): :func:`_write_error`
    determines it.
    """
    try:
        with naming(file):
            yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else _write_error(file)
        newest = find_newest(checkpoint.parent)
        resume = f" {newest} is complete: resume with ckpt_path={newest}." if newest is not None else ""
        advice = f"free space on that disk, or write to another (hydra.run.dir).{resume}"
        if cause is None or (full := disk_full(cause, advice)) is None:
            raise
        shutil.rmtree(folder, ignore_errors=True)
        raise full from error


def _write_error(file: Path) -> OSError | None:
    """Return the error of a trial write next to a file; None if it succeeds."""
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
    """Return the most recent complete checkpoint in a run's folder ``checkpoints``; None if it has none."""
    complete = [path for path in folder.glob("*.ckpt*") if path.suffix != ".part" and (path / MANIFEST).is_file()]
    return max(complete, key=lambda path: (path / MANIFEST).stat().st_mtime, default=None)


def _write_synced(file: Path, text: str) -> None:
    """Write a text and flush it to the disk."""
    with open(file, "w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def _checksum(manifest: Mapping[str, Any]) -> int:
    """Return the crc32 of the entries in a canonical form, independent of the white space in the file."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


_UNSIGNED = {"format", "strategy", "world_size", "epoch", "global_step", "model", "numbering", "files"}
"""Entries of manifests of earlier versions, which have no checksum. Any other entry is a damaged ``checksum`` key."""


def _swap(temporary: Path, path: Path) -> None:
    """Replace the checkpoint at ``path``. :func:`find` handles a kill between the two renames."""
    old = path.with_name(path.name + ".old")
    if path.is_symlink():
        path.unlink()
    if path.exists():
        remove(old)
        os.rename(path, old)
    os.rename(temporary, path)
    remove(old)


def _read(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Load a file without unpickling objects; with ``mmap``, its tensors are mapped from the file."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        if (foreign := foreign_content(path, error)) is not None:
            raise CheckpointError(
                f"{path} holds {foreign}: tensors, numbers, strings and plain containers are read, and other objects "
                "are never unpickled, since that would run their code.",
                hint="save it again with plain values, such as torch.save({'state_dict': model.state_dict()}, file).",
            ) from error
        raise CheckpointError(
            f"{path} cannot be read: it is damaged, or not a checkpoint.", hint="use another checkpoint."
        ) from error
    return content


def _check_file(folder: Path, manifest: Mapping[str, Any], name: str, contents: bool = True) -> None:
    """Compare a file's size, and the checksum of its contents, with the manifest's."""
    path, entry = folder / name, manifest["files"].get(name)
    if entry is None or not path.is_file():
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: {name} is missing.", hint="use another checkpoint."
        )
    if path.stat().st_size != entry["bytes"] or (contents and file_crc(path) != entry["crc32"]):
        raise CheckpointError(
            f"{path} is damaged: its size or checksum differs from the manifest's.", hint="use another checkpoint."
        )


def _shapes(state_dict: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in state_dict.items() if isinstance(value, torch.Tensor)}


def _model_name(module: Module) -> str:
    return type(network_of(module) or module).__name__


def _check_shapes(
    path: Path | str, saved: Mapping[str, list[int]], present: Mapping[str, list[int]], module: Module
) -> None:
    if differences := _differences(saved, present):
        raise CheckpointError(
            f"ckpt_path={path} holds another model than {_model_name(module)}: {differences}.",
            hint="choose the model and data settings that the checkpoint was trained with.",
        )


def _differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Return the first three differences between entries of a checkpoint and those of the run; empty without any."""
    names = [name for name in {**present, **saved} if saved.get(name) != present.get(name)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "; ".join(f"{n}: {saved.get(n, 'absent')} there, {present.get(n, 'absent')} here" for n in names[:3]) + more


def _check_numbering(path: Path, saved: Mapping[str, Any] | None, numbering: Mapping[str, Any] | None) -> None:
    """Refuse learned rows that belong to other nodes, relations or features than those of the data."""
    if numbering is None:
        return
    if saved is None:
        rank_zero_warn(
            f"{path} was written by an earlier version of gtrain and does not state which nodes its learned rows "
            "belong to; they are assumed to be those of the data."
        )
        return
    saved_names, names = saved["names"], numbering["names"]
    if saved["data"] and numbering["data"]:
        # Stores of earlier releases lack this entry.
        saved_names, names = {**saved_names, **saved["data"]}, {**names, **json.loads(json.dumps(numbering["data"]))}
    if differences := _differences(saved_names, names):
        hint = "choose the data settings that the checkpoint was trained with, or train on this data."
        if all(_number(names.get(key)) == _number(value) for key, value in saved_names.items()):
            hint += " If these are the same names in another order, restore their order."
        raise CheckpointError(
            f"ckpt_path={path} was trained on other data: {differences}. Its learned rows would be assigned to other "
            "nodes or features.",
            hint=hint,
        )


def _number(described: Any) -> str:
    """Return the number of names, which their description begins with."""
    return str(described).partition(" ")[0]
