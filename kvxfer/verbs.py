"""The RDMA adapters of an agent, and whether there are any."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvxfer.errors import Error, ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvxfer import _core
    from kvxfer.config import Config


# Where adapters and GPUs are looked up.
_SYSFS = "/sys"
# What `verbs_near` may be besides a place.
_GPU, _ANY = "gpu", "any"
# Between looks for better ports than those in use. Each opens all adapters for a moment.
_CHECK_SECONDS = 10.0


def _devices(config: Config) -> list[str]:
    return [name.strip() for name in (config.verbs_devices or "").split(",") if name.strip()]


def _near(config: Config) -> str:
    """Return what ports are to be near to; empty where nothing is said."""
    return (config.verbs_near or "").strip().lower()


def _options(config: Config | None, gpus: Sequence[str] = ()) -> _core.VerbsOptions:
    from kvxfer import _core  # only here: importing kvxfer loads no native code

    if config is None:
        return _core.VerbsOptions(
            devices=[],
            gid_index=-1,
            queue_pairs=2,
            traffic_class=0,
            near_to="",
            gpus=[],
            sysfs=_SYSFS,
        )
    near = _near(config)
    return _core.VerbsOptions(
        devices=_devices(config),
        gid_index=config.verbs_gid_index,
        queue_pairs=config.verbs_queue_pairs,
        traffic_class=config.verbs_traffic_class,
        near_to="" if near in (_GPU, _ANY) else near,
        gpus=gpus,
        sysfs=_SYSFS,
    )


def rails(config: Config | None = None) -> list[_core.VerbsRail]:
    """Return the ports that verbs would use.

    Raises
    ------
    ResourceError
        None can be used, with the reason.
    """
    from kvxfer import _core  # only here: importing kvxfer loads no native code

    about = _core.build_info()["back_ends"]["verbs"]
    if about["state"] != "on":
        raise ResourceError(f"this build is without the verbs transport: {about['reason']}")
    try:
        return _core.verbs_rails(_options(config))
    except Error as error:  # a device that does not exist is InvalidError
        raise ResourceError(str(error)) from error


def rail_text(rail: _core.VerbsRail) -> str:
    """Return how people read a port: ``"mlx5_0:1 (InfiniBand, 400 Gbit/s)"``."""
    speed = f", {rail.mbit_per_second / 1000:g} Gbit/s" if rail.mbit_per_second else ""
    return f"{rail.device}:{rail.port} ({rail.link_layer}{speed})"


def _ports(rails: Iterable[_core.VerbsRail]) -> set[tuple[str, int]]:
    return {(rail.device, rail.port) for rail in rails}


class Adapters:
    """The adapters of one agent, opened when the first peer wants them and kept until `close`.

    They are those near to the GPUs that hold its caches. When those are others, or all near ports
    are down, the next peer gets others, and near ones again soon after those are up; connections
    keep what they have.

    Parameters
    ----------
    core, config
        Of the agent.
    """

    def __init__(self, core: _core.Agent, config: Config) -> None:
        self._core, self._config = core, config
        self._lock = threading.Lock()
        self._verbs: _core.Verbs | None = None
        self._gpus: list[str] = []  # that those are near to
        self._checked = 0.0  # when it was last seen whether others are better

    def problem(self) -> str | None:
        """Return why none can be used at this moment, or None."""
        if self._verbs is not None:
            return None
        try:
            rails(self._config)
        except ResourceError as error:
            return str(error)
        return None

    def endpoint(self, *, with_arena: bool) -> _core.VerbsEndpoint:
        """Return this side of a connection that is to be made.

        Raises
        ------
        Error
            No adapter can be used, or memory cannot be registered with one.
        """
        with self._lock:
            gpus = self._core.gpus() if self._wants_near_gpus() else []
            verbs = self._verbs
            if verbs is None or gpus != self._gpus:
                verbs = self._open(gpus)
            due = self._is_check_due(verbs)
        if due and not self._are_best(verbs, gpus):
            with self._lock:
                if self._verbs is verbs:
                    self._open(gpus)
                verbs = self._verbs or verbs
        return verbs.endpoint(with_arena)

    def _open(self, gpus: list[str]) -> _core.Verbs:
        """Needs the lock."""
        from kvxfer import _core  # only here: importing kvxfer loads no native code

        verbs = _core.Verbs(self._core, _options(self._config, gpus))
        self._verbs, self._gpus, self._checked = verbs, gpus, time.monotonic()
        return verbs

    def _is_check_due(self, verbs: _core.Verbs) -> bool:
        """Return whether it is time to see what other ports there are. Needs the lock."""
        now = time.monotonic()
        if not self._gpus or (
            now - self._checked < _CHECK_SECONDS and any(rail.active for rail in verbs.rails())
        ):
            return False
        self._checked = now
        return True

    def _are_best(self, verbs: _core.Verbs, gpus: Sequence[str]) -> bool:
        """Return whether there are no other ports to be taken for the same GPUs.

        There are when all near ones are down, so that others have to do, and when near ones are up
        that were not.
        """
        from kvxfer import _core  # only here: importing kvxfer loads no native code

        try:
            best = _core.verbs_rails(_options(self._config, gpus))
        except Error:  # none is up: it may be, by the time that it is needed
            return True
        return _ports(best) <= _ports(verbs.rails())

    def _wants_near_gpus(self) -> bool:
        """Ports that were named are meant, unless it is said that only the nearest are."""
        near = _near(self._config)
        return near == _GPU or not (near or _devices(self._config))

    def close(self) -> None:
        """Let go of the adapters. Links that were made with them keep what they need."""
        with self._lock:
            self._verbs = None
