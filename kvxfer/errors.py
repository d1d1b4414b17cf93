"""The exceptions of kvxfer.

Programming errors and set-up failures raise where they happen. Transfers don't raise by themselves:
they end with a `Status`, which `Fetch.wait` turns into a `TransferError`.
"""

from __future__ import annotations

import enum


class Status(str, enum.Enum):
    """How a transfer or an offer ended. The names are the wire protocol's."""

    OK = "OK"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    STALE = "STALE"
    EXPIRED = "EXPIRED"
    MISMATCH = "MISMATCH"
    CORRUPT = "CORRUPT"
    PEER_LOST = "PEER_LOST"
    UNREACHABLE = "UNREACHABLE"
    CLOSED = "CLOSED"
    INVALID = "INVALID"
    NO_RESOURCES = "NO_RESOURCES"
    PROTOCOL = "PROTOCOL"
    WITHDRAWN = "WITHDRAWN"
    BUSY = "BUSY"


class Error(Exception):
    """Base of everything that kvxfer raises."""


class InvalidError(Error, ValueError):
    """Arguments that make no sense."""


class LayoutError(InvalidError):
    """A cache that cannot be described: strides, shapes, element types, names."""


class ConfigError(InvalidError):
    """A knob with an impossible value, or two that contradict each other."""


class TicketError(InvalidError):
    """A ticket that is damaged, forged, of another version or for something else."""


class ClosedError(Error, RuntimeError):
    """The agent is closed, or belongs to the process that this one was forked from."""


class ResourceError(Error, OSError):
    """Memory, locked memory, file descriptors or threads ran out."""


class HandshakeError(Error, ConnectionError):
    """A peer could not be reached, is not who it should be, or refused us."""

    def __init__(self, message: str, status: Status = Status.UNREACHABLE) -> None:
        super().__init__(message)
        self.status = status


class TransferError(Error):
    """A fetch ended without delivering. Its blocks must not be used.

    After BUSY, `retry_after` says in how many seconds the same may work.
    """

    def __init__(self, status: Status, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.status.value}: {self.args[0]}"


def from_status(name: str, message: str) -> Error:
    """Return the exception for an error of the core."""
    status = Status(name)
    if status is Status.INVALID:
        return InvalidError(message)
    if status is Status.CLOSED:
        return ClosedError(message)
    if status is Status.NO_RESOURCES:
        return ResourceError(message)
    return TransferError(status, message)
