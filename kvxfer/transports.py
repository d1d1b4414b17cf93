"""Which transports there are."""

from __future__ import annotations

import dataclasses
import os

from kvxfer import ucx
from kvxfer.errors import ResourceError
from kvxfer.verbs import rail_text, rails


@dataclasses.dataclass(frozen=True)
class Transport:
    """A transport and whether it can be used here."""

    name: str
    available: bool
    why: str
    """What it is for, or why it is not available and what to do."""


def _shm() -> Transport:
    if not hasattr(os, "memfd_create"):
        return Transport("shm", False, "this Python was built for a C library without memfd_create")
    return Transport(
        "shm", True, "processes of one host; packs straight into the consumer's memory"
    )


def _verbs() -> Transport:
    try:
        found = [rail_text(rail) for rail in rails()]
    except ResourceError as error:
        return Transport("verbs", False, str(error))
    return Transport("verbs", True, f"RDMA between hosts, here over {', '.join(found)}")


def _ucx() -> Transport:
    try:
        found = ucx.info()
    except ResourceError as error:
        return Transport("ucx", False, str(error))
    what = f"UCX {found.version} ({found.path}), here over {', '.join(found.resources)}"
    return Transport("ucx", True, what)


def transports() -> dict[str, Transport]:
    """Return all transports by name, those that cannot be used here too, with the reason."""
    found = [
        Transport("loopback", True, "agents of one process; for tests"),
        _shm(),
        Transport("tcp", True, "any two hosts; several streams a peer"),
    ]
    found += [_verbs(), _ucx()]
    return {transport.name: transport for transport in found}
