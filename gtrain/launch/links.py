"""Authenticated connections between the processes of a job. Imports nothing of torch: the agent uses it too.

Within a machine a connection is a Unix socket, and the kernel says which user is at the other end. Between machines it
is TLS 1.3, and both ends prove that they have the job's key file: its secret is the seed of one certificate, which all
processes of the job derive, present and require. Nothing is read from a connection before its other end is known.

A process without keys may be asked for at a TCP port of its own machine, by ``cluster.rendezvous``. It answers there
with the address of its Unix socket alone, and both ends check each other's user at that.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

from gtrain.errors import ConfigError, PeerLostError
from gtrain.keys import secret_of
from gtrain.launch import slot

HANDSHAKE_SECONDS = 10.0
"""How long a peer may take to prove who it is."""
RETRY_SECONDS = 0.05
_WELCOME = b"gtrain 1\n"
_POINTER = b"gtrain 1 at "
_GREETING = b"gtrain 1?\n"
_LONGEST_POINTER = 256
_HANDSHAKES = 128
_REMEMBERED = 256
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of SO_PEERCRED


class RefusedConnectionError(ConfigError):
    """The other end of a connection is not of this job: it has another key, or is another user's."""


def connect(address: str, key_file: str | None, timeout_seconds: float, *, listens: bool = False) -> socket.socket:
    """Connect to a process of the job, and be sure that it is one.

    Args:
        address: ``ipc://PATH`` within the machine, or ``tcp://HOST:PORT``.
        key_file: of the job; None: only processes of this machine are spoken to.
        timeout_seconds: how long to try.
        listens: whether the process has listened there already, so that whoever is not there is gone for good.

    Raises:
        RefusedConnectionError: who answers is not of the job.
        PeerLostError: nobody answers.
    """
    deadline, resets = time.monotonic() + timeout_seconds, 0
    while True:
        try:
            return _connect(address, key_file, max(1.0, min(HANDSHAKE_SECONDS, deadline - time.monotonic())))
        except (OSError, ssl.SSLError) as error:
            resets += isinstance(error, ConnectionResetError)
            if _is_refusal(error) or (resets > 2 and key_file is None):  # a process with keys hangs up
                raise RefusedConnectionError(
                    f"{address} was reached, and the process there has another key, or one has none.",
                    hint="give all processes of the job the same cluster.key_file.",
                ) from error
            gone = listens and isinstance(error, (FileNotFoundError, ConnectionRefusedError))
            if gone or time.monotonic() >= deadline:
                raise PeerLostError(f"{address} does not answer: {error.strerror or error}") from error
        time.sleep(RETRY_SECONDS)


def _connect(address: str, key_file: str | None, timeout_seconds: float) -> socket.socket:
    """One try of :func:`connect`."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        line = socket.socket(socket.AF_UNIX)
        try:
            line.settimeout(timeout_seconds)
            line.connect(rest)
            _check_user(line, address)
            _expect_welcome(line)
        except BaseException:
            line.close()
            raise
        line.settimeout(None)
        return line
    host, _, port = rest.rpartition(":")
    line = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if key_file is not None:
            line = _contexts(key_file)[1].wrap_socket(line)
            _expect_welcome(line)
            line.settimeout(None)
            return line
        line.sendall(_GREETING)  # a process with keys takes it for a broken handshake, and closes at once
        pointer = _pointer(line)
    except BaseException:
        line.close()
        raise
    line.close()
    if pointer is None:
        raise RefusedConnectionError(
            f"{address} was reached, and what answers there is no process of this machine's user without keys.",
            hint="set cluster.key_file, if the job has one, and give each job a rendezvous of its own.",
        )
    return _connect(pointer, None, timeout_seconds)


def _pointer(line: socket.socket) -> str | None:
    """The address that a process without keys names at its TCP port."""
    content = b""
    while not content.endswith(b"\n") and len(content) < _LONGEST_POINTER:
        some = line.recv(_LONGEST_POINTER - len(content))
        if not some:
            break
        content += some
    if not content:
        raise ConnectionResetError("the connection was closed")
    text = content.removesuffix(b"\n").removeprefix(_POINTER).decode("ascii", "replace")
    return text if content.startswith(_POINTER) and text.startswith("ipc://") else None


def _expect_welcome(line: socket.socket) -> None:
    """Wait until the other end has said that it knows this one."""
    content = b""
    while len(content) < len(_WELCOME):
        some = line.recv(len(_WELCOME) - len(content))
        if not some:
            raise ConnectionResetError("the connection was closed")
        content += some
    if content != _WELCOME:
        theirs, mine = (text.decode("ascii", "replace").strip() for text in (content, _WELCOME))
        raise RefusedConnectionError(
            f"another version of gtrain answered: its connections are {theirs!r}, and those of this process {mine!r}.",
            hint="install the same release on all machines.",
        )


class Door:
    """Lets processes of the job in, at one or more listening sockets, each in a thread of its own.

    Args:
        sockets: Unix or TCP sockets that listen already; they stay the caller's.
        key_file: of the job, for TCP; None: a TCP socket only says where the Unix socket is.
        pointer: address of the Unix socket, for TCP without keys.
        enter: called with each connection that was let in, in a thread of its own.
        name: what is being connected to, for messages.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        key_file: str | None,
        pointer: str | None,
        enter: Callable[[socket.socket], None],
        name: str,
    ) -> None:
        self._key_file, self._pointer, self._enter, self._name = key_file, pointer, enter, name
        self._lock = threading.Lock()
        self._unknown: dict[int, socket.socket] = {}  # connections whose other ends have not proved anything yet
        self._refused: set[str] = set()
        self._closed = False
        self._sockets = list(sockets)
        for one in self._sockets:
            threading.Thread(target=self._accept, args=(one,), name=f"gtrain-door-{name}", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more; connections that were let in stay."""
        self._closed = True
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                line, place = listener.accept()
            except OSError:
                if self._closed or listener.fileno() < 0:
                    return
                time.sleep(RETRY_SECONDS)  # out of descriptors, for now
                continue
            with self._lock:
                if len(self._unknown) >= _HANDSHAKES:  # strangers who are silent: the one that came first has to go
                    with contextlib.suppress(OSError):
                        self._unknown.pop(next(iter(self._unknown))).shutdown(socket.SHUT_RDWR)
                self._unknown[id(line)] = line
            threading.Thread(target=self._admit, args=(line, place), name="gtrain-handshake", daemon=True).start()

    def _admit(self, line: socket.socket, place: object) -> None:
        admitted = None
        try:
            admitted = self._known(line)
        except (OSError, RefusedConnectionError) as error:
            self._say_refused(place, error)
        finally:
            with self._lock:
                self._unknown.pop(id(line), None)
            if admitted is None:
                line.close()
        if admitted is not None:
            try:
                self._enter(admitted)
            except (OSError, ValueError, PeerLostError):
                admitted.close()

    def _known(self, line: socket.socket) -> socket.socket | None:
        """The connection, once its other end has proved who it is; None: it was told where to go."""
        line.settimeout(HANDSHAKE_SECONDS)
        if line.family == socket.AF_UNIX:
            _check_user(line, self._name)
        else:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._key_file is None:
                line.sendall(_POINTER + (self._pointer or "").encode() + b"\n")
                return None
            line = _contexts(self._key_file)[0].wrap_socket(line, server_side=True)
        try:
            line.sendall(_WELCOME)
            line.settimeout(None)
        except BaseException:
            line.close()
            raise
        return line

    def _say_refused(self, place: object, error: Exception) -> None:
        """Say who was refused, once for each address; who only looked whether somebody listens was not."""
        lacks_key = isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
        host = str(place[0]) if isinstance(place, tuple) else "another user"
        if not (lacks_key or isinstance(error, RefusedConnectionError)) or host in self._refused:
            return
        if len(self._refused) < _REMEMBERED:
            self._refused.add(host)
            reason = ": it lacks the job's key" if lacks_key else ""
            text = f"{self._name} refused a connection from {host}{reason}"
            if slot.current() is None:
                print(f"gtrain: {text}", file=sys.stderr, flush=True)
            else:
                slot.say(text)


def _check_user(line: socket.socket, name: str) -> None:
    """Refuse another user at the end of a Unix socket; root is every user."""
    _, user, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user not in (os.geteuid(), 0):
        raise RefusedConnectionError(
            f"{name}: the process at the other end is of user {user}, and this one of {os.geteuid()}.",
            hint="start all processes of a job as the same user.",
        )


def _is_refusal(error: Exception) -> bool:
    """Whether an error says that one end does not accept the other's certificate, or speaks no TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    return isinstance(error, ssl.SSLError) and any(
        word in str(error).upper() for word in ("ALERT", "WRONG_VERSION", "UNKNOWN_PROTOCOL", "HTTP_REQUEST")
    )


@functools.lru_cache(maxsize=8)
def _contexts(key_file: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS of a job's key file, for the end that is connected to and the one that connects."""
    certificate = _certificate(secret_of(key_file))
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    memory = os.memfd_create("gtrain-certificate")  # the ssl module reads keys from files alone
    try:
        os.write(memory, certificate)
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # machines of a job have one certificate
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(f"/proc/self/fd/{memory}")
            context.load_verify_locations(cadata=certificate[certificate.index(b"-----BEGIN CERT") :].decode())
    finally:
        os.close(memory)
    contexts[0].num_tickets = 0  # each connection carries data one way, and nobody would read them
    return contexts


def _certificate(secret: str) -> bytes:
    """A private key and its certificate as PEM; the same for the same secret."""
    from cryptography import x509  # a job of one machine needs none
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    seed = hashlib.sha256(b"gtrain: connections between machines\0" + secret.encode()).digest()
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gtrain job")])
    utc = datetime.UTC
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=utc))  # clocks of machines differ
        .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=utc))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + made.public_bytes(serialization.Encoding.PEM)


def receive_into(line: socket.socket, view: memoryview, heard: Callable[[], None] | None = None) -> None:
    """Fill a buffer from a connection.

    Args:
        line: the connection.
        view: bytes to fill.
        heard: called after each piece.

    Raises:
        ConnectionError: the connection ended before.
    """
    at, piece = 0, 1 << 20
    flags = 0 if isinstance(line, ssl.SSLSocket) else socket.MSG_WAITALL
    while at < len(view):
        count = line.recv_into(view[at : at + piece], 0, flags)
        if not count:
            raise ConnectionResetError("the connection was closed")
        at += count
        if heard is not None:
            heard()
