"""The interpreter that has the rivals, and what of them it has."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvbench.child import BENCHES

PYTHON_VARIABLE = "KVBENCH_PEERS_PYTHON"
SETUP = "make bench-peers-setup installs it"

# What is imported to see whether a rival works. UCXX finds its UCX only when that is loaded.
_IMPORTS = {
    "NIXL": ("nixl_cu12", "import nixl_cu12._api"),
    "Mooncake": ("mooncake", "from mooncake.engine import TransferEngine"),
    "UCXX": ("ucxx", "import libucx; libucx.load_library(); import ucxx"),
}


@dataclass(frozen=True)
class Rival:
    """Something that kvxfer is compared with."""

    name: str
    version: str
    why: str
    """Why it can't be measured, "" when it can."""


def python() -> str | None:
    """The interpreter that rivals run under, or None."""
    named = os.environ.get(PYTHON_VARIABLE)
    path = Path(named) if named else BENCHES.parent / ".venv-peers" / "bin" / "python"
    return str(path) if path.exists() else None


@functools.cache
def rivals() -> dict[str, Rival]:
    """All rivals that need installing, by name, each with why it can't be had."""
    found = {name: _look(name) for name in _IMPORTS}
    perftest = ucx_perftest()
    found["ucx_perftest"] = (
        Rival("ucx_perftest", "", f"no ucx_perftest in PATH nor in the peers' libucx; {SETUP}")
        if perftest is None
        else Rival("ucx_perftest", perftest.version, "")
    )
    return found


def missing(name: str) -> str:
    """Why a rival can't be measured, "" when it can."""
    return rivals()[name].why


@dataclass(frozen=True)
class Perftest:
    """UCX's own benchmark."""

    path: str
    libraries: str
    version: str


def ucx_perftest() -> Perftest | None:
    """The one of the libucx wheel if the peers have it, else the system's."""
    interpreter = python()
    if interpreter is not None:
        for folder in Path(interpreter).parent.parent.glob("lib/python*/site-packages/libucx"):
            path = folder / "bin" / "ucx_perftest"
            if path.exists():
                version = folder / "VERSION"
                text = version.read_text().strip() if version.exists() else "wheel"
                return Perftest(str(path), str(folder / "lib"), text)
    found = shutil.which("ucx_perftest")
    return None if found is None else Perftest(found, "", "system")


def _look(name: str) -> Rival:
    package, statement = _IMPORTS[name]
    interpreter = python()
    if interpreter is None:
        return Rival(name, "", f"not installed: there is no .venv-peers; {SETUP}")
    script = (
        "import json, importlib.metadata as m\n"
        f"{statement}\n"
        "names = [n for n in m.packages_distributions().get('" + package + "', [])]\n"
        "print(json.dumps(m.version(names[0]) if names else '?'))"
    )
    try:
        done = subprocess.run(
            [interpreter, "-c", script], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return Rival(name, "", "its import does not end")
    if done.returncode == 0:
        return Rival(name, str(json.loads(done.stdout.splitlines()[-1])), "")
    said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    if "ModuleNotFoundError" in said:
        return Rival(name, "", f"not installed ({said.partition(': ')[2]}); {SETUP}")
    return Rival(name, "", f"installed, but does not load: {said}")
