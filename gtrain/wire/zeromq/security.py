"""The keys of a job, by which servers and clients authenticate each other (CurveZMQ), and a server's authenticator."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from gtrain.errors import ConfigError
from gtrain.keys import ISOLATED
from gtrain.wire.logs import RefusalLog

_FORMAT = "gtrain-keys-1"
_KEY_LENGTH = 40  # Z85 text of 32 bytes


@dataclass(frozen=True)
class Security:
    """One key pair for the job's servers and one for its clients. Whoever can read the key file belongs to the job.

    Clients check the server's key. Servers accept ``client_public`` and the keys in ``allowed`` (without such a list
    CurveZMQ accepts every key pair). All messages are encrypted and authenticated.

    Args:
        server_public: public key of all servers of the job.
        server_secret: its secret half.
        client_public: public key of all clients of the job.
        client_secret: its secret half.
        allowed: further public keys of clients that servers accept.
    """

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)
    allowed: tuple[str, ...] = ()

    @classmethod
    def create(cls) -> Security:
        """Return new keys, for one job."""
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(server[0].decode(), server[1].decode(), client[0].decode(), client[1].decode())

    def text(self) -> str:
        """Return the content of a key file."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the keys to a file that only this user may read; an existing file is replaced.

        Raises:
            ConfigError: the folder is missing or not writable.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            # The mode is set at creation: at no time can another user read the file.
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(self.text())
            temporary.replace(target)
        except OSError as err:
            temporary.unlink(missing_ok=True)
            raise ConfigError(
                f"the key file {target} cannot be written: {err.strerror}",
                hint="name a file in a writable folder",
            ) from err

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Security:
        """Read a file that :meth:`save` wrote. For :data:`gtrain.keys.ISOLATED`, return keys that anybody can derive.

        Raises:
            ConfigError: the file is missing, readable by other users, or not a key file.
        """
        if path == ISOLATED:
            return cls._isolated()
        target = Path(path)
        try:
            with target.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read(1 << 16)
        except OSError as err:
            raise ConfigError(
                f"the key file {target} cannot be read: {err.strerror}",
                hint="copy the key file of the job to this machine, or check cluster.key_file",
            ) from err
        if mode & 0o077:
            raise ConfigError(
                f"the key file {target} has mode {mode & 0o777:04o}: other users may read the job's keys",
                hint=f"run: chmod 600 {target}; if others had access, make new keys",
            )
        return cls._parse(content, target)

    @classmethod
    def _isolated(cls) -> Security:
        """Return keys that anybody can derive: they protect nothing, for a network that needs no protection."""
        server, client = (
            z85.encode(hashlib.sha256(f"{ISOLATED}: {name}".encode()).digest()) for name in ("server", "client")
        )
        publics = zmq.curve_public(server).decode(), zmq.curve_public(client).decode()
        return cls(publics[0], server.decode(), publics[1], client.decode())

    @classmethod
    def _parse(cls, content: bytes, path: Path) -> Security:
        """Return the keys in a file's content, each checked."""
        try:
            values = json.loads(content)
            if values.pop("format") != _FORMAT:
                raise ValueError("another format")
            loaded = cls(**{**values, "allowed": tuple(values["allowed"])})
            loaded._check()
        except (ValueError, TypeError, KeyError, AttributeError, zmq.ZMQError) as err:
            raise ConfigError(
                f"{path} is not a key file of gtrain, or it is damaged", hint="copy the key file of the job again"
            ) from err
        return loaded

    def _check(self) -> None:
        """Raise ValueError if a key is malformed, or a public key does not belong to its secret key."""
        for key in (self.server_public, self.server_secret, self.client_public, self.client_secret, *self.allowed):
            if type(key) is not str or len(key) != _KEY_LENGTH:
                raise ValueError("not a key")
        pairs = ((self.server_public, self.server_secret), (self.client_public, self.client_secret))
        for public, secret in pairs:
            if zmq.curve_public(secret.encode()) != public.encode():
                raise ValueError("a public key does not belong to its secret key")

    def guard(self, server: zmq.Socket[Any]) -> None:
        """Make a socket a CURVE server; :class:`Authenticator` checks the keys of its peers."""
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt_string(zmq.CURVE_SECRETKEY, self.server_secret)
        server.setsockopt_string(zmq.ZAP_DOMAIN, "gtrain")

    def identify(self, client: zmq.Socket[Any]) -> None:
        """Make a socket a CURVE client of the job's servers."""
        client.setsockopt_string(zmq.CURVE_SERVERKEY, self.server_public)
        client.setsockopt_string(zmq.CURVE_PUBLICKEY, self.client_public)
        client.setsockopt_string(zmq.CURVE_SECRETKEY, self.client_secret)

    def admits(self, key: str) -> bool:
        """Whether servers accept a client's public key."""
        return key == self.client_public or key in self.allowed


class Authenticator:
    """A ZAP handler (ZeroMQ RFC 27), which accepts or refuses the CURVE key of each new connection.

    Runs in a thread, so that handshakes proceed while a handler of the server computes. The thread ends with the
    context.

    Args:
        context: the server's context: zmq sends the requests of all its sockets to one handler per context.
        security: has the list of the job's keys.
        name: name of the server, which becomes part of the thread's name.
        refusals: counts and logs refused keys.
    """

    def __init__(self, context: zmq.Context[Any], security: Security, name: str, refusals: RefusalLog) -> None:
        self._security, self._refusals = security, refusals
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        # The address at which zmq looks for a handler (RFC 27).
        self._socket.bind("inproc://zeromq.zap.01")
        threading.Thread(target=self._run, name=f"gtrain-zap-{name}", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._reply(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _reply(self, request: list[bytes]) -> list[bytes]:
        """Return the reply to one request: accept (200) or refuse (400) a key."""
        if len(request) < 6 or request[0] != b"1.0":
            return [b"1.0", request[1] if len(request) > 1 else b"", b"500", b"not ZAP 1.0", b"", b""]
        # RFC 27: version, request id, domain, address, identity, mechanism, credentials (for CURVE the client's key).
        # The reply: version, request id, status code, status text, user id, metadata.
        number, address, mechanism = request[1], request[3].decode(errors="replace"), request[5]
        key = z85.encode(request[6]).decode() if mechanism == b"CURVE" and len(request[6:]) == 1 else ""
        if self._security.admits(key):
            return [b"1.0", number, b"200", b"OK", key.encode(), b""]
        self._refusals.count()
        self._refusals.report(address, f"its key {key} does not belong to this job")
        return [b"1.0", number, b"400", b"this key does not belong to this job", b"", b""]
