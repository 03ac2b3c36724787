"""Writes what a release leaves on disk, for tests that later releases still read it.

The archive has small stores, run folders with checkpoints of every strategy, and ``expected.json``: what that release
itself makes of them. Run it once for each release, with a Python that has the release installed::

    python tests/assets/releases/write.py NAME     # writes NAME.tar.xz beside this file

The runs are made in a temporary folder, whose path is taken out of the files again; the folder is then moved, and the
release tests, predicts, exports and resumes from where a later release will.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

EPOCHS, MORE = 2, 4
"""Epochs that a run was trained for, and that the resumed one is."""
_SAGE = ("model=sage", "model.hidden_channels=4", "model.dropout=0")
_NODES = ("data.num_nodes=40", "data.num_edges=160", "data.num_features=4", "data.num_classes=3")
_ROWS = ("data=planted_sparse", "data.num_rows=60", "data.num_features=12", "data.features_per_row=4", "model=sparse")
_VECTORS = ("model=kg", "model.dimension=4", "model.num_uniform_negs=0", "model.num_batch_negs=4")
_KG = ("data=kg", "data.path=kg", *_VECTORS, "data.batch_size=8")
_BUCKETS = ("strategy=pbg", "strategy.num_partitions=4", "strategy.matmul=float32", "strategy.shuffle=false")
_PBG = (*_BUCKETS, *_KG, "data.batch_size=48")  # a bucket is one batch
_PAPERS = ("data=planted_hetero", "data.num_papers=24", "data.num_authors=12", "data.num_terms=6", "data.num_writes=40")
_TYPED = (*_PAPERS, "data.num_cites=40", "data.num_mentions=40", "data.num_features=4", "data.num_author_features=3")
_EVENTS = ("data=planted_temporal", "data.num_nodes=20", "data.num_events=200", "data.num_communities=4")
_LINKS = ("model=link_sage", "model.hidden_channels=4", "model.out_channels=4")
_WEIGHTED = ("data=edges", "data.path=edges.txt", "data.features=features.txt", "data.labels=labels.txt", "model=gcn")

RUNS: dict[str, tuple[str, ...]] = {
    "single": ("strategy=single", *_SAGE, *_NODES),
    "single_types": ("strategy=single", *_TYPED, "model=hetero_sage", "model.hidden_channels=4", "model.dropout=0"),
    "single_rows": ("strategy=single", *_ROWS, "model.hidden_channels=4", "data.batch_size=12"),
    "single_names": ("strategy=single", *_KG),
    "single_events": ("strategy=single", *_EVENTS, *_LINKS),
    "single_weights": ("strategy=single", *_WEIGHTED, "model.hidden_channels=4", "model.dropout=0"),
    "sar": ("strategy=sar", *_SAGE, *_NODES),
    "sar_types": ("strategy=sar", *_TYPED, "model=hetero_sage", "model.hidden_channels=4", "model.dropout=0"),
    "pyg": ("strategy=pyg", *_SAGE, *_NODES, "data.batch_size=12", "data.num_neighbors=[3,2]"),
    "ps": ("strategy=ps", *_ROWS, "model.hidden_channels=4", "data.batch_size=12"),
    "ps_names": ("strategy=ps", *_KG),
    "pbg": (*_PBG, "strategy.buffer_partitions=2"),
    "pbg_machines": (*_PBG, "trainer.num_nodes=2"),
}
"""Settings of each run, by its name."""
_DATA = {"names": _KG, "events": (*_EVENTS, *_LINKS), "rows": _ROWS}
STORES = {name: ("partition", *settings, "data.num_parts=2") for name, settings in _DATA.items()}
"""Stores of two parts that no run makes."""


def steps(run: str) -> dict[str, tuple[str, ...]]:
    """Arguments of ``gtrain`` for what is done with a run by verb, in the archive's folder; each writes to its own."""
    last = f"ckpt_path=runs/{run}/checkpoints/last.ckpt"
    common = [(verb, (*RUNS[run], last, f"hydra.run.dir=out/{run}/{verb}")) for verb in ("test", "predict", "export")]
    resumed = (*RUNS[run], last, f"trainer.max_epochs={MORE}", f"hydra.run.dir=out/{run}/train")
    return {verb: (verb, *arguments) for verb, arguments in common} | {"train": ("train", *resumed)}


def result(run: str, verb: str, folder: Path) -> Any:
    """What a step of :func:`steps` left behind: scores, rows, or the losses and scores of the epochs."""
    out = folder / "out" / run / verb
    if verb in ("predict", "export"):
        rows = np.load(out / ("predictions.npy" if verb == "predict" else "embeddings.npy"))
        return rows.astype(np.float64).tolist()
    content = json.loads((out / "summary.json").read_text())
    keep = ("train/", "val/", "test/")
    if verb == "test":
        return {name: value for name, value in content["metrics"].items() if name.startswith(keep)}
    return [{k: v for k, v in epoch.items() if k.startswith(keep)} for epoch in content["history"]]


def contents(path: Path) -> dict[str, str]:
    """Every tensor of a store by its place, with its shape and a checksum."""
    from gtrain.graph.store import Store

    return dict(_tensors(Store.open(path)))


def _tensors(store: Any) -> Iterator[tuple[str, str]]:
    for part in range(store.num_parts):
        for node_type in store.node_types:
            for name in store.node_tensors(node_type):
                yield f"{part}/{node_type}/{name}", _checksum(store.node(name, part, node_type))
        for edge_type in store.edge_types:
            label = "-".join(edge_type)
            for name in ("indptr", *store.edge_tensors(edge_type)):
                yield f"{part}/{label}/{name}", _checksum(store.edge(name, part, edge_type))
            for split in ("val", "test"):
                for name in store.held_out_tensors(split, edge_type):
                    yield f"{part}/{label}/{split}/{name}", _checksum(store.held_out(name, part, split, edge_type))
    for kind, count in store.manifest.names.items():
        yield f"names of {kind}", json.dumps(store.names(kind).decode(torch.arange(count)))


def _checksum(tensor: torch.Tensor) -> str:
    dense = tensor.to_dense() if tensor.layout == torch.sparse_csr else tensor
    digest = hashlib.sha256(np.ascontiguousarray(dense.numpy()).tobytes()).hexdigest()[:16]
    return f"{dense.dtype} {list(dense.shape)} {digest}"


def write(archive: Path) -> None:
    """Make the runs and stores with the release that is installed, and pack them."""
    with tempfile.TemporaryDirectory() as temporary:
        made, moved = Path(temporary, "made").resolve(), Path(temporary, "moved").resolve()
        made.mkdir()
        _write_inputs(made)
        for run, settings in RUNS.items():
            _gtrain(made, *settings, f"trainer.max_epochs={EPOCHS}", f"hydra.run.dir=runs/{run}")
        for name, arguments in STORES.items():
            _gtrain(made, *arguments, f"hydra.run.dir=out/{name}")
        shutil.rmtree(made / "out")
        _forget(made)
        shutil.copytree(made, moved)
        expected: dict[str, Any] = {"runs": {}, "stores": {}}
        for path in sorted((moved / "data" / "stores").iterdir()):
            expected["stores"][path.name] = contents(path)
        for run in RUNS:
            expected["runs"][run] = {}
            for verb, arguments in steps(run).items():
                _gtrain(moved, *arguments)
                expected["runs"][run][verb] = {"arguments": arguments, "result": result(run, verb, moved)}
        (made / "expected.json").write_text(json.dumps(expected, indent=1))
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            tar.add(made, ".", filter=_nobody)


def _write_inputs(folder: Path) -> None:
    """Text files of a knowledge graph and of a weighted graph; a store knows their times of change."""
    draw = random.Random(0)
    (folder / "kg").mkdir()
    triples = sorted({(draw.randrange(16), draw.randrange(3), draw.randrange(16)) for _ in range(110)})
    draw.shuffle(triples)
    for name, some in (("train", triples[:64]), ("valid", triples[64:72]), ("test", triples[72:80])):
        lines = (f"entity {head}\trelation {relation}\tentity {tail}\n" for head, relation, tail in some)
        (folder / "kg" / f"{name}.txt").write_text("".join(lines))
    edges = (f"{draw.randrange(24)} {draw.randrange(24)} {1 + draw.randrange(8)}\n" for _ in range(90))
    (folder / "edges.txt").write_text("".join(edges))
    (folder / "features.txt").write_text("".join(f"{draw.random():.3f} {draw.random():.3f}\n" for _ in range(24)))
    (folder / "labels.txt").write_text("".join(f"{node} {node % 3}\n" for node in range(24)))
    for path in folder.rglob("*.txt"):
        os.utime(path, (1e9, 1e9))


def _gtrain(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "gtrain", *arguments], cwd=folder, env=environment, text=True, capture_output=True
    )
    if done.returncode:
        sys.exit(f"gtrain {' '.join(arguments)}\n{done.stdout}\n{done.stderr}")
    print("gtrain", *arguments, flush=True)


def _forget(folder: Path) -> None:
    """Take the folder and the host's name out of all files, and logs away; checksums of checkpoints follow."""
    for logs in list(folder.rglob("logs")):
        shutil.rmtree(logs)
    for log in list(folder.rglob("*.log")):
        log.unlink()
    for path in folder.rglob("*.pt"):
        content = torch.load(path, weights_only=True)
        if str(folder) in str(content):
            torch.save(_relative(content, folder), path)
    for path in [each for suffix in ("json", "yaml", "txt") for each in folder.rglob(f"*.{suffix}")]:
        text, changed = path.read_text(), path.stat().st_mtime
        text = text.replace(f"{folder}/", "").replace(str(folder), ".")
        path.write_text(text.replace(f'"{socket.gethostname()}"', '"host"'))
        os.utime(path, (changed, changed))
    for path in folder.rglob("checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_text())
        for name, entry in manifest["files"].items():
            data = (path.parent / name).read_bytes()
            entry |= {"bytes": len(data), "crc32": zlib.crc32(data)}
        if "checksum" in manifest:
            del manifest["checksum"]
            manifest["checksum"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
        path.write_text(json.dumps(manifest, indent=1))


def _relative(value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return value.replace(f"{folder}/", "")
    if isinstance(value, dict):
        return {_relative(key, folder): _relative(item, folder) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_relative(item, folder) for item in value)
    return value


def _nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = int(entry.mtime)
    return entry


if __name__ == "__main__":
    write(Path(__file__).with_name(f"{sys.argv[1]}.tar.xz"))
