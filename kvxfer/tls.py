"""TLS around the handshake, where agents have certificates.

Both sides show one, by an authority that both trust. TLS is taken off again before a connection
goes to the core: it protects what the handshake says, not what follows.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from typing import TYPE_CHECKING, NoReturn

from kvxfer.config import Config
from kvxfer.errors import ConfigError, HandshakeError
from kvxfer.handshake import TLS_ADVICE, Deadline, closed_on_fork

if TYPE_CHECKING:
    import ssl

_LINGER = 1.0  # seconds that a peer that was refused has to hear why
_ALERT = bytes.fromhex("15 0303 0002 02 28")  # handshake_failure


def _no_password() -> NoReturn:
    # Without this OpenSSL would ask at the terminal, and wait.
    raise ConfigError("the private key is encrypted: take the passphrase off it")


def _load(cert: str, key: str | None, authority: str, *, listening: bool) -> ssl.SSLContext:
    import ssl  # only where it is used: it takes its time to load

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listening else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if listening:
        context.num_tickets = 0  # nothing is resumed
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ConfigError as error:
        raise ConfigError(f"tls_key {key or cert!r}: {error}") from None
    except OSError as error:
        raise ConfigError(
            f"tls_cert {cert!r} with tls_key {key or cert!r} cannot be used: {_reason(error)}"
        ) from None
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigError(f"tls_ca {authority!r} cannot be used: {_reason(error)}") from None
    return context


class _Files:
    """A certificate, its key and an authority's certificate, which are renewed while agents run.

    Thread-safe.
    """

    def __init__(self, cert: str, key: str | None, authority: str) -> None:
        self._cert, self._key, self._authority = cert, key, authority
        self._lock = threading.Lock()
        self._contexts: dict[bool, ssl.SSLContext] = {}
        self._seen: list[object] = []  # the state of the files that was last looked at

    def context(self, *, listening: bool) -> ssl.SSLContext:
        """Return what the files say; where they cannot be used (any more), what they said last.

        Raises ConfigError where they never could.
        """
        names = self._cert, self._key, self._authority
        with self._lock:
            state = self._state()
            if state != self._seen:
                try:
                    self._contexts = {side: _load(*names, listening=side) for side in (True, False)}
                except ConfigError as error:
                    if not self._contexts:
                        raise
                    _complain(error)
                self._seen = state  # so that it is said once
            return self._contexts[listening]

    def _state(self) -> list[object]:
        found: list[object] = []
        for name in (self._cert, self._key, self._authority):
            try:
                about = os.stat(name or self._cert)
            except OSError as error:
                found.append(error.errno)
            else:
                found.append((about.st_ino, about.st_size, about.st_mtime_ns))
        return found


@functools.cache
def _files(cert: str, key: str | None, authority: str) -> _Files:
    return _Files(cert, key, authority)


# A thread that is not there in a forked child may have held a lock.
os.register_at_fork(after_in_child=_files.cache_clear)


def _of(config: Config) -> _Files:
    assert config.tls_cert is not None
    assert config.tls_ca is not None
    return _files(config.tls_cert, config.tls_key, config.tls_ca)


def _complain(error: ConfigError) -> None:
    import logging

    logging.getLogger("kvxfer.tls").error(
        "%s; the files that were read before stay in use until they can be read again", error
    )


def _reason(error: OSError) -> str:
    return getattr(error, "verify_message", None) or error.strerror or str(error)


def check(config: Config) -> None:
    """Raise ConfigError where the certificates that are asked for never could be used."""
    if config.tls_cert is None or config.tls_ca is None:
        raise ConfigError(
            "TLS needs both tls_cert, our certificate, and tls_ca, that of the authority which "
            "signed the others'"
        )
    _of(config).context(listening=True)


def accept(sock: socket.socket, config: Config, deadline: Deadline) -> socket.socket:
    """Return a connection that came in, under TLS if we have a certificate. `sock` is used up.

    Raises
    ------
    OSError
        The peer speaks no TLS, an older one, or has no certificate that we trust.
    """
    if config.tls_cert is None:
        return sock
    return _wrap(sock, _of(config).context(listening=True), None, deadline)


def connect(sock: socket.socket, host: str, config: Config, deadline: Deadline) -> socket.socket:
    """Return a connection to `host`, under TLS if we have a certificate. `sock` is used up.

    Raises
    ------
    HandshakeError
        The peer speaks no TLS, an older one, or has no certificate for `host` that we trust.
    """
    if config.tls_cert is None:
        return sock
    try:
        return _wrap(sock, _of(config).context(listening=False), host, deadline)
    except TimeoutError:
        raise
    except OSError as error:
        raise HandshakeError(f"no TLS with {host}: {_reason(error)}; {TLS_ADVICE}") from error


def _wrap(
    sock: socket.socket, context: ssl.SSLContext, host: str | None, deadline: Deadline
) -> socket.socket:
    wrapped = context.wrap_socket(
        sock, server_side=host is None, server_hostname=host, do_handshake_on_connect=False
    )
    closed_on_fork(wrapped)
    try:
        wrapped.settimeout(deadline.remaining())
        wrapped.do_handshake()
    except BaseException:
        if host is None:
            _let_it_hear(wrapped)
        wrapped.close()
        raise
    return wrapped


def _let_it_hear(sock: socket.socket) -> None:
    """Tell a consumer that speaks no TLS that we do. One that does has been told already."""
    with contextlib.suppress(OSError):
        sock.settimeout(_LINGER)
        socket.socket.sendall(sock, _ALERT)
        # What a peer has sent and we leave unread would have the alert thrown away.
        socket.socket.shutdown(sock, socket.SHUT_WR)
        socket.socket.recv(sock, 1 << 16)


def leave(sock: socket.socket, deadline: Deadline) -> None:
    """Take TLS off a connection, both sides at the same point. What follows is in clear."""
    unwrap = getattr(sock, "unwrap", None)
    if unwrap is not None:
        sock.settimeout(deadline.remaining())
        unwrap()
