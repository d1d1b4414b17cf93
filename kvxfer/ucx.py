"""UCX as an agent uses it, and whether there is one."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.errors import ResourceError

if TYPE_CHECKING:
    from kvxfer import _core
    from kvxfer.config import Config

_ADAPTERS = Path("/sys/class/infiniband")


def libraries() -> list[str]:
    """Return the library of the wheel ``libucx-cu12``, or ``-cu13``, if one is installed."""
    try:
        found = importlib.util.find_spec("libucx")  # imports nothing of it
    except (ImportError, ValueError):
        return []
    folders = (found.submodule_search_locations if found else None) or []
    paths = [Path(folder) / "lib" / "libucp.so.0" for folder in folders]
    return [str(path) for path in paths if path.exists()]


def info() -> _core.UcxInfo:
    """Return which UCX there is, and what it could use here. It is loaded for good.

    Raises
    ------
    ResourceError
        There is none, with the reason.
    """
    from kvxfer import _core  # only here: importing kvxfer loads no native code

    _check_build()
    return _core.ucx_info(libraries())


def _check_build() -> None:
    from kvxfer import _core  # only here: importing kvxfer loads no native code

    about = _core.build_info()["back_ends"]["ucx"]
    if about["state"] != "on":
        raise ResourceError(f"this build is without the ucx transport: {about['reason']}")


def problem(*, rdma: bool) -> str | None:
    """Return why UCX can't be used at this moment, or for RDMA where that is asked for; or None."""
    if rdma and not (_ADAPTERS.is_dir() and any(_ADAPTERS.iterdir())):
        return "this host has no RDMA adapter"  # then UCX, which is large, need not be loaded
    try:
        found = info()
    except ResourceError as error:
        return str(error)
    if rdma and not found.rdma:
        return f"UCX {found.version} ({found.path}) has only {', '.join(found.resources)} here"
    return None


class Workers:
    """UCX for one agent, made when the first peer wants it and kept until `close`.

    Parameters
    ----------
    core, config
        Of the agent.
    """

    def __init__(self, core: _core.Agent, config: Config) -> None:
        self._core, self._config = core, config
        self._lock = threading.Lock()
        self._ucx: dict[bool, _core.Ucx] = {}  # by whether only RDMA will do

    def problem(self, *, rdma: bool) -> str | None:
        """Return why it can't be used at this moment, or for RDMA where that is asked for."""
        with self._lock:
            if rdma in self._ucx:
                return None
        return problem(rdma=rdma)

    def endpoint(self, *, with_arena: bool, rdma: bool) -> _core.UcxEndpoint:
        """Return this side of a connection that is to be made, by RDMA alone where that is meant.

        Raises
        ------
        Error
            UCX cannot be used, or memory cannot be registered with it.
        """
        with self._lock:
            if rdma not in self._ucx:
                from kvxfer import _core  # only here: importing kvxfer loads no native code

                _check_build()
                # The other half of the handshake's time is for tcp, if UCX gets nowhere.
                timeout = self._config.handshake_timeout / 2
                self._ucx[rdma] = _core.Ucx(self._core, libraries(), rdma, timeout)
            ucx = self._ucx[rdma]
        return ucx.endpoint(with_arena)

    def close(self) -> None:
        """Let go of it. Links that were made keep what they need."""
        with self._lock:
            self._ucx.clear()
