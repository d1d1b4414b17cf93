"""Clocks of the day that jump, in processes of the fleet alone: see ../clock_jump.cc."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kvxfer import _core

_LIBRARY = Path(__file__).parents[3] / "build" / "release" / "libkvxfer_clock_jump.so"


def preloaded() -> str:
    """Return what LD_PRELOAD has to be in a process whose clock is to jump; empty if it can't."""
    if not _LIBRARY.exists() or _core.build_info()["sanitize"]:
        return ""  # sanitizers want to be first, and intercept the same functions
    return ":".join(filter(None, [str(_LIBRARY), os.environ.get("LD_PRELOAD")]))


def jump(seconds: float) -> None:
    """Set by how much this process's clock of the day is wrong, if it was started to allow it."""
    function = getattr(ctypes.CDLL(None), "kvxfer_clock_jump", None)
    if function is not None:
        function(ctypes.c_double(seconds))
