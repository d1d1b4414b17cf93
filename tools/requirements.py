"""Prints requirements that pyproject.toml states, one a line: `build`, or the name of an extra."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10: pip brings a copy of the same parser
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]


def requirements(pyproject: dict[str, Any], group: str) -> list[str]:
    """Requirements of one group, those of `build-system.requires` for "build"."""
    if group == "build":
        return list(pyproject["build-system"]["requires"])
    return list(pyproject["project"]["optional-dependencies"][group])


def main() -> None:
    path = Path(__file__).resolve().parent.parent / "pyproject.toml"
    pyproject = tomllib.loads(path.read_text())
    for group in sys.argv[1:]:
        print("\n".join(requirements(pyproject, group)))


if __name__ == "__main__":
    main()
