"""vLLM's KV connector on kvxfer: disaggregated prefill with one flag.

vLLM imports this package in every process, so importing it loads nothing of vLLM and starts no
thread; `KvxferConnector` is looked up when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KvxferConnector

NAME = "KvxferConnector"

__all__ = ["KvxferConnector", "register"]


def register() -> None:
    """Make the connector's name known to vLLM: the entry point in ``vllm.general_plugins``.

    vLLM calls it once in each process; more often is harmless.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, f"{__name__}.connector", NAME)
    except ValueError:
        pass  # the name is there already


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what a module's __getattr__ returns
    if name == NAME:
        from . import connector

        return connector.KvxferConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
