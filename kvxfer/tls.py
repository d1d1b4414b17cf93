"""TLS around the handshake, where agents have certificates.

Both sides show one, by an authority that both trust. TLS is taken off again before a connection
goes to the core: it protects what the handshake says, not what follows.
"""

from __future__ import annotations

import contextlib
import socket
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


def _context(config: Config, *, listening: bool) -> ssl.SSLContext:
    """Read the files: certificates are renewed while agents run."""
    import ssl  # only where it is used: it takes its time to load

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listening else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if listening:
        context.num_tickets = 0  # nothing is resumed
    assert config.tls_cert is not None
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except ConfigError as error:
        raise ConfigError(f"tls_key {config.tls_key or config.tls_cert!r}: {error}") from None
    except OSError as error:
        raise ConfigError(
            f"tls_cert {config.tls_cert!r} with tls_key {config.tls_key or config.tls_cert!r} "
            f"cannot be used: {_reason(error)}"
        ) from None
    try:
        context.load_verify_locations(config.tls_ca)
    except OSError as error:
        raise ConfigError(f"tls_ca {config.tls_ca!r} cannot be used: {_reason(error)}") from None
    return context


def _reason(error: OSError) -> str:
    return getattr(error, "verify_message", None) or error.strerror or str(error)


def check(config: Config) -> None:
    """Raise ConfigError where the certificates that are asked for cannot be used."""
    if config.tls_cert is None or config.tls_ca is None:
        raise ConfigError(
            "TLS needs both tls_cert, our certificate, and tls_ca, that of the authority which "
            "signed the others'"
        )
    _context(config, listening=True)


def accept(sock: socket.socket, config: Config, deadline: Deadline) -> socket.socket:
    """Return a connection that came in, under TLS if we have a certificate. `sock` is used up.

    Raises
    ------
    OSError
        The peer speaks no TLS, an older one, or has no certificate that we trust.
    """
    if config.tls_cert is None:
        return sock
    return _wrap(sock, _context(config, listening=True), None, deadline)


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
        return _wrap(sock, _context(config, listening=False), host, deadline)
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
