"""The transports that need both sides' addresses before they connect: verbs and ucx."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer import ucx
from kvxfer.config import Config
from kvxfer.verbs import Adapters

if TYPE_CHECKING:
    from kvxfer import _core

NAMES = ("verbs", "ucx")


class Fabrics:
    """What one agent has of them.

    Parameters
    ----------
    core, config
        Of the agent.
    """

    def __init__(self, core: _core.Agent, config: Config) -> None:
        self._verbs = Adapters(core, config)
        self._ucx = ucx.Workers(core, config)

    def problem(self, transport: str, *, rdma: bool) -> str | None:
        """Return why that transport can't be used at this moment, or None.

        With `rdma`, UCX has to have more to offer than sockets and shared memory, which kvxfer's
        own transports do better.
        """
        return self._verbs.problem() if transport == "verbs" else self._ucx.problem(rdma=rdma)

    def endpoint(
        self, transport: str, *, with_arena: bool, rdma: bool = True
    ) -> _core.VerbsEndpoint | _core.UcxEndpoint:
        """Return this side of a connection that is to be made; `rdma` as in `problem`.

        Raises
        ------
        Error
            It cannot be had.
        """
        if transport == "verbs":
            return self._verbs.endpoint(with_arena=with_arena)
        return self._ucx.endpoint(with_arena=with_arena, rdma=rdma)

    def close(self) -> None:
        """Let go of them. Links that were made keep what they need."""
        self._verbs.close()
        self._ucx.close()
