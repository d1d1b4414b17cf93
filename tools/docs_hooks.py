"""What `make docs` adds to mkdocs: help texts of the commands, and links that leave docs/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_HELP = re.compile(r"^<!-- help: (kvxfer[\w -]*) -->$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
# Pages about the repository, which are part of the site under these names.
_PAGES = {"README.md": "index.md", "docs/README.md": "index.md"}


def on_config(config: Any) -> Any:  # noqa: ANN401 - mkdocs' own
    """Put pages that the menu does not name at its end, so that none is lost."""
    pages = {path.name for path in Path(config["docs_dir"]).glob("*.md")} - {"README.md"}
    if missing := sorted(pages - set(_named(config["nav"]))):
        config["nav"].append({"More": missing})
    return config


def _named(entry: Any) -> Iterator[str]:  # noqa: ANN401 - texts in lists and dicts
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        yield from _named(list(entry.values()))
    else:
        for part in entry:
            yield from _named(part)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill in help texts; make links to files that are not on the site plain names."""
    return _OUTSIDE.sub(_link, _HELP.sub(_help, markdown))


def _help(found: re.Match[str]) -> str:
    command = [sys.executable, "-m", "kvxfer.cli", *found[1].split()[1:], "--help"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "90"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{found[1]} --help: {done.stderr.strip()}")
    return f"```text\n{done.stdout.rstrip()}\n```"


def _link(found: re.Match[str]) -> str:
    text, path = found.groups()
    if not (ROOT / path).exists():
        raise RuntimeError(f"a page links to {path}, which does not exist")
    if path in _PAGES:
        return f"[{text}]({_PAGES[path]})"
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
