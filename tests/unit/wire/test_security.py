"""Who is let in, and how those are told who are not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from helpers import LIMIT, until

from gtrain.errors import ConfigError
from gtrain.wire import Client, Limits, Message, RefusedError, Security, Server, is_local
from gtrain.wire.addresses import ipc_folder

NOWHERE = Path("/nowhere")
KEYS = Security.create()
OTHER = Security.create()


def test_keys_are_saved_for_this_user_alone(tmp_path: Path) -> None:
    KEYS.save(tmp_path / "keys")
    KEYS.save(tmp_path / "keys")  # replaces
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert Security.load(tmp_path / "keys") == KEYS
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
    assert KEYS.server_secret not in repr(KEYS)
    assert KEYS.client_secret not in repr(KEYS)
    assert KEYS != OTHER


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    KEYS.save(tmp_path / "keys")
    (tmp_path / "keys").chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}: other users.*\nHINT: run: chmod 600"):
        Security.load(tmp_path / "keys")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: "\0\xff",
        lambda text: "[]",
        lambda text: text.replace("gtrain-keys-1", "gtrain-keys-9"),
        lambda text: text[: len(text) // 2],
        lambda text: json.dumps({**json.loads(text), "server_public": "short"}),
        lambda text: json.dumps({**json.loads(text), "server_public": "'" * 40}),
        lambda text: json.dumps({**json.loads(text), "client_public": OTHER.client_public}),
        lambda text: json.dumps({**json.loads(text), "more": 1}),
    ],
)
def test_a_damaged_key_file_is_refused(tmp_path: Path, change: object) -> None:
    KEYS.save(tmp_path / "keys")
    (tmp_path / "keys").write_text(change((tmp_path / "keys").read_text()))  # type: ignore[operator]
    with pytest.raises(ConfigError, match="is not a key file of gtrain, or it is damaged"):
        Security.load(tmp_path / "keys")


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.*cannot be read: No such file"):
        Security.load(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be written"):
        KEYS.save(tmp_path / "none" / "keys")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("ipc://folder/a", True),
        ("tcp://127.0.0.1:5", True),
        ("tcp://127.9.9.9:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://localhost:5", True),
        ("tcp://0.0.0.0:5", False),
        ("tcp://*:5", False),
        ("tcp://10.0.0.1:5", False),
        ("tcp://[2001:db8::1]:5", False),
        ("tcp://localhost.example.org:5", False),
    ],
)
def test_addresses_that_others_reach_need_keys(address: str, local: bool) -> None:
    assert is_local(address) == local
    if not local:
        with pytest.raises(ConfigError, match="no keys were given"):
            Client(address, peer="table 1")
        with pytest.raises(ConfigError, match="no keys were given"):
            Server({}, name="table 1", address=address)


def test_a_descriptor_that_others_reach_needs_keys() -> None:
    with socket.socket() as bound:
        bound.bind(("0.0.0.0", 0))
        with pytest.raises(ConfigError, match="no keys were given"):
            Server({}, name="table 1", descriptor=bound.fileno())


@pytest.fixture
def server() -> Iterator[Server]:
    """A server with keys, at the loopback."""
    handlers = {"echo": lambda message, caller: message}
    with Server(handlers, name="table 1", address="tcp://127.0.0.1:0", security=KEYS) as running:
        yield running


def test_a_client_with_the_jobs_keys_is_let_in(server: Server) -> None:
    with Client(server.address, peer="table 1", security=KEYS, timeout_seconds=LIMIT) as client:
        assert client.request("echo", {"a": 1}).fields == {"a": 1}


def test_a_wildcard_is_named_by_the_machine() -> None:
    handlers = {"echo": lambda message, caller: Message({"a": 1})}
    with Server(handlers, name="table 1", address="tcp://0.0.0.0:0", security=KEYS) as running:
        host, _, port = running.address.removeprefix("tcp://").rpartition(":")
        assert host == socket.gethostname()
        with Client(f"tcp://127.0.0.1:{port}", peer="table 1", security=KEYS, timeout_seconds=LIMIT) as client:
            assert client.request("echo").fields == {"a": 1}


def test_an_allowed_key_is_let_in() -> None:
    keys = dataclasses.replace(KEYS, allowed=(OTHER.client_public,))
    theirs = dataclasses.replace(OTHER, server_public=KEYS.server_public)
    handlers = {"echo": lambda message, caller: message}
    with (
        Server(handlers, name="table 1", address="tcp://127.0.0.1:0", security=keys) as running,
        Client(running.address, peer="table 1", security=theirs, timeout_seconds=LIMIT) as client,
    ):
        assert client.request("echo", {"a": 1}).fields == {"a": 1}


REFUSED = {
    "a key that is not on the list": (
        dataclasses.replace(OTHER, server_public=KEYS.server_public),
        "this process's key is not on its list",
        f"refused a connection from 127.0.0.1: its key {OTHER.client_public} does not belong to this job",
    ),
    # A client without keys knows the reason if the server's greeting arrives. A server may close the connection before
    # that; then the client only sees handshakes that end.
    "no key": (
        None,
        "this process has no keys and it asks for them|it probably asks for keys",
        "it has no keys, or ended the handshake",
    ),
    "another server's key": (OTHER, "the keys are probably another job's", "it does not know this job's keys"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_strangers_are_refused_and_logged_once(server: Server, case: str, caplog: pytest.LogCaptureFixture) -> None:
    security, told, logged = REFUSED[case]
    for _ in range(2):
        with (
            Client(server.address, peer="table 1", security=security, timeout_seconds=LIMIT) as client,
            pytest.raises(RefusedError) as caught,
        ):
            early = client.submit("echo")
            until(lambda: early.done() or client._session.link.suspected_refusal(), NOWHERE)  # noqa: B023
            client.request("echo", timeout_seconds=0.1)
        assert re.search(told, str(caught.value))
        assert "table 1 at tcp://127.0.0.1:" in str(caught.value)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "refused a connection" in record.getMessage()]

    until(lambda: server.counters.refused >= 2 and lines(), NOWHERE)  # one without an address is told of later
    assert len(lines()) == 1
    assert logged in lines()[0]
    with Client(server.address, peer="table 1", security=KEYS, timeout_seconds=LIMIT) as client:
        assert client.request("echo", {"a": 1}).fields == {"a": 1}
    assert server.counters.requests == 1


def test_a_server_without_keys_is_refused_by_a_client_with_keys() -> None:
    handlers = {"echo": lambda message, caller: message}
    with (
        Server(handlers, name="table 1", address="tcp://127.0.0.1:0") as running,
        Client(running.address, peer="table 1", security=KEYS, timeout_seconds=LIMIT) as client,
        pytest.raises(RefusedError, match="this process has keys and it has none"),
    ):
        client.request("echo")


def test_what_is_no_zmq_is_sent_away(server: Server) -> None:
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        stranger.settimeout(LIMIT)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass
    with Client(server.address, peer="table 1", security=KEYS, timeout_seconds=LIMIT) as client:
        assert client.request("echo", {"a": 1}).fields == {"a": 1}


def test_a_frame_beyond_the_limit_ends_the_connection_and_not_the_server(server: Server) -> None:
    """zmq refuses it before it allocates."""
    handlers = {"echo": lambda message, caller: message}
    limits = Limits(max_frame_bytes=200_000, max_header_bytes=1 << 17)
    with ipc_folder() as folder, Server(handlers, name="table 2", address=folder.address("a"), limits=limits) as small:
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(small.address)
        dealer.send(bytes(200_001))
        assert monitor.poll(int(1000 * LIMIT))
        dealer.disable_monitor()
        monitor.close()
        dealer.close()
        with Client(small.address, peer="table 2", timeout_seconds=LIMIT) as client:
            assert client.request("echo", {"a": 1}).fields == {"a": 1}
