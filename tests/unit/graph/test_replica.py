"""gtrain.graph.store.replica and gtrain.launch.file_server: stores whose files are elsewhere."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from small_graphs import messy_graph, random_parts, stored

from gtrain.errors import ConfigError, PeerLostError, StoreError
from gtrain.graph.store import Store
from gtrain.graph.store.replica import MANIFEST, RemoteFolder, Replica
from gtrain.launch.file_server import FileServer, ServedFolder
from gtrain.wire import Security


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return stored(tmp_path / "original" / "graph", messy_graph(), random_parts(40, 2))


class Counting:
    """An origin that counts the files that are read."""

    def __init__(self, folder: Path) -> None:
        self.address, self._folder = str(folder), folder
        self.names: list[str] = []

    def read(self, name: str) -> Iterator[bytes]:
        self.names.append(name)
        yield (self._folder / name).read_bytes()


def equal(one: Store, other: Store) -> bool:
    return all(
        torch.equal(one.node(name, part), other.node(name, part))
        for part in range(one.num_parts)
        for name in one.node_tensors()
    ) and all(
        torch.equal(one.edge(name, part), other.edge(name, part))
        for part in range(one.num_parts)
        for name in ("indptr", *one.edge_tensors())
    )


def test_a_file_is_fetched_once_and_only_if_it_is_read(store: Store, tmp_path: Path) -> None:
    origin = Counting(store.path)
    replica = Replica.of(origin, tmp_path / "stores", "graph")
    replica.node("x", 1)
    replica.node("x", 1)
    assert origin.names == [MANIFEST, "part-1/nodes/node/x.npy"]
    assert not (replica.path / "part-0").exists()
    again = Replica.of(Counting(store.path), tmp_path / "stores", "graph")
    assert again.path == replica.path and equal(again, store)
    assert not [path for path in replica.path.rglob("*") if path.suffix in (".tmp", ".lock")]


def test_threads_that_read_a_file_fetch_it_once(store: Store, tmp_path: Path) -> None:
    origin = Counting(store.path)
    replica = Replica.of(origin, tmp_path / "stores", "graph")
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda _: replica.node("x", 0), range(16)))
    assert all(torch.equal(row, store.node("x", 0)) for row in rows)
    assert origin.names.count("part-0/nodes/node/x.npy") == 1


def test_a_damaged_file_is_refused_and_not_kept(store: Store, tmp_path: Path) -> None:
    replica = Replica.of(Counting(store.path), tmp_path / "stores", "graph")
    file = store.path / "part-0/nodes/node/x.npy"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(StoreError, match="is damaged: its checksum differs"):
        replica.node("x", 0)
    assert not (replica.path / "part-0/nodes/node/x.npy").exists()
    file.write_bytes(good)
    assert equal(replica, store)


def test_a_manifest_that_leads_out_of_the_store_is_refused(store: Store, tmp_path: Path) -> None:
    outside = "part-0/../../../outside.npy"
    forged = dataclasses.replace(store.manifest, checksums={outside: 0}, sizes={outside: 1})
    (store.path / MANIFEST).write_text(forged.to_json())
    with pytest.raises(StoreError, match=f"names a file outside the store: {re.escape(outside)}"):
        Replica.of(Counting(store.path), tmp_path / "stores", "graph")
    assert not (tmp_path / "stores").exists()


def test_another_store_of_the_same_name_gets_a_replica_of_its_own(store: Store, tmp_path: Path) -> None:
    first = Replica.of(Counting(store.path), tmp_path / "stores", "graph")
    other = stored(tmp_path / "other" / "graph", messy_graph(seed=1), random_parts(40, 2))
    second = Replica.of(Counting(other.path), tmp_path / "stores", "graph")
    assert first.path != second.path and equal(first, store) and equal(second, other)


def test_a_store_is_written_to_a_remote_folder_and_read_from_it(store: Store, tmp_path: Path) -> None:
    remote = RemoteFolder(f"file://{tmp_path}/bucket/graph/")
    with pytest.raises(StoreError, match=r"has no manifest\.json\nHINT: write the store there with gtrain partition"):
        Replica.of(remote, tmp_path / "stores", remote.name)
    remote.write(store)
    remote.write(store)  # it is there already
    assert remote.name == "graph" and equal(Replica.of(remote, tmp_path / "stores", remote.name), store)
    other = stored(tmp_path / "other" / "graph", messy_graph(seed=1), random_parts(40, 2))
    with pytest.raises(StoreError, match="bucket/graph has another store, which jobs may be reading"):
        remote.write(other)
    assert equal(Replica.of(remote, tmp_path / "again", remote.name), store)


def test_a_remote_folder_of_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.remote_store=nosuch://bucket/graph was set: Protocol not known"):
        next(RemoteFolder("nosuch://bucket/graph").read(MANIFEST))


def test_a_remote_folder_that_cannot_be_read_is_named(store: Store, tmp_path: Path) -> None:
    remote = RemoteFolder(f"file://{tmp_path}/bucket/graph")
    remote.write(store)
    (tmp_path / "bucket/graph/part-0/nodes/node/x.npy").unlink()
    replica = Replica.of(remote, tmp_path / "stores", remote.name)
    with pytest.raises(StoreError, match=r"bucket/graph has no part-0/nodes/node/x\.npy"):
        replica.node("x", 0)


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    Security.create().save(tmp_path / "job.key")
    return str(tmp_path / "job.key")


def test_the_file_server_sends_the_files_of_the_store_and_no_others(
    store: Store, key_file: str, tmp_path: Path
) -> None:
    (store.path.parent / "secret").write_text("secret")
    server = FileServer(store.path, {*store.manifest.sizes, MANIFEST}, "127.0.0.1", key_file)
    try:
        origin = ServedFolder(server.address, key_file)
        assert equal(Replica.of(origin, tmp_path / "stores", "graph"), store)
        for name in ("../secret", "/etc/passwd", "part-0", "", "x" * 100_000):
            with pytest.raises((StoreError, PeerLostError)):
                b"".join(origin.read(name))
    finally:
        server.close()


def test_the_file_server_refuses_who_lacks_the_key(store: Store, key_file: str, tmp_path: Path) -> None:
    Security.create().save(tmp_path / "other.key")
    server = FileServer(store.path, {MANIFEST}, "127.0.0.1", key_file)
    try:
        with pytest.raises(ConfigError, match="has another key, or only one of both has a key"):
            b"".join(ServedFolder(server.address, str(tmp_path / "other.key")).read(MANIFEST))
    finally:
        server.close()


def test_a_file_larger_than_a_message_arrives_whole(key_file: str, tmp_path: Path) -> None:
    content = os.urandom((5 << 20) + 123)
    (tmp_path / "large").write_bytes(content)
    server = FileServer(tmp_path, {"large"}, "127.0.0.1", key_file)
    try:
        assert b"".join(ServedFolder(server.address, key_file).read("large")) == content
    finally:
        server.close()
