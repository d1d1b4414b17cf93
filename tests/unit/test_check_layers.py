"""The layer check finds each kind of forbidden include and import, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "check_layers.py"

# A tree in which everything is as it should be; each test adds to it.
RIGHT = {
    "csrc/include/kvxfer/status.h": "#include <string>\n",
    "csrc/include/kvxfer/layout.h": '#include <vector>\n\n#include "kvxfer/status.h"\n',
    "csrc/include/kvxfer/agent.h": '#include "kvxfer/layout.h"\n',
    "csrc/base/clock.h": "#include <chrono>\n",
    "csrc/layout/plan.cc": '#include "kvxfer/layout.h"\n#include "base/clock.h"\n',
    "csrc/wire/frames.h": '#include "base/clock.h"\n',
    "csrc/transport/tcp/link.h": '#include "wire/frames.h"\n#include <sys/socket.h>\n',
    "csrc/transport/tcp/link.cc": '#include "transport/tcp/link.h"\n',
    "csrc/engine/core.cc": '#include "transport/tcp/link.h"\n#include "kvxfer/agent.h"\n',
    "bindings/register.h": "#include <pybind11/pybind11.h>\n",
    "bindings/agent.cc": '#include "register.h"\n#include "kvxfer/agent.h"\n#include <vector>\n',
    "kvxfer/__init__.py": "from . import _core\nfrom .agent import Agent\n",
    "kvxfer/agent.py": "import json\n\nfrom kvxfer import _core\n",
    "kvxfer/serving/model.py": "import math\n\nfrom . import planner\nfrom ..errors import Error\n",
    "integrations/vllm_connector/connector.py": "import vllm.config\n\nfrom kvxfer import Agent\n",
    "integrations/gateway/app.py": "from ..vllm_connector import names\n",
    "benches/bench_transfer.py": "import kvxfer._core\n",
}


def check(root: Path, files: dict[str, str]) -> tuple[int, list[str]]:
    """Writes the files and runs the script over them; its exit status and its lines."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_right_tree_passes(tmp_path: Path) -> None:
    status, lines = check(tmp_path, RIGHT)
    assert (status, lines) == (0, [f"layers: {len(RIGHT)} files, every arrow as it should be"])


@pytest.mark.parametrize(
    ("path", "line", "rule"),
    [
        ("csrc/base/a.cc", '#include "layout/plan.h"', "base may include nothing besides itself"),
        ("csrc/base/a.cc", '#include "kvxfer/agent.h"', "base may include nothing"),
        ("csrc/layout/a.cc", '#include "wire/frames.h"', "layout may include base"),
        ("csrc/pack/a.cc", '#include "transport/tcp/link.h"', "pack may include base, codec"),
        ("csrc/transport/shm/a.cc", '#  include "kvxfer/layout.h"', "transport may include"),
        ("csrc/transport/shm/a.cc", "#include <kvxfer/layout.h>", "transport may include"),
        ("csrc/engine/a.cc", "#include <Python.h>", "csrc knows nothing of Python"),
        ("csrc/engine/a.cc", "#include <pybind11/pybind11.h>", "csrc knows nothing of Python"),
        ("csrc/engine/a.cc", "#include <torch/extension.h>", "csrc knows nothing of Python"),
        ("csrc/engine/a.cc", '#include "core.h"', "written by path from csrc/"),
        ("csrc/engine/a.cc", '#include "kvxfer/unknown.h"', "written by path from csrc/"),
        ("csrc/base/a.cc", "  thread_local int a = 0;", "the C library ends the process"),
        ("csrc/base/a.cc", "static __thread int a;", "the C library ends the process"),
        ("csrc/misc/a.cc", "", "csrc/ has the layers base"),
        ("csrc/include/kvxfer/unknown.h", "", "a public header is named with its layer"),
        ("csrc/include/kvxfer/digest.h", '#include "base/clock.h"', "public headers include"),
        ("bindings/a.cc", '#include "engine/core.h"', "bindings include csrc/include"),
        ("bindings/a.cc", '#include "kvxfer/unknown.h"', "bindings include csrc/include"),
        ("bindings/a.cc", "#include <torch/extension.h>", "bindings include csrc/include"),
        ("kvxfer/a.py", "import kvxfer.integrations.gateway", "what is built on it"),
        ("kvxfer/a.py", "from . import integrations", "what is built on it"),
        ("kvxfer/a.py", "def f():\n    from benches import x", "what is built on it"),
        ("kvxfer/a.py", "import vllm", "only integrations/vllm_connector/ imports vLLM"),
        ("kvxfer/serving/a.py", "from .. import _core", "knows nothing of transports"),
        ("kvxfer/serving/a.py", "from kvxfer.transports import x", "knows nothing of transports"),
        ("kvxfer/serving/a.py", "from kvxfer import Agent", "knows nothing of transports"),
        ("integrations/gateway/a.py", "from vllm import LLM", "only integrations/vllm_connector/"),
        ("integrations/gateway/a.py", "import tests.helpers", "knows nothing of benches and tests"),
    ],
)
def test_violation_is_named(tmp_path: Path, path: str, line: str, rule: str) -> None:
    status, lines = check(tmp_path, {**RIGHT, path: "\n" + line + "\n"})
    assert status == 1
    where = 1 if line == "" else 1 + len(line.splitlines())
    assert len(lines) == 2
    assert lines[0].startswith(f"{path}:{where}: ")
    assert rule in lines[0]
