"""Which transports there are."""

from __future__ import annotations

import dataclasses
import os


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


def transports() -> dict[str, Transport]:
    """Return all transports by name, those that cannot be used here too, with the reason."""
    from kvxfer import _core  # only here: importing kvxfer loads no native code

    found = [
        Transport("loopback", True, "agents of one process; for tests"),
        _shm(),
        Transport("tcp", True, "any two hosts; several streams a peer"),
    ]
    found += [
        Transport(
            "verbs", False, "links of its own in C++ (kvxfer/verbs.h); agents can't use it yet"
        ),
        Transport("ucx", False, _core.build_info()["back_ends"]["ucx"]["reason"]),
    ]
    return {transport.name: transport for transport in found}
