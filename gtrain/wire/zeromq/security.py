"""The keys of a job: who may talk to its servers, and how both sides know each other (CurveZMQ)."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from gtrain.errors import ConfigError
from gtrain.keys import ISOLATED

_FORMAT = "gtrain-keys-1"
_KEY_LENGTH = 40  # Z85 text of 32 bytes


@dataclass(frozen=True)
class Security:
    """One key pair for the job's servers and one for its clients; who has the file belongs to the job.

    Clients check the server's key, servers let in only the keys of ``allowed`` (without such a list CurveZMQ lets in
    any key pair). All that crosses is encrypted and authenticated.

    Args:
        server_public: public key of all servers of the job.
        server_secret: its secret half.
        client_public: public key of all clients of the job.
        client_secret: its secret half.
        allowed: further public keys of clients that servers let in.
    """

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)
    allowed: tuple[str, ...] = ()

    @classmethod
    def create(cls) -> Security:
        """New keys, for one job."""
        pairs = [zmq.curve_keypair() for _ in range(2)]
        (server_public, server_secret), (client_public, client_secret) = [
            (public.decode(), secret.decode()) for public, secret in pairs
        ]
        return cls(server_public, server_secret, client_public, client_secret)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the keys to a file that only this user may read; an existing one is replaced.

        Raises:
            ConfigError: the folder is missing or not to be written to.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump({"format": _FORMAT, **asdict(self)}, file)
            temporary.replace(target)
        except OSError as err:
            raise ConfigError(
                f"the key file {target} cannot be written: {err.strerror}", hint="name a file in a folder of your own"
            ) from err

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Security:
        """Read what :meth:`save` wrote; of :data:`gtrain.keys.ISOLATED` the keys that everybody has.

        Raises:
            ConfigError: the file is missing, open to other users, or no key file.
        """
        if path == ISOLATED:
            return cls._of_everybody()
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
    def _of_everybody(cls) -> Security:
        """Keys that everybody can make: they protect nothing, on a network that needs no protection."""
        halves = []
        for name in ("server", "client"):
            secret = z85.encode(hashlib.sha256(f"{ISOLATED}: {name}".encode()).digest())
            halves += [zmq.curve_public(secret).decode(), secret.decode()]
        return cls(halves[0], halves[1], halves[2], halves[3])

    @classmethod
    def _parse(cls, content: bytes, path: Path) -> Security:
        """The keys in a file's content, each checked."""
        try:
            values = json.loads(content)
            if values.pop("format") != _FORMAT:
                raise ValueError("another format")
            loaded = cls(**{**values, "allowed": tuple(values["allowed"])})
            loaded._check()
        except (ValueError, TypeError, KeyError, AttributeError, zmq.ZMQError) as err:
            raise ConfigError(
                f"{path} is no key file of gtrain, or damaged", hint="copy the key file of the job once more"
            ) from err
        return loaded

    def _check(self) -> None:
        """Raise ValueError if a key is none, or a pair does not fit together."""
        for key in (self.server_public, self.server_secret, self.client_public, self.client_secret, *self.allowed):
            if type(key) is not str or len(key) != _KEY_LENGTH:
                raise ValueError("not a key")
        for public, secret in (
            (self.server_public, self.server_secret),
            (self.client_public, self.client_secret),
        ):
            if zmq.curve_public(secret.encode()) != public.encode():
                raise ValueError("a pair does not fit together")

    def guard(self, server: zmq.Socket[Any]) -> None:
        """Make a socket a CURVE server; :class:`gtrain.wire.zeromq.authenticator.Authenticator` decides who enters."""
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt_string(zmq.CURVE_SECRETKEY, self.server_secret)
        server.setsockopt_string(zmq.ZAP_DOMAIN, "gtrain")

    def identify(self, client: zmq.Socket[Any]) -> None:
        """Make a socket a CURVE client of the job's servers."""
        client.setsockopt_string(zmq.CURVE_SERVERKEY, self.server_public)
        client.setsockopt_string(zmq.CURVE_PUBLICKEY, self.client_public)
        client.setsockopt_string(zmq.CURVE_SECRETKEY, self.client_secret)

    def admits(self, key: str) -> bool:
        """Whether a client's public key is on the list."""
        return key == self.client_public or key in self.allowed


def require_security(address: str, local: bool, security: Security | None) -> None:
    """Refuse to use an address that others can reach without keys.

    Raises:
        ConfigError: the address leaves the machine and there are no keys.
    """
    if security is None and not local:
        raise ConfigError(
            f"{address} can be reached from other machines, and no keys were given",
            hint="give all processes of the job its key file, made by Security.create().save(FILE)",
        )
