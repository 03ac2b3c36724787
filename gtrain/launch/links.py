"""Authenticated connections between the processes of a job. Does not import torch: the agent uses it too.

Within a machine a connection is a Unix socket, and the kernel tells which user is at the other end. Between machines it
is TLS 1.3 with mutual authentication: the secret of the job's key file is the seed of a certificate that all processes
of the job derive, present and require. Nothing is read from a connection before its other end is authenticated.

Without a key file, a TCP port (of ``cluster.rendezvous``) only redirects: it answers with the address of the process's
Unix socket, where both ends check each other's user.
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
from gtrain.launch.sockets import limit_retransmission

HANDSHAKE_SECONDS = 10.0
"""How long a peer may take to authenticate."""
RETRY_SECONDS = 0.05
_WELCOME = b"gtrain 1\n"
_POINTER = b"gtrain 1 at "
_GREETING = b"gtrain 1?\n"
_LONGEST_POINTER = 256
_HANDSHAKES = 128
_REMEMBERED = 256
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of SO_PEERCRED
_FRAME_BYTES = struct.Struct("!I")


class RefusedConnectionError(ConfigError):
    """The other end of a connection does not belong to this job: it has another key or another user."""


def connect(
    address: str,
    key_file: str | None,
    timeout_seconds: float,
    *,
    listens: bool = False,
    on_wait: Callable[[], object] = lambda: None,
) -> socket.socket:
    """Connect to a process of the job and authenticate it.

    Args:
        address: ``ipc://PATH`` within the machine, ``ipc://@NAME`` for a name in its abstract namespace, or
            ``tcp://HOST:PORT``.
        key_file: path of the job's key file; None connects to processes of this machine only.
        timeout_seconds: how long to try.
        listens: whether the process is known to have listened there, so that a refused connection means it is gone.
        on_wait: called after each attempt that failed, and at least every :data:`HANDSHAKE_SECONDS`.

    Raises:
        RefusedConnectionError: the process there does not belong to the job.
        PeerLostError: nothing answers in time.
    """
    deadline, resets = time.monotonic() + timeout_seconds, 0
    while True:
        try:
            return _connect(address, key_file, max(1.0, min(HANDSHAKE_SECONDS, deadline - time.monotonic())))
        except (OSError, ssl.SSLError) as error:
            resets += isinstance(error, ConnectionResetError)
            if _is_refusal(error) or (resets > 2 and key_file is None):  # a process with keys closes the connection
                raise RefusedConnectionError(
                    f"{address} was reached, but the process there has another key, or only one of both has a key.",
                    hint="give all processes of the job the same cluster.key_file.",
                ) from error
            gone = listens and isinstance(error, (FileNotFoundError, ConnectionRefusedError))
            if gone or time.monotonic() >= deadline:
                raise PeerLostError(f"{address} does not answer: {error.strerror or error}") from error
        on_wait()
        time.sleep(RETRY_SECONDS)


def _connect(address: str, key_file: str | None, timeout_seconds: float) -> socket.socket:
    """Try once to connect; see :func:`connect`."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_seconds)
            connection.connect(f"\0{rest[1:]}" if rest.startswith("@") else rest)
            check_user(connection, address)
            _expect_welcome(connection)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        return connection
    host, _, port = rest.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds)
    try:
        _set_options(connection)
        if key_file is not None:
            connection = _contexts(key_file)[1].wrap_socket(connection)
            _expect_welcome(connection)
            connection.settimeout(None)
            return connection
        connection.sendall(_GREETING)  # a process with keys sees a broken handshake and closes at once
        pointer = _pointer(connection)
    except BaseException:
        connection.close()
        raise
    connection.close()
    if pointer is None:
        raise RefusedConnectionError(
            f"{address} was reached, but the process there has a key, or is not a gtrain process of this user.",
            hint="set cluster.key_file, if the job has one, and use another rendezvous for each job.",
        )
    return _connect(pointer, None, timeout_seconds)


def _set_options(connection: socket.socket) -> None:
    """Set the options of a TCP connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limit_retransmission(connection)


def _receive(connection: socket.socket, most: int) -> bytes:
    """Receive up to the end of a line, of the connection, or of ``most`` bytes."""
    content = b""
    while len(content) < most and not content.endswith(b"\n") and (some := connection.recv(most - len(content))):
        content += some
    if not content:
        raise ConnectionResetError("the connection was closed")
    return content


def _pointer(connection: socket.socket) -> str | None:
    """Read the Unix socket's address that a process without keys sends at its TCP port."""
    content = _receive(connection, _LONGEST_POINTER)
    text = content.removesuffix(b"\n").removeprefix(_POINTER).decode("ascii", "replace")
    return text if content.startswith(_POINTER) and text.startswith("ipc://") else None


def _expect_welcome(connection: socket.socket) -> None:
    """Wait until the other end confirms that it accepted this process."""
    content = _receive(connection, len(_WELCOME))
    if content != _WELCOME:
        theirs, mine = (text.decode("ascii", "replace").strip() for text in (content, _WELCOME))
        raise RefusedConnectionError(
            f"another version of gtrain answered: its protocol is {theirs!r}, that of this process {mine!r}.",
            hint="install the same release on all machines.",
        )


class AuthenticatedListener:
    """Accepts and authenticates connections at one or more listening sockets, with one thread per socket.

    Args:
        sockets: listening Unix or TCP sockets; the caller closes them.
        key_file: path of the job's key file, for TCP; None: a TCP socket only redirects to the Unix socket.
        redirect: address of the Unix socket, for TCP without a key file.
        on_connect: called with each authenticated connection, in a thread of the connection.
        name: name of this end in messages.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        key_file: str | None,
        redirect: str | None,
        on_connect: Callable[[socket.socket], None],
        name: str,
    ) -> None:
        self._key_file, self._redirect, self._on_connect, self._name = key_file, redirect, on_connect, name
        self._lock = threading.Lock()
        self._pending: dict[int, socket.socket] = {}  # connections that are not authenticated yet
        self._refused: set[str] = set()
        self._closed = False
        self._sockets = list(sockets)
        for listener in self._sockets:
            threading.Thread(target=self._accept, args=(listener,), name=f"gtrain-accept-{name}", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; accepted ones stay open."""
        self._closed = True
        for listener in self._sockets:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, peer = listener.accept()
            except OSError:
                if self._closed or listener.fileno() < 0:
                    return
                time.sleep(RETRY_SECONDS)  # out of file descriptors
                continue
            with self._lock:
                if len(self._pending) >= _HANDSHAKES:  # drop the oldest silent stranger
                    with contextlib.suppress(OSError):
                        self._pending.pop(next(iter(self._pending))).shutdown(socket.SHUT_RDWR)
                self._pending[id(connection)] = connection
            threading.Thread(target=self._admit, args=(connection, peer), name="gtrain-handshake", daemon=True).start()

    def _admit(self, connection: socket.socket, peer: object) -> None:
        admitted = None
        try:
            admitted = self._authenticate(connection)
        except (OSError, RefusedConnectionError) as error:
            self._report_refusal(peer, error)
        finally:
            with self._lock:
                self._pending.pop(id(connection), None)
            if admitted is None:
                connection.close()
        if admitted is not None:
            try:
                self._on_connect(admitted)
            except (OSError, ValueError, PeerLostError):
                admitted.close()

    def _authenticate(self, connection: socket.socket) -> socket.socket | None:
        """Return the authenticated connection; None if the peer was redirected."""
        connection.settimeout(HANDSHAKE_SECONDS)
        if connection.family == socket.AF_UNIX:
            check_user(connection, self._name)
        else:
            _set_options(connection)
            if self._key_file is None:
                connection.sendall(_POINTER + (self._redirect or "").encode() + b"\n")
                return None
            connection = _contexts(self._key_file)[0].wrap_socket(connection, server_side=True)
        try:
            connection.sendall(_WELCOME)
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection

    def _report_refusal(self, peer: object, error: Exception) -> None:
        """Report a refused peer once per address, unless it closed the connection without a handshake."""
        lacks_key = isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
        if not (lacks_key or isinstance(error, RefusedConnectionError)):
            return
        host = str(peer[0]) if isinstance(peer, tuple) else "another user"
        with self._lock:  # connections of one peer are refused in several threads at a time
            if host in self._refused or len(self._refused) >= _REMEMBERED:
                return
            self._refused.add(host)
        reason = ": it lacks the job's key" if lacks_key else ""
        text = f"{self._name} refused a connection from {host}{reason}"
        if slot.current() is None:
            print(f"gtrain: {text}", file=sys.stderr, flush=True)
        else:
            slot.print_line(text)


def check_user(connection: socket.socket, name: str) -> None:
    """Refuse a Unix socket whose other end belongs to another user than this one or root."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user not in (os.geteuid(), 0):
        raise RefusedConnectionError(
            f"{name}: the process at the other end runs as user {user}, this one as user {os.geteuid()}.",
            hint="start all processes of a job as the same user.",
        )


def _is_refusal(error: Exception) -> bool:
    """Whether an error means that one end rejected the other's certificate or does not speak TLS."""
    signs = ("ALERT", "WRONG_VERSION", "UNKNOWN_PROTOCOL", "HTTP_REQUEST")
    is_alert = isinstance(error, ssl.SSLError) and any(sign in str(error).upper() for sign in signs)
    return is_alert or isinstance(error, ssl.SSLCertVerificationError)


@functools.lru_cache(maxsize=8)
def _contexts(key_file: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of a job's key file for the accepting and the connecting end."""
    certificate = _certificate(secret_of(key_file))
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    memory = os.memfd_create("gtrain-certificate")  # the ssl module reads keys only from files
    try:
        os.write(memory, certificate)
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # all machines of a job share one certificate
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(f"/proc/self/fd/{memory}")
            # The certificate is its own issuer and the only trusted one: whoever presents it knows the secret.
            context.load_verify_locations(cadata=certificate[certificate.index(b"-----BEGIN CERT") :].decode())
    finally:
        os.close(memory)
    contexts[0].num_tickets = 0  # each connection carries data one way; nothing reads the tickets
    return contexts


def _certificate(secret: str) -> bytes:
    """Return a private key and its certificate as PEM; equal secrets give equal results."""
    from cryptography import x509  # not imported by jobs of one machine
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    seed = hashlib.sha256(b"gtrain: connections between machines\0" + secret.encode()).digest()
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gtrain job")])
    utc = datetime.UTC
    certificate = (
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
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def receive_into(connection: socket.socket, view: memoryview, on_progress: Callable[[], None] | None = None) -> None:
    """Fill a buffer from a connection.

    Args:
        connection: the connection.
        view: the buffer.
        on_progress: called after each piece.

    Raises:
        ConnectionError: the connection was closed before the buffer was full.
    """
    at, piece = 0, 1 << 20
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    while at < len(view):
        count = connection.recv_into(view[at : at + piece], 0, flags)
        if not count:
            raise ConnectionResetError("the connection was closed")
        at += count
        if on_progress is not None:
            on_progress()


def receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """Receive this number of bytes; see :func:`receive_into`."""
    content = bytearray(size)
    receive_into(connection, memoryview(content))
    return content


def send_frame(connection: socket.socket, content: bytes) -> None:
    """Send a frame: the number of its bytes, and these bytes."""
    connection.sendall(_FRAME_BYTES.pack(len(content)) + content)


def receive_frame(connection: socket.socket, limit: int) -> bytearray:
    """Receive the bytes of a frame.

    Args:
        connection: the connection.
        limit: the most bytes to accept.

    Raises:
        ConnectionError: the frame is larger, or the connection was closed.
    """
    (size,) = _FRAME_BYTES.unpack(receive_exactly(connection, _FRAME_BYTES.size))
    if size > limit:
        raise ConnectionAbortedError(f"a frame of {size} bytes; the limit is {limit}")
    return receive_exactly(connection, size)
